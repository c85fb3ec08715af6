//! `length`: the soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476), from 0 down to -1 as a completion nears its
//! maximal length.
//!
//! Invariant: a value in [-1, 0], never rising with length. It does not look at the text.

use crate::registry::{RewardKind, pure};
use crate::{RewardError, RewardInput};

/// The kind `length`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("length", &["max_length", "cache"], &["cache"], |spec, _| {
        let cache = spec.required("cache", spec.cache)?;
        let penalty = OverlongPenalty::new(spec.name(), spec.max_length, cache)?;
        Ok(pure(spec, move |label, input| penalty.score(label, input)))
    })
}

/// The range of lengths of the penalty, in tokens.
#[derive(Debug)]
pub struct OverlongPenalty {
    max_length: Option<usize>,
    cache: usize,
}

impl OverlongPenalty {
    /// 0 up to `max_length - cache` tokens, then linear to -1 at `max_length`, which is the trajectory's
    /// `max_completion_length` if it is not given. `reward` is the name under which errors are reported.
    ///
    /// # Errors
    /// `cache` is 0 or above `max_length`.
    pub fn new(reward: &str, max_length: Option<usize>, cache: usize) -> Result<Self, RewardError> {
        check(reward, max_length.unwrap_or(usize::MAX), cache)?;
        Ok(Self { max_length, cache })
    }

    /// A value in [-1, 0].
    ///
    /// # Errors
    /// `max_completion_length` is used and below `cache`.
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
    pub fn score(&self, reward: &str, input: &RewardInput<'_>) -> Result<f64, RewardError> {
        let max_length = self.max_length.unwrap_or(input.max_completion_length);
        check(reward, max_length, self.cache)?;
        let over = input.completion_ids.len().saturating_sub(max_length - self.cache);
        Ok(-(over.min(self.cache) as f64 / self.cache as f64))
    }
}

fn check(reward: &str, max_length: usize, cache: usize) -> Result<(), RewardError> {
    if (1..=max_length).contains(&cache) {
        return Ok(());
    }
    Err(RewardError::Cache { reward: reward.to_owned(), cache, max_length })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{input, task};

    fn at(penalty: &OverlongPenalty, completion_tokens: usize) -> f64 {
        let task = task("4");
        let completion_ids = vec![0; completion_tokens];
        let input = RewardInput { completion_ids: &completion_ids, ..input(&task, "") };
        penalty.score("length", &input).unwrap()
    }

    #[test]
    fn the_penalty_of_the_paper() {
        let dapo = OverlongPenalty::new("length", Some(20_480), 4_096).unwrap();
        for (tokens, expected) in
            [(0, 0.0), (16_384, 0.0), (17_408, -0.25), (18_432, -0.5), (20_480, -1.0), (30_000, -1.0)]
        {
            assert_eq!(at(&dapo, tokens), expected, "{tokens}");
        }
    }

    #[test]
    fn the_limit_of_the_trajectory_is_the_default() {
        let penalty = OverlongPenalty::new("length", None, 10).unwrap();
        assert_eq!((at(&penalty, 10), at(&penalty, 15), at(&penalty, 20)), (0.0, -0.5, -1.0));
    }

    #[test]
    fn a_cache_as_long_as_the_limit_is_refused() {
        for (max_length, cache) in [(Some(8), 9), (None, 0)] {
            assert!(matches!(
                OverlongPenalty::new("length", max_length, cache),
                Err(RewardError::Cache { .. })
            ));
        }
        let late = OverlongPenalty::new("length", None, 21).unwrap();
        let task = task("4");
        assert!(matches!(late.score("length", &input(&task, "")), Err(RewardError::Cache { .. })));
    }
}
