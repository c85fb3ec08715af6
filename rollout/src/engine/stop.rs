//! Stop rules: stop tokens and stop strings.

use model::tokenizer::{DecodeStream, Tokenizer};

use crate::RolloutError;
use crate::sampler::RequestStop;

/// What ends a completion before its length limit.
#[derive(Clone, Debug)]
pub struct StopRules {
    /// Tokens that end it; they belong to the completion but not to its text.
    pub token_ids: Vec<u32>,
    /// Strings that end it; the text is cut before the first of them, the tokens stay.
    pub strings: Vec<String>,
    /// Decodes tokens for the search of stop strings.
    pub tokenizer: Tokenizer,
}

/// Incremental search for stop strings in the text of one completion.
#[derive(Debug)]
pub(super) struct TextWatch {
    stream: DecodeStream,
    /// Stop strings.
    strings: Vec<String>,
    text: String,
    /// Where in the text the stop string begins, bytes.
    end: Option<usize>,
    /// Tokens taken.
    taken: usize,
}

impl StopRules {
    /// Whether `token` ends a completion.
    #[must_use]
    pub fn is_stop_token(&self, token: u32) -> bool {
        self.token_ids.contains(&token)
    }

    /// Whether `token` ends a completion of a request with the rules `own`.
    pub(super) fn is_stop_token_of(&self, own: &RequestStop, token: u32) -> bool {
        (self.is_stop_token(token) && !own.ignore_eos) || own.token_ids.contains(&token)
    }

    /// The search in a completion of a request with the rules `own`; `None` without stop strings.
    pub(super) fn watch(&self, own: &RequestStop) -> Option<TextWatch> {
        let strings: Vec<String> = self.strings.iter().chain(&own.strings).cloned().collect();
        (!strings.is_empty()).then(|| TextWatch {
            stream: self.tokenizer.decode_stream(),
            strings,
            text: String::new(),
            end: None,
            taken: 0,
        })
    }
}

impl TextWatch {
    /// Takes `token`, the completion's `count`-th, unless it was taken before; true if the text now holds a stop
    /// string and `may_end` allows one here.
    pub(super) fn push_once(
        &mut self,
        count: usize,
        token: u32,
        may_end: bool,
    ) -> Result<bool, RolloutError> {
        if count == self.taken {
            return Ok(false);
        }
        self.taken = count;
        let Some(piece) = self.stream.step(token)? else { return Ok(false) };
        self.text.push_str(&piece);
        let before = self.text.len() - piece.len();
        let ends_here = |stop: &String| {
            // What begins here or later ends in this piece.
            let mut from = (before + 1).saturating_sub(stop.len().max(1));
            while !self.text.is_char_boundary(from) {
                from += 1;
            }
            self.text[from..].find(stop.as_str()).map(|at| from + at)
        };
        self.end = self.strings.iter().filter_map(ends_here).min().filter(|_| may_end);
        Ok(self.end.is_some())
    }

    /// `text`, the whole completion, up to the stop string that ended it.
    pub(super) fn cut<'a>(&self, text: &'a str) -> &'a str {
        // Both are the same text unless the tokenizer decodes a whole text in another way than its pieces.
        let at = self.end.and_then(|end| {
            let there = |stop: &String| text.get(end..).is_some_and(|rest| rest.starts_with(stop.as_str()));
            self.strings.iter().any(there).then_some(end)
        });
        let first = || self.strings.iter().filter_map(|stop| text.find(stop.as_str())).min();
        &text[..at.or_else(first).unwrap_or(text.len())]
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use model::SpecialTokens;

    use super::*;

    #[test]
    fn a_stop_string_that_overlaps_itself_ends_as_soon_as_one_may() {
        let json = model::characters::characters();
        let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), &json).unwrap();
        let token = tokenizer.encode("a", SpecialTokens::Omit).unwrap()[0];
        let rules = StopRules { token_ids: vec![], strings: vec!["aa".to_owned()], tokenizer };
        let mut watch = rules.watch(&RequestStop::default()).unwrap();
        let ended: Vec<bool> = (1..=3).map(|n| watch.push_once(n, token, n > 2).unwrap()).collect();
        assert_eq!(ended, [false, false, true]);
        assert_eq!(watch.cut("aaa"), "a");
    }
}
