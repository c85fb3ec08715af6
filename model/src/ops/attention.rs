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

use std::ops::Range;

use candle_core::{Result, Tensor};
pub(crate) use device::ops::attention::Segment;

use super::gemm::{Panels, ProductOut, Right, StridedMatrix, product};
use super::heads::HeadShape;
use super::simd::{LANES, dot, exp, max, sum, vectorized};
use super::{matrix, unwritten, values};

/// Positions of one page of the cache: one AVX-512 register of scores.
pub(crate) const PAGE: usize = 16;

/// Queries of a block: their scores are in memory at a time.
const QUERIES: usize = 32;

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
}

impl AttentionRule<'_> {
    /// Without a window and sinks, with the usual scale.
    pub(crate) fn full(shape: HeadShape) -> Self {
        Self { shape, scale: (shape.head_dim as f32).powf(-0.5), window: usize::MAX, sinks: &[] }
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
    for segment in segments {
        SegmentHeads::new(&qkv, segment, first, rule).forward(&mut out);
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
    for segment in segments {
        SegmentHeads::new(&qkv, segment, first, rule).backward(&g, &mut reverse);
    }
    Ok(reverse)
}

/// One segment with the rows that it attends to.
struct SegmentHeads<'a> {
    qkv: &'a [f32],
    rows: Range<usize>,
    prefix: Range<usize>,
    rule: AttentionRule<'a>,
    shape: HeadShape,
}

/// Rows of attention weights of one head, for a block of queries.
#[derive(Default)]
struct WeightRows {
    /// `[block, seen]`
    keys: Vec<f32>,
    /// `[block]` weights of the sink; 0 without one.
    sink: Vec<f32>,
}

/// Keys or values of one head, of the prefix and of the segment itself, packed for products.
struct PackedColumns {
    prefix: Panels,
    own: Panels,
}

impl<'a> SegmentHeads<'a> {
    fn new(qkv: &'a [f32], segment: &Segment, first: usize, rule: AttentionRule<'a>) -> Self {
        let within = |rows: &Range<usize>| {
            if rows.is_empty() { 0..0 } else { rows.start - first..rows.end - first }
        };
        Self { qkv, rows: within(&segment.rows), prefix: within(&segment.prefix), rule, shape: rule.shape }
    }

    /// Columns of a row from `column` on, for `rows`: `[rows, head_dim]`.
    fn columns(&self, rows: Range<usize>, column: usize) -> StridedMatrix<'a> {
        let width = self.shape.width();
        let values = &self.qkv[(rows.start * width + column).min(self.qkv.len())..];
        StridedMatrix::strided(values, rows.len(), self.shape.head_dim, width)
    }

    fn both(&self, column: usize, pack: impl Fn(StridedMatrix<'_>) -> Panels) -> PackedColumns {
        PackedColumns {
            prefix: pack(self.columns(self.prefix.clone(), column)),
            own: pack(self.columns(self.rows.clone(), column)),
        }
    }

    /// Blocks of queries: offsets in the segment.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let len = self.rows.len();
        (0..len).step_by(QUERIES).map(move |start| start..(start + QUERIES).min(len))
    }

    /// Column of the query of head `h`, and of key and value of its group.
    fn query_column(&self, h: usize) -> usize {
        h * self.shape.head_dim
    }

    fn key_column(&self, kv: usize) -> usize {
        (self.shape.heads + kv) * self.shape.head_dim
    }

    fn value_column(&self, kv: usize) -> usize {
        self.key_column(kv) + self.shape.kv_width()
    }

    fn group(&self, kv: usize) -> Range<usize> {
        let per_kv = self.shape.heads / self.shape.kv_heads;
        kv * per_kv..(kv + 1) * per_kv
    }

    /// Weights `[block, prefix + block.end]` of the queries of a block over the keys that the last of them sees; zero for
    /// keys that a query does not see.
    fn weights(&self, h: usize, block: &Range<usize>, keys: &PackedColumns, weights: &mut WeightRows) {
        let (before, seen) = (self.prefix.len(), self.prefix.len() + block.end);
        let WeightRows { keys: weights, sink } = weights;
        weights.resize(block.len() * seen, 0.0);
        sink.resize(block.len(), 0.0);
        let rows = self.rows.start + block.start..self.rows.start + block.end;
        let queries = self.columns(rows, self.query_column(h));
        self.scores(queries, keys, block, weights);
        let softmax = RowSoftmax { rule: self.rule, sink: self.rule.sinks.get(h).copied() };
        softmax_rows(weights, seen, before + block.start, softmax, sink);
    }

    /// `left [block, head_dim] x columns [head_dim, prefix + block.end]`.
    fn scores(
        &self,
        left: StridedMatrix<'_>,
        columns: &PackedColumns,
        block: &Range<usize>,
        out: &mut [f32],
    ) {
        let (before, dim) = (self.prefix.len(), self.shape.head_dim);
        let row_stride = before + block.end;
        product(left, columns.prefix.part(dim, before), ProductOut::new(out, row_stride), true);
        let own = ProductOut::new(&mut out[before..], row_stride);
        product(left, columns.own.part(dim, block.end), own, true);
    }

    /// `out [block, head_dim] = left [block, prefix + block.end] x rows [prefix + block.end, head_dim]`.
    fn combine(
        &self,
        left: &[f32],
        rows: &PackedColumns,
        block: &Range<usize>,
        out: &mut [f32],
        row_stride: usize,
    ) {
        let (before, dim) = (self.prefix.len(), self.shape.head_dim);
        let seen = before + block.end;
        let prefix = StridedMatrix::strided(left, block.len(), before, seen);
        product(prefix, rows.prefix.part(before, dim), ProductOut::new(out, row_stride), true);
        let own = StridedMatrix::strided(&left[before..], block.len(), block.end, seen);
        product(own, rows.own.part(block.end, dim), ProductOut::new(out, row_stride), false);
    }

    /// Adds to `d_sinks [T, heads]` the derivatives by the sink of head `h` in `rows`, for its weights and the means of the rows.
    fn add_sinks(&self, h: usize, rows: &Range<usize>, weights: &[f32], means: &[f32], d_sinks: &mut [f32]) {
        let heads = self.rule.sinks.len();
        if heads > 0 {
            let of_rows = d_sinks[rows.start * heads..].chunks_exact_mut(heads);
            for ((d_sinks, weight), mean) in of_rows.zip(weights).zip(means) {
                d_sinks[h] = -weight * mean;
            }
        }
    }

    fn forward(&self, out: &mut [f32]) {
        let row_stride = self.shape.query_width();
        let mut weights = WeightRows::default();
        for kv in 0..self.shape.kv_heads {
            let keys = self.both(self.key_column(kv), |keys| Panels::new(keys.transposed()));
            let values = self.both(self.value_column(kv), Panels::new);
            for h in self.group(kv) {
                for block in self.blocks() {
                    self.weights(h, &block, &keys, &mut weights);
                    let at = (self.rows.start + block.start) * row_stride + self.query_column(h);
                    self.combine(&weights.keys, &values, &block, &mut out[at..], row_stride);
                }
            }
        }
    }

    /// With `p` the weights, `o` the result and `d = sum_j p_j (g . v_j)`: `ds_j = p_j (g . v_j - d) / sqrt(head_dim)`,
    /// `dq = sum_j ds_j k_j`, `dk_j += ds_j q`, `dv_j += p_j g`. The sink has the value 0: its derivative is `-p d`.
    fn backward(&self, g: &[f32], PackedReverse { d_qkv: out, d_sinks }: &mut PackedReverse) {
        let (dim, width, query_width) = (self.shape.head_dim, self.shape.width(), self.shape.query_width());
        let (before, scale) = (self.prefix.len(), self.rule.scale);
        let (mut weights, mut slopes, mut means) = (WeightRows::default(), Vec::new(), Vec::new());
        for kv in 0..self.shape.kv_heads {
            let (key_column, value_column) = (self.key_column(kv), self.value_column(kv));
            let keys = self.both(key_column, |keys| Panels::new(keys.transposed()));
            let values = self.both(value_column, |values| Panels::new(values.transposed()));
            let key_rows = self.both(key_column, Panels::new);
            for h in self.group(kv) {
                for block in self.blocks() {
                    let rows = self.rows.start + block.start..self.rows.start + block.end;
                    let seen = before + block.end;
                    self.weights(h, &block, &keys, &mut weights);
                    let at = rows.start * query_width + self.query_column(h);
                    let g = StridedMatrix::strided(&g[at..], block.len(), dim, query_width);
                    slopes.resize(block.len() * seen, 0.0);
                    self.scores(g, &values, &block, &mut slopes);
                    means.resize(block.len(), 0.0);
                    softmax_slopes(&weights.keys, &mut slopes, seen, before + block.start, scale, &mut means);
                    self.add_sinks(h, &rows, &weights.sink, &means, d_sinks);

                    let at = rows.start * width + self.query_column(h);
                    self.combine(&slopes, &key_rows, &block, &mut out[at..], width);

                    let queries = self.columns(rows, self.query_column(h));
                    for (matrix, right, column) in
                        [(&slopes, queries, key_column), (&weights.keys, g, value_column)]
                    {
                        for (from, count, row) in
                            [(0, before, self.prefix.start), (before, block.end, self.rows.start)]
                        {
                            let left = StridedMatrix::strided(&matrix[from..], block.len(), count, seen)
                                .transposed();
                            let at = row * width + column;
                            let to = ProductOut::new(&mut out[at..], width);
                            product(left, Right::Unpacked(right), to, false);
                        }
                    }
                }
            }
        }
    }
}

/// The softmax of the scores of one head.
#[derive(Clone, Copy)]
struct RowSoftmax<'a> {
    rule: AttentionRule<'a>,
    sink: Option<f32>,
}

vectorized! {
    /// Turns scores into weights: row `i` of `rows [_, width]` sees the last of its first `first + i + 1` keys.
    /// `of_sink [_]` gets the weights of the sink.
    fn softmax_rows(rows: &mut [f32], width: usize, first: usize, of: RowSoftmax<'_>, of_sink: &mut [f32]) {
        let RowSoftmax { rule, sink } = of;
        for (i, (row, of_sink)) in rows.chunks_exact_mut(width).zip(of_sink).enumerate() {
            let (upto, behind) = row.split_at_mut(first + i + 1);
            let (before, seen) = upto.split_at_mut(upto.len().saturating_sub(rule.window));
            *of_sink = softmax(seen, rule.scale, sink);
            before.fill(0.0);
            behind.fill(0.0);
        }
    }
}

vectorized! {
    /// Turns derivatives by the weights into derivatives by the unscaled scores. `means [_]` gets the weighted mean of each row.
    fn softmax_slopes(
        weights: &[f32],
        slopes: &mut [f32],
        width: usize,
        first: usize,
        scale: f32,
        means: &mut [f32],
    ) {
        let rows = weights.chunks_exact(width).zip(slopes.chunks_exact_mut(width)).zip(means);
        for (i, ((weights, slopes), of_row)) in rows.enumerate() {
            let seen = first + i + 1;
            let mean = dot(&weights[..seen], &slopes[..seen]);
            *of_row = mean;
            for (slope, weight) in slopes.iter_mut().zip(weights) {
                *slope = weight * (*slope - mean) * scale;
            }
        }
    }
}

/// Softmax of `scores * scale` and of `sink`, if there is one, in place. Returns the weight of the sink.
#[inline(always)]
fn softmax(scores: &mut [f32], scale: f32, sink: Option<f32>) -> f32 {
    for score in scores.iter_mut() {
        *score *= scale;
    }
    let top = sink.unwrap_or(f32::NEG_INFINITY).max(max(scores));
    let mut lanes = [0.0_f32; LANES];
    let mut chunks = scores.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (score, lane) in chunk.iter_mut().zip(&mut lanes) {
            *score = exp(*score - top);
            *lane += *score;
        }
    }
    for (score, lane) in chunks.into_remainder().iter_mut().zip(&mut lanes) {
        *score = exp(*score - top);
        *lane += *score;
    }
    let of_sink = sink.map_or(0.0, |sink| exp(sink - top));
    let inv = 1.0 / (sum(&lanes) + of_sink);
    for score in scores {
        *score *= inv;
    }
    of_sink * inv
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
                page += match work.pages.len() {
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
            LANES..32 => page_values::<H, 1>(work, head_dim, d, out),
            32..64 => page_values::<H, 2>(work, head_dim, d, out),
            _ => page_values::<H, 4>(work, head_dim, d, out),
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
