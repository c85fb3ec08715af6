//! Rows to micro-batches: packed token streams under a budget, spread over ranks by cost.
//!
//! Invariant: the plan is a function of the rows alone, never of timing, so a step can be repeated bit for bit.

use model::{Pack, Target};

use crate::batch::Row;

/// Rows that go through the network together, by index, and the rank that computes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MicroBatch {
    /// Indices of rows, ascending.
    pub rows: Vec<usize>,
    /// Tokens in all.
    pub tokens: usize,
}

/// Cuts rows of the given lengths into micro-batches of at most `budget` tokens (a longer row stands alone), in
/// order, at least one for every one of `world` ranks where there are rows enough.
#[must_use]
pub fn micro_batches(lengths: &[usize], budget: usize, world: usize) -> Vec<MicroBatch> {
    let total: usize = lengths.iter().sum();
    let budget = budget.min(total.div_ceil(world.max(1))).max(1);
    let mut out: Vec<MicroBatch> = Vec::new();
    for (row, length) in lengths.iter().enumerate() {
        match out.last_mut() {
            Some(last) if last.tokens + length <= budget => {
                last.rows.push(row);
                last.tokens += length;
            }
            _ => out.push(MicroBatch { rows: vec![row], tokens: *length }),
        }
    }
    out
}

/// Shares micro-batches among `world` ranks: the next largest to the least loaded. Returns indices per rank, ascending.
#[must_use]
pub fn assign(batches: &[MicroBatch], world: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..batches.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(batches[*i].tokens), *i));
    let mut ranks: Vec<(usize, Vec<usize>)> = vec![(0, Vec::new()); world.max(1)];
    for i in order {
        if let Some(rank) = ranks.iter_mut().min_by_key(|rank| rank.0) {
            rank.0 += batches[i].tokens;
            rank.1.push(i);
        }
    }
    ranks
        .into_iter()
        .map(|(_, mut mine)| {
            mine.sort_unstable();
            mine
        })
        .collect()
}

/// Tokens of a row that go through the network: everything before its last trained token.
#[must_use]
pub fn row_tokens(row: &Row<'_>) -> usize {
    row.sample.loss_mask().iter().rposition(|m| *m).unwrap_or(0)
}

/// A micro-batch laid out for the network.
#[derive(Debug)]
pub struct Packed<'a> {
    /// The token stream.
    pub pack: Pack,
    /// Row of the pack that predicts each trained token.
    pub positions: Vec<usize>,
    /// The trained tokens, with the distributions that they were sampled from.
    pub targets: Vec<Target<'a>>,
    /// Number of trained tokens of each row, in order.
    pub trained: Vec<usize>,
}

/// Packs `rows`, which all have a trained token.
#[must_use]
pub fn pack<'a>(rows: impl Iterator<Item = &'a Row<'a>>) -> Packed<'a> {
    let mut packed =
        Packed { pack: Pack::new(), positions: Vec::new(), targets: Vec::new(), trained: Vec::new() };
    for row in rows {
        let sample = row.sample;
        // A trained token is never the first, so a row that has one is not empty here.
        let Ok(start) = packed.pack.push(&sample.token_ids()[..row_tokens(row)]) else { continue };
        let before = packed.targets.len();
        for (t, token) in sample.token_ids().iter().enumerate().filter(|(t, _)| sample.loss_mask()[*t]) {
            let kept = sample.kept().map(|kept| kept.set(packed.targets.len() - before));
            packed.positions.push(start + t - 1);
            packed.targets.push(Target { token: *token, temperature: sample.temperature(), kept });
        }
        packed.trained.push(packed.targets.len() - before);
    }
    packed
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_row_is_packed_once_within_the_budget(
            lengths in prop::collection::vec(1..50usize, 0..60), budget in 1..200usize, world in 1..5usize
        ) {
            let batches = micro_batches(&lengths, budget, world);
            let rows: Vec<usize> = batches.iter().flat_map(|b| b.rows.clone()).collect();
            prop_assert_eq!(rows, (0..lengths.len()).collect::<Vec<_>>());
            for batch in &batches {
                prop_assert_eq!(batch.tokens, batch.rows.iter().map(|r| lengths[*r]).sum::<usize>());
                prop_assert!(batch.tokens <= budget || batch.rows.len() == 1);
            }
            let ranks = assign(&batches, world);
            prop_assert_eq!(ranks.len(), world);
            let mut all: Vec<usize> = ranks.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..batches.len()).collect::<Vec<_>>());
            if batches.len() >= world {
                prop_assert!(ranks.iter().all(|rank| !rank.is_empty()));
            }
        }
    }
}
