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
use crate::TensorRanks;
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

/// Exchanges the logits of `rows` rows between `parts [rows, own tokens]` of this rank and `whole [own rows, V]`, where own rows are
/// those of [`even_shards`].
pub(super) fn exchange_logits(
    tensor: &TensorRanks,
    rows: usize,
    way: LogitsMove,
    parts: &mut [f32],
    whole: &mut [f32],
) -> Result<()> {
    let TensorRanks { ranks, vocabulary, .. } = tensor;
    let shares = even_shards(rows, ranks.world());
    let own = shares[ranks.rank()].len();
    let tokens: Vec<Range<usize>> = (0..ranks.world()).map(|rank| tensor.tokens_of(rank)).collect();
    let width = tokens[ranks.rank()].len();
    let of_rows: Vec<Range<usize>> =
        shares.iter().map(|share| share.start * width..share.end * width).collect();
    let of_tokens: Vec<Range<usize>> = tokens.iter().map(|of| of.start * own..of.end * own).collect();
    // Of each rank's tokens `[own rows, tokens]`.
    let mut blocks: Vec<f32> = unwritten(whole.len());
    let places = || {
        tokens.iter().flat_map(|of| {
            let block = move |row: usize| of.start * own + row * of.len();
            (0..own).map(move |row| (block(row)..block(row) + of.len(), row * vocabulary + of.start))
        })
    };
    if way == LogitsMove::ToRows {
        ranks.all_to_all(parts, &of_rows, &mut blocks, &of_tokens).map_err(failed)?;
        places().for_each(|(block, to)| whole[to..to + block.len()].copy_from_slice(&blocks[block]));
    } else {
        places().for_each(|(block, from)| {
            blocks[block.clone()].copy_from_slice(&whole[from..from + block.len()])
        });
        ranks.all_to_all(&blocks, &of_tokens, parts, &of_rows).map_err(failed)?;
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
