//! A micro-batch laid out for the network: one token stream without padding, every common prompt in it once.
//!
//! Invariant: rows and their targets keep the order in which they are given.

use model::{Pack, Target};
use trajectory::Sample;

use crate::plan::{prompt, row_tokens};

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

/// Packs `rows`, which all have a trained token. The prompt of neighbours goes through the network once, where it is the
/// same.
#[must_use]
pub fn pack<'a>(rows: impl Iterator<Item = &'a Sample>) -> Packed<'a> {
    let mut packed =
        Packed { pack: Pack::new(), positions: Vec::new(), targets: Vec::new(), trained: Vec::new() };
    let mut shared: Option<(&[u32], usize)> = None;
    for sample in rows {
        let prompt = prompt(sample);
        let prefix = match shared {
            Some((tokens, prefix)) if tokens == prompt => prefix,
            // A trained token is never the first, so there is a prompt.
            _ => match packed.pack.push(prompt) {
                Ok(prefix) => prefix,
                Err(_) => continue,
            },
        };
        shared = Some((prompt, prefix));
        let rest = &sample.token_ids()[prompt.len()..row_tokens(sample)];
        // Nothing is left of a row whose only trained token follows its prompt.
        let start = packed.pack.push_continuation(prefix, rest).unwrap_or(prefix + prompt.len());
        let before = packed.targets.len();
        for (t, token) in sample.token_ids().iter().enumerate().filter(|(t, _)| sample.loss_mask()[*t]) {
            let kept = sample.kept().map(|kept| kept.set(packed.targets.len() - before));
            let first = t == prompt.len();
            packed.positions.push(if first { prefix + t - 1 } else { start + t - 1 - prompt.len() });
            packed.targets.push(Target { token: *token, temperature: sample.temperature(), kept });
        }
        packed.trained.push(packed.targets.len() - before);
    }
    packed
}
