//! Data from other processes that the run refused, by sender and reason, until it is logged.
//!
//! Invariant: peers control neither the memory that this module uses nor the duration of a call.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Most pairs of sender and reason between two looks; more are counted under [`OTHERS`].
const MOST: usize = 64;
/// Name for all senders beyond the limit.
const OTHERS: &str = "others";
/// Most characters of an example.
const SHOWN: usize = 400;

/// Rejected messages of one sender for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Its address or name.
    pub sender: String,
    /// A stable word for the reason.
    pub code: String,
    /// How often.
    pub count: u64,
    /// The first of them.
    pub example: String,
}

/// The messages rejected since the last [`Peers::take`].
#[derive(Debug, Default)]
pub(crate) struct Peers {
    refused: Mutex<BTreeMap<(String, String), Refused>>,
}

impl Peers {
    /// Notes that something of `sender` was refused: why, as a word and with its evidence.
    pub(crate) fn refuse(&self, sender: &str, code: &str, detail: &str) {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let known = (sender.to_owned(), code.to_owned());
        let key = if refused.len() < MOST || refused.contains_key(&known) {
            known
        } else {
            (OTHERS.to_owned(), String::new())
        };
        let (sender, code) = key.clone();
        let first = || Refused { sender, code, count: 0, example: detail.chars().take(SHOWN).collect() };
        refused.entry(key).or_insert_with(first).count += 1;
    }

    /// The messages rejected since the last call.
    pub(crate) fn take(&self) -> Vec<Refused> {
        std::mem::take(&mut *self.refused.lock().unwrap_or_else(PoisonError::into_inner))
            .into_values()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_counted_and_bounded() {
        let peers = Peers::default();
        for n in 0..10_000 {
            peers.refuse(&format!("10.0.0.{}", n % 1000), "bad_turn", &"x".repeat(1000));
        }
        let refused = peers.take();
        assert_eq!(refused.len(), MOST + 1);
        assert_eq!(refused.iter().map(|refused| refused.count).sum::<u64>(), 10_000);
        assert!(refused.iter().all(|refused| refused.example.len() == SHOWN));
        assert!(refused.iter().any(|refused| refused.sender == OTHERS));
        assert!(peers.take().is_empty());
    }
}
