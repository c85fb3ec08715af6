//! `repetition`: open-r1's penalty of repetition: the share of n-grams of words that are not new, times `max_penalty`.
//!
//! Invariant: the value is in [`max_penalty`, 0]; a text shorter than an n-gram has none to repeat.

use std::collections::HashSet;

use crate::registry::{RewardKind, pure};
use crate::{RewardError, RewardSpec};

/// The kind `repetition`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("repetition", &["ngram", "max_penalty"], &[], |spec, _| {
        let penalty = RepetitionPenalty::new(spec)?;
        Ok(pure(spec, move |_, input| Ok(penalty.score(input.text))))
    })
}

/// A checked penalty.
#[derive(Clone, Copy, Debug)]
pub struct RepetitionPenalty {
    ngram: usize,
    max_penalty: f64,
}

impl RepetitionPenalty {
    /// The penalty with the n-gram length and the greatest penalty of a spec.
    ///
    /// # Errors
    /// An n-gram of 0 words, or a positive penalty.
    pub fn new(spec: &RewardSpec) -> Result<Self, RewardError> {
        let (ngram, max_penalty) = (spec.ngram.unwrap_or(3), spec.max_penalty.unwrap_or(-1.0));
        if ngram == 0 {
            return Err(spec.wrong("ngram", "is 0; an n-gram has at least one word"));
        }
        if max_penalty > 0.0 || !max_penalty.is_finite() {
            return Err(
                spec.wrong("max_penalty", "must be finite and at most 0, or repetition would be rewarded")
            );
        }
        Ok(Self { ngram, max_penalty })
    }

    /// The penalty of a text, at most 0.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts of words are far below 2^53")]
    pub fn score(&self, text: &str) -> f64 {
        let text = text.to_lowercase();
        let words: Vec<&str> = text.split_whitespace().collect();
        let all = words.windows(self.ngram);
        let total = all.len();
        if total == 0 {
            return 0.0;
        }
        let distinct: HashSet<&[&str]> = all.collect();
        (1.0 - distinct.len() as f64 / total as f64) * self.max_penalty
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of open-r1's `get_repetition_penalty_reward`.
    #[test]
    fn the_share_of_repeated_n_grams_is_the_penalty() {
        let spec = RewardSpec { ngram: Some(2), max_penalty: Some(-1.0), ..RewardSpec::new("repetition") };
        let penalty = RepetitionPenalty::new(&spec).unwrap();
        assert_eq!(penalty.score("this is a test this is a test"), -(1.0 - 4.0 / 7.0));
        assert_eq!(penalty.score("one two three"), 0.0);
        assert_eq!(penalty.score("one"), 0.0);
        assert_eq!(penalty.score(""), 0.0);
        let spec = RewardSpec { max_penalty: Some(-0.5), ..RewardSpec::new("repetition") };
        assert_eq!(RepetitionPenalty::new(&spec).unwrap().score("no no No no"), -0.25);
    }

    #[test]
    fn a_penalty_is_no_reward() {
        for (ngram, max_penalty) in [(0, -1.0), (3, 0.5), (3, f64::NAN)] {
            let spec = RewardSpec {
                ngram: Some(ngram),
                max_penalty: Some(max_penalty),
                ..RewardSpec::new("repetition")
            };
            assert!(RepetitionPenalty::new(&spec).is_err());
        }
    }
}
