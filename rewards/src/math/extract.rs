//! Finds the final answer in a text.
//!
//! The last statement counts: a `\boxed{...}` with balanced braces (or several side by side), `#### number`, or the text
//! after `answer is` or `answer:`. Without any of them, the formula or number at the end of the text counts.
//!
//! Invariant: the result is a list of slices of the text, best candidate first. A number next to a character that could
//! change its value is no answer. Nothing is evaluated.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

use super::clause;
use super::ending::{LastFormulas, compiled, ending, last_formulas};
use super::lex;

/// Bytes at the end of a text that are searched. Long completions answer at their end.
const MAX_TEXT: usize = 200_000;
/// Most boxes of one answer.
pub(super) const MAX_BOXES: usize = 16;
/// Most bytes between two boxes of one answer.
const MAX_GAP: usize = 70;
/// Longest text that may be an answer as a whole.
pub(super) const MAX_WHOLE: usize = 300;

/// A candidate for the final answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found<'a> {
    pub(super) text: Cow<'a, str>,
    /// Whether it was in a box or between formula delimiters.
    pub(super) formula: bool,
}

impl<'a> Found<'a> {
    pub(super) fn formula(text: impl Into<Cow<'a, str>>) -> Self {
        Self { text: text.into(), formula: true }
    }

    pub(super) fn plain(text: impl Into<Cow<'a, str>>) -> Self {
        let text = text.into();
        let formula = text.contains('\\') && !text.contains('$') && !text.contains("\\(");
        Self { text, formula }
    }
}

/// The final answer of a completion, best candidate first; empty if it does not state one.
///
/// In a completion that was cut off only complete parts count: boxes, and marks on complete lines.
pub(super) fn completion(text: &str, truncated: bool) -> Vec<Found<'_>> {
    let text = without_special_tokens(tail(text));
    if let Some(inner) = tagged(text) {
        return completion(inner, false);
    }
    let (boxed, boxes_end) = boxed(text).map_or((None, 0), |(found, end)| (Some(found), end));
    let finished = if truncated { text.rsplit_once('\n').map_or("", |(finished, _)| finished) } else { text };
    let after = finished.get(boxes_end..).unwrap_or("");
    let mut found = stated(after, boxed.is_some());
    found.extend(boxed);
    if found.is_empty() && !truncated {
        found = solution(text);
        found.extend(ending(text));
    }
    found
}

/// The content of the last `<answer>...</answer>`.
fn tagged(text: &str) -> Option<&str> {
    let (before, _) = text.rsplit_once("</answer>")?;
    let (_, inner) = before.rsplit_once("<answer>")?;
    (!inner.trim().is_empty()).then(|| inner.trim())
}

/// The stated solution or option, if no number or formula follows it.
///
/// These words are also common within a solution, so only the end of the text counts, and only a value.
fn solution(text: &str) -> Vec<Found<'_>> {
    let nouns = ["olution", "ption", "hoice", "root", "Root"];
    let last = nouns.iter().filter_map(|noun| text.rfind(noun).map(|at| (at, noun.len()))).max();
    let Some((at, len)) = last else { return vec![] };
    let Some(rest) = after_phrase(&text[at + len..]) else { return vec![] };
    let end = sentence_end(rest);
    let value = rest[..end].trim_matches(['*', ' ', '\t', '\r', ':', '_']);
    let more = rest[end..].contains(|c: char| c.is_ascii_digit() || c == '$' || c == '\\');
    let letter = value.trim_matches(['(', ')']);
    let chosen = letter.len() == 1 && letter.bytes().all(|byte| byte.is_ascii_uppercase());
    let solid = chosen || value.contains(|c: char| c.is_ascii_digit());
    let asked = rest[end..].starts_with(['!', '?']);
    if more || asked || !solid || value.len() > MAX_WHOLE || clause::supposes(&text[..at]) {
        return vec![];
    }
    vec![Found::plain(value)]
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
    match last_formulas(answer).and_then(|last| last.answer) {
        Some(found) => vec![found, whole],
        None => vec![whole],
    }
}

/// Bytes up to the brace that closes an open one.
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

/// The text up to the first token of a chat template that the model generated.
fn without_special_tokens(text: &str) -> &str {
    let special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|eot_id|>", "</s>"];
    if !text.contains('<') {
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

/// The last box with the earlier boxes of the same answer, and its end in bytes.
fn boxed(text: &str) -> Option<(Found<'_>, usize)> {
    let mut contents: Vec<&str> = vec![];
    let mut end = 0;
    let mut next_start = text.len();
    let mut search = text;
    while let Some(at) = last_box(search) {
        search = &text[..at];
        // A box inside an unbalanced box cannot close it, so no part of the text is searched twice.
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

/// Searches for single backslashes from the end, so that every byte is read once.
fn last_box(text: &str) -> Option<usize> {
    let opens = |at: &usize| text[*at..].starts_with("\\boxed") || text[*at..].starts_with("\\fbox");
    text.rmatch_indices('\\').map(|(at, _)| at).find(opens)
}

/// Whether the text between two boxes lists them, and does not conclude one from the other.
fn joined(gap: &str) -> bool {
    const CONCLUDES: [&str; 14] = [
        "so",
        "thus",
        "hence",
        "therefore",
        "answer",
        "then",
        "which",
        "is",
        "not",
        "but",
        "actually",
        "wait",
        "gives",
        "final",
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

/// The candidate after a mark or a phrase, whichever is later. With `certain` it must have a number or a formula.
fn stated(text: &str, certain: bool) -> Vec<Found<'_>> {
    let mark = if text.contains('#') { text.rfind("####") } else { None };
    let (phrase_at, phrase) = phrase(text, certain).map_or((None, vec![]), |(at, found)| (Some(at), found));
    if mark > phrase_at
        && let Some(found) = marked(text)
    {
        return vec![found];
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

/// The text after the last `answer is` or `answer:`, to the end of the sentence, and its position.
fn phrase(text: &str, certain: bool) -> Option<(usize, Vec<Found<'_>>)> {
    for (at, _) in text.rmatch_indices("nswer").take(8) {
        let before = text[..at].chars().next_back();
        let word =
            matches!(before, Some('a' | 'A')) && !text[..at - 1].ends_with(|c: char| c.is_alphanumeric());
        let Some(rest) = after_phrase(&text[at + 5..]).filter(|_| word) else { continue };
        if clause::retracts(&rest[sentence_end(rest)..]) {
            return None;
        }
        if clause::supposes(&text[..at - 1]) {
            continue;
        }
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
    let rest = rest.strip_prefix('s').unwrap_or(rest).trim_start_matches('*').trim_start();
    // "The answer to the question is 5."
    let line = rest.lines().next().unwrap_or("");
    let link = rest.strip_prefix(':').or_else(|| {
        let after = rest.strip_prefix("is").or_else(|| rest.strip_prefix("are"))?;
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
        if !part.is_empty()
            && part.len() <= lex::MAX_BYTES
            && found.iter().all(|found: &Found<'_>| found.text != part)
        {
            found.push(Found::plain(part));
        }
    }
    if let Some(LastFormulas { answer: Some(formulas), start, end }) = last_formulas(sentence) {
        if clause::states(&sentence[..start], &sentence[end..]) {
            found.push(formulas);
        }
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
        let after = &bytes[at + 1..];
        let ends_word = after.first().is_none_or(u8::is_ascii_whitespace) || after.starts_with(b"**");
        match byte {
            b'\n' => return at,
            b'$' => formula = !formula && after.contains(&b'$'),
            b'.' | b'!' | b'?' if ends_word && !formula => return at,
            _ => {}
        }
    }
    text.len()
}

/// The only number of a sentence, if no word changes its value.
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
    let apart = !outside[0].ends_with(|c: char| c.is_alphanumeric())
        && !outside[1].starts_with(|c: char| c.is_alphanumeric());
    let number = number.as_str().trim_end_matches(['.', ',']);
    let value = outside[0].rsplit_once(" is ").map_or(outside[0], |(_, value)| value);
    let stated = clause::tells(value) && clause::states(outside[0], outside[1]);
    (apart && stated && words(outside[0]) && words(outside[1])).then_some(number)
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
    fn an_answer_stated_after_a_box_replaces_it() {
        assert_eq!(
            answer("\\boxed{200}, later. Final Answer: The final answer is $10,455$.").as_deref(),
            Some("$10,455$")
        );
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
        assert_eq!(
            marked("#### 7\n#### 18\nmore").map(|found| found.text.to_string()).as_deref(),
            Some("18")
        );
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
    fn a_truncated_completion_is_no_answer() {
        assert!(completion("she has 18 eggs and", true).is_empty());
        assert!(completion("#### 18", true).is_empty());
        assert_eq!(first(&completion("#### 18\n\nNext", true)).as_deref(), Some("18"));
    }
}
