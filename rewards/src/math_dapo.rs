//! `math_dapo`: verl's grader of DAPO, character by character, so that scores compare with its runs: 1 or -1.
//!
//! Invariant: same verdict as verl's `math_dapo.py`, its quirks included: words such as `square` disappear from answers,
//! only the last 300 characters count, and a box counts without normalisation. Digits are ASCII digits.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

use crate::registry::{RewardKind, pure};
use crate::{Outcome, RewardError, RewardInput};

/// Only the end of a completion is searched, in characters.
const CLIP_CHARS: usize = 300;
/// Only the end of that is searched for a box, in characters.
const BOX_CHARS: usize = 100;
/// What stands for no answer.
const INVALID: &str = "[INVALID]";

/// What is replaced, in this order.
const SUBSTITUTIONS: [(&str, &str); 10] = [
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
];
/// What is removed after that, in this order.
const REMOVED: [&str; 41] = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    "\"",
    "\\dots",
];

/// The kind `math_dapo`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("math_dapo", &["strict_box"], &[], |spec, _| {
        let strict_box = spec.strict_box.unwrap_or_default();
        Ok(pure(spec, move |label, input| score(label, strict_box, input)))
    })
}

/// 1.0 or -1.0, with the details `acc` and `pred`; `reward` is the name under which errors are reported.
///
/// # Errors
/// The task has no reference answer.
pub fn score(reward: &str, strict_box: bool, input: &RewardInput<'_>) -> Result<Outcome, RewardError> {
    let (correct, pred) = verify(input.text, input.answer(reward)?, strict_box);
    let outcome = Outcome::from(if correct { 1.0 } else { -1.0 });
    Ok(outcome.with("acc", correct).with("pred", pred))
}

/// Whether the answer is right, and which was found.
fn verify(text: &str, gold: &str, strict_box: bool) -> (bool, Option<String>) {
    let text = last_chars(text, CLIP_CHARS);
    let boxed = last_boxed(last_chars(text, BOX_CHARS));
    if strict_box {
        return (boxed == Some(gold), boxed.map(str::to_owned));
    }
    static ANSWER: LazyLock<Regex> =
        LazyLock::new(|| compiled(r"(?i)Answer[\s\x1c-\x1f]*:[\s\x1c-\x1f]*([^\n]+)"));
    let found = ANSWER.captures_iter(text).last().map_or(INVALID.to_owned(), |found| found[1].to_owned());
    let pred = normalise(&found);
    match boxed {
        Some(boxed) if pred == INVALID => (boxed == gold, Some(boxed.to_owned())),
        _ => (pred == normalise(gold), Some(pred)),
    }
}

fn last_chars(text: &str, chars: usize) -> &str {
    text.char_indices().rev().nth(chars - 1).map_or(text, |(at, _)| &text[at..])
}

/// The content of the last `\boxed{`; `None` if that one is never closed.
fn last_boxed(text: &str) -> Option<&str> {
    let (_, content) = text.rsplit_once("\\boxed{")?;
    let mut depth = 1;
    for (at, byte) in content.bytes().enumerate() {
        depth += i32::from(byte == b'{') - i32::from(byte == b'}');
        if depth == 0 {
            return Some(&content[..at]);
        }
    }
    None
}

/// The normal form of Lewkowycz et al. 2022 (Minerva), as verl applies it.
fn normalise(answer: &str) -> String {
    static REWRITES: LazyLock<[(Regex, &str); 7]> = LazyLock::new(|| {
        [
            (compiled(r"(.*?)(\$)(.*?)(\$)(.*)"), "$$${3}$$"),
            (compiled(r"(\\text\{)(.*?)(\})"), "${2}"),
            (compiled(r"(\\textbf\{)(.*?)(\})"), "${2}"),
            (compiled(r"(\\overline\{)(.*?)(\})"), "${2}"),
            (compiled(r"(\\boxed\{)(.*)(\})"), "${2}"),
            (compiled(r"(frac)([^{])(.)"), "frac{${2}}{${3}}"),
            (compiled(r"(sqrt)([^{])"), "sqrt{${2}}"),
        ]
    });
    let mut answer = answer.rsplit('=').next().unwrap_or(answer).to_owned();
    for (before, after) in SUBSTITUTIONS {
        answer = answer.replace(before, after);
    }
    for removed in REMOVED {
        answer = answer.replace(removed, "");
    }
    for (pattern, rewrite) in &*REWRITES {
        if let Cow::Owned(rewritten) = pattern.replace_all(&answer, *rewrite) {
            answer = rewritten;
        }
    }
    answer = answer.replace('$', "");
    let digits = answer.replace(',', "");
    if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        answer = digits;
    }
    answer.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)).to_owned()
}

fn compiled(pattern: &str) -> Regex {
    Regex::new(pattern).expect("constant pattern")
}
