//! What context ranks exchange for attention: heads of all tokens, or the keys and values that the tokens of others attend to.
//!
//! Invariant: values are moved and never computed with, so that the exchange changes no bit. Every rank knows the layout of all ranks,
//! and with it what each of them sends and expects.

use std::ops::Range;

use candle_core::Result;
use collective::Collective;

use super::rows::RowRanges;
use crate::pass_ranks::failed;

/// The context ranks of a pass, with the rows of the pack that each computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankRows<'a> {
    pub(super) ranks: &'a dyn Collective,
    /// Ascending, of every rank.
    pub(super) rows: &'a [Range<usize>],
}

/// Equal parts of a row that are divided among the ranks: the first column and the width of each.
type DividedColumns<'a> = &'a [(usize, usize)];

impl RankRows<'_> {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    /// The rows of this rank.
    pub(super) fn own(&self) -> Range<usize> {
        self.rows[self.rank()].clone()
    }

    /// Turns all heads of the tokens of this rank, `x [own rows, width]`, to some heads of all tokens, `[all rows, width / ranks]`.
    pub(super) fn heads_of_all(
        &self,
        x: &[f32],
        width: usize,
        parts: DividedColumns<'_>,
    ) -> Result<Vec<f32>> {
        let world = self.ranks.world();
        let mut sent = Vec::with_capacity(x.len());
        for peer in 0..world {
            for row in x.chunks_exact(width) {
                parts.iter().for_each(|part| sent.extend_from_slice(&row[share(*part, peer, world)]));
            }
        }
        let each = width / world;
        let sends: Vec<_> = (0..world).map(|peer| range(peer, self.own().len() * each)).collect();
        let receives: Vec<_> = self.rows.iter().map(|rows| rows.start * each..rows.end * each).collect();
        self.call(&sent, &sends, &receives)
    }

    /// Turns some heads of all tokens, `x [all rows, width / ranks]`, to all heads of the tokens of this rank, `[own rows, width]`.
    pub(super) fn tokens_of_own(
        &self,
        x: &[f32],
        width: usize,
        parts: DividedColumns<'_>,
    ) -> Result<Vec<f32>> {
        let (world, own) = (self.ranks.world(), self.own().len());
        let each = width / world;
        let sends: Vec<_> = self.rows.iter().map(|rows| rows.start * each..rows.end * each).collect();
        let receives: Vec<_> = (0..world).map(|peer| range(peer, own * each)).collect();
        let received = self.call(x, &sends, &receives)?;
        let mut out = vec![0.0; own * width];
        for (peer, of_peer) in receives.into_iter().enumerate() {
            let rows = received[of_peer].chunks_exact(each.max(1)).zip(out.chunks_exact_mut(width));
            for (mut row, out) in rows {
                for part in parts {
                    let columns = share(*part, peer, world);
                    let (values, rest) = row.split_at(columns.len());
                    out[columns].copy_from_slice(values);
                    row = rest;
                }
            }
        }
        Ok(out)
    }

    /// The rows `needs[rank]` of all ranks, of which each has its own, `x [own rows, width]`: `[needed rows, width]`.
    pub(super) fn rows_needed(&self, x: &[f32], width: usize, needs: &[RowRanges]) -> Result<Vec<f32>> {
        let own = self.own();
        let (mut sent, mut sends) = (Vec::new(), Vec::with_capacity(needs.len()));
        for needed in needs {
            let start = sent.len();
            for rows in needed.within(&own).iter() {
                sent.extend_from_slice(&x[(rows.start - own.start) * width..(rows.end - own.start) * width]);
            }
            sends.push(start..sent.len());
        }
        self.call(&sent, &sends, &owners(&needs[self.rank()], self.rows, width))
    }

    /// The reverse: every rank gives its owners the rows that it needed, `x [needed rows, width]`. Returns what each rank gives this
    /// one: `[own rows of needs[rank], width]`.
    pub(super) fn rows_returned(
        &self,
        x: &[f32],
        width: usize,
        needs: &[RowRanges],
    ) -> Result<Vec<(RowRanges, Vec<f32>)>> {
        let own = self.own();
        let given: Vec<RowRanges> = needs.iter().map(|needed| needed.within(&own)).collect();
        let mut end = 0;
        let receives: Vec<_> = given
            .iter()
            .map(|rows| {
                end += rows.len() * width;
                end - rows.len() * width..end
            })
            .collect();
        let received = self.call(x, &owners(&needs[self.rank()], self.rows, width), &receives)?;
        Ok(given.into_iter().zip(receives).map(|(rows, range)| (rows, received[range].to_vec())).collect())
    }

    /// The rows of all ranks, of which this one has `x [rows of this rank, width]`, in order of rank; `counts [ranks]` are their numbers.
    pub(super) fn gather(&self, x: &[f32], width: usize, counts: &[usize]) -> Result<Vec<f32>> {
        let mut end = 0;
        let shards: Vec<_> = counts
            .iter()
            .map(|rows| {
                end += rows * width;
                end - rows * width..end
            })
            .collect();
        let mut all = vec![0.0; end];
        self.ranks.all_gather(x, &shards, &mut all).map_err(failed)?;
        Ok(all)
    }

    fn call(&self, values: &[f32], sends: &[Range<usize>], receives: &[Range<usize>]) -> Result<Vec<f32>> {
        let mut received = vec![0.0; receives.last().map_or(0, |last| last.end)];
        self.ranks.all_to_all(values, sends, &mut received, receives).map_err(failed)?;
        Ok(received)
    }
}

/// The columns of `rank` of `world`, of a part of a row.
fn share((start, width): (usize, usize), rank: usize, world: usize) -> Range<usize> {
    let each = width / world;
    start + rank * each..start + (rank + 1) * each
}

/// The range number `index` of ranges of length `len`.
fn range(index: usize, len: usize) -> Range<usize> {
    index * len..(index + 1) * len
}

/// Where the rows of every rank are in a buffer of the rows `needed`, in values.
fn owners(needed: &RowRanges, rows: &[Range<usize>], width: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    let of = |rows: &Range<usize>| {
        let start = end;
        end += needed.within(rows).len() * width;
        start..end
    };
    rows.iter().map(of).collect()
}
