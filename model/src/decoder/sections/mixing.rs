//! Attention over sections, on one rank or among context ranks, forward and backward.
//!
//! A rank computes all heads of its own queries, or some heads of all queries. Key-value heads are jobs of the thread pool.
//!
//! Invariant: the gradient of a key is a balanced binary tree over the sections of queries, whichever rank computes them; sections that
//! do not see the key add zeros.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::super::mixer::{MixingReverse, MixingRule};
use super::exchange::RankRows;
use super::rows::{RowRanges, needed, section_segments};
use crate::ThreadPool;
use crate::ops::attention::{
    AttentionRule, HeadColumns, HeadOperands, KeyColumns, PackedReverse, Segment, SegmentGradients,
    SegmentHeads, SegmentRows,
};
use crate::ops::heads::{HeadShape, sum_leaves};
use crate::ops::{matrix, values};
use crate::pass_ranks::ContextExchange;

/// How the tokens of a pass are mixed.
#[derive(Debug)]
pub(super) struct SectionMixing<'a> {
    pub(super) segments: &'a [Segment],
    /// Rows of all sections.
    pub(super) sections: &'a [Range<usize>],
    /// The context ranks; `None` for one rank.
    pub(super) ranks: Option<RankRows<'a>>,
    pub(super) exchange: ContextExchange,
    /// Rows of the parts of this rank.
    pub(super) parts: Vec<Range<usize>>,
    pub(super) pool: &'a ThreadPool,
}

/// The operands of the attention that this rank computes.
struct GatheredOperands {
    /// `[queries, stride]` with keys and values, if they are not apart.
    queries: Vec<f32>,
    stride: usize,
    /// `[keys, 2 kv_width]`
    keys: Option<Vec<f32>>,
    /// The first row of the queries.
    first: usize,
    /// The rows of the keys.
    key_rows: RowRanges,
    /// Of the heads that this rank computes.
    shape: HeadShape,
    /// Its sinks among those of the layer.
    sinks: Range<usize>,
    /// The queries by section, with the rows of their operands.
    segments: Vec<Vec<SegmentRows>>,
}

/// Gradients for one key-value head.
struct KeyHeadReverse {
    /// `[queries, group * head_dim]`
    queries: Vec<f32>,
    /// `[keys, 2 head_dim]`
    keys: Vec<f32>,
    /// `[queries, group]`, or empty.
    sinks: Vec<f32>,
}

impl SectionMixing<'_> {
    /// Mixes what is prepared of each part, `[T, width]`.
    pub(super) fn mix(&self, rule: MixingRule<'_>, prepared: &[&Tensor]) -> Result<Vec<Tensor>> {
        let rule = attention(rule)?;
        let operands = self.gather(rule, &joined(prepared)?)?;
        let shape = operands.shape;
        let group = shape.heads / shape.kv_heads * shape.head_dim;
        let heads = self.pool.map((0..shape.kv_heads).collect(), |kv| {
            let mut out = vec![0.0; operands.count() * group];
            for rows in operands.segments.iter().flatten() {
                let to = HeadColumns { stride: group, column: 0 };
                operands.head(rule, kv, rows).forward(0, &mut out, to);
            }
            out
        });
        let mut mixed = vec![0.0; operands.count() * shape.query_width()];
        for (kv, head) in heads.iter().enumerate() {
            place(head, group, &mut mixed, shape.query_width(), kv * group);
        }
        let width = rule.shape.query_width();
        if let Some(ranks) = self.heads_apart() {
            mixed = ranks.tokens_of_own(&mixed, width, &[(0, width)])?;
        }
        self.cut(&mixed, width).map(|part| matrix(part.to_vec(), width)).collect()
    }

    /// Backward of [`SectionMixing::mix`] for the gradients `g`, `[T, mixed]` of each part.
    pub(super) fn mix_backward(
        &self,
        rule: MixingRule<'_>,
        prepared: &[&Tensor],
        g: &[&Tensor],
    ) -> Result<Vec<MixingReverse>> {
        let rule = attention(rule)?;
        let operands = self.gather(rule, &joined(prepared)?)?;
        let mut g = joined(g)?;
        if let Some(ranks) = self.heads_apart() {
            let width = rule.shape.query_width();
            g = ranks.heads_of_all(&g, width, &[(0, width)])?;
        }
        let shape = operands.shape;
        let reverse = |kv| operands.reverse_head(rule, kv, &g);
        let heads = self.pool.map((0..shape.kv_heads).collect(), reverse);
        drop(g);
        let (d_qkv, d_sinks) = self.scatter(rule, &operands, &heads)?;
        let of_sinks = rule.sinks.len();
        let mut sinks = self.cut(&d_sinks, of_sinks);
        let of_part = |d_qkv: &[f32]| {
            let d_sinks = sinks.next().unwrap_or_default().to_vec();
            MixingReverse::Attention(PackedReverse { d_qkv: d_qkv.to_vec(), d_sinks })
        };
        Ok(self.cut(&d_qkv, rule.shape.width()).map(of_part).collect())
    }

    /// The ranks, if each computes some heads of all tokens.
    fn heads_apart(&self) -> Option<&RankRows<'_>> {
        self.ranks.as_ref().filter(|_| self.exchange == ContextExchange::Heads)
    }

    /// The parts of `x [own rows, width]`.
    fn cut<'x>(&'x self, x: &'x [f32], width: usize) -> impl Iterator<Item = &'x [f32]> {
        let first = self.parts.first().map_or(0, |part| part.start);
        self.parts.iter().map(move |rows| &x[(rows.start - first) * width..(rows.end - first) * width])
    }

    /// The operands, of what is prepared of the tokens of this rank, `own [own rows, width]`.
    fn gather(&self, rule: AttentionRule<'_>, own: &[f32]) -> Result<GatheredOperands> {
        let AttentionRule { shape, window, sinks, .. } = rule;
        let all = 0..self.sections.last().map_or(0, |last| last.end);
        let by_section = |sections: &[Range<usize>]| -> Vec<Vec<SegmentRows>> {
            sections.iter().map(|section| section_segments(self.segments, section, window)).collect()
        };
        let Some(ranks) = &self.ranks else {
            return Ok(GatheredOperands {
                queries: own.to_vec(),
                stride: shape.width(),
                keys: None,
                first: 0,
                key_rows: RowRanges::union(vec![all]),
                shape,
                sinks: 0..sinks.len(),
                segments: by_section(self.sections),
            }
            .placed());
        };
        let (rank, world) = (ranks.ranks.rank(), ranks.ranks.world());
        if self.exchange == ContextExchange::Heads {
            let each = sinks.len() / world;
            let queries = ranks.heads_of_all(own, shape.width(), &fused_parts(shape))?;
            let shape = HeadShape { heads: shape.heads / world, kv_heads: shape.kv_heads / world, ..shape };
            return Ok(GatheredOperands {
                queries,
                stride: shape.width(),
                keys: None,
                first: 0,
                key_rows: RowRanges::union(vec![all]),
                shape,
                sinks: rank * each..(rank + 1) * each,
                segments: by_section(self.sections),
            }
            .placed());
        }
        let needs = self.needs(ranks, window);
        let (width, query_width) = (shape.width(), shape.query_width());
        let keys: Vec<f32> = own.chunks_exact(width).flat_map(|row| row[query_width..].to_vec()).collect();
        let keys = ranks.rows_needed(&keys, 2 * shape.kv_width(), &needs)?;
        Ok(GatheredOperands {
            queries: own.to_vec(),
            stride: width,
            keys: Some(keys),
            first: ranks.own().start,
            key_rows: needs[rank].clone(),
            shape,
            sinks: 0..sinks.len(),
            segments: by_section(self.own_sections(world, rank)),
        }
        .placed())
    }

    /// The sections of a rank.
    fn own_sections(&self, world: usize, rank: usize) -> &[Range<usize>] {
        let each = self.sections.len() / world;
        &self.sections[rank * each..(rank + 1) * each]
    }

    /// The rows of keys that the queries of each rank see.
    fn needs(&self, ranks: &RankRows<'_>, window: usize) -> Vec<RowRanges> {
        ranks.rows.iter().map(|rows| needed(&section_segments(self.segments, rows, window))).collect()
    }

    /// The gradients `[own rows, width]` and `[own rows, sinks]` of what was prepared of the tokens of this rank, of those of the heads
    /// that it computed.
    fn scatter(
        &self,
        rule: AttentionRule<'_>,
        operands: &GatheredOperands,
        heads: &[KeyHeadReverse],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (shape, of_sinks) = (operands.shape, operands.sinks.len());
        let group = shape.heads / shape.kv_heads;
        let (width, key_width) = (shape.width(), 2 * shape.kv_width());
        let mut keys = vec![0.0; operands.key_rows.len() * key_width];
        // The sinks are behind queries, keys and values.
        let row = width + of_sinks;
        let mut all = vec![0.0; operands.count() * row];
        for (kv, head) in heads.iter().enumerate() {
            let column = kv * group * shape.head_dim;
            place(&head.queries, group * shape.head_dim, &mut all, row, column);
            place_keys(&head.keys, shape, kv, &mut keys);
            if of_sinks > 0 {
                place(&head.sinks, group, &mut all, row, width + kv * group);
            }
        }
        let keys = match &self.ranks {
            Some(ranks) if self.exchange == ContextExchange::Keys => {
                sum_of_ranks(ranks, &keys, key_width, &self.needs(ranks, rule.window))?
            }
            _ => keys,
        };
        place(&keys, key_width, &mut all, row, shape.query_width());
        let (width, of_sinks) = (rule.shape.width(), rule.sinks.len());
        if let Some(ranks) = self.heads_apart() {
            let mut parts = fused_parts(rule.shape).to_vec();
            parts.push((width, of_sinks));
            all = ranks.tokens_of_own(&all, width + of_sinks, &parts)?;
        }
        if of_sinks == 0 {
            return Ok((all, Vec::new()));
        }
        let rows = || all.chunks_exact(width + of_sinks);
        Ok((
            rows().flat_map(|row| row[..width].to_vec()).collect(),
            rows().flat_map(|row| row[width..].to_vec()).collect(),
        ))
    }
}

impl GatheredOperands {
    /// The same, whose segments have places in its buffers in place of rows of the pack.
    fn placed(mut self) -> Self {
        for rows in self.segments.iter_mut().flatten() {
            rows.queries = rows.queries.start - self.first..rows.queries.end - self.first;
            rows.prefix = self.key_rows.place(&rows.prefix);
            rows.own = self.key_rows.place(&rows.own);
        }
        self
    }

    /// Number of queries.
    fn count(&self) -> usize {
        self.queries.len() / self.stride
    }

    /// Head `kv` of some queries as the only one.
    fn head<'a>(&'a self, rule: AttentionRule<'a>, kv: usize, rows: &SegmentRows) -> SegmentHeads<'a> {
        let mut from = HeadOperands::fused(&self.queries, self.shape);
        if let Some(keys) = &self.keys {
            let of_keys =
                KeyColumns { stride: 2 * self.shape.kv_width(), key: 0, value: self.shape.kv_width() };
            from = HeadOperands { keys, of_keys, ..from };
        }
        let rule = AttentionRule { shape: self.shape, sinks: &rule.sinks[self.sinks.clone()], ..rule };
        SegmentHeads { from, rows: rows.clone(), rule }.of_kv(kv)
    }

    /// Backward of head `kv` for the gradient `g [queries, heads * head_dim]`.
    fn reverse_head(&self, rule: AttentionRule<'_>, kv: usize, g: &[f32]) -> KeyHeadReverse {
        let HeadShape { heads, kv_heads, head_dim } = self.shape;
        let group = heads / kv_heads;
        let of_g = HeadColumns { stride: heads * head_dim, column: kv * group * head_dim };
        let mut queries = vec![0.0; self.count() * group * head_dim];
        let mut sinks = vec![0.0; if self.sinks.is_empty() { 0 } else { self.count() * group }];
        let keys = tree(0..self.segments.len(), &mut |section| {
            let (leaves, width) = (rule.leaves, 2 * head_dim);
            let mut keys = vec![0.0; self.key_rows.len() * leaves * width];
            for rows in &self.segments[section] {
                let mut out = SegmentGradients {
                    queries: &mut queries,
                    of_queries: HeadColumns { stride: group * head_dim, column: 0 },
                    keys: Some(&mut keys),
                    of_keys: KeyColumns { stride: leaves * width, key: 0, value: head_dim },
                    leaf: width,
                    d_sinks: &mut sinks,
                    of_sinks: HeadColumns { stride: group, column: 0 },
                };
                self.head(rule, kv, rows).backward(0, g, of_g, &mut out);
            }
            if leaves == 1 {
                return keys;
            }
            let sum = |row: &mut [f32]| {
                sum_leaves(row, leaves, width);
                row[..width].to_vec()
            };
            keys.chunks_exact_mut(leaves * width).flat_map(sum).collect()
        });
        KeyHeadReverse { queries, keys, sinks }
    }
}

/// The attention of a rule.
fn attention(rule: MixingRule<'_>) -> Result<AttentionRule<'_>> {
    match rule {
        MixingRule::Attention(rule) => Ok(rule),
        MixingRule::DeltaNet(_) => candle_core::bail!("a recurrence does not run in sections of tokens"),
    }
}

/// Queries, keys and values of a row.
fn fused_parts(shape: HeadShape) -> [(usize, usize); 3] {
    let (queries, keys) = (shape.query_width(), shape.kv_width());
    [(0, queries), (queries, keys), (queries + keys, keys)]
}

/// `[rows of all parts, width]`
fn joined(parts: &[&Tensor]) -> Result<Vec<f32>> {
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.elem_count()).sum());
    for part in parts {
        all.extend_from_slice(&values(part)?);
    }
    Ok(all)
}

/// Writes `x [rows, width]` to the columns from `column` of `out [rows, stride]`.
fn place(x: &[f32], width: usize, out: &mut [f32], stride: usize, column: usize) {
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(stride)) {
        out[column..column + width].copy_from_slice(x);
    }
}

/// Writes keys and values of head `kv`, `x [rows, 2 head_dim]`, to their columns of those of all heads, `out [rows, 2 kv_width]`.
fn place_keys(x: &[f32], shape: HeadShape, kv: usize, out: &mut [f32]) {
    let (dim, width) = (shape.head_dim, shape.kv_width());
    let (key, value) = (kv * dim, width + kv * dim);
    for (x, out) in x.chunks_exact(2 * dim).zip(out.chunks_exact_mut(2 * width)) {
        out[key..key + dim].copy_from_slice(&x[..dim]);
        out[value..value + dim].copy_from_slice(&x[dim..]);
    }
}

/// The sum over all ranks of the gradients of the keys of this one: `keys [needed rows, width]` are those that it computed.
fn sum_of_ranks(ranks: &RankRows<'_>, keys: &[f32], width: usize, needs: &[RowRanges]) -> Result<Vec<f32>> {
    let own = ranks.own();
    let returned = ranks.rows_returned(keys, width, needs)?;
    Ok(tree(0..returned.len(), &mut |rank| {
        let mut all = vec![0.0; own.len() * width];
        let (rows, mut values) = (&returned[rank].0, &returned[rank].1[..]);
        for rows in rows.iter() {
            let (of_rows, rest) = values.split_at(rows.len() * width);
            all[(rows.start - own.start) * width..(rows.end - own.start) * width].copy_from_slice(of_rows);
            values = rest;
        }
        all
    }))
}

/// The balanced binary tree over the values of some numbers, whose count is a power of two.
fn tree(numbers: Range<usize>, of: &mut impl FnMut(usize) -> Vec<f32>) -> Vec<f32> {
    if numbers.len() <= 1 {
        return of(numbers.start);
    }
    let middle = numbers.start + numbers.len() / 2;
    let mut sum = tree(numbers.start..middle, of);
    let right = tree(middle..numbers.end, of);
    sum.iter_mut().zip(right).for_each(|(sum, value)| *sum += value);
    sum
}
