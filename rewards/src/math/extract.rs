//! Finds the final answer in a text.
//!
//! What is stated last counts: a `\boxed{...}` with balanced braces (or several side by side), `#### number`, what
//! follows `answer is` or `answer:`; without any of them the formula or number that ends the text.
//!
//! Invariant: one or a few slices of the text, in the order in which they should be tried. Which number ends a text is
//! decided conservatively: a number that touches anything that could change its value is no answer. Nothing is evaluated.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

use super::lex;

/// Only the end of a text is searched, in bytes: longer completions answer there.
const MAX_TEXT: usize = 200_000;
/// Boxes that are parts of one answer.
const MAX_BOXES: usize = 16;
/// Bytes between two boxes of one answer.
const MAX_GAP: usize = 70;
/// Longest text that may be an answer as a whole.
const MAX_WHOLE: usize = 300;

/// A candidate for the final answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found<'a> {
    pub(super) text: Cow<'a, str>,
    /// Whether it stood in a box or between formula delimiters.
    pub(super) formula: bool,
}

impl<'a> Found<'a> {
    fn formula(text: impl Into<Cow<'a, str>>) -> Self {
        Self { text: text.into(), formula: true }
    }

    fn plain(text: &'a str) -> Self {
        let formula = text.contains('\\') && !text.contains('$') && !text.contains("\\(");
        Self { text: text.into(), formula }
    }
}

/// The final answer of a completion, best candidate first; empty if it does not state one.
///
/// In a completion that was cut off, only what was finished counts: boxes, and marks on finished lines.
pub(super) fn completion(text: &str, truncated: bool) -> Vec<Found<'_>> {
    let text = without_special_tokens(tail(text));
    let (boxed, boxes_end) = boxed(text).map_or((None, 0), |(found, end)| (Some(found), end));
    let finished = if truncated { text.rsplit_once('\n').map_or("", |(finished, _)| finished) } else { text };
    let after = finished.get(boxes_end..).unwrap_or("");
    let mut found = stated(after, boxed.is_some());
    found.extend(boxed);
    if found.is_empty() && !truncated {
        found = ending(text);
    }
    found
}

/// The answer in a reference: a whole solution that states one, or the answer itself.
pub(super) fn reference(answer: &str) -> Vec<Found<'_>> {
    let answer = tail(answer).trim();
    if let Some((found, _)) = boxed(answer) {
        return vec![found];
    }
    // A box that is never closed still begins an answer.
    if let Some(at) = answer.rfind("boxed{") {
        return vec![Found::formula(&answer[at + 6..])];
    }
    if let Some(found) = marked(answer) {
        return vec![found];
    }
    let whole = Found::plain(answer);
    if answer.len() > 40 {
        let found = stated(answer, true);
        if !found.is_empty() {
            return found;
        }
    }
    match last_formulas(answer) {
        Some((Some(found), _)) => vec![found, whole],
        _ => vec![whole],
    }
}

/// Bytes up to the brace that closes one already open.
pub(super) fn balanced(text: &str) -> Option<usize> {
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

fn tail(text: &str) -> &str {
    let mut from = text.len().saturating_sub(MAX_TEXT);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

/// The text up to the first token of the chat template that a model wrote by itself.
fn without_special_tokens(text: &str) -> &str {
    let special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|eot_id|>", "</s>"];
    if !text.contains("<|") && !text.contains("</s>") {
        return text;
    }
    let from = text.len() - text.trim_start().len();
    let cut = special.iter().filter_map(|token| text.find(token)).filter(|at| *at > from).min();
    cut.map_or(text, |at| &text[..at])
}

/// The content of a box that the text begins with, and the bytes up to its end.
fn box_content(text: &str) -> Option<(&str, usize)> {
    let after = text.strip_prefix("\\boxed").or_else(|| text.strip_prefix("\\fbox"))?.trim_start();
    let inner = after.strip_prefix('{')?;
    let from = text.len() - inner.len();
    let len = balanced(inner)?;
    Some((&inner[..len], from + len + 1))
}

/// The last box, with those before it that belong to the same answer, and where it ends.
fn boxed(text: &str) -> Option<(Found<'_>, usize)> {
    let mut contents: Vec<&str> = vec![];
    let mut end = 0;
    let mut next_start = text.len();
    let mut search = text;
    while let Some(at) = last_box(search) {
        search = &text[..at];
        // An opening inside an unbalanced one cannot close it, so no part of the text is searched twice.
        let Some((content, len)) = box_content(&text[at..next_start]) else {
            if contents.is_empty() {
                next_start = at;
                continue;
            }
            break;
        };
        if contents.is_empty() {
            end = at + len;
        } else if !joined(&text[at + len..next_start]) || contents.len() >= MAX_BOXES {
            break;
        }
        if contents.last() != Some(&content) {
            contents.push(content);
        }
        next_start = at;
    }
    contents.reverse();
    match contents.as_slice() {
        [] => None,
        [single] => Some((Found::formula(*single), end)),
        several => Some((Found::formula(several.join(", ")), end)),
    }
}

fn last_box(text: &str) -> Option<usize> {
    text.rfind("\\boxed").max(text.rfind("\\fbox"))
}

/// Whether what stands between two boxes lists them, and does not conclude one from the other.
fn joined(gap: &str) -> bool {
    const CONCLUDES: [&str; 14] = [
        "so", "thus", "hence", "therefore", "answer", "then", "which", "is", "not", "but", "actually", "wait", "gives", "final",
    ];
    if gap.len() > MAX_GAP || gap.contains("\n\n") || gap.contains('=') {
        return false;
    }
    let mut lists = gap.contains([',', ';']);
    let mut letters = false;
    for word in gap.split(|c: char| !c.is_ascii_alphabetic()).filter(|word| !word.is_empty()) {
        let word = word.to_ascii_lowercase();
        if CONCLUDES.contains(&word.as_str()) {
            return false;
        }
        lists |= word == "and" || word == "or";
        letters |= !["text", "quad", "qquad"].contains(&word.as_str());
    }
    lists || (!letters && gap.len() < 10)
}

/// What is stated by a mark or a phrase, whichever is later; `certain`: only if it has a number or a formula.
fn stated(text: &str, certain: bool) -> Vec<Found<'_>> {
    let mark = text.rfind("####");
    let (phrase_at, phrase) = phrase(text, certain).map_or((None, vec![]), |(at, found)| (Some(at), found));
    if mark > phrase_at {
        if let Some(found) = marked(text) {
            return vec![found];
        }
    }
    phrase
}

/// The number after the last `####`, to the end of its line. A heading of that level is not an answer.
fn marked(text: &str) -> Option<Found<'_>> {
    let (_, after) = text.rsplit_once("####")?;
    let line = after.trim_start_matches(' ').lines().next()?.trim();
    let bare = line.trim_start_matches(['$', '-', '+', '\u{20ac}', '\u{a3}', '*', ' ']);
    let digits = bare.starts_with(|c: char| c.is_ascii_digit() || c == '\\' || c == '.' || c == '(');
    // "#### 2. Add them" is a heading.
    let numbered = bare.split_once(". ").is_some_and(|(number, rest)| {
        number.bytes().all(|byte| byte.is_ascii_digit()) && rest.starts_with(|c: char| c.is_alphabetic())
    });
    (digits && !numbered && line.len() <= MAX_WHOLE).then(|| Found::plain(line))
}

/// What follows the last `answer is` or `answer:`, to the end of the sentence, and where.
fn phrase(text: &str, certain: bool) -> Option<(usize, Vec<Found<'_>>)> {
    for (at, _) in text.rmatch_indices("nswer").take(8) {
        let before = text[..at].chars().next_back();
        let word = matches!(before, Some('a' | 'A'))
            && !text[..at - 1].ends_with(|c: char| c.is_alphanumeric());
        let Some(rest) = after_phrase(&text[at + 5..]).filter(|_| word) else { continue };
        let found = sentence(rest);
        let solid = |found: &Found<'_>| found.formula || found.text.contains(|c: char| c.is_ascii_digit());
        if found.is_empty() || (certain && !found.iter().any(solid)) {
            continue;
        }
        return Some((at, found));
    }
    None
}

/// The text after `is` or `:`, if one follows the word.
fn after_phrase(rest: &str) -> Option<&str> {
    let rest = rest.trim_start_matches('*').trim_start();
    // "The answer to the question is 5."
    let line = rest.lines().next().unwrap_or("");
    let link = rest.strip_prefix(':').or_else(|| {
        let after = rest.strip_prefix("is")?;
        (!after.starts_with(|c: char| c.is_alphanumeric())).then_some(after)
    });
    let link = link.or_else(|| {
        let at = line.find(" is ").filter(|at| *at < 60 && !line[..*at].contains(['.', '$', '\\']))?;
        Some(&rest[at + 4..])
    })?;
    Some(link.trim_start_matches(['*', ' ', '\t', '\r', '\n', ':']))
}

/// The candidates in the sentence that the text begins with.
fn sentence(text: &str) -> Vec<Found<'_>> {
    let end = sentence_end(text);
    let sentence = &text[..end];
    // Without its full stop a factorial or a question would look like a plain number.
    if text[end..].starts_with(['!', '?']) && sentence.ends_with(|c: char| c.is_ascii_digit()) {
        return vec![];
    }
    let mut found = vec![];
    // "Final answer: the greatest $n$ is 34"
    let value = sentence.rsplit_once(" is ").map_or(sentence, |(_, value)| value);
    for part in [value, sentence] {
        let part = part.trim_matches(['*', ' ', '\t', '\r', ':', '_']);
        if !part.is_empty() && part.len() <= lex::MAX_BYTES && found.iter().all(|found: &Found<'_>| found.text != part) {
            found.push(Found::plain(part));
        }
    }
    if let Some((Some(formulas), _)) = last_formulas(sentence) {
        found.push(formulas);
    } else if let Some(number) = sole_number(sentence) {
        found.push(Found::plain(number));
    }
    found
}

/// Bytes of the sentence: to a line break, or to a full stop outside of formulas.
fn sentence_end(text: &str) -> usize {
    for (open, close) in [("$$", "$$"), ("\\[", "\\]")] {
        if let Some(end) = text.strip_prefix(open).and_then(|inner| inner.find(close)) {
            return open.len() + end + close.len();
        }
    }
    let bytes = text.as_bytes();
    let mut formula = false;
    for (at, byte) in bytes.iter().enumerate() {
        let ends_word = bytes.get(at + 1).is_none_or(u8::is_ascii_whitespace) || text[at + 1..].starts_with("**");
        match byte {
            b'\n' => return at,
            b'$' => formula = !formula && text[at + 1..].contains('$'),
            b'.' | b'!' | b'?' if ends_word && !formula => return at,
            _ => {}
        }
    }
    text.len()
}

/// The only number of a sentence of words, if no word changes its value.
fn sole_number(sentence: &str) -> Option<&str> {
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| compiled(r"-?\$?[0-9][0-9.,]*"));
    let mut numbers = NUMBER.find_iter(sentence);
    let number = numbers.next()?;
    if numbers.next().is_some() {
        return None;
    }
    let outside = [&sentence[..number.start()], &sentence[number.end()..]];
    let words = |text: &str| {
        text.split(|c: char| c.is_whitespace() || "*,.:;()'\"%$".contains(c)).all(|word| {
            let plain = word.chars().all(|c| c.is_ascii_alphabetic() || c == '-');
            let lone = word.len() == 1 && !word.eq_ignore_ascii_case("a");
            plain && !lone && !super::words::changes_value(word) && super::words::scale(word).is_none()
        })
    };
    let apart = !outside[0].ends_with(|c: char| c.is_alphanumeric()) && !outside[1].starts_with(|c: char| c.is_alphanumeric());
    let number = number.as_str().trim_end_matches(['.', ',']);
    (apart && words(outside[0]) && words(outside[1])).then_some(number)
}

/// The formula or number that ends the text, whichever is later, or a short text as a whole.
fn ending(text: &str) -> Vec<Found<'_>> {
    let formulas = last_formulas(text);
    let plain = formulas.as_ref().map_or(0, |(_, end)| *end);
    let rest = &text[plain..];
    let mut found = vec![];
    if formulas.is_none() {
        let whole = text.trim();
        let arithmetic = whole.chars().all(|c| c.is_ascii_digit() || " +-*x/^().=\u{d7}\u{f7}".contains(c));
        let unevaluated = arithmetic && whole.contains(['+', '-', '*', 'x', '/', '\u{d7}', '\u{f7}'])
            && !whole.trim_start_matches('-').bytes().all(|byte| byte.is_ascii_digit() || byte == b'/' || byte == b'.');
        let asked = whole.ends_with(['?', '!']);
        let whole = whole.trim_matches(['*', '_', ' ']);
        let prose = has_plain_word(whole) && whole.contains(|c: char| c.is_ascii_digit());
        if !whole.is_empty() && !prose && whole.len() <= MAX_WHOLE && !unevaluated && !asked && !whole.contains('\n') {
            found.push(Found::plain(whole));
        }
    }
    // The numbers inside formulas are parts of them, and no answer by themselves.
    if rest.contains(|c: char| c.is_ascii_digit()) {
        found.extend(last_number(rest).map(Found::plain));
    } else {
        found.extend(formulas.and_then(|(found, _)| found));
    }
    found
}

/// The last formula with those before it that are listed with it, and where it ends.
///
/// A single `$...$` that spans lines is more likely two amounts of money: it ends what is searched, and is no answer.
fn last_formulas(text: &str) -> Option<(Option<Found<'_>>, usize)> {
    let all = formulas(text);
    let (last, earlier) = all.split_last()?;
    if !last.whole_line {
        return Some((None, last.whole.1));
    }
    let mut group = vec![&text[last.content.0..last.content.1]];
    let mut start = last.whole.0;
    for formula in earlier.iter().rev() {
        let gap = text[formula.whole.1..start].trim();
        let lists = matches!(gap, "," | "and" | "or" | ", and" | ", or" | ";");
        if !lists || group.len() >= MAX_BOXES || !formula.whole_line {
            break;
        }
        group.push(&text[formula.content.0..formula.content.1]);
        start = formula.whole.0;
    }
    group.reverse();
    let found = match group.as_slice() {
        [single] => Found::formula(*single),
        several => Found::formula(several.join(", ")),
    };
    Some((Some(found), last.whole.1))
}

/// Whether a run of letters is no command; joints do not count.
fn has_plain_word(text: &str) -> bool {
    let mut before = ' ';
    text.split_inclusive(|c: char| !c.is_ascii_alphabetic()).any(|piece| {
        let word = piece.trim_end_matches(|c: char| !c.is_ascii_alphabetic());
        let found = word.len() > 1 && before != '\\' && !matches!(word, "and" | "or") && !lex::is_function(word);
        before = piece.chars().next_back().unwrap_or(' ');
        found
    })
}

struct Formula {
    /// With its delimiters, in bytes.
    whole: (usize, usize),
    /// Without them.
    content: (usize, usize),
    /// In one line, as formulas within a sentence are.
    whole_line: bool,
}

/// Everything between formula delimiters.
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
        found.push(Formula { whole: (at, from + end + close.len()), content: (from, from + end), whole_line });
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
    let unit = unit_length(after);
    let end = if before.chars().next_back() == Some('=') || before.is_empty() { "" } else { &after[unit..] };
    let joined_after = after[unit..].chars().next().is_some_and(|c| (touches(c) && c != ')') || ['!', '?'].contains(&c))
        || end.trim_start().chars().next().is_some_and(operates);
    if joined_before || joined_after {
        return None;
    }
    let sign = text[..found.start()].chars().next_back().filter(|_| negative).map_or(0, char::len_utf8);
    Some(&text[found.start() - sign..found.end() + unit])
}

/// Bytes of a unit that follows a number without a blank.
fn unit_length(after: &str) -> usize {
    let len = after.bytes().take_while(u8::is_ascii_alphabetic).count();
    let ends = after[len..].chars().next().is_none_or(|c| c.is_whitespace() || ".,;:)*".contains(c));
    if len > 1 && ends && super::words::unit(&after[..len]).is_some() { len } else { 0 }
}

fn compiled(pattern: &str) -> Regex {
    Regex::new(pattern).expect("constant pattern")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(found: &[Found<'_>]) -> Option<String> {
        found.first().map(|found| found.text.to_string())
    }

    fn answer(text: &str) -> Option<String> {
        first(&completion(text, false))
    }

    #[test]
    fn boxes_come_first_and_the_last_whole_one_counts() {
        for (text, expected) in [
            ("\\boxed{1} then \\boxed{\\frac{1}{2}} is 7", Some("\\frac{1}{2}")),
            ("\\boxed{\\{1\\}}", Some("\\{1\\}")),
            ("\\boxed{1} then \\boxed{2", Some("1")),
            ("\\boxed{\\boxed{3}", Some("3")),
            ("\\fbox {4}", Some("4")),
            ("\\boxed{1} and \\boxed{2}", Some("1, 2")),
            ("\\boxed{1}, so the answer is \\boxed{2}", Some("2")),
        ] {
            assert_eq!(boxed(text).map(|(found, _)| found.text.to_string()).as_deref(), expected, "{text:?}");
        }
        assert_eq!(boxed("\\boxed{1"), None);
    }

    #[test]
    fn what_is_stated_after_a_box_replaces_it() {
        assert_eq!(answer("\\boxed{200}, later. Final Answer: The final answer is $10,455$.").as_deref(), Some("$10,455$"));
        assert_eq!(answer("\\boxed{200}\n#### 7").as_deref(), Some("7"));
        assert_eq!(answer("\\boxed{200}. The answer is correct.").as_deref(), Some("200"));
    }

    #[test]
    fn references_are_solutions_or_answers() {
        let reference = |text| first(&reference(text));
        assert_eq!(reference("so \\boxed{2}, that is \\boxed{2}.").as_deref(), Some("2"));
        assert_eq!(reference("work\n#### 18").as_deref(), Some("18"));
        assert_eq!(reference("18").as_deref(), Some("18"));
        assert_eq!(reference("$21,16$ or $11$").as_deref(), Some("21,16, 11"));
    }

    #[test]
    fn headings_are_not_marked_answers() {
        assert_eq!(marked("#### Step 2\nwork"), None);
        assert_eq!(marked("#### 2. Add them\nwork"), None);
        assert_eq!(marked("#### 7\n#### 18\nmore").map(|found| found.text.to_string()).as_deref(), Some("18"));
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
            let found = phrase(text, false).map(|(_, found)| found).unwrap_or_default();
            assert_eq!(first(&found).as_deref(), expected, "{text:?}");
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
            ("$ \n 9 \n $", None),
            ("none", None),
        ] {
            let found = ending(text);
            assert_eq!(found.last().filter(|found| found.text != "none" && found.text != text || found.formula).map(|found| found.text.to_string()).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn what_was_cut_off_is_no_answer() {
        assert!(completion("she has 18 eggs and", true).is_empty());
        assert!(completion("#### 18", true).is_empty());
        assert_eq!(first(&completion("#### 18\n\nNext", true)).as_deref(), Some("18"));
    }
}
