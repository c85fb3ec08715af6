//! Causal attention with grouped key-value heads: over packed sequences, forward and backward, and over a paged cache.
//!
//! Invariant: for a query at position `p` both forms visit keys `0..=p` in the same order with the same arithmetic, so
//! that decoding from the cache and training on the pack give the same bits. No `T x T` matrix is kept: scores live in
//! one row of scratch, and the backward recomputes them.

use candle_core::{Result, Tensor};

use super::heads::HeadShape;
use super::simd::{LANES, dot, exp, max, sum, vectorized};
use super::{matrix, values};

/// Positions of one page of the cache.
pub(crate) const PAGE: usize = 16;

/// Where the keys and values of a sequence lie in the page pool of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PagedQuery<'a> {
    /// Pages of the sequence in order.
    pub(crate) pages: &'a [u32],
    /// Position of the query; keys `0..=position` are in the pages.
    pub(crate) position: usize,
}

/// Attention within each packed sequence: `qkv [T, width]` prepared, `offsets [S + 1]`, result `[T, heads * head_dim]`.
pub(crate) fn packed(qkv: &Tensor, offsets: &[usize], shape: HeadShape) -> Result<Tensor> {
    let mut out = vec![0.0; qkv.dim(0)? * shape.query_width()];
    packed_forward(&values(qkv)?, offsets, shape, &mut out);
    matrix(out, shape.query_width())
}

/// Gradient of the prepared `qkv` for the gradient `g [T, heads * head_dim]` of the result.
pub(crate) fn packed_backward(
    qkv: &Tensor,
    offsets: &[usize],
    shape: HeadShape,
    g: &Tensor,
) -> Result<Tensor> {
    let mut out = vec![0.0; qkv.elem_count()];
    packed_reverse(&values(qkv)?, offsets, shape, &values(g)?, &mut out);
    matrix(out, shape.width())
}

/// Attention of each row of `qkv [T, width]` over the pages of its sequence, which already hold its own key and value.
/// `keys` and `values_` are page pools `[pages, PAGE, kv_heads * head_dim]`.
pub(crate) fn paged(
    qkv: &Tensor,
    queries: &[PagedQuery<'_>],
    shape: HeadShape,
    (keys, cached_values): (&[f32], &[f32]),
) -> Result<Tensor> {
    let mut out = vec![0.0; queries.len() * shape.query_width()];
    paged_forward(&values(qkv)?, queries, shape, keys, cached_values, &mut out);
    matrix(out, shape.query_width())
}

/// Keys and values of one head of one sequence.
trait KeyValues: Copy {
    fn key(&self, position: usize) -> &[f32];
    fn value(&self, position: usize) -> &[f32];
}

#[derive(Clone, Copy)]
struct Packed<'a> {
    qkv: &'a [f32],
    start: usize,
    key_column: usize,
    value_column: usize,
    shape: HeadShape,
}

impl KeyValues for Packed<'_> {
    #[inline(always)]
    fn key(&self, position: usize) -> &[f32] {
        &self.qkv[(self.start + position) * self.shape.width() + self.key_column..][..self.shape.head_dim]
    }

    #[inline(always)]
    fn value(&self, position: usize) -> &[f32] {
        &self.qkv[(self.start + position) * self.shape.width() + self.value_column..][..self.shape.head_dim]
    }
}

impl<'a> Packed<'a> {
    #[inline(always)]
    fn new(qkv: &'a [f32], start: usize, kv_head: usize, shape: HeadShape) -> Self {
        let key_column = (shape.heads + kv_head) * shape.head_dim;
        Self { qkv, start, key_column, value_column: key_column + shape.kv_width(), shape }
    }
}

#[derive(Clone, Copy)]
struct Paged<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    pages: &'a [u32],
    column: usize,
    shape: HeadShape,
}

impl Paged<'_> {
    #[inline(always)]
    fn at(&self, position: usize) -> usize {
        (self.pages[position / PAGE] as usize * PAGE + position % PAGE) * self.shape.kv_width() + self.column
    }
}

impl KeyValues for Paged<'_> {
    #[inline(always)]
    fn key(&self, position: usize) -> &[f32] {
        &self.keys[self.at(position)..][..self.shape.head_dim]
    }

    #[inline(always)]
    fn value(&self, position: usize) -> &[f32] {
        &self.values[self.at(position)..][..self.shape.head_dim]
    }
}

/// Turns `weights [n]` into the attention weights of `query` over keys `0..n`.
#[inline(always)]
fn attention_weights(query: &[f32], kv: impl KeyValues, weights: &mut [f32]) {
    let scale = 1.0 / (query.len() as f32).sqrt();
    for (position, weight) in weights.iter_mut().enumerate() {
        *weight = dot(query, kv.key(position)) * scale;
    }
    let top = max(weights);
    let mut lanes = [0.0_f32; LANES];
    for chunk in weights.chunks_mut(LANES) {
        for (weight, lane) in chunk.iter_mut().zip(&mut lanes) {
            *weight = exp(*weight - top);
            *lane += *weight;
        }
    }
    let inv = 1.0 / sum(&lanes);
    for weight in weights {
        *weight *= inv;
    }
}

#[inline(always)]
fn attend(query: &[f32], kv: impl KeyValues, weights: &mut [f32], out: &mut [f32]) {
    attention_weights(query, kv, weights);
    for (position, weight) in weights.iter().enumerate() {
        for (out, v) in out.iter_mut().zip(kv.value(position)) {
            *out = weight.mul_add(*v, *out);
        }
    }
}

vectorized! {
    fn packed_forward(qkv: &[f32], offsets: &[usize], shape: HeadShape, out: &mut [f32]) {
        let mut weights = Vec::new();
        let per_kv = shape.heads / shape.kv_heads;
        for sequence in offsets.windows(2) {
            weights.resize(weights.len().max(sequence[1] - sequence[0]), 0.0);
            for row in sequence[0]..sequence[1] {
                let queries = qkv[row * shape.width()..][..shape.query_width()].chunks_exact(shape.head_dim);
                let outs = out[row * shape.query_width()..][..shape.query_width()].chunks_exact_mut(shape.head_dim);
                for (h, (query, out)) in queries.zip(outs).enumerate() {
                    let kv = Packed::new(qkv, sequence[0], h / per_kv, shape);
                    attend(query, kv, &mut weights[..=row - sequence[0]], out);
                }
            }
        }
    }
}

vectorized! {
    fn paged_forward(
        qkv: &[f32],
        queries: &[PagedQuery<'_>],
        shape: HeadShape,
        keys: &[f32],
        values: &[f32],
        out: &mut [f32],
    ) {
        let mut weights = vec![0.0; queries.iter().map(|q| q.position + 1).max().unwrap_or(0)];
        let per_kv = shape.heads / shape.kv_heads;
        let rows = qkv.chunks_exact(shape.width()).zip(out.chunks_exact_mut(shape.query_width()));
        for (sequence, (row, out)) in queries.iter().zip(rows) {
            let heads = row.chunks_exact(shape.head_dim).zip(out.chunks_exact_mut(shape.head_dim));
            for (h, (query, out)) in heads.enumerate() {
                let column = h / per_kv * shape.head_dim;
                let kv = Paged { keys, values, pages: sequence.pages, column, shape };
                attend(query, kv, &mut weights[..=sequence.position], out);
            }
        }
    }
}

vectorized! {
    /// With `p` the weights, `o` the result and `d = sum_j p_j (g . v_j)`: `ds_j = p_j (g . v_j - d) / sqrt(head_dim)`,
    /// `dq = sum_j ds_j k_j`, `dk_j += ds_j q`, `dv_j += p_j g`.
    fn packed_reverse(qkv: &[f32], offsets: &[usize], shape: HeadShape, g: &[f32], out: &mut [f32]) {
        let (mut weights, mut slopes) = (Vec::new(), Vec::new());
        let (per_kv, dim, width) = (shape.heads / shape.kv_heads, shape.head_dim, shape.width());
        let scale = 1.0 / (dim as f32).sqrt();
        for sequence in offsets.windows(2) {
            let longest = weights.len().max(sequence[1] - sequence[0]);
            weights.resize(longest, 0.0);
            slopes.resize(longest, 0.0_f32);
            for row in sequence[0]..sequence[1] {
                for h in 0..shape.heads {
                    let query = &qkv[row * width + h * dim..][..dim];
                    let g = &g[row * shape.query_width() + h * dim..][..dim];
                    let kv = Packed::new(qkv, sequence[0], h / per_kv, shape);
                    let n = row - sequence[0] + 1;
                    let (weights, slopes) = (&mut weights[..n], &mut slopes[..n]);
                    attention_weights(query, kv, weights);
                    for (position, slope) in slopes.iter_mut().enumerate() {
                        *slope = dot(g, kv.value(position));
                    }
                    let mean = dot(weights, slopes);
                    for position in 0..n {
                        let slope = weights[position] * (slopes[position] - mean) * scale;
                        let at = (sequence[0] + position) * width;
                        add_scaled(&mut out[row * width + h * dim..][..dim], kv.key(position), slope);
                        add_scaled(&mut out[at + kv.key_column..][..dim], query, slope);
                        add_scaled(&mut out[at + kv.value_column..][..dim], g, weights[position]);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn add_scaled(out: &mut [f32], x: &[f32], scale: f32) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = scale.mul_add(*x, *out);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::check::{gradient, noise, weighted};
    use super::*;

    #[test]
    fn backward_is_the_derivative() {
        let shape = HeadShape { heads: 4, kv_heads: 2, head_dim: 6 };
        let offsets = [0, 5, 6, 9];
        let x: Vec<f32> = noise(9 * shape.width(), 1).iter().map(|x| 2.0 * x).collect();
        let c = noise(9 * shape.query_width(), 2);
        let loss = |x: &[f32]| {
            let mut out = vec![0.0; c.len()];
            packed_forward(x, &offsets, shape, &mut out);
            weighted(&out, &c)
        };
        let mut dx = vec![0.0; x.len()];
        packed_reverse(&x, &offsets, shape, &c, &mut dx);
        gradient(loss, &x, &dx, 5e-3);
    }

    proptest! {
        #[test]
        fn paged_and_packed_give_the_same_bits(lengths in prop::collection::vec(1..40usize, 1..4), kv_heads in 1..3usize) {
            let shape = HeadShape { heads: 2 * kv_heads, kv_heads, head_dim: 10 };
            let mut offsets = vec![0];
            lengths.iter().for_each(|n| offsets.push(offsets[offsets.len() - 1] + n));
            let rows = offsets[lengths.len()];
            let qkv = noise(rows * shape.width(), 5);
            let mut expected = vec![0.0; rows * shape.query_width()];
            packed_forward(&qkv, &offsets, shape, &mut expected);

            // Pages are handed out backwards, so that they are not contiguous.
            let tables: Vec<Vec<u32>> = lengths.iter().enumerate()
                .map(|(s, n)| (0..n.div_ceil(PAGE) as u32).map(|p| 3 * (lengths.len() - s) as u32 - 1 - p).collect())
                .collect();
            let mut keys = vec![f32::NAN; 3 * lengths.len() * PAGE * shape.kv_width()];
            let mut values = keys.clone();
            let mut queries = Vec::new();
            for (s, table) in tables.iter().enumerate() {
                for position in 0..lengths[s] {
                    let row = &qkv[(offsets[s] + position) * shape.width()..][..shape.width()];
                    let (key, value) = row[shape.query_width()..].split_at(shape.kv_width());
                    let at = (table[position / PAGE] as usize * PAGE + position % PAGE) * shape.kv_width();
                    keys[at..][..shape.kv_width()].copy_from_slice(key);
                    values[at..][..shape.kv_width()].copy_from_slice(value);
                    queries.push(PagedQuery { pages: table, position });
                }
            }
            let mut out = vec![0.0; expected.len()];
            paged_forward(&qkv, &queries, shape, &keys, &values, &mut out);
            prop_assert_eq!(out, expected);
        }
    }
}
