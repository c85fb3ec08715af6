//! Finds the final answer in a text.
//!
//! In order: the last `\boxed{...}` with balanced braces, the last `#### number`, what follows the last `answer is`
//! or `answer:`, and at last the formula or number that ends the text.
//!
//! Invariant: the result is a slice of the text. Which number ends a text is decided conservatively: a number that
//! is part of an expression, or touches anything that could change its value, is no answer. Nothing is evaluated.

use std::sync::LazyLock;

use regex::Regex;

use super::{latex, number};

static OPENING: LazyLock<Regex> = LazyLock::new(|| compiled(r"\\f?box(?:ed)?\s*\{"));

/// The final answer of a completion, or `None` if it does not state one.
///
/// In a completion that was cut off, only what was finished counts: no number that merely happens to be the last, and
/// nothing that touches the end without a closing brace.
#[must_use]
pub fn completion(text: &str, truncated: bool) -> Option<&str> {
    if let Some(answer) = boxed(text) {
        return Some(answer);
    }
    let text = if truncated { text.rsplit_once('\n').map_or("", |(finished, _)| finished) } else { text };
    marked(text).or_else(|| phrase(text)).or_else(|| if truncated { None } else { ending(text) })
}

/// The answer in a reference: a whole solution that states one, or the answer itself.
///
/// A reference with several boxes has several parts, and none of them is the answer by itself.
#[must_use]
pub fn reference(answer: &str) -> &str {
    let last = boxed(answer);
    let first = OPENING.find(answer).and_then(|found| {
        let content = &answer[found.end()..];
        balanced(content).map(|len| &content[..len])
    });
    if last != first {
        return answer;
    }
    last.or_else(|| marked(answer)).unwrap_or(answer)
}

/// The content of the last `\boxed{...}` or `\fbox{...}` whose braces are balanced.
fn boxed(text: &str) -> Option<&str> {
    let openings: Vec<_> = OPENING.find_iter(text).map(|found| found.end()).collect();
    let mut after = text.len();
    for start in openings.into_iter().rev() {
        // An opening inside an unbalanced one cannot close it, so no part of the text is searched twice.
        if let Some(len) = balanced(&text[start..after]) {
            return Some(&text[start..start + len]);
        }
        after = start;
    }
    None
}

/// Bytes up to the brace that closes one already open.
fn balanced(text: &str) -> Option<usize> {
    let mut depth = 1usize;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => {
                escaped = false;
                continue;
            }
            b'\\' => escaped = true,
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// The number after the last `####`, to the end of its line. A heading of that level is not an answer.
fn marked(text: &str) -> Option<&str> {
    let (_, after) = text.rsplit_once("####")?;
    let line = after.lines().next()?.trim();
    number::with_unit(&latex::normalise(line)).map(|_| line)
}

/// What follows the last `answer is` or `answer:`, to the end of the sentence.
fn phrase(text: &str) -> Option<&str> {
    static PHRASE: LazyLock<Regex> = LazyLock::new(|| compiled(r"(?i)\banswer\**\s*(?:is\b|:)[\s:*]*"));
    static SENTENCE: LazyLock<Regex> = LazyLock::new(|| compiled(r"\n|[.!?](?:\s|\z)"));
    let start = PHRASE.find_iter(text).last()?.end();
    let rest = &text[start..];
    let sentence = SENTENCE.find(rest).map_or(rest, |end| &rest[..end.start()]);
    // Without its full stop a factorial or a question would look like a plain number.
    let doubtful = rest[sentence.len()..].starts_with(['!', '?']);
    // "Final answer: the greatest $n$ is 34"
    let stated = sentence.rsplit_once(" is ").map_or(sentence, |(_, stated)| stated);
    let answer = stated.trim_matches(['*', ' ', '\t', '\r', ':']);
    if doubtful || answer.is_empty() { None } else { Some(answer) }
}

/// The formula or number that ends the text, whichever is later.
fn ending(text: &str) -> Option<&str> {
    static FORMULA: LazyLock<Regex> =
        LazyLock::new(|| compiled(r"(?s)\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"));
    let mut plain = 0;
    let mut last = None;
    for captures in FORMULA.captures_iter(text) {
        plain = captures.get(0).map_or(plain, |whole| whole.end());
        last = captures.iter().skip(1).flatten().next();
    }
    // The numbers inside formulas are parts of them, and no answer by themselves.
    let is_number = |c: char| c.is_ascii_digit();
    if text[plain..].contains(is_number) {
        return last_number(&text[plain..]);
    }
    // A single `$...$` that spans lines is more likely two amounts of money.
    let formula = last?.as_str();
    let display = text[..plain].ends_with("$$") || text[..plain].ends_with("\\]");
    if formula.contains('\n') && !display { None } else { Some(formula) }
}

/// The last number of a text without formulas, if it stands by itself.
fn last_number(text: &str) -> Option<&str> {
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
        compiled(
            r"[0-9]{1,3}(?: [0-9]{3})+\b|[0-9]+ [0-9]+/[0-9]+|[0-9.,:/]*[0-9](?:[0-9.,:/]*[0-9])?(?:[eE][+-]?[0-9]+)?",
        )
    });
    let found = NUMBER.find_iter(text).last()?;
    let (before, after) = (&text[..found.start()], &text[found.end()..]);
    let negative = before.ends_with(['-', '\u{2212}']);
    let before = if negative { before.trim_end_matches(['-', '\u{2212}']) } else { before };
    // Signs next to the number, or on the other side of a blank, that make it a part of something else.
    let touches = |c: char| c.is_alphanumeric() || "_^\\{}()[]|<>~\u{221a}".contains(c);
    let operates = |c: char| "+*/^=-\u{2212}\u{d7}\u{f7}\u{b7}".contains(c);
    let joined_before = before.chars().next_back().is_some_and(touches)
        || before.trim_end().chars().next_back().is_some_and(|c| operates(c) && c != '=');
    let joined_after =
        after.chars().next().is_some_and(|c| (touches(c) && c != ')') || ['!', '?'].contains(&c))
            || after.trim_start().chars().next().is_some_and(operates);
    if joined_before || joined_after {
        return None;
    }
    let sign = text[..found.start()].chars().next_back().filter(|_| negative).map_or(0, char::len_utf8);
    Some(&text[found.start() - sign..found.end()])
}

fn compiled(pattern: &str) -> Regex {
    Regex::new(pattern).expect("constant pattern")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_come_first_and_the_last_whole_one_counts() {
        for (text, expected) in [
            ("\\boxed{1} then \\boxed{\\frac{1}{2}} is 7", Some("\\frac{1}{2}")),
            ("\\boxed{\\{1\\}}", Some("\\{1\\}")),
            ("\\boxed{1} then \\boxed{2", Some("1")),
            ("\\boxed{\\boxed{3}", Some("3")),
            ("\\fbox {4}", Some("4")),
            ("\\boxed{1", None),
        ] {
            assert_eq!(boxed(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_reference_with_several_boxes_is_no_single_answer() {
        assert_eq!(reference("\\boxed{1} papers, \\boxed{2} bins"), "\\boxed{1} papers, \\boxed{2} bins");
        assert_eq!(reference("so \\boxed{2}, that is \\boxed{2}."), "2");
        assert_eq!(reference("work\n#### 18"), "18");
        assert_eq!(reference("18"), "18");
    }

    #[test]
    fn headings_are_not_marked_answers() {
        assert_eq!(marked("#### Step 2\nwork"), None);
        assert_eq!(marked("#### 2. Add them\nwork"), None);
        assert_eq!(marked("#### 7\n#### 18\nmore"), Some("18"));
    }

    #[test]
    fn the_last_phrase_counts_to_the_end_of_its_sentence() {
        for (text, expected) in [
            ("The answer is 3. No, the answer is 4.5. Sure.", Some("4.5")),
            ("**Final Answer:**\n\n$72$\nBye", Some("$72$")),
            ("Final Answer: The largest $n$ is 34.", Some("34")),
            ("answer: 5!", None),
            ("Answer:", None),
            ("answers 4", None),
        ] {
            assert_eq!(phrase(text), expected, "{text:?}");
        }
    }

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
            ("4a", None),
            ("$ \n 9 \n $", None),
            ("none", None),
        ] {
            assert_eq!(ending(text), expected, "{text:?}");
        }
    }
}
