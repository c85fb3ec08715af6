//! Finds the program in a completion.
//!
//! Invariant: what was thought before `</think>` is never run. It does not look at whether the program is one that parses.

use std::sync::LazyLock;

use regex::Regex;

/// What shows that a text without any fence is Python.
static PYTHON: LazyLock<Regex> = LazyLock::new(|| {
    let line = r"(?m)^(?:(?:async )?def |class |import |from \w[\w.]* import |print\(|@\w|(?:for|while|if|with) .*:|\w[\w, .\[\]]*=[^=])";
    Regex::new(line).expect("constant pattern")
});

/// The last closed block in fences that names `language` (lower case), else the last that names none, else a last one that is
/// not closed; without any fence the whole text, if it looks like code. None if there is no program.
#[must_use]
pub fn program<'a>(text: &'a str, language: &str) -> Option<&'a str> {
    let text = match text.rsplit_once("</think>") {
        Some((_, answer)) => answer,
        None if text.contains("<think>") => return None,
        None => text,
    };
    let blocks = blocks(text);
    if blocks.is_empty() {
        let code = language != "python" || PYTHON.is_match(text);
        return Some(text.trim()).filter(|text| code && !text.is_empty());
    }
    let names = names(language);
    let last = |test: &dyn Fn(&Block<'_>) -> bool| blocks.iter().rev().find(|block| test(block));
    let named = |block: &Block<'_>| names.iter().any(|name| block.tag.eq_ignore_ascii_case(name));
    let found = last(&|block| block.closed && named(block))
        .or_else(|| last(&|block| block.closed && block.tag.is_empty()))
        .or_else(|| last(&|block| !block.closed && (named(block) || block.tag.is_empty())));
    found.map(|block| block.text).filter(|text| !text.trim().is_empty())
}

/// What people write after a fence for a language.
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

/// A block in fences.
struct Block<'a> {
    tag: &'a str,
    text: &'a str,
    closed: bool,
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut open: Option<(&str, usize)> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let (begin, end) = (at, at + line.len());
        at = end;
        let Some(rest) = line.trim().strip_prefix("```") else { continue };
        match open {
            None => {
                let tag = rest.trim_start_matches('`').split([' ', '{', ',']).next().unwrap_or_default();
                open = Some((tag, end));
            }
            Some((tag, from)) if rest.trim_matches('`').is_empty() => {
                blocks.push(Block { tag, text: &text[from..begin], closed: true });
                open = None;
            }
            Some(_) => {}
        }
    }
    if let Some((tag, from)) = open {
        blocks.push(Block { tag, text: &text[from..], closed: false });
    }
    blocks
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
            ("  ```python\n  a=1\n  ```", Some("  a=1\n")),
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
            assert_eq!(program(text, "python"), expected, "{text:?}");
        }
        assert_eq!(program("```js\n1\n```", "javascript"), Some("1\n"));
        assert_eq!(program("```cobol\n1\n```", "cobol"), Some("1\n"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(```|python|\n|a=1|</think>|\u{e9}| ){0,30}") {
            if let Some(found) = program(&text, "python") {
                prop_assert!(text.contains(found));
            }
        }
    }
}
