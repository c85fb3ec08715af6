//! Reads a score out of what a judge said.
//!
//! Invariant: the last thing said counts, since judges think aloud first. What holds no score is an error, never 0.

use std::collections::BTreeMap;

use regex::Regex;

/// `Score: 7`, `**Score:** 7.5` and the like.
const DEFAULT: &str = r"(?i)score[*_`]*\s*[:=]\s*[*_`]*\s*(-?\d+(?:\.\d+)?)";

/// How a score is found.
#[derive(Clone, Debug)]
pub enum Rule {
    /// The last match captures a number, which is divided by the second.
    Number(Regex, f64),
    /// The last of these words, upper case or lower, stands for its value.
    Word(Regex, BTreeMap<String, f64>),
}

impl Rule {
    /// The last match of `pattern`, or of the usual form of a score, divided by `scale`.
    ///
    /// # Errors
    /// A pattern that is none or captures nothing, a scale that is not a positive number; the texts end a sentence.
    pub fn number(pattern: Option<&str>, scale: f64) -> Result<Self, (&'static str, String)> {
        let regex = Regex::new(pattern.unwrap_or(DEFAULT))
            .map_err(|error| ("parse", format!("is not a regular expression: {error}")))?;
        if regex.captures_len() < 2 {
            return Err(("parse", "captures nothing; put parentheses around the score".to_owned()));
        }
        if !(scale.is_finite() && scale > 0.0) {
            return Err(("scale", format!("is {scale}; it must be a positive number")));
        }
        Ok(Self::Number(regex, scale))
    }

    /// The last of `choices`.
    ///
    /// # Errors
    /// None at all, an empty one, one worth no finite number; the text ends a sentence.
    pub fn word(choices: &BTreeMap<String, f64>) -> Result<Self, String> {
        if choices.is_empty() {
            return Err("is empty; write words and what each is worth".to_owned());
        }
        if let Some((word, value)) =
            choices.iter().find(|(word, value)| word.trim().is_empty() || !value.is_finite())
        {
            return Err(format!(
                "gives the word `{word}` the value {value}; it takes words and finite numbers"
            ));
        }
        let mut words: Vec<&str> = choices.keys().map(String::as_str).collect();
        // Of two that begin alike, the longer one is meant.
        words.sort_by_key(|word| std::cmp::Reverse(word.len()));
        let edge =
            |at: Option<char>| if at.is_some_and(|c| c.is_alphanumeric() || c == '_') { r"\b" } else { "" };
        let alternatives = words.iter().map(|word| {
            let (first, last) = (word.chars().next(), word.chars().next_back());
            format!("{}{}{}", edge(first), regex::escape(word), edge(last))
        });
        let pattern = format!("(?i)({})", alternatives.collect::<Vec<_>>().join("|"));
        let regex = Regex::new(&pattern).map_err(|error| format!("cannot be looked for: {error}"))?;
        Ok(Self::Word(regex, choices.iter().map(|(word, value)| (word.to_lowercase(), *value)).collect()))
    }

    /// The score in a reply, if there is one.
    #[must_use]
    pub fn read(&self, reply: &str) -> Option<f64> {
        match self {
            Self::Number(regex, scale) => {
                let found = regex.captures_iter(reply).last()?.get(1)?;
                let value: f64 = found.as_str().trim().parse().ok()?;
                Some(value / scale).filter(|value| value.is_finite())
            }
            Self::Word(regex, choices) => {
                let found = regex.find_iter(reply).last()?;
                choices.get(&found.as_str().to_lowercase()).copied()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_score_counts() {
        let rule = Rule::number(None, 10.0).unwrap();
        for (reply, expected) in [
            ("Score: 7", Some(0.7)),
            ("score = 3\nOn reflection, **Score:** 8.5.", Some(0.85)),
            ("Score: **10**", Some(1.0)),
            ("Score: -1", Some(-0.1)),
            ("I give it 7 of 10", None),
            ("Score: high", None),
            ("", None),
        ] {
            assert_eq!(rule.read(reply), expected, "{reply:?}");
        }
        assert_eq!(Rule::number(Some(r"\[\[(\d+)\]\]"), 1.0).unwrap().read("[[1]] or [[2]]"), Some(2.0));
    }

    #[test]
    fn the_last_word_counts() {
        let choices = [("yes", 1.0), ("no", 0.0), ("not sure", 0.5), ("A+", 2.0)];
        let rule = Rule::word(&choices.map(|(word, value)| (word.to_owned(), value)).into()).unwrap();
        for (reply, expected) in [
            ("Yes.", Some(1.0)),
            ("no... YES, then NO", Some(0.0)),
            ("I am not sure", Some(0.5)),
            ("nothing", None),
            ("yesterday", None),
            ("grade: a+", Some(2.0)),
        ] {
            assert_eq!(rule.read(reply), expected, "{reply:?}");
        }
    }

    #[test]
    fn rules_that_make_no_sense_are_refused() {
        assert_eq!(Rule::number(Some("("), 1.0).unwrap_err().0, "parse");
        assert_eq!(Rule::number(Some("x"), 1.0).unwrap_err().0, "parse");
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Rule::number(None, scale).unwrap_err().0, "scale");
        }
        for choices in [BTreeMap::new(), [(" ".to_owned(), 1.0)].into(), [("a".to_owned(), f64::NAN)].into()]
        {
            assert!(Rule::word(&choices).is_err());
        }
    }
}
