//! Queries and keys between the projection and the attention: RMSNorm of each head (Qwen3; Henry et al. 2020, arXiv 2010.04245) or of
//! all together (OLMoE), and rotary position embedding (RoPE, Su et al. 2021, arXiv 2104.09864, in the half-split layout of Hugging Face).

use candle_core::{Result, Tensor};
pub(crate) use device::ops::heads::HeadShape;

use super::norm::{norm_row, norm_row_backward, norm_row_weight_gradient};
use super::simd::vectorized;
use super::{matrix, rows_each, values};
use crate::ThreadPool;

/// Weights of the RMSNorm of queries and keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNormWeights<'a> {
    /// Scale of the queries: `[head_dim]` for each head apart, or `[heads * head_dim]` for all together.
    pub(crate) query: &'a [f32],
    /// Scale of the keys, likewise.
    pub(crate) key: &'a [f32],
    pub(crate) eps: f32,
}

/// Cosines and sines of the angles of a batch of positions, shared by all layers with the same rotary embedding.
#[derive(Clone, Debug, Default)]
pub(crate) struct Angles {
    /// Number of rotated pairs of a head: its first values; 0 for a layer without rotary embedding.
    pairs: usize,
    /// `[T, pairs]`
    cos: Vec<f32>,
    /// `[T, pairs]`
    sin: Vec<f32>,
}

/// The angular frequencies of a rotary embedding.
#[derive(Clone, Debug)]
pub(crate) struct Frequencies {
    /// `[pairs]` radians per position.
    pub(crate) inv_freq: Vec<f32>,
    /// Multiplies cosines and sines.
    pub(crate) amplitude: f32,
}

impl Angles {
    /// Angles `position * inv_freq[i]` for each of `positions [T]`.
    pub(crate) fn new(positions: &[u32], Frequencies { inv_freq, amplitude }: &Frequencies) -> Self {
        let half = inv_freq.len();
        let last = positions.iter().max().map_or(0, |p| *p as usize + 1);
        // Positions repeat in every sequence of a batch, and a sine costs as much as a hundred multiplications.
        let mut known: Vec<Option<usize>> = vec![None; last];
        let (mut cos, mut sin) =
            (Vec::with_capacity(positions.len() * half), Vec::with_capacity(positions.len() * half));
        for position in positions {
            match known[*position as usize] {
                Some(at) => {
                    cos.extend_from_within(at..at + half);
                    sin.extend_from_within(at..at + half);
                }
                None => {
                    known[*position as usize] = Some(cos.len());
                    let angles = inv_freq.iter().map(|f| *position as f32 * f);
                    cos.extend(angles.clone().map(|angle| libm::cosf(angle) * amplitude));
                    sin.extend(angles.map(|angle| libm::sinf(angle) * amplitude));
                }
            }
        }
        Self { pairs: half, cos, sin }
    }

    /// Cosines and sines `[pairs]` of a row.
    pub(super) fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.pairs..(row + 1) * self.pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Normalises (if the model does) and rotates queries and keys of `qkv [T, width]` in place; values pass as they are.
/// `angles` are those of the same tokens.
pub(crate) fn prepare(
    qkv: &mut [f32],
    shape: HeadShape,
    norm: Option<HeadNormWeights<'_>>,
    angles: &Angles,
    pool: &ThreadPool,
) {
    let each = rows_each(qkv.len() / shape.width(), qkv.len(), pool);
    let parts = qkv.chunks_mut(each * shape.width()).enumerate().collect();
    pool.map(parts, |(part, qkv)| forward(qkv, part * each, shape, norm, angles));
}

/// Gradient of the raw projection for the gradient `g [T, width]` of the prepared. `raw [T, width]` is needed where heads
/// are normalised.
pub(crate) fn prepare_backward(
    raw: Option<&Tensor>,
    shape: HeadShape,
    norm: Option<HeadNormWeights<'_>>,
    angles: &Angles,
    mut g: Vec<f32>,
) -> Result<Tensor> {
    rotate_back(&mut g, shape, angles);
    if let (Some(raw), Some(norm)) = (raw, norm) {
        norm_backward(&values(raw)?, shape, norm, &mut g);
    }
    matrix(g, shape.width())
}

/// Adds the gradients of the weights of the query norm and the key norm, for the gradient `g [T, width]` of the prepared, to those
/// of `groups` of heads: `gradient` is `[groups[0], query norm]`, then `[groups[1], key norm]`.
pub(crate) fn head_norm_gradient(
    raw: &Tensor,
    shape: HeadShape,
    norm: HeadNormWeights<'_>,
    angles: &Angles,
    g: &Tensor,
    groups: [usize; 2],
    gradient: &mut [f32],
) -> Result<()> {
    let mut g = values(g)?.to_vec();
    rotate_back(&mut g, shape, angles);
    norm_gradient(&values(raw)?, shape, norm, &g, groups, gradient);
    Ok(())
}

/// Adds the gradients of groups of heads ([`head_norm_gradient`]) as balanced binary trees, in place. Returns `[norms]` the sums.
pub(crate) fn sum_head_groups(norms: [usize; 2], groups: [usize; 2], gradient: &mut [f32]) -> Vec<f32> {
    let (queries, keys) = gradient.split_at_mut(norms[0] * groups[0]);
    let mut sums = Vec::with_capacity(norms[0] + norms[1]);
    for ((part, norm), groups) in [queries, keys].into_iter().zip(norms).zip(groups) {
        sum_leaves(part, groups, norm);
        sums.extend_from_slice(&part[..norm]);
    }
    sums
}

/// Adds `values [leaves, width]` as a balanced binary tree, in place: the first leaf becomes the sum.
pub(crate) fn sum_leaves(values: &mut [f32], leaves: usize, width: usize) {
    let mut step = 1;
    while step < leaves {
        for left in (0..leaves - step).step_by(2 * step) {
            let (to, from) = values.split_at_mut((left + step) * width);
            to[left * width..][..width].iter_mut().zip(&*from).for_each(|(a, b)| *a += b);
        }
        step *= 2;
    }
}

vectorized! {
    /// Rows from row `first` of the angles on.
    fn forward(qkv: &mut [f32], first: usize, shape: HeadShape, norm: Option<HeadNormWeights<'_>>, angles: &Angles) {
        for (row, of_row) in qkv.chunks_exact_mut(shape.width()).enumerate() {
            let (cos, sin) = angles.row(first + row);
            let (queries, rest) = of_row.split_at_mut(shape.query_width());
            let keys = &mut rest[..shape.kv_width()];
            if let Some(HeadNormWeights { query, key, eps }) = norm {
                queries.chunks_exact_mut(query.len()).for_each(|part| norm_row(part, query, eps));
                keys.chunks_exact_mut(key.len()).for_each(|part| norm_row(part, key, eps));
            }
            for head in queries.chunks_exact_mut(shape.head_dim).chain(keys.chunks_exact_mut(shape.head_dim)) {
                rotate(head, cos, sin, 1.0);
            }
        }
    }
}

vectorized! {
    fn rotate_back(g: &mut [f32], shape: HeadShape, angles: &Angles) {
        for (row, g) in g.chunks_exact_mut(shape.width()).enumerate() {
            let (cos, sin) = angles.row(row);
            for g in g.chunks_exact_mut(shape.head_dim).take(shape.heads + shape.kv_heads) {
                rotate(g, cos, sin, -1.0);
            }
        }
    }
}

vectorized! {
    fn norm_backward(raw: &[f32], shape: HeadShape, norm: HeadNormWeights<'_>, g: &mut [f32]) {
        for (row, g) in raw.chunks_exact(shape.width()).zip(g.chunks_exact_mut(shape.width())) {
            let [queries, keys] = shape.parts();
            for (part, weight) in [(queries, norm.query), (keys, norm.key)] {
                let parts = row[part.clone()].chunks_exact(weight.len()).zip(g[part].chunks_exact_mut(weight.len()));
                parts.for_each(|(x, g)| norm_row_backward(x, weight, norm.eps, g));
            }
        }
    }
}

vectorized! {
    fn norm_gradient(
        raw: &[f32],
        shape: HeadShape,
        norm: HeadNormWeights<'_>,
        g: &[f32],
        groups: [usize; 2],
        gradient: &mut [f32],
    ) {
        let (query, key) = gradient.split_at_mut(norm.query.len() * groups[0]);
        for (row, g) in raw.chunks_exact(shape.width()).zip(g.chunks_exact(shape.width())) {
            let [queries, keys] = shape.parts();
            for ((part, groups), gradient) in [queries, keys].into_iter().zip(groups).zip([&mut *query, &mut *key]) {
                let width = gradient.len() / groups;
                let of_group = part.len() / groups;
                let rows = row[part.clone()].chunks_exact(of_group).zip(g[part].chunks_exact(of_group));
                for ((row, g), gradient) in rows.zip(gradient.chunks_exact_mut(width)) {
                    let parts = row.chunks_exact(width).zip(g.chunks_exact(width));
                    parts.for_each(|(x, g)| norm_row_weight_gradient(x, norm.eps, g, gradient));
                }
            }
        }
    }
}

/// Rotates pairs `(x[i], x[i + pairs])` by the angle, or back for `direction` -1. Values behind the pairs stay.
#[inline(always)]
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], direction: f32) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let sin = direction * sin;
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    #[test]
    fn backward_is_the_derivative() {
        let shape = HeadShape { heads: 4, kv_heads: 2, head_dim: 6 };
        // All of a head, a part of it with longer vectors, none of it.
        let rotaries = [(vec![1.0, 0.3, 0.1], 1.0), (vec![1.0, 0.1], 1.2), (vec![], 1.0)];
        let rotaries = rotaries.map(|(inv_freq, amplitude)| Frequencies { inv_freq, amplitude });
        let all = rotaries.map(|of| Angles::new(&[0, 1, 7], &of));
        let (x, c, w) = (noise(3 * shape.width(), 1), noise(3 * shape.width(), 2), noise(36, 3));
        // Without a norm, of each head, of all heads together.
        for ([query, key], angles) in [[0, 0], [6, 6], [24, 12]]
            .into_iter()
            .flat_map(|norm| all.iter().map(move |angles| (norm, angles)))
        {
            let with_norm = query > 0;
            let weights = |w: &'_ [f32]| (w[..query].to_vec(), w[query..query + key].to_vec());
            let loss = |x: &[f32], w: &[f32]| {
                let mut out = x.to_vec();
                let (query, key) = weights(w);
                let norm = HeadNormWeights { query: &query, key: &key, eps: 1e-2 };
                forward(&mut out, 0, shape, with_norm.then_some(norm), angles);
                weighted(&out, &c)
            };
            let (of_queries, of_keys) = weights(&w);
            let norm = with_norm.then_some(HeadNormWeights { query: &of_queries, key: &of_keys, eps: 1e-2 });
            let raw = matrix(x.clone(), shape.width()).unwrap();
            let dx = prepare_backward(Some(&raw), shape, norm, angles, c.clone()).unwrap();
            gradient(|x| loss(x, &w), &x, &values(&dx).unwrap(), 2e-2);
            let mut dw = vec![0.0; w.len()];
            if let Some(norm) = norm {
                let g = matrix(c.clone(), shape.width()).unwrap();
                // In groups of heads, where heads are normalised apart.
                let groups = if query == 6 { [4, 2] } else { [1, 1] };
                let mut of_groups = vec![0.0; query * groups[0] + key * groups[1]];
                head_norm_gradient(&raw, shape, norm, angles, &g, groups, &mut of_groups).unwrap();
                dw[..query + key].copy_from_slice(&sum_head_groups([query, key], groups, &mut of_groups));
            }
            gradient(|w| loss(&x, w), &w, &dw, 1e-3);
        }
    }
}
