//! Stop rules: stop tokens and stop strings.

use model::tokenizer::{DecodeStream, Tokenizer};

use crate::RolloutError;

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
    text: String,
    /// Tokens taken.
    taken: usize,
}

impl StopRules {
    /// Whether `token` ends a completion.
    #[must_use]
    pub fn is_stop_token(&self, token: u32) -> bool {
        self.token_ids.contains(&token)
    }

    /// `text` up to the first stop string.
    #[must_use]
    pub fn cut<'a>(&self, text: &'a str) -> &'a str {
        let end = self.strings.iter().filter_map(|stop| text.find(stop.as_str())).min();
        &text[..end.unwrap_or(text.len())]
    }

    pub(super) fn watch(&self) -> Option<TextWatch> {
        (!self.strings.is_empty()).then(|| TextWatch {
            stream: self.tokenizer.decode_stream(),
            text: String::new(),
            taken: 0,
        })
    }
}

impl TextWatch {
    /// Takes `token`, the completion's `count`-th, unless it was taken before; true if the text now holds a stop
    /// string.
    pub(super) fn push_once(
        &mut self,
        count: usize,
        token: u32,
        strings: &[String],
    ) -> Result<bool, RolloutError> {
        if count == self.taken {
            return Ok(false);
        }
        self.taken = count;
        let Some(piece) = self.stream.step(token)? else { return Ok(false) };
        self.text.push_str(&piece);
        // A stop string that ends in this piece begins at most its own length before it.
        let longest = strings.iter().map(String::len).max().unwrap_or(0);
        let mut from = self.text.len().saturating_sub(piece.len() + longest);
        while !self.text.is_char_boundary(from) {
            from -= 1;
        }
        Ok(strings.iter().any(|stop| self.text[from..].contains(stop.as_str())))
    }
}
