//! The tokenizer of a GGUF file as a `tokenizer.json`: byte-level BPE, `tokenizer.ggml.model` = `gpt2`.
//!
//! Invariant: texts get the token ids that they get from the `tokenizer.json` of the model that the file was made from. A
//! vocabulary whose split of texts into words is not known exactly is refused. Vocabularies of SentencePiece are in `pieces`.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::GgufFile;
use crate::{ModelError, Tokenizer};

/// The remedy for what cannot be built.
pub(super) const BESIDE: &str = "put the tokenizer.json of the model that the file was made from beside it";

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const PRE: &str = "tokenizer.ggml.pre";

/// GPT-2's words, as llama.cpp writes them.
const GPT2_WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN_WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What `tokenizer.ggml.pre` stands for.
struct PreTokenizer {
    names: &'static [&'static str],
    /// Expressions whose matches become words, one after the other; none for GPT-2's own.
    splits: &'static [&'static str],
    /// Whether every digit is a word.
    digits: bool,
    /// Whether a word that is a token is not built from merges.
    ignore_merges: bool,
    /// Whether texts are normalised to Unicode's composed form.
    composed: bool,
    /// Whether a text begins with the beginning of a text where the file does not say so.
    add_bos: bool,
}

const PRE_TOKENIZERS: [PreTokenizer; 6] = [
    PreTokenizer { names: &["gpt-2"], ..PLAIN },
    PreTokenizer { names: &["smollm"], digits: true, ..PLAIN },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        splits: &[LLAMA3_WORDS],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["qwen2"], splits: &[QWEN2_WORDS], composed: true, ..PLAIN },
    PreTokenizer { names: &["tekken"], splits: &[TEKKEN_WORDS], ignore_merges: true, add_bos: true, ..PLAIN },
    // What llama.cpp does where a converter did not know better.
    PreTokenizer {
        names: &["default"],
        splits: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"],
        ..PLAIN
    },
];

const PLAIN: PreTokenizer = PreTokenizer {
    names: &[],
    splits: &[],
    digits: false,
    ignore_merges: false,
    composed: false,
    add_bos: false,
};

/// The kind of a token, `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    /// Special: recognised in texts, left out of decoded texts.
    Control,
    /// Recognised in texts as it is.
    UserDefined,
    /// A row of the embedding without a token.
    Unused,
    Byte,
}

/// The tokens of a file by id.
pub(super) struct Vocabulary<'a> {
    pub(super) tokens: Vec<(&'a str, TokenKind)>,
    /// Ids of the tokens that are not [`TokenKind::Unused`].
    pub(super) ids: HashMap<&'a str, u32>,
}

impl GgufFile {
    /// The content of a `tokenizer.json`.
    ///
    /// # Errors
    /// If there is no tokenizer, it is damaged, or it cannot be built exactly.
    pub(super) fn tokenizer_json(&self) -> Result<Value, ModelError> {
        let keys = self.keys();
        if !keys.has(MODEL) || !keys.has(TOKENS) {
            return Err(self.unusable(format!("it has no tokenizer (`{MODEL}`, `{TOKENS}`); {BESIDE}")));
        }
        let vocabulary = self.vocabulary()?;
        match keys.text(MODEL)? {
            "gpt2" => self.byte_level(&vocabulary),
            "llama" => self.sentence_pieces(&vocabulary),
            _ => Err(keys.unsupported(MODEL, &format!("gpt2, llama; {BESIDE}"))),
        }
    }

    /// Refuses a tokenizer from beside the file that gives the ids another meaning.
    pub(super) fn compare(&self, tokenizer: &Tokenizer) -> Result<(), ModelError> {
        if !self.keys().has(TOKENS) {
            return Ok(());
        }
        let spelled_alike = |kind| matches!(kind, TokenKind::Normal | TokenKind::Control);
        for (id, (token, kind)) in (0..).zip(self.vocabulary()?.tokens) {
            let beside = tokenizer.token(id).unwrap_or_default();
            if spelled_alike(kind) && beside != token {
                return Err(self.unusable(format!(
                    "token {id} is {token:?} in it and {beside:?} in {}; remove that file, or replace it by the \
                     tokenizer.json of the model that the GGUF file was made from",
                    tokenizer.path().display()
                )));
            }
        }
        Ok(())
    }

    fn vocabulary(&self) -> Result<Vocabulary<'_>, ModelError> {
        let tokens = self.texts(TOKENS)?;
        let kinds = match self.metadata.get(TYPES) {
            None => vec![TokenKind::Normal; tokens.len()],
            Some(list) => {
                let kinds = list.as_array().map(|list| list.iter().map(TokenKind::of).collect());
                let kinds: Option<Vec<_>> = kinds.flatten();
                kinds.filter(|kinds| kinds.len() == tokens.len()).ok_or_else(|| {
                    self.unusable(format!(
                        "`{TYPES}` is no list of a type from 1 to 6 for each of the {} tokens; {BESIDE}",
                        tokens.len()
                    ))
                })?
            }
        };
        let tokens: Vec<_> = tokens.into_iter().zip(kinds).collect();
        let mut ids = HashMap::new();
        for (id, (token, kind)) in (0..).zip(&tokens) {
            if *kind != TokenKind::Unused
                && let Some(other) = ids.insert(*token, id)
            {
                return Err(self.unusable(format!("tokens {other} and {id} are both {token:?}; {BESIDE}")));
            }
        }
        Ok(Vocabulary { tokens, ids })
    }

    /// The list of texts of a key.
    fn texts(&self, key: &str) -> Result<Vec<&str>, ModelError> {
        let list = self.metadata.get(key).and_then(Value::as_array);
        let texts = list.and_then(|list| list.iter().map(Value::as_str).collect());
        texts.ok_or_else(|| self.unusable(format!("`{key}` is missing or no list of texts; {BESIDE}")))
    }

    /// Byte-level BPE: words become bytes, and bytes become tokens by merges.
    fn byte_level(&self, vocabulary: &Vocabulary<'_>) -> Result<Value, ModelError> {
        let keys = self.keys();
        let names =
            || PRE_TOKENIZERS.iter().flat_map(|known| known.names).copied().collect::<Vec<_>>().join(", ");
        if !keys.has(PRE) {
            return Err(self.unusable(format!(
                "it does not say how its tokenizer splits texts into words (`{PRE}`); {BESIDE}"
            )));
        }
        let name = keys.text(PRE)?;
        let Some(pre) = PRE_TOKENIZERS.iter().find(|known| known.names.contains(&name)) else {
            return Err(keys.unsupported(PRE, &format!("{}; for another, {BESIDE}", names())));
        };
        let merges: Vec<Value> = self
            .texts(MERGES)?
            .into_iter()
            .map(|merge| merge.split_once(' ').map(|(left, right)| json!([left, right])))
            .collect::<Option<_>>()
            .ok_or_else(|| self.unusable(format!("`{MERGES}` has an entry that is no pair; {BESIDE}")))?;
        let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": vocabulary.added_tokens(),
            "normalizer": pre.composed.then(|| json!({"type": "NFC"})),
            "pre_tokenizer": pre.json(&byte_level),
            "post_processor": self.special_tokens_around(vocabulary, pre.add_bos)?,
            "decoder": byte_level(true),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": self.unknown_byte(vocabulary)?,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": pre.ignore_merges,
                "vocab": vocabulary.json(),
                "merges": merges,
            },
        }))
    }

    /// The token for bytes without one; none if every byte has a token.
    fn unknown_byte(&self, vocabulary: &Vocabulary<'_>) -> Result<Option<String>, ModelError> {
        let mut spelling = [0; 4];
        let lacks =
            byte_characters().filter(|c| !vocabulary.ids.contains_key(&*c.encode_utf8(&mut spelling)));
        let lacks = lacks.count();
        if lacks == 0 {
            return Ok(None);
        }
        let unknown = self.special("unknown_token_id", vocabulary)?;
        let missing = || {
            self.unusable(format!(
                "its vocabulary has no token for {lacks} of the 256 bytes, and no unknown token; {BESIDE}"
            ))
        };
        Ok(Some(unknown.ok_or_else(missing)?.0.to_owned()))
    }

    /// The token of a key `tokenizer.ggml.*_id` and its id, if the file has it.
    pub(super) fn special<'a>(
        &self,
        key: &str,
        vocabulary: &Vocabulary<'a>,
    ) -> Result<Option<(&'a str, u32)>, ModelError> {
        let (keys, key) = (self.keys(), format!("tokenizer.ggml.{key}"));
        let Some(id) = keys.token_ids(&key)?.first().copied() else { return Ok(None) };
        match vocabulary.tokens.get(id as usize) {
            Some((token, _)) => Ok(Some((*token, id))),
            None => Err(keys.bad(&key, &format!("the id of one of the {} tokens", vocabulary.tokens.len()))),
        }
    }

    /// The post-processor: special tokens around texts, as the file says or else `add_bos` does.
    pub(super) fn special_tokens_around(
        &self,
        vocabulary: &Vocabulary<'_>,
        add_bos: bool,
    ) -> Result<Value, ModelError> {
        let keys = self.keys();
        let mut around = [None, None];
        for (place, name, default) in [(0, "bos", add_bos), (1, "eos", false)] {
            let flag = format!("tokenizer.ggml.add_{name}_token");
            if !keys.flag(&flag, default)? {
                continue;
            }
            around[place] = self.special(&format!("{name}_token_id"), vocabulary)?;
            if around[place].is_none() && keys.has(&flag) {
                return Err(keys.missing(&format!("tokenizer.ggml.{name}_token_id")));
            }
        }
        let tokens: Map<String, Value> = around
            .iter()
            .flatten()
            .map(|(token, id)| ((*token).to_owned(), json!({"id": token, "ids": [id], "tokens": [token]})))
            .collect();
        if tokens.is_empty() {
            return Ok(Value::Null);
        }
        let sequence = |name: &str, kind: u32| {
            let special = |token: &Option<(&str, u32)>| {
                token.map(|(token, _)| json!({"SpecialToken": {"id": token, "type_id": kind}}))
            };
            let text = json!({"Sequence": {"id": name, "type_id": kind}});
            [special(&around[0]), Some(text), special(&around[1])].into_iter().flatten().collect::<Vec<_>>()
        };
        let pair = [sequence("A", 0), sequence("B", 1)].concat();
        Ok(json!({
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": pair,
            "special_tokens": tokens,
        }))
    }
}

impl Vocabulary<'_> {
    /// The vocabulary of the model.
    pub(super) fn json(&self) -> Value {
        self.ids
            .iter()
            .map(|(token, id)| ((*token).to_owned(), Value::from(*id)))
            .collect::<Map<_, _>>()
            .into()
    }

    /// The tokens that are recognised before words are made, by id.
    pub(super) fn added_tokens(&self) -> Vec<Value> {
        let added = (0..).zip(&self.tokens).filter_map(|(id, (content, kind)): (u32, _)| {
            let special = match kind {
                TokenKind::Control | TokenKind::Unknown => true,
                TokenKind::UserDefined => false,
                TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => return None,
            };
            Some(json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            }))
        });
        added.collect()
    }
}

impl TokenKind {
    fn of(value: &Value) -> Option<Self> {
        Some(match value.as_u64()? {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

impl PreTokenizer {
    /// The pre-tokenizer, which ends with `byte_level`, with GPT-2's words or without.
    fn json(&self, byte_level: &impl Fn(bool) -> Value) -> Value {
        let mut steps: Vec<Value> = Vec::new();
        if self.digits {
            steps.push(json!({"type": "Digits", "individual_digits": true}));
        }
        steps.extend(self.splits.iter().map(|split| {
            json!({"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": false})
        }));
        steps.push(byte_level(self.splits.is_empty()));
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}

/// The 256 characters by which byte-level vocabularies spell bytes: printable bytes as they are, others from U+0100 on.
fn byte_characters() -> impl Iterator<Item = char> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=u8::MAX).filter(move |byte| !printable(byte)).count() as u32;
    (0..=u8::MAX)
        .filter(printable)
        .map(char::from)
        .chain((0..others).filter_map(|n| char::from_u32(0x100 + n)))
}
