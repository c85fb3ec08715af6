//! Tokenizer: text to token ids and back, from `tokenizer.json`.
//!
//! Invariant: encoding neither truncates nor pads, even if the file asks for it; the caller refuses prompts that are too
//! long. Chat templates are in `chat`.

mod bounds;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::{ModelError, files};
use bounds::Growth;

/// A tokenizer; clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    path: PathBuf,
    vocab_size: usize,
    /// The highest id without added tokens.
    base_highest: Option<u32>,
    /// Ids that texts may have are below it.
    embedding_rows: usize,
    growth: Growth,
}

/// Whether encoding puts the model's own special tokens, such as a beginning of text, around a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// As `tokenizer.json` says: for plain texts.
    Add,
    /// No: for rendered chat templates, which contain them, and for pieces of text.
    Omit,
}

/// Text of a growing token sequence, piece by piece; each piece is whole characters.
pub struct DecodeStream {
    tokenizer: Tokenizer,
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// If the file cannot be read or is none that the tokenizers library understands.
    pub fn load(path: &Path) -> Result<Self, ModelError> {
        let bytes = files::read(path, files::MAX_TOKENIZER_BYTES)
            .map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
        Self::from_bytes(path, &bytes)
    }

    /// The tokenizer of a `tokenizer.json` in memory; `path` names it in errors.
    ///
    /// # Errors
    /// If the tokenizers library does not understand it.
    pub fn from_json(path: &Path, json: &Value) -> Result<Self, ModelError> {
        Self::from_bytes(path, json.to_string().as_bytes())
    }

    /// Token ids of a text. Special tokens that are spelled out in it are recognised.
    ///
    /// # Errors
    /// If the tokenizer has no token for a part of it, or the embedding of the model no row for a token.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, ModelError> {
        self.growth.check(text.len()).map_err(|reason| encode_error(text, &reason))?;
        let encoding = self.inner.encode_fast(text, special == SpecialTokens::Add);
        let encoding = encoding.map_err(|err| encode_error(text, &err.to_string()))?;
        self.embedded(text, encoding.get_ids())
    }

    /// The text of the token ids `ids [tokens]`, without special tokens. Ids without a token, as padded embeddings have, give
    /// no text.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.decoded(ids, true)
    }

    /// The text of the token ids `ids [tokens]`, with special tokens.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn decode_special(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.decoded(ids, false)
    }

    fn decoded(&self, ids: &[u32], skip_special: bool) -> Result<String, ModelError> {
        self.inner
            .decode(ids, skip_special)
            .map_err(|err| ModelError::Decode { tokens: ids.len(), reason: err.to_string() })
    }

    /// Token ids of two texts as the tokenizer joins them, with its special tokens.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<Vec<u32>, ModelError> {
        for text in [first, second] {
            self.growth.check(text.len()).map_err(|reason| encode_error(text, &reason))?;
        }
        let encoding = self.inner.encode_fast((first, second), true);
        let encoding = encoding.map_err(|err| encode_error(second, &err.to_string()))?;
        self.embedded(second, encoding.get_ids())
    }

    /// The ids of `text`, if the embedding of the model has a row for each.
    fn embedded(&self, text: &str, ids: &[u32]) -> Result<Vec<u32>, ModelError> {
        let rows = self.embedding_rows;
        let Some(id) = ids.iter().find(|id| **id as usize >= rows) else { return Ok(ids.to_vec()) };
        let token = self.token(*id).unwrap_or_default();
        let reason = format!(
            "its token {token:?} has id {id}, and config.json says vocab_size {rows}; remove the token from the text"
        );
        Err(encode_error(text, &reason))
    }

    /// A digest of the vocabulary: tokenizers with equal fingerprints give every token id the same meaning.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for id in 0..self.vocab_size as u32 {
            let token = self.token(id).unwrap_or_default();
            hasher.update(&(token.len() as u64).to_le_bytes());
            hasher.update(token.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// A decoder for tokens that come one at a time, special tokens left out.
    #[must_use]
    pub fn decode_stream(&self) -> DecodeStream {
        DecodeStream { tokenizer: self.clone(), ids: Vec::new(), prefix: String::new(), prefix_index: 0 }
    }

    /// The highest token id plus one. The embedding of the model may have more rows.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token as it is spelled in the vocabulary.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// A token as it is spelled in the vocabulary.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The file it was read from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tokenizer of the content of a `tokenizer.json`; `path` names it in errors.
    pub(crate) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, ModelError> {
        let error = |reason: String| ModelError::Tokenizer { path: path.to_owned(), reason };
        let growth = Growth::of(bytes).map_err(error)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|err| error(err.to_string()))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|err| error(err.to_string()))?;
        let vocabulary = inner.get_vocab(true);
        let highest = vocabulary.values().max().copied();
        let highest = highest.ok_or_else(|| error("its vocabulary is empty".to_owned()))?;
        let longest = vocabulary.keys().map(String::len).max().unwrap_or(0);
        bounds::check_vocabulary(highest, longest).map_err(error)?;
        let vocab_size = highest as usize + 1;
        let base_highest = inner.get_vocab(false).values().max().copied();
        let (inner, path) = (Arc::new(inner), path.to_owned());
        Ok(Self { inner, path, vocab_size, base_highest, embedding_rows: usize::MAX, growth })
    }

    /// The tokenizer of a model whose embedding has `rows` rows. Added tokens may lie beyond it, such as those for images in a
    /// model that reads text alone; texts with such a token are refused.
    ///
    /// # Errors
    /// If another token lies beyond it.
    pub(crate) fn with_embedding(self, rows: usize) -> Result<Self, ModelError> {
        match self.base_highest.filter(|id| *id as usize >= rows) {
            None => Ok(Self { embedding_rows: rows, ..self }),
            Some(id) => Err(ModelError::Vocabulary {
                token: self.token(id).unwrap_or_default(),
                path: self.path,
                id,
                vocab_size: rows,
            }),
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).field("vocab_size", &self.vocab_size).finish()
    }
}

impl DecodeStream {
    /// Takes the next token and returns the text that is certain now: nothing while a character is incomplete.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn step(&mut self, id: u32) -> Result<Option<String>, ModelError> {
        let Self { tokenizer, ids, prefix, prefix_index } = self;
        match tokenizers::step_decode_stream(&tokenizer.inner, vec![id], true, ids, prefix, prefix_index) {
            Ok(piece) => Ok(piece),
            // A decoder of bytes replaces the text of a whole run of them if one does not fit. What was given stays, and what is
            // new is decoded alone.
            Err(_) if *prefix_index < ids.len() => {
                let new = ids.split_off(*prefix_index);
                let piece = tokenizer.decode(&new)?;
                (*prefix_index, *ids) = (new.len(), new);
                prefix.clone_from(&piece);
                Ok(Some(piece))
            }
            Err(err) => Err(ModelError::Decode { tokens: ids.len(), reason: err.to_string() }),
        }
    }
}

impl std::fmt::Debug for DecodeStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DecodeStream").field("pending", &self.ids).finish_non_exhaustive()
    }
}

/// The error for a text that cannot be turned into tokens.
pub(crate) fn encode_error(text: &str, reason: &str) -> ModelError {
    ModelError::Encode {
        bytes: text.len(),
        start: text.chars().take(40).collect(),
        reason: reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::characters::{CHARACTERS, characters};
    use proptest::prelude::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_json(Path::new("tokenizer.json"), &characters()).unwrap()
    }

    #[test]
    fn characters_are_tokens() {
        let tokenizer = tokenizer();
        assert_eq!(tokenizer.vocab_size(), CHARACTERS);
        let ids = tokenizer.encode("<bos>1 +\n~<eos>", SpecialTokens::Add).unwrap();
        assert_eq!(ids, [1, 22, 5, 16, 4, 99, 2]);
        assert_eq!(tokenizer.decode(&ids).unwrap(), "1 +\n~");
        assert_eq!(tokenizer.encode("\t", SpecialTokens::Omit).unwrap(), [3]);
        assert_eq!((tokenizer.token_id("<eos>"), tokenizer.token(22).as_deref()), (Some(2), Some("1")));
    }

    #[test]
    fn bytes_that_are_no_character_do_not_end_a_stream() {
        let json = serde_json::json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "byte_fallback": true, "merges": [],
                "vocab": {"a": 0, "<0x0A>": 1, "<0xE5>": 2, "x": 3, "<0xC3>": 4, "<0xA9>": 5}}});
        let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), &json).unwrap();
        let mut stream = tokenizer.decode_stream();
        let mut pieces =
            |ids: &[u32]| -> Vec<Option<String>> { ids.iter().map(|id| stream.step(*id).unwrap()).collect() };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(pieces(&[0, 1]), [some("a"), some("\n")]);
        assert_eq!(pieces(&[2, 3]), [None, some("\u{fffd}x")]);
        assert_eq!(pieces(&[4, 5, 0]), [None, some("\u{e9}"), some("a")]);
    }

    #[test]
    fn a_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        assert!(matches!(Tokenizer::load(&path), Err(ModelError::Read { .. })));
        for content in ["", "{", "[]", r#"{"model": {"type": "Unheard"}}"#] {
            std::fs::write(&path, content).unwrap();
            let err = Tokenizer::load(&path).unwrap_err();
            assert!(matches!(err, ModelError::Tokenizer { .. }), "{err}");
            assert!(err.to_string().contains("tokenizer.json"), "{err}");
        }
    }

    #[test]
    fn a_normalizer_that_multiplies_is_refused() {
        let mut json = characters();
        let replacement =
            serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(99)});
        json["normalizer"] =
            serde_json::json!({"type": "Sequence", "normalizers": vec![replacement.clone(); 30]});
        let error = Tokenizer::from_json(Path::new("tokenizer.json"), &json).unwrap_err().to_string();
        assert!(error.contains("its normalizer can make"), "{error}");
        json["normalizer"] = replacement;
        let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), &json).unwrap();
        assert_eq!(tokenizer.encode("aa", SpecialTokens::Omit).unwrap().len(), 198);
        let error = tokenizer.encode(&"a".repeat(1 << 20), SpecialTokens::Omit).unwrap_err().to_string();
        assert!(error.contains("a text of 1048576 bytes") && error.contains("can make"), "{error}");
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_not_applied() {
        let mut json = characters();
        json["truncation"] = serde_json::json!({"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"});
        let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), &json).unwrap();
        assert_eq!(tokenizer.encode("abcde", SpecialTokens::Add).unwrap().len(), 5);
    }

    #[test]
    fn a_stream_waits_for_whole_characters() {
        // A vocabulary of the two bytes of an e with acute accent, beside the character tokenizer's.
        let mut json = characters();
        json["model"]["vocab"]["\u{c3}"] = 100.into();
        json["model"]["vocab"]["\u{a9}"] = 101.into();
        let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), &json).unwrap();
        let mut stream = tokenizer.decode_stream();
        let pieces: Vec<_> = [68, 100, 101, 2, 69].map(|id| stream.step(id).unwrap()).into();
        let text = |s: &str| Some(s.to_owned());
        assert_eq!(pieces, [text("_"), None, text("\u{e9}"), None, text("`")]);
    }

    proptest! {
        #[test]
        fn ascii_survives_a_round_trip_whole_and_in_pieces(text in "[ -~\n]{0,60}") {
            let tokenizer = tokenizer();
            prop_assume!(!text.contains('<'));
            let ids = tokenizer.encode(&text, SpecialTokens::Omit).unwrap();
            prop_assert_eq!(ids.len(), text.len());
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.clone());
            let mut stream = tokenizer.decode_stream();
            let pieces: String = ids.iter().filter_map(|&id| stream.step(id).unwrap()).collect();
            prop_assert_eq!(pieces, text);
        }
    }
}
