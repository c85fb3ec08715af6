//! Limits on the content of a `tokenizer.json`.
//!
//! A normalizer that replaces `a` by a thousand, ten times in a row, makes 10^30 bytes of one; decoders and templates of
//! special tokens multiply in the same way. The library follows them, so their growth is added up before it is built.
//!
//! Invariant: a text of `n` bytes is normalized to at most `factor * n + extra` bytes. A file beyond the limits
//! is refused by name, and so is a text that could become longer than [`MAX_NORMALIZED_BYTES`].

use serde::Deserialize;
use serde_json::Value;

/// Longest text that a normalizer may give, bytes.
const MAX_NORMALIZED_BYTES: f64 = (64 << 20) as f64;
/// Most that a normalizer may make of one byte, bytes. The largest that are published stay below 200.
const MAX_FACTOR: f64 = 4096.0;
/// Most that a decoder may make of one byte, bytes.
const MAX_DECODER_FACTOR: f64 = 64.0;
/// Most that is added to a text whatever its length, bytes.
const MAX_EXTRA: f64 = (1 << 20) as f64;
/// Longest token, bytes.
const MAX_TOKEN_BYTES: usize = 4096;
/// Most tokens.
const MAX_TOKENS: u32 = 1 << 24;
/// Most special tokens that are put around a text.
const MAX_SPECIAL: usize = 4096;
/// Longest word that WordPiece looks up from every place to every other, characters. BERT has 100.
const MAX_WORD_CHARS: u64 = 1000;

/// The parts of the file that can multiply.
#[derive(Deserialize)]
struct Parts {
    normalizer: Option<Value>,
    decoder: Option<Value>,
    post_processor: Option<Value>,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Option<TokenizerModel>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

#[derive(Deserialize)]
struct TokenizerModel {
    max_input_chars_per_word: Option<u64>,
}

/// Bound on the growth of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Growth {
    /// Bytes for one byte.
    factor: f64,
    /// Bytes for a text.
    extra: f64,
}

impl Growth {
    const NONE: Self = Self { factor: 1.0, extra: 0.0 };

    /// Bound on the growth of a text in this normalizer.
    ///
    /// # Errors
    /// A file that asks for more than any tokenizer needs; the reason.
    pub(super) fn of(json: &[u8]) -> Result<Self, String> {
        let parts: Parts = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let growth = parts.normalizer.as_ref().map_or(Self::NONE, normalizer);
        within("its normalizer", growth, MAX_FACTOR)?;
        let decoder = parts.decoder.as_ref().map_or(Self::NONE, decoder);
        within("its decoder", decoder, MAX_DECODER_FACTOR)?;
        let long = parts.added_tokens.iter().map(|token| token.content.len()).max().unwrap_or(0);
        check_token(long)?;
        let normalized: f64 = parts.added_tokens.iter().map(|token| growth.bytes(token.content.len())).sum();
        if normalized > 4.0 * MAX_NORMALIZED_BYTES {
            return Err(format!("its normalizer can make {normalized:.0} bytes of its added tokens"));
        }
        parts.post_processor.as_ref().map_or(Ok(()), |value| post_processor(value, &mut 0))?;
        let word = parts.model.and_then(|model| model.max_input_chars_per_word).unwrap_or(0);
        if word > MAX_WORD_CHARS {
            return Err(format!(
                "max_input_chars_per_word is {word}, and at most {MAX_WORD_CHARS} are computed"
            ));
        }
        Ok(growth)
    }

    /// Whether a text of `bytes` bytes may be normalized.
    ///
    /// # Errors
    /// The reason why not.
    pub(super) fn check(self, bytes: usize) -> Result<(), String> {
        let longest = self.bytes(bytes);
        if longest <= MAX_NORMALIZED_BYTES {
            return Ok(());
        }
        Err(format!(
            "the normalizer of the tokenizer can make {longest:.0} bytes of it, and at most {MAX_NORMALIZED_BYTES} are \
             computed; shorten the text"
        ))
    }

    fn bytes(self, bytes: usize) -> f64 {
        self.factor * bytes as f64 + self.extra
    }

    /// This, and then `next`.
    fn then(self, next: Self) -> Self {
        Self { factor: self.factor * next.factor, extra: self.extra * next.factor + next.extra }
    }
}

/// Checks what is known only after the file was read: the number of tokens, and the longest in bytes.
///
/// # Errors
/// The reason why it is refused.
pub(super) fn check_vocabulary(highest_id: u32, longest: usize) -> Result<(), String> {
    if highest_id >= MAX_TOKENS {
        return Err(format!("a token has id {highest_id}, and ids are below {MAX_TOKENS}"));
    }
    check_token(longest)
}

fn check_token(longest: usize) -> Result<(), String> {
    if longest <= MAX_TOKEN_BYTES {
        return Ok(());
    }
    Err(format!("a token has {longest} bytes, and at most {MAX_TOKEN_BYTES} are taken"))
}

fn within(what: &str, growth: Growth, most: f64) -> Result<(), String> {
    let Growth { factor, extra } = growth;
    if factor <= most && extra <= MAX_EXTRA {
        return Ok(());
    }
    Err(format!(
        "{what} can make {factor:.3e} bytes of one and adds {extra:.3e}; at most {most} and {MAX_EXTRA} are computed"
    ))
}

/// A kind is recognised by its fields, because old files do not name it.
fn normalizer(value: &Value) -> Growth {
    if let Some(list) = value["normalizers"].as_array() {
        return list.iter().map(normalizer).fold(Growth::NONE, Growth::then);
    }
    if let Some(growth) = replace(value) {
        return growth;
    }
    if let Some(text) = value["prepend"].as_str() {
        return Growth { factor: 1.0, extra: text.len() as f64 };
    }
    if let Some(text) = value["precompiled_charsmap"].as_str() {
        return Growth { factor: longest_mapped(text) as f64, extra: 0.0 };
    }
    // Of UTF-8, by Unicode's own table (UAX 15).
    let factor = match value["type"].as_str() {
        Some("NFC" | "NFD" | "Lowercase") => 3.0,
        Some("NFKC" | "NFKD") => 11.0,
        Some("Strip" | "StripAccents" | "Nmt") => 1.0,
        Some("ByteLevel") => 2.0,
        // BERT's normalizer separates, decomposes and lowers.
        _ => 18.0,
    };
    Growth { factor, extra: 0.0 }
}

fn decoder(value: &Value) -> Growth {
    if let Some(list) = value["decoders"].as_array() {
        return list.iter().map(decoder).fold(Growth::NONE, Growth::then);
    }
    let factor = match value["type"].as_str() {
        Some("ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace" | "Strip") => 1.0,
        // Of others, a space may stand before every token.
        _ => 2.0,
    };
    replace(value).unwrap_or(Growth { factor, extra: 1.0 })
}

/// A replacement of `pattern` by `content`.
fn replace(value: &Value) -> Option<Growth> {
    let content = value["content"].as_str()?.len() as f64;
    match value["pattern"]["String"].as_str() {
        Some(pattern) if !pattern.is_empty() => {
            Some(Growth { factor: (content / pattern.len() as f64).max(1.0), extra: 0.0 })
        }
        // It may match between any two characters.
        _ => value.get("pattern").map(|_| Growth { factor: 1.0 + content, extra: content }),
    }
}

/// The longest text that SentencePiece's map has for a character: behind a table with its length in front, texts end with
/// a zero.
fn longest_mapped(base64: &str) -> usize {
    let bytes = decode_base64(base64);
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return 1 };
    let texts = rest.get(u32::from_le_bytes(*length) as usize..).unwrap_or_default();
    texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(1).max(1)
}

fn decode_base64(text: &str) -> Vec<u8> {
    let sextet = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(text.len() / 4 * 3), 0_u32, 0);
    for six in text.bytes().filter_map(sextet) {
        bits = (bits << 6) | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    bytes
}

/// A text may stand in a template of special tokens once; `special` counts these.
fn post_processor(value: &Value, special: &mut usize) -> Result<(), String> {
    for inner in value["processors"].as_array().into_iter().flatten() {
        post_processor(inner, special)?;
    }
    for form in ["single", "pair"] {
        let pieces = value[form].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut texts: Vec<&Value> = pieces.iter().filter_map(|piece| piece.get("Sequence")).collect();
        let all = texts.len();
        texts.dedup_by_key(|text| text["id"].clone());
        if all > 2 || texts.len() < all {
            return Err(format!("the template `{form}` of its post-processor repeats a text"));
        }
        for piece in pieces {
            let id = piece["SpecialToken"]["id"].as_str().unwrap_or_default();
            *special += value["special_tokens"][id]["ids"].as_array().map_or(1, Vec::len);
        }
    }
    if *special <= MAX_SPECIAL {
        return Ok(());
    }
    Err(format!("its post-processor adds {special} special tokens, and at most {MAX_SPECIAL} are added"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn growth(file: &Value) -> Result<Growth, String> {
        Growth::of(file.to_string().as_bytes())
    }

    fn replacement(pattern: &Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn tokenizers_in_use_stay_within_bounds() {
        let space = replacement(&json!({"String": " "}), "\u{2581}");
        let gemma = json!({"normalizer": space, "decoder": {"type": "Sequence", "decoders": [
            replacement(&json!({"String": "\u{2581}"}), " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}});
        assert_eq!(growth(&gemma), Ok(Growth { factor: 3.0, extra: 0.0 }));
        let llama = json!({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"}, replacement(&json!({"String": " "}), "\u{2581}")]},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                "pair": [{"Sequence": {"id": "A"}}, {"Sequence": {"id": "B"}}],
                "special_tokens": {"<s>": {"ids": [1]}}}});
        assert_eq!(growth(&llama), Ok(Growth { factor: 3.0, extra: 9.0 }));
        let bert = json!({"normalizer": {"type": "BertNormalizer"}, "decoder": {"type": "WordPiece"},
            "model": {"max_input_chars_per_word": 100}});
        let bert = growth(&bert).unwrap();
        bert.check(1 << 20).unwrap();
        assert!(bert.check(1 << 30).unwrap_err().contains("shorten the text"));
        assert_eq!(
            growth(&json!({"normalizer": null, "decoder": null, "added_tokens": []})),
            Ok(Growth::NONE)
        );
    }

    #[test]
    fn the_longest_text_of_a_character_map_is_its_growth() {
        // A table of four bytes, then "ab", "" and "abcde".
        let blob = [&[4, 0, 0, 0, 9, 9, 9, 9][..], b"ab\0\0abcde\0"].concat();
        assert_eq!(decode_base64("BAAAAAkJCQlhYgAAYWJjZGUA"), blob);
        let map = json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAkJCQlhYgAAYWJjZGUA"}});
        assert_eq!(growth(&map), Ok(Growth { factor: 5.0, extra: 0.0 }));
    }

    #[test]
    fn files_that_multiply_are_refused() {
        let tenfold = replacement(&json!({"String": "a"}), &"a".repeat(1000));
        let chain = json!({"type": "Sequence", "normalizers": vec![tenfold.clone(); 10]});
        let between = replacement(&json!({"Regex": ""}), &"a".repeat(5000));
        let text = json!({"Sequence": {"id": "A"}});
        for (file, reason) in [
            (json!({"normalizer": chain}), "its normalizer can make 1.000e30 bytes of one"),
            (json!({"normalizer": between}), "its normalizer can make 5.001e3 bytes of one"),
            (json!({"normalizer": {"type": "Prepend", "prepend": "a".repeat(2 << 20)}}), "adds 2.097e6"),
            (json!({"decoder": tenfold}), "its decoder can make 1.000e3 bytes of one"),
            (json!({"added_tokens": [{"content": "a".repeat(5000)}]}), "a token has 5000 bytes"),
            (
                json!({"post_processor": {"single": [text, text]}}),
                "the template `single` of its post-processor",
            ),
            (
                json!({"post_processor": {"processors": [{"single": [{"SpecialToken": {"id": "b"}}],
                    "special_tokens": {"b": {"ids": vec![1; 5000]}}}]}}),
                "adds 5000 special tokens",
            ),
            (
                json!({"model": {"max_input_chars_per_word": 1_000_000}}),
                "max_input_chars_per_word is 1000000",
            ),
        ] {
            let error = growth(&file).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        assert!(check_vocabulary(u32::MAX, 1).unwrap_err().contains("ids are below"));
    }
}
