//! Causal attention with grouped key-value heads (GQA, Ainslie et al. 2023, arXiv 2305.13245): over packed segments, forward
//! and backward, in blocks of queries with scores recomputed in the backward as in FlashAttention (Dao et al. 2022, arXiv
//! 2205.14135), and over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv 2309.06180). The softmax of a row is not
//! online: all its scores are in memory, so that both forms have the same bits. A query sees all keys up to its own, or the last
//! of them: a sliding window (Beltagy et al. 2020, arXiv 2004.05150). Packed segments compute the scores of keys before a window
//! too, and give them the weight zero; the paged form skips the pages before it. A head may have a sink, a logit of the softmax
//! that has no key and no value (gpt-oss, OpenAI 2025, arXiv 2508.10925; Xiao et al. 2023, arXiv 2309.17453).
//!
//! Invariant: for a query at position `p` both forms compute the same bits. A score is one chain over the head's width,
//! a result one chain over the keys that it sees in their order, and the softmax of a row is the same function. No `T x T` matrix
//! is kept: scores exist for 32 queries of one head at a time, and the backward computes them again.

mod segment_heads;

use std::ops::Range;

use candle_core::{Result, Tensor};
pub(crate) use device::ops::attention::Segment;

use self::segment_heads::softmax;
pub(crate) use self::segment_heads::{
    HeadColumns, HeadOperands, KeyColumns, SegmentGradients, SegmentHeads, SegmentRows,
};
use super::heads::{HeadShape, sum_leaves};
use super::simd::{LANES, vectorized};
use super::{matrix, unwritten, values};

/// Positions of one page of the cache: one AVX-512 register of scores.
pub(crate) const PAGE: usize = 16;

/// What attention computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionRule<'a> {
    pub(crate) shape: HeadShape,
    /// Multiplies scores.
    pub(crate) scale: f32,
    /// Tokens that a query sees, the last of which is its own; `usize::MAX` for all.
    pub(crate) window: usize,
    /// `[heads]` logits of the softmax that have no key; empty for none.
    pub(crate) sinks: &'a [f32],
    /// Parts of the queries of a key-value head, a power of two, whose gradients of its keys and values are summed apart and added as a
    /// balanced binary tree: tensor-parallel ranks may divide them. With 1 they are one chain.
    pub(crate) leaves: usize,
}

impl AttentionRule<'_> {
    /// Without a window and sinks, with the usual scale and one chain.
    pub(crate) fn full(shape: HeadShape) -> Self {
        Self {
            shape,
            scale: libm::powf(shape.head_dim as f32, -0.5),
            window: usize::MAX,
            sinks: &[],
            leaves: 1,
        }
    }
}

/// Attention within each segment: `qkv [T, width]` prepared, result `[T, heads * head_dim]`. Rows of the segments begin
/// at `first` in the pack that they are of.
pub(crate) fn packed(
    qkv: &Tensor,
    segments: &[Segment],
    first: usize,
    rule: AttentionRule<'_>,
) -> Result<Tensor> {
    let query_width = rule.shape.query_width();
    let mut out = unwritten(qkv.dim(0)? * query_width);
    let qkv = values(qkv)?;
    let to = HeadColumns { stride: query_width, column: 0 };
    for segment in segments {
        let heads = whole_segment(&qkv, segment, first, rule);
        (0..rule.shape.kv_heads).for_each(|kv| heads.forward(kv, &mut out, to));
    }
    matrix(out, query_width)
}

/// Gradients of the operands of attention.
#[derive(Debug)]
pub(crate) struct PackedReverse {
    /// `[T, width]` gradient of the prepared queries, keys and values.
    pub(crate) d_qkv: Vec<f32>,
    /// `[T, heads]` what each row adds to the gradient of the sinks; empty without sinks.
    pub(crate) d_sinks: Vec<f32>,
}

/// Gradients for the gradient `g [T, heads * head_dim]` of the result of [`packed`].
pub(crate) fn packed_backward(
    qkv: &Tensor,
    segments: &[Segment],
    first: usize,
    rule: AttentionRule<'_>,
    g: &Tensor,
) -> Result<PackedReverse> {
    let d_qkv = vec![0.0; qkv.elem_count()];
    let mut reverse = PackedReverse { d_qkv, d_sinks: vec![0.0; qkv.dim(0)? * rule.sinks.len()] };
    let (qkv, g) = (values(qkv)?, values(g)?);
    let of_g = HeadColumns { stride: rule.shape.query_width(), column: 0 };
    let HeadOperands { of_queries, of_keys, .. } = HeadOperands::fused(&qkv, rule.shape);
    let of_sinks = HeadColumns { stride: rule.sinks.len(), column: 0 };
    if rule.leaves == 1 {
        let mut out = SegmentGradients {
            queries: &mut reverse.d_qkv,
            of_queries,
            keys: None,
            of_keys,
            leaf: 0,
            d_sinks: &mut reverse.d_sinks,
            of_sinks,
        };
        for segment in segments {
            let heads = whole_segment(&qkv, segment, first, rule);
            (0..rule.shape.kv_heads).for_each(|kv| heads.backward(kv, &g, of_g, &mut out));
        }
        return Ok(reverse);
    }
    // The leaves of one key-value head at a time: `[T, leaves, 2 head_dim]`.
    let (stride, dim, each) = (rule.shape.width(), rule.shape.head_dim, 2 * rule.shape.head_dim);
    let mut leaves = vec![0.0; qkv.len() / stride * rule.leaves * each];
    for kv in 0..rule.shape.kv_heads {
        leaves.fill(0.0);
        let mut out = SegmentGradients {
            queries: &mut reverse.d_qkv,
            of_queries: of_queries.of_kv(kv, rule.shape, dim),
            keys: Some(&mut leaves),
            of_keys: KeyColumns { stride: rule.leaves * each, key: 0, value: dim },
            leaf: each,
            d_sinks: &mut reverse.d_sinks,
            of_sinks: of_sinks.of_kv(kv, rule.shape, 1),
        };
        for segment in segments {
            let heads = whole_segment(&qkv, segment, first, rule).of_kv(kv);
            heads.backward(0, &g, of_g.of_kv(kv, rule.shape, dim), &mut out);
        }
        let rows = leaves.chunks_exact_mut(rule.leaves * each).zip(reverse.d_qkv.chunks_exact_mut(stride));
        for (leaves, row) in rows {
            sum_leaves(leaves, rule.leaves, each);
            let (key, value) = leaves[..each].split_at(dim);
            row[of_keys.key + kv * dim..][..dim].copy_from_slice(key);
            row[of_keys.value + kv * dim..][..dim].copy_from_slice(value);
        }
    }
    Ok(reverse)
}

/// A segment with the rows that it attends to, of `qkv [T, width]`, whose first row is row `first` of the pack.
fn whole_segment<'a>(
    qkv: &'a [f32],
    segment: &Segment,
    first: usize,
    rule: AttentionRule<'a>,
) -> SegmentHeads<'a> {
    let within = |rows: &Range<usize>| {
        if rows.is_empty() { 0..0 } else { rows.start - first..rows.end - first }
    };
    let own = within(&segment.rows);
    let rows = SegmentRows { queries: own.clone(), prefix: within(&segment.prefix), own };
    SegmentHeads { from: HeadOperands::fused(qkv, rule.shape), rows, rule }
}

/// Layout of one head's keys and values in a page: keys `[head_dim, PAGE]`, so that one register has the scores of all
/// positions of a page, and values `[PAGE, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageLayout {
    shape: HeadShape,
}

impl PageLayout {
    pub(crate) fn new(shape: HeadShape) -> Self {
        Self { shape }
    }

    /// Values of a page of one layer.
    pub(crate) fn len(self) -> usize {
        2 * PAGE * self.shape.kv_width()
    }

    fn head(self) -> usize {
        PAGE * self.shape.head_dim
    }

    /// Writes key and value `[kv_heads * head_dim]` of one token.
    pub(crate) fn write(self, page: &mut [f32], slot: usize, key: &[f32], value: &[f32]) {
        let (keys, values) = page.split_at_mut(PAGE * self.shape.kv_width());
        let heads = keys.chunks_exact_mut(self.head()).zip(values.chunks_exact_mut(self.head()));
        let tokens = key.chunks_exact(self.shape.head_dim).zip(value.chunks_exact(self.shape.head_dim));
        for ((keys, values), (key, value)) in heads.zip(tokens) {
            keys[slot..].iter_mut().step_by(PAGE).zip(key).for_each(|(to, k)| *to = *k);
            values[slot * self.shape.head_dim..][..self.shape.head_dim].copy_from_slice(value);
        }
    }

    /// Attention of one row of queries over the first `end` positions of `pages`, which are those of one layer, or the last of
    /// them under a window, to `out [heads * head_dim]`. `weights` is scratch.
    pub(crate) fn attend(
        self,
        rule: AttentionRule<'_>,
        queries: &[f32],
        pages: &[&[f32]],
        end: usize,
        weights: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let start = end.saturating_sub(rule.window);
        let (pages, passed) = (&pages[start / PAGE..], start / PAGE * PAGE);
        weights.resize(self.shape.heads * pages.len() * PAGE, 0.0);
        paged(rule, queries, pages, start - passed..end - passed, weights, out);
    }
}

vectorized! {
    /// Over the positions `seen` of `pages`.
    fn paged(rule: AttentionRule<'_>, queries: &[f32], pages: &[&[f32]], seen: Range<usize>, weights: &mut [f32], out: &mut [f32]) {
        let (layout, HeadShape { heads, kv_heads, head_dim }) = (PageLayout::new(rule.shape), rule.shape);
        let (per_kv, head) = (heads / kv_heads, layout.head());
        let row = pages.len() * PAGE;
        for kv in 0..kv_heads {
            let group = kv * per_kv..(kv + 1) * per_kv;
            let queries = &queries[group.start * head_dim..group.end * head_dim];
            let weights = &mut weights[group.start * row..group.end * row];
            // A chain of multiply-adds is as long as a head is wide, so several run at a time: heads of a group, which read
            // the same keys, times pages.
            let mut page = 0;
            while page < pages.len() {
                let work = ScoreWork { queries, column: kv * head, pages: &pages[page..], head_dim };
                let rows = &mut weights[page * PAGE..];
                page += match work.pages.len().min(beside(per_kv)) {
                    1 => scores_of_pages::<1>(work, per_kv, rows, row),
                    2 => scores_of_pages::<2>(work, per_kv, rows, row),
                    3 => scores_of_pages::<3>(work, per_kv, rows, row),
                    _ => scores_of_pages::<4>(work, per_kv, rows, row),
                };
            }
            for (h, weights) in group.clone().zip(weights.chunks_exact_mut(row)) {
                weights[..seen.start].fill(0.0);
                softmax(&mut weights[seen.clone()], rule.scale, rule.sinks.get(h).copied());
            }
            let values = PAGE * layout.shape.kv_width() + kv * head;
            let out = &mut out[group.start * head_dim..group.end * head_dim];
            let mut h = 0;
            while h < per_kv {
                let work = ValueWork { weights: &weights[h * row..], row, pages, column: values, seen: seen.end };
                let out = &mut out[h * head_dim..];
                h += match per_kv - h {
                    1 => values_of_heads::<1>(work, head_dim, out),
                    2 => values_of_heads::<2>(work, head_dim, out),
                    3 => values_of_heads::<3>(work, head_dim, out),
                    _ => values_of_heads::<4>(work, head_dim, out),
                };
            }
        }
    }
}

/// Pages, or parts of 16 columns, that are computed at a time for so many heads: 1 to 4, whose sums fit into the registers. With more
/// sums than that the code for aarch64 has no vectors.
#[inline(always)]
fn beside(heads: usize) -> usize {
    const SUMS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 16 };
    SUMS / heads.clamp(SUMS / 4, 4)
}

/// Operands of scores.
#[derive(Clone, Copy)]
struct ScoreWork<'a> {
    queries: &'a [f32],
    /// Column of the keys in a page.
    column: usize,
    pages: &'a [&'a [f32]],
    head_dim: usize,
}

/// Scores of all heads of a group over the first `P` pages, to rows of `weights` that lie `row` apart. Returns `P`.
#[inline(always)]
fn scores_of_pages<const P: usize>(
    work: ScoreWork<'_>,
    per_kv: usize,
    weights: &mut [f32],
    row: usize,
) -> usize {
    let mut h = 0;
    while h < per_kv {
        h += match per_kv - h {
            1 => page_scores::<1, P>(work, h, weights, row),
            2 => page_scores::<2, P>(work, h, weights, row),
            3 => page_scores::<3, P>(work, h, weights, row),
            _ => page_scores::<4, P>(work, h, weights, row),
        };
    }
    P
}

/// Scores of `H` heads from `first` on over `P` pages. Returns `H`.
#[inline(always)]
fn page_scores<const H: usize, const P: usize>(
    ScoreWork { queries, column, pages, head_dim }: ScoreWork<'_>,
    first: usize,
    weights: &mut [f32],
    row: usize,
) -> usize {
    let queries: [&[f32]; H] = std::array::from_fn(|h| &queries[(first + h) * head_dim..][..head_dim]);
    let keys: [&[f32]; P] = std::array::from_fn(|p| &pages[p][column..][..head_dim * PAGE]);
    let mut scores = [[[0.0_f32; PAGE]; P]; H];
    for d in 0..head_dim {
        let keys: [&[f32]; P] = std::array::from_fn(|p| &keys[p][d * PAGE..][..PAGE]);
        for (scores, query) in scores.iter_mut().zip(queries) {
            let q = query[d];
            for (scores, keys) in scores.iter_mut().zip(keys) {
                for (score, k) in scores.iter_mut().zip(keys) {
                    *score = q.mul_add(*k, *score);
                }
            }
        }
    }
    for (h, scores) in scores.iter().enumerate() {
        for (p, scores) in scores.iter().enumerate() {
            weights[(first + h) * row + p * PAGE..][..PAGE].copy_from_slice(scores);
        }
    }
    H
}

/// Operands of weighted sums of values.
#[derive(Clone, Copy)]
struct ValueWork<'a> {
    weights: &'a [f32],
    /// How far the rows of `weights` lie apart.
    row: usize,
    pages: &'a [&'a [f32]],
    /// Column of the values in a page.
    column: usize,
    /// Number of keys.
    seen: usize,
}

/// Weighted sums of the values of `H` heads, to `out [H * head_dim]`. Returns `H`.
#[inline(always)]
fn values_of_heads<const H: usize>(work: ValueWork<'_>, head_dim: usize, out: &mut [f32]) -> usize {
    let mut d = 0;
    while d < head_dim {
        d += match head_dim - d {
            1..LANES => {
                let ValueWork { weights, row, pages, column, seen } = work;
                for h in 0..H {
                    let value =
                        |position: usize| pages[position / PAGE][column + position % PAGE * head_dim + d];
                    let chain =
                        |sum: f32, position: usize| weights[h * row + position].mul_add(value(position), sum);
                    out[h * head_dim + d] = (0..seen).fold(0.0, chain);
                }
                1
            }
            left => match (left / LANES).min(beside(H)) {
                1 => page_values::<H, 1>(work, head_dim, d, out),
                2 | 3 => page_values::<H, 2>(work, head_dim, d, out),
                _ => page_values::<H, 4>(work, head_dim, d, out),
            },
        };
    }
    H
}

/// The same for `D` times 16 columns of a head from `d` on. Returns their number.
#[inline(always)]
fn page_values<const H: usize, const D: usize>(
    ValueWork { weights, row, pages, column, seen }: ValueWork<'_>,
    head_dim: usize,
    d: usize,
    out: &mut [f32],
) -> usize {
    let weights: [&[f32]; H] = std::array::from_fn(|h| &weights[h * row..][..seen]);
    let mut sums = [[[0.0_f32; LANES]; D]; H];
    for (p, page) in pages.iter().enumerate() {
        let values = &page[column..][..PAGE * head_dim];
        for slot in 0..PAGE.min(seen - p * PAGE) {
            let v = &values[slot * head_dim + d..][..D * LANES];
            for (sums, weights) in sums.iter_mut().zip(weights) {
                let w = weights[p * PAGE + slot];
                for (sums, v) in sums.iter_mut().zip(v.chunks_exact(LANES)) {
                    for (sum, v) in sums.iter_mut().zip(v) {
                        *sum = w.mul_add(*v, *sum);
                    }
                }
            }
        }
    }
    for (h, sums) in sums.iter().enumerate() {
        out[h * head_dim + d..][..D * LANES].copy_from_slice(sums.as_flattened());
    }
    D * LANES
}

#[cfg(test)]
mod tests;
