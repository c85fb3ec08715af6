//! The tokenizer of fresh models: every printable ASCII character is one token.
//!
//! Invariant: the files are ordinary byte-level BPE files with an empty merge list, which every Hugging Face tool reads.
//! Ids are 0 `<pad>`, 1 `<bos>`, 2 `<eos>`, 3 `<unk>`, 4 newline, then U+0020 to U+007E; 100 in all. It
//! is not trained and has no options.

use serde_json::{Map, Value, json};

/// Number of tokens.
pub const CHARACTERS: usize = 100;

const SPECIALS: [&str; 4] = ["<pad>", "<bos>", "<eos>", "<unk>"];

/// The content of `tokenizer.json`.
#[must_use]
pub fn characters() -> Value {
    let printable = (' '..='~').map(byte_level);
    let tokens = SPECIALS.map(str::to_owned).into_iter().chain([byte_level('\n')]).chain(printable);
    let vocab: Map<String, Value> =
        tokens.zip(0..).map(|(token, id): (String, u32)| (token, id.into())).collect();
    let added: Vec<Value> = SPECIALS
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": "<unk>",
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": [],
        },
    })
}

/// The content of `tokenizer_config.json` for a model with a context of `max_length` tokens.
#[must_use]
pub(crate) fn characters_config(max_length: usize) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": max_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": false,
        "add_bos_token": false,
    })
}

/// A character in the byte-level alphabet, which maps invisible characters to visible ones.
fn byte_level(character: char) -> String {
    match character {
        ' ' => "\u{120}".to_owned(),
        '\n' => "\u{10a}".to_owned(),
        visible => visible.to_string(),
    }
}
