//! The reward `math`: 1 or 0 by the verdict of [`grade`], and the handling of unknown verdicts.
//!
//! Invariant: the fallback scores unknown verdicts only. Its value is not changed.

use serde::{Deserialize, Serialize};

use super::{MathVerdict, grade};
use crate::python::math_verify;
use crate::registry::RewardKind;
use crate::reward::each;
use crate::{BoxFuture, Judged, Load, Outcome, Reward, RewardError, RewardInput, RewardSpec};

/// The kind `math`.
pub(crate) fn kind() -> RewardKind {
    /// Keys of the processes that run Math-Verify.
    const KEYS: &[&str] = &["strict", "on_unknown", "python", "workers", "batch", "memory_mb", "environment"];
    RewardKind::self_contained("math", KEYS, &[], |spec, context| {
        let asks = spec.on_unknown == Some(OnUnknown::MathVerify);
        let foreign = spec.given().into_iter().find(|key| !["strict", "on_unknown"].contains(&key.as_str()));
        if let Some(key) = foreign.filter(|_| !asks) {
            return Err(spec.wrong(&key, "has no effect without `on_unknown = \"math_verify\"`"));
        }
        let fallback = asks.then(|| math_verify(spec, context)).transpose()?;
        Ok(Box::new(MathReward::new(spec, fallback)))
    })
}

/// The outcome of an unknown verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnUnknown {
    /// The value is 0.
    #[default]
    Zero,
    /// The reward fails for this trajectory; the recipe's `on_error` has the effect.
    Skip,
    /// Math-Verify decides, run by the interpreter that `python` names.
    MathVerify,
}

/// The grader as a reward.
#[derive(Debug)]
pub struct MathReward {
    name: String,
    strict: bool,
    on_unknown: OnUnknown,
    fallback: Option<Box<dyn Reward>>,
    load: Load,
}

impl MathReward {
    /// A grader by its spec. `fallback`, which is Math-Verify, scores completions with an unknown verdict.
    #[must_use]
    pub fn new(spec: &RewardSpec, fallback: Option<Box<dyn Reward>>) -> Self {
        Self {
            name: spec.name().to_owned(),
            strict: spec.strict.unwrap_or(true),
            on_unknown: spec.on_unknown.unwrap_or_default(),
            fallback,
            load: Load::default(),
        }
    }

    async fn judge(&self, input: &RewardInput<'_>) -> Judged {
        let running = self.load.wait().begin();
        let gold = input.answer(&self.name)?;
        let MathVerdict { equal, decided_by } = grade(gold, input.text, input.truncated, self.strict);
        drop(running);
        if let (None, Some(fallback)) = (equal, &self.fallback) {
            let inputs = [*input];
            let judged = fallback.score(&inputs).await.pop();
            let missing = || self.unknown(input, "its fallback returned no outcome");
            let outcome = judged.unwrap_or_else(|| Err(missing()))?;
            return Ok(outcome.with("decided_by", "math_verify"));
        }
        if equal.is_none() && self.on_unknown == OnUnknown::Skip {
            let shown: String = gold.chars().take(200).collect();
            let reason = format!(
                "the reference answer `{shown}` cannot be compared with the completion; write it as a number, a formula, \
                 a set or a matrix, or say `on_unknown = \"zero\"`"
            );
            return Err(self.unknown(input, &reason));
        }
        let value = f64::from(u8::from(equal == Some(true)));
        Ok(Outcome::from(value).with("decided_by", decided_by.as_str()))
    }

    fn unknown(&self, input: &RewardInput<'_>, reason: &str) -> RewardError {
        input.trajectory().failed(&self.name, reason)
    }
}

impl Reward for MathReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        each(inputs, |input| self.judge(input))
    }

    fn about(&self) -> Option<String> {
        self.fallback.as_ref().map(|_| "unknown ones are decided by Math-Verify".to_owned())
    }

    fn load(&self) -> &Load {
        &self.load
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{block_on, input, task};

    fn judge(reward: &dyn Reward, answer: &str, text: &str) -> Judged {
        let task = task(answer);
        let inputs = [input(&task, text)];
        block_on(reward.score(&inputs)).pop().unwrap()
    }

    #[test]
    fn a_verdict_is_a_value_and_what_decided() {
        let reward = MathReward::new(&RewardSpec::new("math"), None);
        let right = judge(&reward, "\\frac{1}{2}", "\\boxed{0.5}").unwrap();
        assert_eq!((right.value, &right.details["decided_by"]), (Some(1.0), &"number".into()));
        let silent = judge(&reward, "4", "I do not know").unwrap();
        assert_eq!((silent.value, &silent.details["decided_by"]), (Some(0.0), &"no_answer".into()));
    }

    #[test]
    fn an_unknown_is_zero_or_a_failure_or_the_fallback_decides() {
        let gold = "\\undefined{\\{)";
        let zero = MathReward::new(&RewardSpec::new("math"), None);
        assert_eq!(judge(&zero, gold, "\\boxed{5}").unwrap().value, Some(0.0));
        let spec = RewardSpec { on_unknown: Some(OnUnknown::Skip), ..RewardSpec::new("math") };
        let message = judge(&MathReward::new(&spec, None), gold, "\\boxed{5}").unwrap_err().to_string();
        assert!(message.contains(gold), "{message}");
        let fallback = crate::Builtin::new("other", |_: &RewardInput<'_>| Ok(0.75));
        let asked = MathReward::new(&spec, Some(Box::new(fallback)));
        let outcome = judge(&asked, gold, "\\boxed{5}").unwrap();
        assert_eq!((outcome.value, &outcome.details["decided_by"]), (Some(0.75), &"math_verify".into()));
        assert_eq!(judge(&asked, "5", "\\boxed{5}").unwrap().value, Some(1.0));
    }

    #[test]
    fn names_of_variables_count_unless_the_recipe_says_no() {
        let loose = RewardSpec { strict: Some(false), ..RewardSpec::new("math") };
        for (spec, value) in [(RewardSpec::new("math"), 0.0), (loose, 1.0)] {
            let outcome = judge(&MathReward::new(&spec, None), "f(x)", "\\boxed{f(y)}").unwrap();
            assert_eq!(outcome.value, Some(value));
        }
    }
}
