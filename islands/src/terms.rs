//! What islands that exchange outer gradients must have in common.
//!
//! Invariant: terms that differ are refused before anything is written, and every difference is named with both values.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::compression::GradientCompression;
use crate::frame::WEIGHTS_DIGEST;

/// Longest name of an island, bytes.
const MAX_NAME: usize = 64;
/// Most fragments of the trained values.
pub const MAX_FRAGMENTS: usize = 1024;

/// What all islands of a coordinator have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IslandTerms {
    /// Digest of names and shapes of the trained tensors, and of frozen weights under an adapter.
    pub model: String,
    /// Local steps between two outer gradients of the same value.
    pub local_steps: u64,
    /// Form of the values of outer gradients and outer updates.
    pub compression: GradientCompression,
    /// End of each fragment among the trained values, ascending; the last is their number.
    pub ends: Vec<u64>,
}

impl IslandTerms {
    /// Number of trained values.
    #[must_use]
    pub fn values(&self) -> usize {
        self.ends.last().map_or(0, |end| usize::try_from(*end).unwrap_or(usize::MAX))
    }

    /// The fragment that round `round` exchanges, a range of the trained values. Rounds take the fragments by turns.
    #[must_use]
    pub fn fragment(&self, round: u64) -> Range<usize> {
        let count = self.ends.len().max(1) as u64;
        let index = usize::try_from(round % count).unwrap_or_default();
        let end =
            |index: usize| self.ends.get(index).map_or(0, |end| usize::try_from(*end).unwrap_or_default());
        let begin = if index == 0 { 0 } else { end(index - 1) };
        begin..end(index)
    }

    /// Local steps between two rounds.
    #[must_use]
    pub fn steps_per_round(&self) -> u64 {
        self.local_steps / self.ends.len().max(1) as u64
    }

    /// Length of the message of round `round`, bytes.
    #[must_use]
    pub fn message_bytes(&self, round: u64) -> usize {
        self.compression.bytes(self.fragment(round).len())
    }

    /// Length of the outer update of round `round` with the digest of the outer weights after it, bytes.
    #[must_use]
    pub fn update_bytes(&self, round: u64) -> usize {
        self.message_bytes(round) + WEIGHTS_DIGEST
    }

    /// Why no coordinator can have these terms, with at most `most` values; `None` if one can.
    #[must_use]
    pub fn fault(&self, most: u64) -> Option<String> {
        let (count, values) = (self.ends.len() as u64, self.ends.last().copied().unwrap_or_default());
        if self.model.len() != 64 || !self.model.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Some("the digest of the model is not 64 hexadecimal digits".to_owned());
        }
        if values == 0 || values > most {
            return Some(format!("{values} trained values, and 1 to {most} fit: raise `--max-bytes`"));
        }
        if count > MAX_FRAGMENTS as u64 || !self.ends.is_sorted_by(|a, b| a < b) {
            return Some(format!(
                "{count} fragments whose ends are not ascending, or more than {MAX_FRAGMENTS}"
            ));
        }
        if self.local_steps == 0 || !self.local_steps.is_multiple_of(count) {
            return Some(format!(
                "{} local steps cannot be divided among {count} fragments",
                self.local_steps
            ));
        }
        None
    }

    /// How `other`, the terms of an island, differ from these of the coordinator; empty if they are equal.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let short = |digest: &str| digest.chars().take(12).collect::<String>();
        let pairs = [
            ("model", short(&self.model), short(&other.model), self.model == other.model),
            (
                "trained values",
                self.values().to_string(),
                other.values().to_string(),
                self.values() == other.values(),
            ),
            (
                "`island.steps`",
                self.local_steps.to_string(),
                other.local_steps.to_string(),
                self.local_steps == other.local_steps,
            ),
            (
                "`island.compression`",
                self.compression.as_str().to_owned(),
                other.compression.as_str().to_owned(),
                self.compression == other.compression,
            ),
            (
                "`island.fragments`",
                self.ends.len().to_string(),
                other.ends.len().to_string(),
                self.ends == other.ends || self.values() != other.values(),
            ),
        ];
        let named = |(what, ours, theirs, _): (&str, String, String, bool)| {
            format!("{what} {theirs}, and the other islands have {ours}")
        };
        pairs.into_iter().filter(|(.., equal)| !equal).map(named).collect()
    }
}

/// The ends of `count` fragments of about equal size, each of whole tensors with `lens` values. Fewer if there are fewer tensors.
#[must_use]
pub fn fragment_ends(lens: &[usize], count: usize) -> Vec<u64> {
    let total: u64 = lens.iter().map(|len| *len as u64).sum();
    let (mut ends, mut end) = (Vec::new(), 0_u64);
    for len in lens {
        end += *len as u64;
        let due = (total * (ends.len() as u64 + 1)).div_ceil(count.max(1) as u64);
        if end >= due && ends.last() != Some(&end) {
            ends.push(end);
        }
    }
    ends
}

/// Whether `name` can be that of an island: 1 to 64 letters, digits, `.`, `_` and `-`, and no dot first.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(fits) && !name.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms() -> IslandTerms {
        IslandTerms {
            model: "a".repeat(64),
            local_steps: 8,
            compression: GradientCompression::Int8,
            ends: vec![3, 10],
        }
    }

    #[test]
    fn rounds_take_the_fragments_by_turns() {
        let terms = terms();
        assert_eq!([0, 1, 2].map(|round| terms.fragment(round)), [0..3, 3..10, 0..3]);
        assert_eq!((terms.values(), terms.steps_per_round()), (10, 4));
    }

    #[test]
    fn fragments_end_with_tensors_and_cover_all() {
        assert_eq!(fragment_ends(&[4, 4, 4, 4], 2), [8, 16]);
        assert_eq!(fragment_ends(&[1, 100, 1], 2), [101, 102]);
        assert_eq!(fragment_ends(&[5, 5], 1), [10]);
        assert_eq!(fragment_ends(&[5, 5], 9), [5, 10]);
    }

    #[test]
    fn differences_name_both_values() {
        let ours = terms();
        assert!(ours.differences(&ours).is_empty());
        let theirs = IslandTerms { local_steps: 32, model: "b".repeat(64), ..terms() };
        let named = ours.differences(&theirs);
        assert_eq!(named[0], "model bbbbbbbbbbbb, and the other islands have aaaaaaaaaaaa");
        assert_eq!(named[1], "`island.steps` 32, and the other islands have 8");
        assert_eq!(named.len(), 2);
    }

    #[test]
    fn impossible_terms_are_refused() {
        assert_eq!(terms().fault(10), None);
        for wrong in [
            IslandTerms { model: "x".to_owned(), ..terms() },
            IslandTerms { ends: Vec::new(), ..terms() },
            IslandTerms { ends: vec![3, 3], ..terms() },
            IslandTerms { ends: vec![3, 11], ..terms() },
            IslandTerms { local_steps: 7, ..terms() },
            IslandTerms { local_steps: 0, ..terms() },
        ] {
            assert!(wrong.fault(10).is_some(), "{wrong:?}");
        }
    }

    #[test]
    fn names_are_names_of_files() {
        assert!(is_name("berlin-1.a_b"));
        for wrong in ["", ".", "..", ".a", "a/b", "a b", &"a".repeat(65)] {
            assert!(!is_name(wrong), "{wrong}");
        }
    }
}
