//! The answer of a text without a mark: the formula or number at its end.
//!
//! Invariant: a number next to a character that could change its value is no answer.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

use super::clause;
use super::commands::is_function;
use super::extract::{Found, MAX_BOXES, MAX_WHOLE};
use super::units;

/// Most characters between the begin of the last number of a text and its last digit.
const WINDOW: usize = 80;

/// The last formula or number of the text, whichever is later, or a short text as a whole.
pub(super) fn ending(text: &str) -> Vec<Found<'_>> {
    let formulas = last_formulas(text);
    // Formulas in a clause of explanation follow the formula that counts.
    let plain = self::formulas(text).last().map_or(0, |formula| formula.whole.1);
    let rest = &text[plain..];
    let mut found = vec![];
    if formulas.is_none() {
        let whole = text.trim();
        let arithmetic = whole.chars().all(|c| c.is_ascii_digit() || " +-*x/^().=\u{d7}\u{f7}".contains(c));
        let unevaluated = arithmetic
            && whole.contains(['+', '-', '*', 'x', '/', '\u{d7}', '\u{f7}'])
            && !whole
                .trim_start_matches('-')
                .bytes()
                .all(|byte| byte.is_ascii_digit() || byte == b'/' || byte == b'.');
        let asked = whole.ends_with(['?', '!']);
        let whole = whole.trim_matches(['*', '_', ' ']);
        let prose = has_plain_word(whole) && whole.contains(|c: char| c.is_ascii_digit());
        if !whole.is_empty()
            && !prose
            && whole.len() <= MAX_WHOLE
            && !unevaluated
            && !asked
            && !whole.contains('\n')
        {
            found.push(Found::plain(whole));
        }
    }
    if let Some(surd) = last_surd(text, plain) {
        found.push(Found::plain(surd));
        return found;
    }
    // A number inside a formula is a part of it, and no answer of its own.
    if rest.contains(|c: char| c.is_ascii_digit()) {
        found.extend(last_number(text, plain).map(Found::plain));
    } else {
        let stated = formulas.filter(|last| clause::states(&text[..last.start], &text[last.end..]));
        found.extend(stated.and_then(|last| last.answer));
    }
    found
}

/// Formulas that a text ends with.
pub(super) struct LastFormulas<'a> {
    /// They as an answer, if they are one.
    pub(super) answer: Option<Found<'a>>,
    /// Where they begin, bytes.
    pub(super) start: usize,
    /// Where they end, bytes.
    pub(super) end: usize,
}

/// The last formula with the formulas listed before it.
///
/// A `$...$` that spans lines is more likely two amounts of money. The search ends there, and it is no answer.
pub(super) fn last_formulas(text: &str) -> Option<LastFormulas<'_>> {
    let mut all = formulas(text);
    // "$x + 1$, where $x$ is the length"
    while all.len() > 1 && all.last().is_some_and(|last| text[..last.whole.0].trim_end().ends_with(" where"))
    {
        all.pop();
    }
    let (last, earlier) = all.split_last()?;
    if !last.whole_line {
        return Some(LastFormulas { answer: None, start: last.whole.0, end: last.whole.1 });
    }
    let mut group = text[last.content.0..last.content.1].to_owned();
    let mut start = last.whole.0;
    for (count, formula) in (1..).zip(earlier.iter().rev()) {
        let gap = text[formula.whole.1..start].trim();
        let lists = matches!(gap, "," | "and" | "or" | ", and" | ", or" | ";");
        if !lists || count >= MAX_BOXES || !formula.whole_line {
            break;
        }
        let formula_text = &text[formula.content.0..formula.content.1];
        // Of conditions joined by "and" all hold, of those joined by "or" one. Values are a list.
        let joint = match (bounds(formula_text) && bounds(&group), gap.trim_start_matches([',', ' '])) {
            (true, "and") => " \\text{ and } ",
            (true, "or") => " \\text{ or } ",
            _ => ", ",
        };
        group = format!("{formula_text}{joint}{group}");
        start = formula.whole.0;
    }
    Some(LastFormulas { answer: Some(Found::formula(group)), start, end: last.whole.1 })
}

/// Whether a formula is an inequality.
fn bounds(formula: &str) -> bool {
    ["<", ">", "\\le", "\\ge", "\\lt", "\\gt", "\u{2264}", "\u{2265}"]
        .iter()
        .any(|sign| formula.match_indices(sign).any(|(at, _)| !formula[at..].starts_with("\\left")))
}

/// `and`, `or`, also without a blank before the variable that follows.
fn joins(word: &str) -> bool {
    ["and", "or"].iter().any(|joint| word.strip_prefix(joint).is_some_and(|rest| rest.len() < 2))
}

/// Whether a run of letters is no command. Conjunctions and names of environments do not count.
fn has_plain_word(text: &str) -> bool {
    static ENVIRONMENT: LazyLock<Regex> = LazyLock::new(|| compiled(r"\\(?:begin|end)\{[a-zA-Z]+\*?\}"));
    let text = if text.contains("\\begin{") { ENVIRONMENT.replace_all(text, "") } else { text.into() };
    let mut before = ' ';
    text.split_inclusive(|c: char| !c.is_ascii_alphabetic()).any(|piece| {
        let word = piece.trim_end_matches(|c: char| !c.is_ascii_alphabetic());
        let found = word.len() > 1 && before != '\\' && !joins(word) && !is_function(word);
        before = piece.chars().next_back().unwrap_or(' ');
        found
    })
}

struct Formula {
    /// Range with the delimiters, bytes.
    whole: (usize, usize),
    /// Range without the delimiters, bytes.
    content: (usize, usize),
    /// `false` for an inline formula that spans lines.
    whole_line: bool,
}

/// All formulas between delimiters.
fn formulas(text: &str) -> Vec<Formula> {
    let mut found = vec![];
    let mut at = 0;
    while let Some(skip) = text[at..].find(['$', '\\']) {
        at += skip;
        let rest = &text[at..];
        let delimiters = [("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")];
        let Some((open, close)) = delimiters.into_iter().find(|(open, _)| rest.starts_with(open)) else {
            // An escaped sign, or a command.
            at += 1 + rest[1..].chars().next().map_or(0, char::len_utf8);
            continue;
        };
        let inner = &rest[open.len()..];
        let end = close_of(inner, close);
        let inline = open == "$" || open == "\\(";
        let Some(end) = end.filter(|end| !inner[..*end].trim().is_empty()) else {
            at += open.len();
            continue;
        };
        let from = at + open.len();
        let whole_line = !(inline && inner[..end].contains('\n'));
        found.push(Formula {
            whole: (at, from + end + close.len()),
            content: (from, from + end),
            whole_line,
        });
        at = from + end + close.len();
    }
    found
}

fn close_of(inner: &str, close: &str) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + inner[from..].find(close)?;
        if close.starts_with('\\') || !inner[..at].ends_with('\\') {
            return Some(at);
        }
        from = at + close.len();
    }
}

/// The last number of a text without formulas after `plain` bytes, if it stands alone and the text states it.
fn last_number(text: &str, plain: usize) -> Option<Cow<'_, str>> {
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
        compiled(
            r"[0-9]{1,3}(?: [0-9]{3})+\b|[0-9]+ [0-9]+/[0-9]+|[0-9.]+ : [0-9.]*[0-9]|[0-9.,:/]*[0-9](?:[0-9.,:/]*[0-9])?(?:[eE][+-]?[0-9]+)?",
        )
    });
    // The last number begins after the white space before its last digits.
    let digit = text.rfind(|c: char| c.is_ascii_digit())?;
    let from = text[..digit].char_indices().rev().nth(WINDOW).map_or(0, |(at, _)| at);
    let window = text[from..].find(char::is_whitespace).filter(|_| from > 0).map_or(from, |at| from + at);
    let found = NUMBER.find_at(text, window.min(digit).max(plain));
    let all = std::iter::successors(found, |found| NUMBER.find_at(text, found.end()));
    let found = all.clone().last()?;
    // "9.8 m/s^2" ends with 9.8.
    let found = match units::number_before(&text[..found.end()]) {
        Some(end) => all.filter(|found| found.end() == end).last()?,
        None => found,
    };
    let (before, after) = (&text[..found.start()], &text[found.end()..]);
    let negative = before.ends_with(['-', '\u{2212}']);
    let before = if negative { before.trim_end_matches(['-', '\u{2212}']) } else { before };
    // "**18**" is set in bold.
    let (before, after) = match before.strip_suffix("**") {
        Some(inner) if after.contains("**") => (inner, after.strip_prefix("**").unwrap_or(after)),
        _ => (before, after),
    };
    let (before, negated) = match before.trim_end().strip_suffix("negative") {
        Some(rest) if !negative => (rest, true),
        _ => (before, false),
    };
    // Signs beside the number, or beyond a blank, that make it a part of an expression.
    let touches = |c: char| c.is_alphanumeric() || "_^\\{}()[]|<>~\u{221a}".contains(c);
    let operates = |c: char| "+*/^=-<>\u{2212}\u{d7}\u{f7}\u{b7}\u{2264}\u{2265}\u{2260}".contains(c);
    let joined_before = before.chars().next_back().is_some_and(touches)
        || before.trim_end().chars().next_back().is_some_and(|c| operates(c) && c != '=')
        || ends_with_operator(before.trim_end());
    let unit = units::length(after);
    let joined_after =
        after[unit..].chars().next().is_some_and(|c| (touches(c) && c != ')') || ['!', '?'].contains(&c))
            || after[unit..].trim_start().chars().next().is_some_and(operates);
    let joined_after = joined_after || units::multiplies(&after[unit..]);
    if joined_before || joined_after || !clause::states(before, &after[unit..]) {
        return None;
    }
    if negated {
        return Some(format!("-{}", &text[found.start()..found.end() + unit]).into());
    }
    let sign = text[..found.start()].chars().next_back().filter(|_| negative).map_or(0, char::len_utf8);
    Some(text[found.start() - sign..found.end() + unit].into())
}

/// A multiple of a root or of pi at the end of a text, in plain signs: `2\u{221a}3`, `3\u{3c0}/4`.
fn last_surd(text: &str, plain: usize) -> Option<&str> {
    static SURD: LazyLock<Regex> = LazyLock::new(|| {
        compiled(r"[-\x{2212}]?(?:[0-9]+(?:\.[0-9]+|/[0-9]+)?)?(?:\x{221a}\(?[0-9]+\)?|\x{3c0})(?:/[0-9]+)?")
    });
    let sign = text[plain..].rfind(['\u{221a}', '\u{3c0}']).map(|at| plain + at)?;
    let from = text[..sign].char_indices().rev().nth(WINDOW).map_or(0, |(at, _)| at).max(plain);
    let found = SURD.find_iter(&text[from..]).last()?;
    let (start, end) = (from + found.start(), from + found.end());
    let (before, after) = (&text[..start], &text[end..]);
    let apart = |c: Option<char>| c.is_none_or(|c| c.is_whitespace() || "=*$.,;:!)(".contains(c));
    let operates = |c: char| "+-*/^<>\u{2212}\u{d7}\u{f7}\u{b7}\u{2264}\u{2265}\u{2248}(".contains(c);
    let alone = apart(before.chars().next_back())
        && apart(after.chars().next())
        && !before.trim_end().ends_with(operates)
        && !after.trim_start().starts_with(operates)
        && !after.starts_with('!')
        && found.as_str().contains('(') == found.as_str().contains(')');
    let digits = after.trim_start().trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '^');
    let later = digits.trim_start_matches(['2', '3']).contains(|c: char| c.is_ascii_digit());
    (alone && !later && !units::multiplies(after) && clause::states(before, after)).then_some(found.as_str())
}

/// Whether a text ends with a command other than a blank or an approximate equality, as in `x \\le`, or with `!=` and `<=`.
fn ends_with_operator(text: &str) -> bool {
    let stem = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let command = &text[stem.len()..];
    let relation = !matches!(command, "" | "approx" | "quad" | "qquad" | "text" | "boxed" | "n");
    (stem.ends_with('\\') && relation) || ["!=", "<=", ">="].iter().any(|sign| text.ends_with(sign))
}

pub(super) fn compiled(pattern: &str) -> Regex {
    Regex::new(pattern).expect("constant pattern")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_text() {
        for (text, expected) in [
            ("first 3, then 4.", Some("4")),
            ("it is -4 now", Some("-4")),
            ("range 3-4", None),
            ("3 - 4", None),
            ("= 1 000 eggs", Some("1 000")),
            ("2 1/2 cups", Some("2 1/2")),
            ("so $x+1$ holds", Some("x+1")),
            ("$x+1$ is 7", Some("7")),
            ("costs $5 and $6", Some("6")),
            ("at 12:00", Some("12:00")),
            ("37+48", None),
            ("5 + 6 =", None),
            ("a4", None),
            ("$ \n 9 \n $", None),
            ("none", None),
        ] {
            let found = ending(text);
            assert_eq!(
                found
                    .last()
                    .filter(|found| found.text != "none" && found.text != text || found.formula)
                    .map(|found| found.text.to_string())
                    .as_deref(),
                expected,
                "{text:?}"
            );
        }
    }
}
