//! The tokenizer of a GGUF file with a vocabulary of SentencePiece, `tokenizer.ggml.model` = `llama`, as a `tokenizer.json`.
//!
//! SentencePiece merges the neighbours whose union has the highest score. The merges of a `tokenizer.json` are all splits of
//! all pieces into two pieces, by descending score of the union, which gives the same tokens.
//!
//! Invariant: the `tokenizer.json` is the one that transformers makes of Llama 2's and Mistral 7B's vocabularies. A word
//! boundary is put before every text between special tokens, as llama.cpp does.

use serde_json::{Value, json};

use super::GgufFile;
use super::tokenizer::{BESIDE, TokenKind, Vocabulary};
use crate::ModelError;

const SCORES: &str = "tokenizer.ggml.scores";
/// What SentencePiece writes for a space.
const SPACE: &str = "\u{2581}";
/// Longest piece, bytes. The longest that are published have 48: a split costs its length.
const MAX_PIECE_BYTES: usize = 256;

impl GgufFile {
    pub(super) fn sentence_pieces(&self, vocabulary: &Vocabulary<'_>) -> Result<Value, ModelError> {
        let keys = self.keys();
        let prefix = keys.flag("tokenizer.ggml.add_space_prefix", true)?;
        let unknown = self.special("unknown_token_id", vocabulary)?;
        let unknown = unknown.or_else(|| Some(("<unk>", *vocabulary.ids.get("<unk>")?)));
        let mut normalizers = Vec::new();
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            normalizers.push(json!({"type": "Prepend", "prepend": SPACE}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        normalizers.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE}));
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": vocabulary.added_tokens(),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "post_processor": self.special_tokens_around(vocabulary, true)?,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown.map(|(token, _)| token),
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": true,
                "ignore_merges": false,
                "vocab": vocabulary.json(),
                "merges": self.merges(vocabulary)?,
            },
        }))
    }

    /// Merges in the order of transformers: by descending score of the union, then by descending length of the left part, then
    /// by the ids of the parts.
    fn merges(&self, vocabulary: &Vocabulary<'_>) -> Result<Vec<Value>, ModelError> {
        let scores = self.metadata.get(SCORES).and_then(Value::as_array);
        let scores: Option<Vec<f64>> =
            scores.and_then(|list| list.iter().map(|score| score.as_f64()).collect());
        let scores = scores.filter(|scores| scores.len() == vocabulary.tokens.len());
        let scores = scores.ok_or_else(|| {
            self.unusable(format!("`{SCORES}` is no list of a number for each token; {BESIDE}"))
        })?;
        // SentencePiece never makes control tokens, bytes and the unknown token of text.
        let piece = |text: &str| {
            let id = *vocabulary.ids.get(text)?;
            let (_, kind) = vocabulary.tokens[id as usize];
            matches!(kind, TokenKind::Normal | TokenKind::UserDefined).then_some(id)
        };
        let mut merges = Vec::new();
        for ((token, _), score) in vocabulary.tokens.iter().zip(scores) {
            if piece(token).is_none() {
                continue;
            }
            if token.len() > MAX_PIECE_BYTES {
                let (found, most) = (token.len(), MAX_PIECE_BYTES);
                return Err(self.unusable(format!(
                    "a piece of its tokenizer has {found} bytes, and at most {most} are read; {BESIDE}"
                )));
            }
            for (length, (at, _)) in token.char_indices().enumerate().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(first), Some(second)) = (piece(left), piece(right)) {
                    merges.push((score, length, first, second, left, right));
                }
            }
        }
        merges.sort_by(|one, other| {
            other.0.total_cmp(&one.0).then(other.1.cmp(&one.1)).then((one.2, one.3).cmp(&(other.2, other.3)))
        });
        Ok(merges.into_iter().map(|(.., left, right)| json!([left, right])).collect())
    }
}
