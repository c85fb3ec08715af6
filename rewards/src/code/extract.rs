//! Finds the program in a completion.
//!
//! Invariant: text before `</think>` is never run. Whether the program parses is not checked.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

/// Recognises Python in a text without a fence.
static PYTHON: LazyLock<Regex> = LazyLock::new(|| {
    let line = r"(?m)^(?:(?:async )?def |class |import |from \w[\w.]* import |print\(|@\w|(?:for|while|if|with) .*:|\w[\w, .\[\]]*=[^=])";
    Regex::new(line).expect("constant pattern")
});

/// The last closed block in fences that names `language` (lower case), else the last that names none, else a last one that is
/// not closed; without any fence the whole text, if it looks like code. Blocks for which `wanted` is true have priority, as an
/// example of its use may follow a program. `None` if there is no program.
#[must_use]
pub fn program<'a>(text: &'a str, language: &str, wanted: &dyn Fn(&str) -> bool) -> Option<Cow<'a, str>> {
    let text = match text.rsplit_once("</think>") {
        Some((_, answer)) => answer,
        None if text.contains("<think>") => return None,
        None => text,
    };
    let blocks = blocks(text);
    if blocks.is_empty() {
        let code = language != "python" || PYTHON.is_match(text);
        return Some(text.trim()).filter(|text| code && !text.is_empty()).map(Cow::Borrowed);
    }
    let names = names(language);
    let named = |block: &CodeBlock<'_>| {
        // Also with a version, as in `python3.11` or `c++20`.
        let plain = block.tag.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
        names.iter().any(|name| block.tag.eq_ignore_ascii_case(name) || plain.eq_ignore_ascii_case(name))
    };
    let rank = |block: &CodeBlock<'_>| match (block.closed, named(block), block.tag.is_empty()) {
        (true, true, _) => Some(2),
        (true, _, true) => Some(1),
        (false, true, _) | (false, _, true) => Some(0),
        _ => None,
    };
    // Of equals the last one is kept.
    let found = blocks.iter().filter_map(|block| Some((wanted(block.text), rank(block)?, block)));
    let (.., block) = found.max_by_key(|(wanted, rank, _)| (*wanted, *rank))?;
    Some(dedented(block.text)).filter(|text| !text.trim().is_empty())
}

/// The text without the indentation of its first line that is not blank; in a list that is the indentation of the item.
fn dedented(text: &str) -> Cow<'_, str> {
    let indentation = |line: &str| line.len() - line.trim_start_matches([' ', '\t']).len();
    let first = text.lines().find(|line| !line.trim().is_empty()).map_or(0, indentation);
    if first == 0 {
        return Cow::Borrowed(text);
    }
    text.split_inclusive('\n').map(|line| &line[indentation(line).min(first)..]).collect()
}

/// The names of a language after a fence.
fn names(language: &str) -> Vec<&str> {
    let others: &[&str] = match language {
        "python" => &["py", "python3"],
        "javascript" => &["js", "node"],
        "typescript" => &["ts"],
        "cpp" => &["c++", "cc", "cxx"],
        "rust" => &["rs"],
        "go" => &["golang"],
        "bash" => &["sh", "shell"],
        "ruby" => &["rb"],
        _ => &[],
    };
    [&[language], others].concat()
}

/// A fenced block of code.
struct CodeBlock<'a> {
    tag: &'a str,
    text: &'a str,
    closed: bool,
}

fn blocks(text: &str) -> Vec<CodeBlock<'_>> {
    let mut blocks = Vec::new();
    let mut open: Option<(Fence<'_>, usize)> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let (begin, end) = (at, at + line.len());
        at = end;
        match open {
            None => {
                open =
                    fence(ITEM.find(line).map_or(line, |item| &line[item.end()..])).map(|found| (found, end))
            }
            Some((opening, from)) => {
                if fence(line).is_some_and(|found| found.closes(&opening)) {
                    blocks.push(CodeBlock { tag: tag(opening.info), text: &text[from..begin], closed: true });
                    open = None;
                }
            }
        }
    }
    if let Some((opening, from)) = open {
        blocks.push(CodeBlock { tag: tag(opening.info), text: &text[from..], closed: false });
    }
    blocks
}

/// The marker of a list item; a fence may follow in the same line.
static ITEM: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]+").expect("constant pattern"));

/// A line that begins or ends a block, as in CommonMark.
#[derive(Clone, Copy)]
struct Fence<'a> {
    mark: char,
    length: usize,
    info: &'a str,
}

impl Fence<'_> {
    fn closes(&self, opening: &Self) -> bool {
        self.info.is_empty() && self.mark == opening.mark && self.length >= opening.length
    }
}

fn fence(line: &str) -> Option<Fence<'_>> {
    let line = line.trim();
    let mark = line.chars().next().filter(|mark| matches!(mark, '`' | '~'))?;
    let info = line.trim_start_matches(mark);
    let length = line.len() - info.len();
    // Otherwise it is code within a line.
    let opens = length >= 3 && !(mark == '`' && info.contains('`'));
    opens.then_some(Fence { mark, length, info: info.trim() })
}

/// The language in the text after a fence: `python title="a"`, `python:a.py`, `{.python}`.
fn tag(info: &str) -> &str {
    let info = info.trim_start_matches(['{', '.', ' ']);
    info.split([' ', '\t', '{', '}', ',', ';', ':', '(']).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_last_block_of_the_language_is_the_program() {
        for (text, expected) in [
            ("first\n```python\na=1\n```\nthen\n```py\nb=2\n```\nso", Some("b=2\n")),
            ("```python\na=1\n```\n```\nplain\n```\n```bash\nls\n```", Some("a=1\n")),
            ("```\na=1\n```\n```text\n5\n```", Some("a=1\n")),
            ("```Python\na=1\n```", Some("a=1\n")),
            ("  ```python\n  a=1\n  ```", Some("a=1\n")),
            ("1. Code:\n   ```python\n   if x:\n\n       print(5)\n   ```", Some("if x:\n\n    print(5)\n")),
            ("- ```python\n  a=1\n  ```\n- so", Some("a=1\n")),
            ("   ```python\ndef f():\n  return 1\n   ```", Some("def f():\n  return 1\n")),
            ("~~~python\na='''\n```\n'''\n~~~", Some("a='''\n```\n'''\n")),
            ("````python\n```\na=1\n````", Some("```\na=1\n")),
            ("```python:main.py\na=1\n```\n```text\n5\n```", Some("a=1\n")),
            ("``` python\na=1\n```", Some("a=1\n")),
            ("```{.python .numbered}\na=1\n```", Some("a=1\n")),
            ("```python3.11\na=1\n```\n```\n5\n```", Some("a=1\n")),
            ("```print(1)```\n```python\na=1\n```", Some("a=1\n")),
            ("```python\na=1", Some("a=1")),
            ("```python\na=1\n```\n```python\nb=", Some("a=1\n")),
            ("```text\n5\n```", None),
            ("```python\n```", None),
            ("def f():\n    return 1\n", Some("def f():\n    return 1")),
            ("the answer is 5", None),
            ("", None),
            ("<think>```python\na=1\n```</think>none", None),
            ("<think>```python\na=1\n```", None),
            ("<think>x</think>```python\na=1\n```", Some("a=1\n")),
        ] {
            assert_eq!(program(text, "python", &|_| true).as_deref(), expected, "{text:?}");
        }
        assert_eq!(program("```js\n1\n```", "javascript", &|_| true).as_deref(), Some("1\n"));
        assert_eq!(program("```cobol\n1\n```", "cobol", &|_| true).as_deref(), Some("1\n"));
        assert_eq!(program("```c++20\n1\n```", "cpp", &|_| true).as_deref(), Some("1\n"));
    }

    #[test]
    fn a_wanted_block_has_priority_over_the_last_one() {
        let text =
            "```python\ndef f(): 1\n```\n```python\ndef f(): 2\n```\nExample usage:\n```python\nf()\n```\n";
        let wanted = |name: &'static str| move |code: &str| code.contains(name);
        assert_eq!(program(text, "python", &wanted("def f")).as_deref(), Some("def f(): 2\n"));
        assert_eq!(program(text, "python", &wanted("def g")).as_deref(), Some("f()\n"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(```|python|\n|a=1|</think>|\u{e9}| ){0,30}") {
            if let Some(found) = program(&text, "python", &|_| true) {
                prop_assert!(found.lines().all(|line| text.contains(line)));
            }
        }
    }
}
