//! Logits of ranks that share the vocabulary: a rank computes those of its tokens in all rows, and normalises some rows of all
//! tokens.
//!
//! A row is normalised, and its derivatives are computed, by one rank from all of its logits. So they have the bits that one rank
//! gives, whatever the distribution was truncated to. Ranks exchange `(t - 1) / t` of `[rows, V / t]` logits each, twice; they have
//! `[rows, V / t]` of them in memory.

use std::ops::Range;

use candle_core::Result;
use collective::{Collective, even_shards};

use super::Prediction;
use crate::ops::unwritten;
use crate::pass_ranks::failed;

/// Which way logits go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogitsMove {
    /// To the rank that normalises a row.
    ToRows,
    /// To the rank that has a token.
    ToVocabulary,
}

/// Exchanges the logits of `rows` rows between `parts [rows, V / t]` of the tokens of this rank and `whole [own rows, V]`, where own
/// rows are those of [`even_shards`].
pub(super) fn exchange_logits(
    ranks: &dyn Collective,
    rows: usize,
    way: LogitsMove,
    parts: &mut [f32],
    whole: &mut [f32],
) -> Result<()> {
    let (shares, world) = (even_shards(rows, ranks.world()), ranks.world());
    let own = shares[ranks.rank()].len();
    let width = parts.len().checked_div(rows).unwrap_or(0);
    let of_rows: Vec<Range<usize>> =
        shares.iter().map(|share| share.start * width..share.end * width).collect();
    let of_ranks: Vec<Range<usize>> =
        (0..world).map(|rank| rank * own * width..(rank + 1) * own * width).collect();
    // `[t, own rows, V / t]`
    let mut blocks: Vec<f32> = unwritten(whole.len());
    let wide = || (0..world).flat_map(|rank| (0..own).map(move |row| (rank, row)));
    let block = |(rank, row): (usize, usize)| (rank * own + row) * width;
    let place = |(rank, row): (usize, usize)| (row * world + rank) * width;
    if way == LogitsMove::ToRows {
        ranks.all_to_all(parts, &of_rows, &mut blocks, &of_ranks).map_err(failed)?;
        wide().for_each(|at| whole[place(at)..][..width].copy_from_slice(&blocks[block(at)..][..width]));
    } else {
        wide().for_each(|at| blocks[block(at)..][..width].copy_from_slice(&whole[place(at)..][..width]));
        ranks.all_to_all(&blocks, &of_ranks, parts, &of_rows).map_err(failed)?;
    }
    Ok(())
}

/// `[rows]` predictions of all ranks, of which this one has those of its rows.
pub(super) fn gather_predictions(
    ranks: &dyn Collective,
    rows: usize,
    own: &[Prediction],
) -> Result<Vec<Prediction>> {
    let numbers: Vec<f32> = own.iter().flat_map(|row| [row.logprob, row.entropy]).collect();
    let mut all = unwritten(2 * rows);
    let shards: Vec<_> =
        even_shards(rows, ranks.world()).into_iter().map(|share| 2 * share.start..2 * share.end).collect();
    ranks.all_gather(&numbers, &shards, &mut all).map_err(failed)?;
    let (pairs, _) = all.as_chunks::<2>();
    Ok(pairs
        .iter()
        .map(|[logprob, entropy]| Prediction { logprob: *logprob, entropy: *entropy, value: 0.0 })
        .collect())
}
