//! Reads the score from the reply of a judge.
//!
//! Invariant: a verdict is at the end of a line or is a line of its own, and the last one counts, since judges reason first. Text
//! before `</think>` is ignored. A reply without a verdict, or with one out of the requested range, is an error, never a score.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;

/// `Score: 7`, `**Score:** 7.5`, `Score (0-10): 7/10`, `Final score is 7` at the end of a line, `"score": 7` in an object.
static USUAL: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = concat!(
        r"(?im)(?:^|[^[:alpha:]])score[*_`]*(?:[ \t]*\([^()\n]*\))?",
        r#"(?:["*_`]*[ \t]*[:=][*_`]*|[ \t]+is\b:?)[ \t]*["'*_`(\[]*(?<score>[-+]?\d+(?:\.\d+)?)"#,
        r#"(?:[*_`]*[ \t]*(?:/|out[ \t]+of)[ \t]*(?<of>\d+(?:\.\d+)?))?(?:["'*_`)\].!;,}\s]*?$|"?[ \t]*[,}][ \t]*["}])"#,
    );
    Regex::new(pattern).expect("constant pattern")
});
/// Patterns before and after a word that is a verdict, with markup.
const BEFORE: &str = r#"(?im)^[\s*_`#>"'(\[{-]*(?:[^:=\n]{1,60}[:=][\s*_`"'(\[{]*?)?"#;
const AFTER: &str = r#"["'*_`)\].!;,}\s]*?$"#;

/// The form of the verdicts.
#[derive(Clone, Debug)]
pub enum ReplyParser {
    /// The last verdict in the usual form is divided by `scale`.
    Score {
        /// Largest score of the requested range, which begins at 0; `None` if it is unknown.
        top: Option<f64>,
        /// Above 0.
        scale: f64,
    },
    /// The last match captures a number, which is divided by the second.
    Number(Regex, f64),
    /// The last of these words that is a line, or follows a label in one, gives its value.
    Word(Regex, BTreeMap<String, f64>),
}

impl ReplyParser {
    /// The last verdict in the usual form, divided by `scale`; `top` is the largest score of the requested range.
    ///
    /// # Errors
    /// A scale that is not a positive number; the texts are the key and the end of a sentence.
    pub fn score(top: Option<f64>, scale: f64) -> Result<Self, (&'static str, String)> {
        Ok(Self::Score { top, scale: positive(scale)? })
    }

    /// The last match of `pattern`, divided by `scale`.
    ///
    /// # Errors
    /// A pattern that is invalid or captures nothing, a scale that is not a positive number; the texts are the key and the end of a
    /// sentence.
    pub fn number(pattern: &str, scale: f64) -> Result<Self, (&'static str, String)> {
        let regex = Regex::new(pattern)
            .map_err(|error| ("parse", format!("is not a regular expression: {error}")))?;
        if regex.captures_len() < 2 {
            return Err(("parse", "captures nothing; put parentheses around the score".to_owned()));
        }
        Ok(Self::Number(regex, positive(scale)?))
    }

    /// The last of `choices`.
    ///
    /// # Errors
    /// No choice, an empty one, a value that is not finite; the text ends a sentence.
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
        let mut words: Vec<&str> = choices.keys().map(|word| word.trim()).collect();
        // Of two words with the same beginning, the longer one is tried first.
        words.sort_by_key(|word| std::cmp::Reverse(word.len()));
        let words = words.into_iter().map(regex::escape).collect::<Vec<_>>().join("|");
        let regex = Regex::new(&format!("{BEFORE}({words}){AFTER}"))
            .map_err(|error| format!("cannot be looked for: {error}"))?;
        let choices = choices.iter().map(|(word, value)| (word.trim().to_lowercase(), *value));
        Ok(Self::Word(regex, choices.collect()))
    }

    /// The score in a reply.
    ///
    /// # Errors
    /// There is no score, or none in the range; the text has the expected form or the score.
    pub fn read(&self, reply: &str) -> Result<f64, String> {
        let reply = match reply.rsplit_once("</think>") {
            Some((_, verdict)) => verdict,
            None if reply.contains("<think>") => return Err("there is nothing but thoughts".to_owned()),
            None => reply,
        };
        match self {
            Self::Score { top, scale } => {
                let missing = || "there is no score at the end of a line, such as `Score: 7`,".to_owned();
                let found = USUAL.captures_iter(reply).last().ok_or_else(missing)?;
                let score = finite(&found["score"])?;
                let range = top.unwrap_or(*scale);
                if let Some(of) = found.name("of")
                    && (finite(of.as_str())? - range).abs() > f64::EPSILON
                {
                    return Err(format!(
                        "there is a score of {score} out of {}, not out of {range},",
                        of.as_str()
                    ));
                }
                if top.is_some_and(|top| !(0.0..=top).contains(&score)) {
                    return Err(format!("there is a score of {score}, which is not from 0 to {range},"));
                }
                Ok(score / scale)
            }
            Self::Number(regex, scale) => {
                let missing = || "there is nothing that `parse` matches".to_owned();
                let found =
                    regex.captures_iter(reply).last().and_then(|found| found.get(1)).ok_or_else(missing)?;
                Ok(finite(found.as_str())? / scale)
            }
            Self::Word(regex, choices) => {
                let found = regex.captures_iter(reply).last();
                let value = found.and_then(|found| choices.get(&found[1].to_lowercase()).copied());
                value.ok_or_else(|| {
                    let words: Vec<_> = choices.keys().map(String::as_str).collect();
                    format!(
                        "there is no line that says only `{}`, or that after a label,",
                        words.join("` or `")
                    )
                })
            }
        }
    }
}

fn positive(scale: f64) -> Result<f64, (&'static str, String)> {
    if scale.is_finite() && scale > 0.0 {
        return Ok(scale);
    }
    Err(("scale", format!("is {scale}; it must be a positive number")))
}

fn finite(text: &str) -> Result<f64, String> {
    let value = text.trim().parse().ok().filter(|value: &f64| value.is_finite());
    value.ok_or_else(|| format!("`{text}` is not a number that can be a score"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_score_at_the_end_of_a_line_counts() {
        let rule = ReplyParser::score(Some(10.0), 10.0).unwrap();
        for (reply, expected) in [
            ("Score: 7", 0.7),
            ("score = 3\nOn reflection, **Score:** 8.5.", 0.85),
            ("Score: **10**", 1.0),
            ("**Score**: 0", 0.0),
            ("Score: 7/10", 0.7),
            ("Score: 7 out of 10.", 0.7),
            ("**Score: 7**/10", 0.7),
            ("{\"score\": 7}", 0.7),
            ("```json\n{\n  \"score\": \"7\",\n  \"why\": \"good\"\n}\n```", 0.7),
            ("{\"score\": 7, \"why\": \"good\"}", 0.7),
            ("Score (0-10): 7", 0.7),
            ("Final score is 8", 0.8),
            ("Score: 7\nA score: 10 would need a proof.", 0.7),
            ("<think>maybe\nScore: 2</think>It is good.\nScore: 9\n", 0.9),
        ] {
            assert_eq!(rule.read(reply), Ok(expected), "{reply:?}");
        }
        for (reply, word) in [
            ("I give it 7 of 10", "no score"),
            ("Score: high", "no score"),
            ("", "no score"),
            ("Score: 7,5", "no score"),
            ("A score: 10 would need a proof.", "no score"),
            ("Score: 7/10. A score: 10 would need a proof.", "no score"),
            ("<think>maybe\nScore: 2\n</think>It is good: 9/10", "no score"),
            ("<think>maybe\nScore: 2\n", "thoughts"),
            ("Score: 85/100", "85 out of 100, not out of 10"),
            ("Score: 95", "95, which is not from 0 to 10"),
            ("Score: -3", "-3, which is not from 0 to 10"),
        ] {
            let error = rule.read(reply).unwrap_err();
            assert!(error.contains(word), "{reply:?}: {error}");
        }
    }

    #[test]
    fn the_scale_is_not_the_requested_range() {
        assert_eq!(ReplyParser::score(Some(10.0), 1.0).unwrap().read("Score: 7/10"), Ok(7.0));
        let own = ReplyParser::score(None, 5.0).unwrap();
        assert_eq!((own.read("Score: 10"), own.read("Score: -5")), (Ok(2.0), Ok(-1.0)));
        assert_eq!(own.read("Score: 4/5"), Ok(0.8));
        assert!(own.read("Score: 4/10").is_err());
        let number = ReplyParser::number(r"\[\[(.*?)\]\]", 1.0).unwrap();
        assert_eq!(number.read("[[1]] or [[2]]"), Ok(2.0));
        assert_eq!(number.read("<think>[[1]]</think>[[3]]"), Ok(3.0));
        assert!(number.read("[[x]]").unwrap_err().contains("`x`"));
    }

    #[test]
    fn the_last_word_that_is_a_line_counts() {
        let choices = [("yes", 1.0), ("no", 0.0), ("not sure", 0.5), ("A+", 2.0), ("A", 1.5)];
        let rule = ReplyParser::word(&choices.map(|(word, value)| (word.to_owned(), value)).into()).unwrap();
        for (reply, expected) in [
            ("Yes.", 1.0),
            ("yes\n**NO**\n", 0.0),
            ("I cannot find a mistake.\n\nVerdict: **yes**", 1.0),
            ("- not sure", 0.5),
            ("grade: a+", 2.0),
            ("[[A]]", 1.5),
            ("{\"correct\": \"yes\"}", 1.0),
            ("<think>\nno\n</think>\n\nyes", 1.0),
        ] {
            assert_eq!(rule.read(reply), Ok(expected), "{reply:?}");
        }
        for reply in [
            "nothing",
            "yesterday",
            "Yes, there is no mistake.",
            "The answer is not correct: there is no proof",
            "I cannot say yes or no.",
            "I am not sure",
            "A++",
            "",
        ] {
            let error = rule.read(reply).unwrap_err();
            assert!(error.contains("`no`"), "{reply:?}: {error}");
        }
    }

    #[test]
    fn invalid_parsers_are_refused() {
        assert_eq!(ReplyParser::number("(", 1.0).unwrap_err().0, "parse");
        assert_eq!(ReplyParser::number("x", 1.0).unwrap_err().0, "parse");
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(ReplyParser::number("(x)", scale).unwrap_err().0, "scale");
            assert_eq!(ReplyParser::score(None, scale).unwrap_err().0, "scale");
        }
        for choices in [BTreeMap::new(), [(" ".to_owned(), 1.0)].into(), [("a".to_owned(), f64::NAN)].into()]
        {
            assert!(ReplyParser::word(&choices).is_err());
        }
    }
}
