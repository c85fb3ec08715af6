//! `exact`: 1 if the text is the reference answer, white space at both ends aside, else 0.
//!
//! Invariant: nothing inside the text is normalised. It does not look for an answer within a longer text.

use crate::registry::{RewardKind, pure};
use crate::{RewardError, RewardInput};

/// The kind `exact`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("exact", &[], &[], |spec, _| Ok(pure(spec, score)))
}

/// 1.0 or 0.0; `reward` is the name under which errors are reported.
///
/// # Errors
/// The task has no reference answer.
pub fn score(reward: &str, input: &RewardInput<'_>) -> Result<f64, RewardError> {
    let equal = input.text.trim() == input.answer(reward)?.trim();
    Ok(f64::from(u8::from(equal)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{input, task};

    #[test]
    fn only_white_space_at_the_ends_is_forgiven() {
        let task = task("85\n");
        for (text, expected) in [("85", 1.0), (" 85\n", 1.0), ("8 5", 0.0), ("85.", 0.0), ("", 0.0)] {
            assert_eq!(score("exact", &input(&task, text)).unwrap(), expected, "{text:?}");
        }
    }

    #[test]
    fn a_missing_answer_is_an_error_that_names_the_row() {
        let mut task = task("");
        task.answer = None;
        let message = score("mine", &input(&task, "85")).unwrap_err().to_string();
        assert!(message.contains("`mine`") && message.contains("task 7, trajectory 3"), "{message}");
    }
}
