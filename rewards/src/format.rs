//! `format`: 1 if the whole text has a form, else 0. By default: `<think>...</think>`, then `<answer>...</answer>`.
//!
//! Invariant: the form must cover the text from its first to its last character (white space at the ends aside), and
//! the default form admits each tag exactly once. The text between the tags is not judged.

use std::sync::LazyLock;

use ::regex::Regex;

use crate::RewardError;
use crate::regex::compile;
use crate::registry::{RewardKind, pure};

const TAGS: [&str; 4] = ["<think>", "</think>", "<answer>", "</answer>"];

static THINK_ANSWER: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?s)\A<think>.*</think>\s*<answer>.*</answer>\z").expect("constant pattern")
});

/// The kind `format`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("format", &["pattern"], &[], |spec, _| {
        let form = Form::new(spec.name(), spec.pattern.as_deref())?;
        Ok(pure(spec, move |_, input| Ok(form.score(input.text))))
    })
}

/// The required form of a text.
#[derive(Debug)]
pub struct Form {
    own: Option<Regex>,
}

impl Form {
    /// The default form, or an own pattern that must match the whole text.
    ///
    /// # Errors
    /// The pattern is no regular expression; `reward` is the name under which that is reported.
    pub fn new(reward: &str, pattern: Option<&str>) -> Result<Self, RewardError> {
        let Some(pattern) = pattern else { return Ok(Self { own: None }) };
        // Compiled bare first, so that a message of the parser shows the pattern of the user, and so that a pattern like `)|(`
        // cannot close the group around it. The line break ends a comment of `(?x)` and is a character otherwise.
        compile(reward, pattern.to_owned())?;
        let whole = compile(reward, format!(r"\A(?:{pattern})\z"))
            .or_else(|_| compile(reward, format!("\\A(?:{pattern}\n)\\z")))?;
        Ok(Self { own: Some(whole) })
    }

    /// 1.0 or 0.0.
    #[must_use]
    pub fn score(&self, text: &str) -> f64 {
        let text = text.trim();
        let fits = match &self.own {
            Some(own) => own.is_match(text),
            None => THINK_ANSWER.is_match(text) && TAGS.iter().all(|tag| text.matches(tag).count() == 1),
        };
        f64::from(u8::from(fits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_form_is_one_thought_and_one_answer() {
        let form = Form::new("format", None).unwrap();
        for (text, expected) in [
            ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
            (" <think></think><answer></answer>\n", 1.0),
            ("<think>a</think><answer>4</answer> bye", 0.0),
            ("hi <think>a</think><answer>4</answer>", 0.0),
            ("<think>a</think> so <answer>4</answer>", 0.0),
            ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
            ("<think><think>a</think><answer>4</answer>", 0.0),
            ("<answer>4</answer><think>a</think>", 0.0),
            ("", 0.0),
        ] {
            assert_eq!(form.score(text), expected, "{text:?}");
        }
    }

    #[test]
    fn an_own_pattern_must_cover_the_text() {
        let form = Form::new("format", Some("a|ab")).unwrap();
        assert_eq!((form.score("ab"), form.score("abc"), form.score("a")), (1.0, 0.0, 1.0));
        let commented = Form::new("format", Some("(?x) \\d+ # digits")).unwrap();
        assert_eq!((commented.score("42"), commented.score("42a")), (1.0, 0.0));
        assert!(matches!(Form::new("f", Some(")|(")), Err(RewardError::Pattern { .. })));
    }
}
