//! The heads of one segment, or of some of its queries: scores, weights, results and gradients in blocks of queries.
//!
//! Queries, keys, results and gradients are rows of buffers with any stride, so that queries and keys may lie apart.
//!
//! Invariant: the bits of a row do not depend on the buffers, nor on which queries of its segment are computed with it.

use std::ops::Range;

use super::super::gemm::{Panels, ProductOut, Right, StridedMatrix, product};
use super::super::heads::HeadShape;
use super::super::simd::{LANES, dot, exp, max, sum, vectorized};
use super::AttentionRule;

/// Queries of a block: their scores are in memory at a time.
const QUERIES: usize = 32;

/// Rows of values of heads, each `[stride]`; heads follow one another from `column` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadColumns {
    pub(crate) stride: usize,
    pub(crate) column: usize,
}

/// Prepared queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadOperands<'a> {
    pub(crate) queries: &'a [f32],
    pub(crate) of_queries: HeadColumns,
    /// Keys and values.
    pub(crate) keys: &'a [f32],
    pub(crate) of_keys: KeyColumns,
}

/// Where keys and values are in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyColumns {
    pub(crate) stride: usize,
    /// Of the first key.
    pub(crate) key: usize,
    /// Of the first value.
    pub(crate) value: usize,
}

/// Rows of some queries of a segment, and of the keys that they see.
#[derive(Clone, Debug)]
pub(crate) struct SegmentRows {
    /// Rows of the queries.
    pub(crate) queries: Range<usize>,
    /// Rows of keys of the prefix.
    pub(crate) prefix: Range<usize>,
    /// Rows of keys of the segment: those before the queries, and theirs.
    pub(crate) own: Range<usize>,
}

/// Gradients of queries, keys and values, to which those of some queries are written.
#[derive(Debug)]
pub(crate) struct SegmentGradients<'a> {
    /// Those of keys too if `keys` is absent.
    pub(crate) queries: &'a mut [f32],
    pub(crate) of_queries: HeadColumns,
    pub(crate) keys: Option<&'a mut [f32]>,
    pub(crate) of_keys: KeyColumns,
    /// Columns of `keys` from one leaf of the sums of keys and values to the next.
    pub(crate) leaf: usize,
    /// `[rows, stride]` what each row of queries adds to the gradient of the sinks; unused without sinks.
    pub(crate) d_sinks: &'a mut [f32],
    pub(crate) of_sinks: HeadColumns,
}

impl SegmentGradients<'_> {
    fn keys(&mut self) -> &mut [f32] {
        match &mut self.keys {
            Some(keys) => keys,
            None => self.queries,
        }
    }
}

impl<'a> HeadOperands<'a> {
    /// Of the rows of the fused projection `qkv [T, width]`.
    pub(crate) fn fused(qkv: &'a [f32], shape: HeadShape) -> Self {
        let (stride, key) = (shape.width(), shape.query_width());
        let of_keys = KeyColumns { stride, key, value: key + shape.kv_width() };
        Self { queries: qkv, of_queries: HeadColumns { stride, column: 0 }, keys: qkv, of_keys }
    }
}

/// Some queries of one segment with the keys that they see.
pub(crate) struct SegmentHeads<'a> {
    pub(crate) from: HeadOperands<'a>,
    pub(crate) rows: SegmentRows,
    pub(crate) rule: AttentionRule<'a>,
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

impl HeadColumns {
    /// Those of the queries of head `kv`, which have `width` columns each.
    pub(crate) fn of_kv(self, kv: usize, shape: HeadShape, width: usize) -> Self {
        Self { column: self.column + kv * (shape.heads / shape.kv_heads) * width, ..self }
    }
}

impl<'a> SegmentHeads<'a> {
    /// Head `kv` and its queries as the only ones.
    pub(crate) fn of_kv(self, kv: usize) -> Self {
        let HeadShape { heads, kv_heads, head_dim } = self.rule.shape;
        let (group, mut from) = (heads / kv_heads, self.from);
        from.of_queries = from.of_queries.of_kv(kv, self.rule.shape, head_dim);
        from.of_keys.key += kv * head_dim;
        from.of_keys.value += kv * head_dim;
        let sinks = self.rule.sinks.get(kv * group..(kv + 1) * group).unwrap_or_default();
        let shape = HeadShape { heads: group, kv_heads: 1, head_dim };
        Self { from, rule: AttentionRule { shape, sinks, ..self.rule }, rows: self.rows }
    }

    /// Columns of rows `rows` of `values [_, stride]` from `column` on: `[rows, head_dim]`.
    fn columns<'v>(
        &self,
        values: &'v [f32],
        stride: usize,
        rows: Range<usize>,
        column: usize,
    ) -> StridedMatrix<'v> {
        let values = &values[(rows.start * stride + column).min(values.len())..];
        StridedMatrix::strided(values, rows.len(), self.rule.shape.head_dim, stride)
    }

    fn both(&self, column: usize, pack: impl Fn(StridedMatrix<'_>) -> Panels) -> PackedColumns {
        let HeadOperands { keys, of_keys, .. } = self.from;
        let of = |rows: &Range<usize>| pack(self.columns(keys, of_keys.stride, rows.clone(), column));
        PackedColumns { prefix: of(&self.rows.prefix), own: of(&self.rows.own) }
    }

    /// Keys of the segment before the first query.
    fn skipped(&self) -> usize {
        self.rows.own.len() - self.rows.queries.len()
    }

    /// Blocks of queries: offsets among the own keys.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let (first, len) = (self.skipped(), self.rows.own.len());
        (first..len).step_by(QUERIES).map(move |start| start..(start + QUERIES).min(len))
    }

    /// The rows of the queries of a block.
    fn query_rows(&self, block: &Range<usize>) -> Range<usize> {
        let start = self.rows.queries.start + block.start - self.skipped();
        start..start + block.len()
    }

    /// The queries of a block, of head `h`.
    fn queries(&self, h: usize, block: &Range<usize>) -> StridedMatrix<'a> {
        let HeadOperands { queries, of_queries: HeadColumns { stride, column }, .. } = self.from;
        self.columns(queries, stride, self.query_rows(block), column + h * self.rule.shape.head_dim)
    }

    /// Columns of a key and of a value of head `kv`.
    fn key_columns(&self, kv: usize) -> [usize; 2] {
        let KeyColumns { key, value, .. } = self.from.of_keys;
        [key, value].map(|first| first + kv * self.rule.shape.head_dim)
    }

    /// The query heads of a key-value head.
    fn group(&self, kv: usize) -> Range<usize> {
        let per_kv = self.rule.shape.heads / self.rule.shape.kv_heads;
        kv * per_kv..(kv + 1) * per_kv
    }

    /// Weights `[block, prefix + block.end]` of the queries of a block over the keys that the last of them sees; zero for
    /// keys that a query does not see.
    fn weights(&self, h: usize, block: &Range<usize>, keys: &PackedColumns, weights: &mut WeightRows) {
        let before = self.rows.prefix.len();
        let seen = before + block.end;
        let WeightRows { keys: weights, sink } = weights;
        weights.resize(block.len() * seen, 0.0);
        sink.resize(block.len(), 0.0);
        self.scores(self.queries(h, block), keys, block, weights);
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
        let (before, dim) = (self.rows.prefix.len(), self.rule.shape.head_dim);
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
        let (before, dim) = (self.rows.prefix.len(), self.rule.shape.head_dim);
        let seen = before + block.end;
        let prefix = StridedMatrix::strided(left, block.len(), before, seen);
        product(prefix, rows.prefix.part(before, dim), ProductOut::new(out, row_stride), true);
        let own = StridedMatrix::strided(&left[before..], block.len(), block.end, seen);
        product(own, rows.own.part(block.end, dim), ProductOut::new(out, row_stride), false);
    }

    /// Writes the results of the queries of head `kv` to their rows of `out`; `to` has the columns of all heads.
    pub(crate) fn forward(&self, kv: usize, out: &mut [f32], to: HeadColumns) {
        let [key_column, value_column] = self.key_columns(kv);
        let keys = self.both(key_column, |keys| Panels::new(keys.transposed()));
        let values = self.both(value_column, Panels::new);
        let mut weights = WeightRows::default();
        for h in self.group(kv) {
            for block in self.blocks() {
                self.weights(h, &block, &keys, &mut weights);
                let row = self.query_rows(&block).start;
                let at = row * to.stride + to.column + h * self.rule.shape.head_dim;
                self.combine(&weights.keys, &values, &block, &mut out[at..], to.stride);
            }
        }
    }

    /// Backward of [`SegmentHeads::forward`] for the gradient `g` of the results, whose heads are in the columns `of_g`. With `p` the
    /// weights, `o` the result and `d = sum_j p_j (g . v_j)`: `ds_j = p_j (g . v_j - d) / sqrt(head_dim)`, `dq = sum_j ds_j k_j`,
    /// `dk_j += ds_j q`, `dv_j += p_j g`. The sink has the value 0: its derivative is `-p d`.
    pub(crate) fn backward(&self, kv: usize, g: &[f32], of_g: HeadColumns, out: &mut SegmentGradients<'_>) {
        let (dim, before) = (self.rule.shape.head_dim, self.rows.prefix.len());
        let [key_column, value_column] = self.key_columns(kv);
        let keys = self.both(key_column, |keys| Panels::new(keys.transposed()));
        let values = self.both(value_column, |values| Panels::new(values.transposed()));
        let key_rows = self.both(key_column, Panels::new);
        let (mut weights, mut slopes, mut means) = (WeightRows::default(), Vec::new(), Vec::new());
        for h in self.group(kv) {
            for block in self.blocks() {
                let (rows, seen) = (self.query_rows(&block), before + block.end);
                self.weights(h, &block, &keys, &mut weights);
                let g = self.columns(g, of_g.stride, rows.clone(), of_g.column + h * dim);
                slopes.resize(block.len() * seen, 0.0);
                self.scores(g, &values, &block, &mut slopes);
                means.resize(block.len(), 0.0);
                let first = before + block.start;
                softmax_slopes(&weights.keys, &mut slopes, seen, first, self.rule.scale, &mut means);
                self.add_sinks(h, &rows, &weights.sink, &means, out);

                let HeadColumns { stride, column } = out.of_queries;
                let at = rows.start * stride + column + h * dim;
                self.combine(&slopes, &key_rows, &block, &mut out.queries[at..], stride);
                let query = self.queries(h, &block);
                self.add_keys(&block, [(&slopes, query), (&weights.keys, g)], h, out);
            }
        }
    }

    /// Adds the gradients of the keys and values of head `h`, `left^T x right`, of a block of queries, to theirs: of keys the slopes
    /// `[block, seen]` and the queries `[block, head_dim]`, of values the weights and the gradients of the results.
    fn add_keys(
        &self,
        block: &Range<usize>,
        products: [(&Vec<f32>, StridedMatrix<'_>); 2],
        h: usize,
        out: &mut SegmentGradients<'_>,
    ) {
        let (before, KeyColumns { stride, key, value }) = (self.rows.prefix.len(), out.of_keys);
        let HeadShape { heads, kv_heads, head_dim } = self.rule.shape;
        let per_kv = heads / kv_heads;
        let (kv, leaf) = (h / per_kv, h % per_kv * self.rule.leaves / per_kv);
        let of_head = kv * head_dim + leaf * out.leaf;
        let seen = before + block.end;
        for ((matrix, right), column) in products.into_iter().zip([key, value]) {
            for (from, count, row) in
                [(0, before, self.rows.prefix.start), (before, block.end, self.rows.own.start)]
            {
                let left = StridedMatrix::strided(&matrix[from..], block.len(), count, seen).transposed();
                let at = row * stride + column + of_head;
                let to = ProductOut::new(&mut out.keys()[at..], stride);
                product(left, Right::Unpacked(right), to, false);
            }
        }
    }

    /// Writes the derivatives by the sink of head `h` in `rows`, for its weights and the means of the rows.
    fn add_sinks(
        &self,
        h: usize,
        rows: &Range<usize>,
        weights: &[f32],
        means: &[f32],
        out: &mut SegmentGradients<'_>,
    ) {
        if self.rule.sinks.is_empty() {
            return;
        }
        let HeadColumns { stride, column } = out.of_sinks;
        let of_rows = out.d_sinks[rows.start * stride..].chunks_exact_mut(stride);
        for ((d_sinks, weight), mean) in of_rows.zip(weights).zip(means) {
            d_sinks[column + h] = -weight * mean;
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
pub(super) fn softmax(scores: &mut [f32], scale: f32, sink: Option<f32>) -> f32 {
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
