//! `gsm8k`: verl's grader of Grade School Math, character by character, so that scores compare with its runs.
//!
//! Invariant: same verdict as verl's `gsm8k.py` on every text, its quirks included (`#### 18.` is not `18`; the
//! flexible method keeps commas). For 18.00 to equal 18, use `math`.

use std::sync::LazyLock;

use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::registry::{RewardKind, pure};
use crate::{RewardError, RewardInput};

/// Only the end of a completion is searched, in characters.
const CLIP_CHARS: usize = 300;

static MARKED: LazyLock<Regex> = LazyLock::new(|| compiled(r"#### (-?[0-9.,]+)"));
static NUMBER: LazyLock<Regex> = LazyLock::new(|| compiled(r"-?[0-9.,]+"));

/// The kind `gsm8k`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("gsm8k", &["method"], &[], |spec, _| {
        let method = spec.method.unwrap_or_default();
        Ok(pure(spec, move |label, input| score(label, method, input)))
    })
}

/// How `gsm8k` finds the answer in a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gsm8kMethod {
    /// The last number after `#### `.
    #[default]
    Strict,
    /// The last number of any kind.
    Flexible,
}

/// 1.0 or 0.0; `reward` is the name under which errors are reported.
///
/// The reference is the number after the first `#### ` of the answer, commas removed, or else the answer as it is.
///
/// # Errors
/// The task has no reference answer.
pub fn score(reward: &str, method: Gsm8kMethod, input: &RewardInput<'_>) -> Result<f64, RewardError> {
    let answer = input.answer(reward)?;
    let reference = MARKED.captures(answer).map_or_else(|| answer.to_owned(), |c| without_marks(&c[1]));
    let equal = extract(method, input.text).is_some_and(|found| found == reference);
    Ok(f64::from(u8::from(equal)))
}

/// The answer in a completion.
fn extract(method: Gsm8kMethod, text: &str) -> Option<String> {
    let tail = text.char_indices().rev().nth(CLIP_CHARS - 1).map_or(text, |(at, _)| &text[at..]);
    match method {
        Gsm8kMethod::Strict => MARKED.captures_iter(tail).last().map(|c| without_marks(&c[1])),
        Gsm8kMethod::Flexible => {
            let numbers: Vec<_> = NUMBER.find_iter(tail).map(|found| found.as_str()).collect();
            // If every one is a full stop, verl is left with the first.
            let last = numbers.iter().rev().find(|number| **number != ".").or(numbers.first());
            last.map(|number| (*number).to_owned())
        }
    }
}

fn without_marks(number: &str) -> String {
    number.replace([',', '$'], "")
}

fn compiled(pattern: &str) -> Regex {
    Regex::new(pattern).expect("constant pattern")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{input, task};

    fn verdict(method: Gsm8kMethod, answer: &str, text: &str) -> f64 {
        score("gsm8k", method, &input(&task(answer), text)).unwrap()
    }

    #[test]
    fn strict_is_verl_strict() {
        for (text, expected) in [
            ("so\n#### 1,234", 1.0),
            ("#### 1234", 1.0),
            ("#### 7\n#### 1234", 1.0),
            ("#### 1234\n#### 7", 0.0),
            ("####1234", 0.0),
            ("#### 1234.", 0.0),
            ("#### 1234.0", 0.0),
            ("#### $1234", 0.0),
            ("1234", 0.0),
            ("", 0.0),
        ] {
            assert_eq!(verdict(Gsm8kMethod::Strict, "work\n#### 1,234", text), expected, "{text:?}");
            assert_eq!(verdict(Gsm8kMethod::Strict, "1234", text), expected, "{text:?}");
        }
    }

    #[test]
    fn flexible_is_verl_flexible() {
        for (text, expected) in [
            ("#### 18", 1.0),
            ("it is 18 .", 1.0),
            ("it is 18.", 0.0),
            ("1,8", 0.0),
            ("18 or 19", 0.0),
            (".", 0.0),
        ] {
            assert_eq!(verdict(Gsm8kMethod::Flexible, "18", text), expected, "{text:?}");
        }
    }

    #[test]
    fn only_the_last_300_characters_count() {
        let at = |filler: usize| format!("#### 18{}", "\u{e9}".repeat(filler));
        assert_eq!(verdict(Gsm8kMethod::Strict, "18", &at(293)), 1.0);
        assert_eq!(verdict(Gsm8kMethod::Strict, "18", &at(294)), 0.0);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>(), answer in any::<String>()) {
            verdict(Gsm8kMethod::Strict, &answer, &text);
            verdict(Gsm8kMethod::Flexible, &answer, &text);
        }
    }
}
