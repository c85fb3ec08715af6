//! What happens to queries and keys between the projection and the attention: per-head RMSNorm (Qwen3) and rotary
//! position embedding (Su et al. 2021, arXiv 2104.09864, in the half-split layout of Hugging Face).

use candle_core::{Result, Tensor};

use super::norm::{norm_row, norm_row_backward};
use super::simd::vectorized;
use super::{matrix, values};

/// How a row of the fused projection `[(heads + 2 kv_heads) * head_dim]` divides: queries, keys, values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadShape {
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads; divides `heads`.
    pub(crate) kv_heads: usize,
    /// Width of a head.
    pub(crate) head_dim: usize,
}

impl HeadShape {
    /// Width of a row of the fused projection.
    pub(crate) fn width(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of the keys, or of the values, of a row.
    pub(crate) fn kv_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of the queries of a row.
    pub(crate) fn query_width(self) -> usize {
        self.heads * self.head_dim
    }
}

/// Weights of the per-head RMSNorm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorm<'a> {
    /// `[head_dim]` scale of the queries.
    pub(crate) query: &'a [f32],
    /// `[head_dim]` scale of the keys.
    pub(crate) key: &'a [f32],
    pub(crate) eps: f32,
}

/// Cosines and sines of the angles of a batch of positions, shared by all layers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Angles {
    /// `[T, head_dim / 2]`
    cos: Vec<f32>,
    /// `[T, head_dim / 2]`
    sin: Vec<f32>,
}

impl Angles {
    /// Angles `position * inv_freq[i]` for each of `positions [T]`.
    pub(crate) fn new(positions: &[u32], inv_freq: &[f32]) -> Self {
        let angle = positions.iter().flat_map(|p| inv_freq.iter().map(move |f| *p as f32 * f));
        Self { cos: angle.clone().map(f32::cos).collect(), sin: angle.map(f32::sin).collect() }
    }
}

/// Normalises (if the model does) and rotates queries and keys of `qkv [T, width]`; values pass as they are.
pub(crate) fn prepare(
    qkv: &Tensor,
    shape: HeadShape,
    norm: Option<HeadNorm<'_>>,
    angles: &Angles,
) -> Result<Tensor> {
    let mut out = values(qkv)?.to_vec();
    forward(&mut out, shape, norm, angles);
    matrix(out, shape.width())
}

/// Gradient of the raw `qkv` for the gradient `g` of the prepared; adds to the gradients `[2, head_dim]` of the norm's
/// query and key weights, which lie one after the other.
pub(crate) fn prepare_backward(
    qkv: &Tensor,
    shape: HeadShape,
    norm: Option<(HeadNorm<'_>, &mut [f32])>,
    angles: &Angles,
    g: &Tensor,
) -> Result<Tensor> {
    let mut out = values(g)?.to_vec();
    backward(&values(qkv)?, shape, norm, angles, &mut out);
    matrix(out, shape.width())
}

vectorized! {
    fn forward(qkv: &mut [f32], shape: HeadShape, norm: Option<HeadNorm<'_>>, angles: &Angles) {
        let half = shape.head_dim / 2;
        let angles = angles.cos.chunks_exact(half).zip(angles.sin.chunks_exact(half));
        for (row, (cos, sin)) in qkv.chunks_exact_mut(shape.width()).zip(angles) {
            let rotated = row.chunks_exact_mut(shape.head_dim).take(shape.heads + shape.kv_heads);
            for (h, head) in rotated.enumerate() {
                if let Some(norm) = norm {
                    norm_row(head, if h < shape.heads { norm.query } else { norm.key }, norm.eps);
                }
                rotate(head, cos, sin, 1.0);
            }
        }
    }
}

vectorized! {
    fn backward(qkv: &[f32], shape: HeadShape, norm: Option<(HeadNorm<'_>, &mut [f32])>, angles: &Angles, g: &mut [f32]) {
        let half = shape.head_dim / 2;
        let mut norm = norm;
        let angles = angles.cos.chunks_exact(half).zip(angles.sin.chunks_exact(half));
        let rows = qkv.chunks_exact(shape.width()).zip(g.chunks_exact_mut(shape.width()));
        for ((row, g), (cos, sin)) in rows.zip(angles) {
            let heads = row.chunks_exact(shape.head_dim).zip(g.chunks_exact_mut(shape.head_dim));
            for (h, (head, g)) in heads.take(shape.heads + shape.kv_heads).enumerate() {
                rotate(g, cos, sin, -1.0);
                if let Some((norm, gradient)) = &mut norm {
                    let (query, key) = gradient.split_at_mut(shape.head_dim);
                    if h < shape.heads {
                        norm_row_backward(head, norm.query, norm.eps, g, query);
                    } else {
                        norm_row_backward(head, norm.key, norm.eps, g, key);
                    }
                }
            }
        }
    }
}

/// Rotates pairs `(x[i], x[i + half])` by the angle, or back for `direction` -1.
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
        let angles = Angles::new(&[0, 1, 7], &[1.0, 0.3, 0.1]);
        let (x, c, w) = (noise(3 * shape.width(), 1), noise(3 * shape.width(), 2), noise(12, 3));
        for with_norm in [false, true] {
            let loss = |x: &[f32], w: &[f32]| {
                let mut out = x.to_vec();
                let norm = HeadNorm { query: &w[..6], key: &w[6..], eps: 1e-2 };
                forward(&mut out, shape, with_norm.then_some(norm), &angles);
                weighted(&out, &c)
            };
            let (mut dx, mut dw) = (c.clone(), vec![0.0; 12]);
            let norm = HeadNorm { query: &w[..6], key: &w[6..], eps: 1e-2 };
            backward(&x, shape, with_norm.then_some((norm, &mut dw[..])), &angles, &mut dx);
            gradient(|x| loss(x, &w), &x, &dx, 2e-2);
            gradient(|w| loss(&x, w), &w, &dw, 1e-3);
        }
    }
}
