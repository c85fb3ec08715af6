//! The criterion of correct answers, for evaluation, curation and algorithms.
//!
//! Invariant: weights, penalties and bonuses never change whether an answer is correct. An answer that the criterion could not
//! judge is not correct; its component has the failure.

use trajectory::Component;

use crate::RewardSpec;

/// Kinds that compare an answer with a reference or run its tests, and are worth 1 for a correct one. `regex` is one of them
/// where it compares (`compare = true`). Formats, lengths, functions of users, judges and reward models are not: their
/// threshold has to be declared.
pub const VERIFIABLE: [&str; 7] = ["math", "math_dapo", "hendrycks", "gsm8k", "countdown", "exact", "code"];

/// Which answers are correct: those for which one reward, before weighting, is worth at least the threshold.
#[derive(Clone, Debug, PartialEq)]
pub struct Criterion {
    /// Name of the reward.
    pub reward: String,
    /// Least value of a correct answer.
    pub threshold: f64,
}

impl Criterion {
    /// The value of a verifiable reward for a correct answer.
    pub const FULL: f64 = 1.0;

    /// The first verifiable reward of `specs`, at full value; `None` if none of them is.
    #[must_use]
    pub fn first(specs: &[RewardSpec]) -> Option<Self> {
        let verifiable = |spec: &&RewardSpec| {
            VERIFIABLE.contains(&&spec.kind[..]) || (spec.kind == "regex" && spec.compare == Some(true))
        };
        let spec = specs.iter().find(verifiable)?;
        Some(Self { reward: spec.name().to_owned(), threshold: Self::FULL })
    }

    /// Whether an answer with these components is correct.
    #[must_use]
    pub fn judge(&self, components: &[Component]) -> bool {
        let own = components.iter().find(|component| component.name == self.reward);
        own.and_then(|component| component.value).is_some_and(|value| value >= self.threshold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;

    #[test]
    fn the_first_verifiable_reward_judges() {
        let regex = |compare| RewardSpec { compare, ..RewardSpec::new("regex") };
        let named = RewardSpec { name: Some("sums".to_owned()), ..RewardSpec::new("exact") };
        for (specs, expected) in [
            (vec![RewardSpec::new("format"), named.clone(), RewardSpec::new("math")], Some("sums")),
            (
                vec![RewardSpec::new("python"), RewardSpec::new("judge"), regex(None), regex(Some(false))],
                None,
            ),
            (vec![RewardSpec::new("length"), regex(Some(true))], Some("regex")),
            (vec![], None),
        ] {
            let found = Criterion::first(&specs);
            assert_eq!(found.as_ref().map(|criterion| &criterion.reward[..]), expected);
            assert!(found.is_none_or(|criterion| criterion.threshold == 1.0));
        }
        let known = Registry::builtin();
        let known: Vec<&str> = known.names().collect();
        let there = |kind: &&str| known.contains(kind) || cfg!(not(target_os = "linux"));
        assert!(VERIFIABLE.iter().all(there), "{known:?}");
    }

    #[test]
    fn an_unjudged_trajectory_is_not_correct() {
        let component =
            |name: &str, value| Component { name: name.to_owned(), value, ..Component::default() };
        let criterion = Criterion { reward: "b".to_owned(), threshold: 0.5 };
        for (value, correct) in [(Some(0.5), true), (Some(0.49), false), (None, false)] {
            assert_eq!(criterion.judge(&[component("a", Some(9.0)), component("b", value)]), correct);
        }
        assert!(!criterion.judge(&[component("a", Some(1.0))]));
    }
}
