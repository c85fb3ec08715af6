//! `regex`: 1 if a pattern occurs in the text or, with `compare`, captures the reference answer; else 0.
//!
//! Invariant: linear time in the text whatever the pattern (no backtracking, hence no look-around and no
//! back-references). The captured text is not normalised, except for white space at its ends.

use ::regex::Regex;

use crate::registry::{RewardKind, pure};
use crate::{RewardError, RewardInput};

/// The kind `regex`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("regex", &["pattern", "compare"], &["pattern"], |spec, _| {
        let pattern = spec.required("pattern", spec.pattern.as_deref())?;
        let rule = PatternRule::new(spec.name(), pattern, spec.compare.unwrap_or_default())?;
        Ok(pure(spec, move |label, input| rule.score(label, input)))
    })
}

/// A compiled pattern, and whether its capture is compared.
#[derive(Debug)]
pub struct PatternRule {
    pattern: Regex,
    compare: bool,
}

impl PatternRule {
    /// Compiles the pattern; `reward` is the name under which errors are reported.
    ///
    /// # Errors
    /// The pattern is no regular expression, or is to be compared and captures nothing.
    pub fn new(reward: &str, pattern: impl Into<String>, compare: bool) -> Result<Self, RewardError> {
        let regex = compile(reward, pattern.into())?;
        if compare && regex.captures_len() < 2 {
            return Err(RewardError::NoCapture {
                reward: reward.to_owned(),
                pattern: regex.as_str().to_owned(),
            });
        }
        Ok(Self { pattern: regex, compare })
    }

    /// 1.0 or 0.0. With `compare`, the last occurrence decides, by its first capture group.
    ///
    /// # Errors
    /// `compare` is set and the task has no reference answer.
    pub fn score(&self, reward: &str, input: &RewardInput<'_>) -> Result<f64, RewardError> {
        let hit = if self.compare {
            let answer = input.answer(reward)?.trim();
            let last = self.pattern.captures_iter(input.text).last();
            last.and_then(|captures| captures.get(1)).is_some_and(|found| found.as_str().trim() == answer)
        } else {
            self.pattern.is_match(input.text)
        };
        Ok(f64::from(u8::from(hit)))
    }
}

/// Compiles a pattern that a user wrote.
pub(crate) fn compile(reward: &str, pattern: String) -> Result<Regex, RewardError> {
    Regex::new(&pattern).map_err(|error| RewardError::Pattern {
        reward: reward.to_owned(),
        pattern,
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{input, task};

    fn verdict(pattern: &str, compare: bool, text: &str) -> f64 {
        PatternRule::new("regex", pattern, compare)
            .unwrap()
            .score("regex", &input(&task("85"), text))
            .unwrap()
    }

    #[test]
    fn without_compare_an_occurrence_is_enough() {
        assert_eq!(verdict("so+", false, "and sooo on"), 1.0);
        assert_eq!(verdict("^so+$", false, "and sooo on"), 0.0);
    }

    #[test]
    fn with_compare_the_last_occurrence_decides() {
        let pattern = "= ?([^=]*)";
        assert_eq!(verdict(pattern, true, "37+48 = 84 = 85 "), 1.0);
        assert_eq!(verdict(pattern, true, "37+48 = 85 = 84"), 0.0);
        assert_eq!(verdict("x(1)?", true, "x"), 0.0);
        assert_eq!(verdict(pattern, true, "85"), 0.0);
    }

    #[test]
    fn bad_patterns_are_refused_at_once() {
        let broken = PatternRule::new("mine", "(", false).unwrap_err();
        assert!(matches!(&broken, RewardError::Pattern { reward, .. } if reward == "mine"));
        let mute = PatternRule::new("mine", "x", true).unwrap_err();
        assert!(matches!(mute, RewardError::NoCapture { .. }));
    }
}
