//! `hendrycks`: verl's `math_reward`, which is lm-eval's `hendrycks_math`, character by character: 1 or 0.
//!
//! Invariant: same verdict as verl's `math_reward.py`, its quirks included: a `\fbox` is found and never right, one
//! `\boxed ` with a blank anywhere has priority over all with braces, and text that cannot be normalised is compared as it is.

use crate::registry::{RewardKind, pure};
use crate::{RewardError, RewardInput};

/// The kind `hendrycks`.
pub(crate) fn kind() -> RewardKind {
    RewardKind::self_contained("hendrycks", &[], &[], |spec, _| Ok(pure(spec, score)))
}

/// 1.0 or 0.0; `reward` is the name under which errors are reported.
///
/// # Errors
/// The task has no reference answer.
pub fn score(reward: &str, input: &RewardInput<'_>) -> Result<f64, RewardError> {
    let gold = input.answer(reward)?;
    Ok(f64::from(u8::from(boxed(input.text).is_some_and(|answer| equivalent(&answer, gold)))))
}

/// The content of the last box, as verl cuts it.
fn boxed(text: &str) -> Option<String> {
    if let Some((_, last)) = text.rsplit_once("\\boxed ") {
        let content = last.split('$').next().unwrap_or(last);
        return Some(content.to_owned());
    }
    let from = text.rfind("\\boxed").or_else(|| text.rfind("\\fbox"))?;
    let mut depth = 0;
    for (at, byte) in text[from..].bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return text[from..from + at].strip_prefix("\\boxed{").map(str::to_owned);
                }
            }
            _ => {}
        }
    }
    None
}

fn equivalent(a: &str, b: &str) -> bool {
    match (stripped(a), stripped(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// The normal form of Hendrycks et al. 2021; `None` where the original raises.
fn stripped(text: &str) -> Option<String> {
    let mut text = text.replace('\n', "").replace("\\!", "").replace("\\\\", "\\");
    for (before, after) in [
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        ("\\left", ""),
        ("\\right", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\$", ""),
    ] {
        text = text.replace(before, after);
    }
    text = without_right_units(text)?;
    for (before, after) in [("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")] {
        text = text.replace(before, after);
    }
    if text.is_empty() {
        return Some(text);
    }
    if text.starts_with('.') {
        text.insert(0, '0');
    }
    let mut sides = text.split('=');
    if let (Some(name), Some(value), None) = (sides.next(), sides.next(), sides.next())
        && name.chars().count() <= 2
    {
        text = value.to_owned();
    }
    text = braced_roots(&text)?.replace(' ', "");
    text = braced_fractions(&text)?;
    if text == "0.5" {
        text = "\\frac{1}{2}".to_owned();
    }
    Some(slash_as_fraction(text))
}

/// `\text{ ` only ever begins a unit; two of them raise.
fn without_right_units(text: String) -> Option<String> {
    match text.matches("\\text{ ").count() {
        0 => Some(text),
        1 => text.split_once("\\text{ ").map(|(value, _)| value.to_owned()),
        _ => None,
    }
}

/// `\sqrt3` as `\sqrt{3}`; a root of nothing raises.
fn braced_roots(text: &str) -> Option<String> {
    let mut parts = text.split("\\sqrt");
    let mut out = parts.next()?.to_owned();
    for part in parts {
        let first = part.chars().next()?;
        let rest = &part[first.len_utf8()..];
        if first == '{' {
            out.push_str("\\sqrt");
            out.push_str(part);
        } else {
            out.push_str(&format!("\\sqrt{{{first}}}{rest}"));
        }
    }
    Some(out)
}

/// `\frac12` and `\frac1{72}` with braces; a fraction of one character leaves the text as it is, one of none raises.
fn braced_fractions(text: &str) -> Option<String> {
    let mut parts = text.split("\\frac");
    let mut out = parts.next()?.to_owned();
    for part in parts {
        out.push_str("\\frac");
        let mut chars = part.chars();
        let first = chars.next()?;
        if first == '{' {
            out.push_str(part);
            continue;
        }
        let Some(second) = chars.next() else { return Some(text.to_owned()) };
        let rest = chars.as_str();
        if second == '{' {
            out.push_str(&format!("{{{first}}}{{{rest}"));
        } else {
            out.push_str(&format!("{{{first}}}{{{second}}}{rest}"));
        }
    }
    Some(out)
}

/// `a/b` of two whole numbers as `\frac{a}{b}`.
fn slash_as_fraction(text: String) -> String {
    let canonical = |side: &str| {
        let digits = side.strip_prefix('-').unwrap_or(side);
        let plain =
            !digits.is_empty() && digits.len() <= 4300 && digits.bytes().all(|byte| byte.is_ascii_digit());
        plain && (side == "0" || !digits.starts_with('0'))
    };
    match text.split_once('/') {
        Some((a, b)) if canonical(a) && canonical(b) => format!("\\frac{{{a}}}{{{b}}}"),
        _ => text,
    }
}
