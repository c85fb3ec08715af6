//! The text of a completion while it is sampled.
//!
//! Invariant: the pieces together are the text of the completion: what may be the beginning of a stop string waits until it
//! is known not to be one.

use model::{DecodeStream, Tokenizer};

/// Text of a growing completion.
#[derive(Debug)]
pub(crate) struct TextStream {
    stream: DecodeStream,
    text: String,
    /// Bytes that were taken.
    taken: usize,
    /// Longest stop string, bytes.
    longest_stop: usize,
}

impl TextStream {
    pub(crate) fn new(tokenizer: &Tokenizer, stops: &[String]) -> Self {
        let longest_stop = stops.iter().map(String::len).max().unwrap_or(0);
        Self { stream: tokenizer.decode_stream(), text: String::new(), taken: 0, longest_stop }
    }

    /// The text that is certain after `token_ids [N]` more.
    pub(crate) fn push(&mut self, token_ids: &[u32]) -> String {
        for token in token_ids {
            // The end of the completion has the whole text: a token that the tokenizer cannot decode delays its piece.
            if let Ok(Some(piece)) = self.stream.step(*token) {
                self.text.push_str(&piece);
            }
        }
        let mut end = self.text.len().saturating_sub(self.longest_stop.saturating_sub(1)).max(self.taken);
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        let piece = self.text[self.taken..end].to_owned();
        self.taken = end;
        piece
    }

    /// The rest of `whole`, the text of the completion that has ended.
    pub(crate) fn rest(&mut self, whole: &str) -> String {
        let (given, waiting) = self.text.split_at(self.taken);
        // A tokenizer may decode a whole text in another way than its pieces: then only what waits is left.
        let ends_whole = |end: &usize| waiting.is_char_boundary(*end) && whole.ends_with(&waiting[..*end]);
        let left = || (0..=waiting.len()).rev().find(ends_whole).map_or("", |end| &waiting[..end]);
        let rest = whole.strip_prefix(given).unwrap_or_else(left).to_owned();
        self.taken = self.text.len();
        rest
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use model::SpecialTokens;
    use proptest::prelude::*;

    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_json(Path::new("tokenizer.json"), &model::characters::characters()).unwrap()
    }

    #[test]
    fn the_beginning_of_a_stop_string_waits() {
        let tokenizer = tokenizer();
        let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Omit).unwrap();
        let mut stream = TextStream::new(&tokenizer, &["END".to_owned()]);
        assert_eq!(stream.push(&encode("abcE")), "ab");
        assert_eq!(stream.push(&encode("N")), "c");
        assert_eq!(stream.rest("abc"), "");
        let mut stream = TextStream::new(&tokenizer, &[]);
        assert_eq!((stream.push(&encode("ab")), stream.rest("abc")), ("ab".to_owned(), "c".to_owned()));
        let mut stream = TextStream::new(&tokenizer, &["END".to_owned()]);
        assert_eq!((stream.push(&encode("abcdE")), stream.rest("?bcd")), ("abc".to_owned(), "d".to_owned()));
    }

    proptest! {
        #[test]
        fn pieces_are_the_text(text in "[a-z ]{0,40}", cut in 0..40usize, stop in "[A-Z]{1,5}") {
            let tokenizer = tokenizer();
            let ids = tokenizer.encode(&text, SpecialTokens::Omit).unwrap();
            let cut = cut.min(ids.len());
            let mut stream = TextStream::new(&tokenizer, &[stop]);
            let mut pieces = stream.push(&ids[..cut]);
            pieces += &stream.push(&ids[cut..]);
            pieces += &stream.rest(&text);
            prop_assert_eq!(pieces, text);
        }
    }
}
