//! A micro-batch laid out for the network: one token stream without padding.
//!
//! Invariant: rows and their targets keep the order in which they are given.

use model::{Pack, Target};

use crate::batch::Row;
use crate::plan::row_tokens;

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
