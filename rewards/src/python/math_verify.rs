//! Math-Verify, run by the user's interpreter: it decides on answers that the grader of kind `math` cannot judge.
//!
//! Invariant: the verdict is Math-Verify's own, reference first, with its default extraction and its own time limits.

use super::PythonReward;
use crate::registry::RewardContext;
use crate::{Reward, RewardError, RewardSpec};

/// A function in the dialect of verifiers. A reference without delimiters is put between dollar signs: otherwise Math-Verify
/// would look for the first number in it.
const SOURCE: &str = r#"
from math_verify import parse, verify

MARKS = ("$", "\\(", "\\[", "\\boxed", "\\begin")


def math_verify(completion, answer):
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    marked = any(mark in answer for mark in MARKS)
    gold = parse(answer if marked else "$" + answer + "$") or parse(answer)
    if not gold:
        raise ValueError(f"Math-Verify cannot read the reference answer {answer!r}")
    return 1.0 if verify(gold, parse(text)) else 0.0
"#;

/// A pool of processes that run Math-Verify: `python`, `workers`, `batch`, `memory_mb`, `timeout_s` and `environment` of
/// the spec say how.
///
/// # Errors
/// The interpreter has no `math_verify`, or does not start.
pub fn math_verify(spec: &RewardSpec, context: &RewardContext) -> Result<Box<dyn Reward>, RewardError> {
    match PythonReward::start(spec, context, Some(SOURCE)) {
        Ok(reward) => Ok(Box::new(reward)),
        Err(RewardError::Start { reward, reason }) if reason.contains("No module named 'math_verify'") => {
            let python = spec.python.as_deref().unwrap_or("python3");
            let reason = format!(
                "`{python}` has no math_verify; install it there (`{python} -m pip install 'math-verify[antlr4_13_2]'`), or name \
                 another interpreter in `python`"
            );
            Err(RewardError::Start { reward, reason })
        }
        Err(error) => Err(error),
    }
}
