//! Tokenizers from the metadata of GGUF files, against the tokenizers that the metadata was made from.
//!
//! Invariant: vocabularies are trained here on documents of the repository. The `tokenizer.json` of each family has the form that
//! its models are published with, and SentencePiece is its algorithm, written out.

use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as GgufValue;
use model::{Architecture, Config, ModelDirectory, Parameters, Sizes, SpecialTokens, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::common::gguf::{GgufContent, texts};

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Control tokens, and one that is not special.
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const TOOL: &str = "<tool call>";
/// Marked as bytes, control or unknown in vocabularies of SentencePiece.
const FIRST_PIECES: [(&str, i32); 3] = [("<unk>", 2), ("<s>", 3), ("</s>", 3)];

/// A tokenizer and the same from a GGUF file.
struct Pair {
    original: Tokenizer,
    converted: Tokenizer,
}

static PAIRS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    let split = |regex: &str| {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})
    };
    let words =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let digits = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true}, words]});
    let composed = json!({"type": "NFC"});
    [
        ("smollm", Value::Null, digits, false),
        ("gpt-2", Value::Null, words, false),
        ("llama-bpe", Value::Null, split(LLAMA3), true),
        ("qwen2", composed, split(QWEN2), false),
        ("tekken", Value::Null, split(TEKKEN), true),
    ]
    .into_iter()
    .map(|(pre, normalizer, pre_tokenizer, begins)| pair(pre, &normalizer, &pre_tokenizer, begins))
    .collect()
});

/// Text to train on, in several scripts.
fn corpus() -> Vec<String> {
    let read = |name: &str| {
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)).unwrap()
    };
    let scripts = "caf\u{e9} na\u{ef}ve \u{65e5}\u{672c}\u{8a9e} \u{41f}\u{440}\u{438}\u{432}\u{435}\u{442} "
        .repeat(20);
    [read("README.md"), read("model/src/config.rs"), scripts]
        .map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .concat()
}

/// The `tokenizer.json` of byte-level BPE, trained.
fn trained(normalizer: &Value, pre_tokenizer: &Value, special: Vec<tokenizers::AddedToken>) -> Value {
    let empty = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": true,
        "trim_offsets": true, "use_regex": true}, "model": {"type": "BPE", "vocab": {}, "merges": []}});
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(empty.to_string()).unwrap();
    let alphabet =
        if special.is_empty() { Default::default() } else { ByteLevel::alphabet().into_iter().collect() };
    let trainer = BpeTrainer::builder().vocab_size(2000).min_frequency(2).show_progress(false);
    let mut trainer: TrainerWrapper =
        trainer.special_tokens(special).initial_alphabet(alphabet).build().into();
    tokenizer.train(&mut trainer, corpus().into_iter()).unwrap();
    serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap()
}

fn pair(pre: &str, normalizer: &Value, pre_tokenizer: &Value, begins: bool) -> Pair {
    let special = CONTROL.map(|token| tokenizers::AddedToken::from(token, true));
    let mut original = trained(normalizer, pre_tokenizer, special.into());
    let id = original["model"]["vocab"].as_object().unwrap().len();
    assert!(id > 1000, "{id} tokens");
    original["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(json!({"id": id, "content": TOOL, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": false}));
    if begins {
        original["model"]["ignore_merges"] = true.into();
        let begin = CONTROL[0];
        original["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {begin: {"id": begin, "ids": [0], "tokens": [begin]}}});
        original["post_processor"]["pair"] =
            json!([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]);
    }
    let config = Config { bos_token_id: Some(0), ..config(id + 3) };
    let mut content = content(&config, (&original, pre));
    // Rows without a token, as vocabularies that were padded have.
    for padding in 1..3 {
        push(&mut content, "tokenizer.ggml.tokens", GgufValue::String(format!("[PAD{padding}]")));
        push(&mut content, "tokenizer.ggml.token_type", GgufValue::I32(5));
    }
    let original = Tokenizer::from_json(Path::new(pre), &original).unwrap();
    Pair { original, converted: converted(&content) }
}

fn config(vocab_size: usize) -> Config {
    Config::fresh(&Sizes {
        vocab_size,
        hidden_size: 32,
        intermediate_size: 32,
        num_layers: 1,
        num_heads: 2,
        num_kv_heads: 1,
        max_position_embeddings: 64,
    })
    .of_family(Architecture::Llama)
}

fn content(config: &Config, tokenizer: (&Value, &str)) -> GgufContent {
    GgufContent::of(config, &Parameters::random(config, 1), GgmlDType::Q8_0, tokenizer)
}

fn push(content: &mut GgufContent, key: &str, value: GgufValue) {
    let Some(GgufValue::Array(list)) = content.metadata.get_mut(key) else { panic!("{key}") };
    list.push(value);
}

/// The tokenizer of a file.
fn converted(content: &GgufContent) -> Tokenizer {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.gguf");
    content.write(&path);
    ModelDirectory::open(&path).unwrap().tokenizer().clone()
}

fn compare(text: &str) {
    for (index, Pair { original, converted }) in PAIRS.iter().enumerate() {
        let ids = original.encode(text, SpecialTokens::Add).unwrap();
        assert_eq!(converted.encode(text, SpecialTokens::Add).unwrap(), ids, "{index}: {text:?}");
        assert_eq!(converted.decode(&ids).unwrap(), original.decode(&ids).unwrap(), "{index}: {text:?}");
        let special = converted.decode_special(&ids).unwrap();
        assert_eq!(special, original.decode_special(&ids).unwrap(), "{index}: {text:?}");
    }
}

#[test]
fn byte_level_tokenizers_are_those_of_their_models() {
    for text in [
        "What is 139 + 37?  1234567 \t\n\n  x",
        "<|im_start|>user\nHello<|im_end|>\n<tool call>{}</tool call> <|endoftext|>",
        "we'LL don't I'm e\u{301} \u{1e9b}\u{323} caf\u{e9} \u{65e5}\u{672c}\u{8a9e}\u{ff11}\u{ff12} \u{1f600}\u{200d}\u{1f600}",
        "    fn main() {\r\n\tlet x = a[0] / 2;// ok\r\n}\r\n",
        "",
    ] {
        compare(text);
    }
    let Pair { original, converted } = &PAIRS[0];
    assert_eq!(original.fingerprint(), converted.fingerprint());
    // Padding of the embedding is no token.
    assert!(PAIRS.iter().all(|pair| pair.converted.vocab_size() == pair.original.vocab_size()));
}

proptest! {
    #[test]
    fn byte_level_tokenizers_agree_on_any_text(text in any::<String>(), tail in "([ \n\t]{0,3}[0-9A-Za-z'.,]{0,5}){0,12}") {
        compare(&text);
        compare(&format!("{tail}{text}{tail}"));
    }
}

/// A vocabulary of SentencePiece.
struct Pieces {
    /// Score and id.
    pieces: HashMap<String, (f32, u32)>,
    converted: Tokenizer,
}

static PIECES: LazyLock<Pieces> = LazyLock::new(|| {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let trained = trained(&Value::Null, &metaspace, Vec::new());
    let merges = trained["model"]["merges"].as_array().unwrap();
    let union = |merge: &Value| format!("{}{}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
    let unions = merges.iter().map(union);
    let characters = trained["model"]["vocab"].as_object().unwrap().keys();
    let characters = characters.filter(|token| token.chars().count() == 1).cloned();
    let mut pieces = HashMap::new();
    let mut tokens: Vec<(String, i32)> =
        FIRST_PIECES.into_iter().map(|(token, kind)| (token.to_owned(), kind)).collect();
    tokens.extend((0..=u8::MAX).map(|byte| (format!("<0x{byte:02X}>"), 6)));
    let mut scores = vec![0.0; tokens.len()];
    for piece in unions.chain(characters) {
        if !pieces.contains_key(&piece) {
            let score = -(pieces.len() as f32);
            pieces.insert(piece.clone(), (score, tokens.len() as u32));
            tokens.push((piece, 1));
            scores.push(score);
        }
    }
    assert!(pieces.len() > 1000);
    let config = Config { bos_token_id: Some(1), eos_token_ids: vec![2], ..config(tokens.len()) };
    let mut content = content(&config, (&model::characters(), "default"));
    let list = |values: Vec<GgufValue>| GgufValue::Array(values);
    content.set("tokenizer.ggml.model", GgufValue::String("llama".to_owned()));
    content.set("tokenizer.ggml.tokens", texts(tokens.iter().map(|(token, _)| &token[..])));
    content.set(
        "tokenizer.ggml.token_type",
        list(tokens.iter().map(|(_, kind)| GgufValue::I32(*kind)).collect()),
    );
    content.set("tokenizer.ggml.scores", list(scores.into_iter().map(GgufValue::F32).collect()));
    content.set("tokenizer.ggml.unknown_token_id", GgufValue::U32(0));
    content.metadata.remove("tokenizer.ggml.merges");
    Pieces { pieces, converted: converted(&content) }
});

impl Pieces {
    /// SentencePiece: merges the neighbours whose union has the highest score, the first of equals, until there is none.
    fn encode(&self, text: &str) -> Vec<u32> {
        let marked = if text.is_empty() {
            String::new()
        } else {
            format!("\u{2581}{}", text.replace(' ', "\u{2581}"))
        };
        let mut symbols: Vec<String> = marked.chars().map(String::from).collect();
        loop {
            let unions = symbols.windows(2).enumerate().filter_map(|(at, pair)| {
                let (score, _) = self.pieces.get(&pair.concat())?;
                Some((*score, at))
            });
            let best = unions.reduce(|best, next| if next.0 > best.0 { next } else { best });
            let Some((_, at)) = best else { break };
            let right = symbols.remove(at + 1);
            symbols[at].push_str(&right);
        }
        let ids = symbols.iter().flat_map(|symbol| match self.pieces.get(symbol) {
            Some((_, id)) => vec![*id],
            None => symbol.bytes().map(|byte| 3 + u32::from(byte)).collect(),
        });
        ids.collect()
    }
}

fn compare_pieces(text: &str) {
    let ids = PIECES.encode(text);
    assert_eq!(PIECES.converted.encode(text, SpecialTokens::Omit).unwrap(), ids, "{text:?}");
    let with_start = [&[1], &ids[..]].concat();
    assert_eq!(PIECES.converted.encode(text, SpecialTokens::Add).unwrap(), with_start, "{text:?}");
    assert_eq!(PIECES.converted.decode(&with_start).unwrap(), text);
}

#[test]
fn sentence_pieces_are_merged_by_score() {
    for text in [
        "What is 139 + 37?",
        "  two  spaces ",
        "a\n\tb",
        "caf\u{e9} \u{1f600}",
        "=====---- --- ..........",
        "",
    ] {
        compare_pieces(text);
    }
    // A word boundary follows a special token, as in llama.cpp.
    let ids = PIECES.converted.encode("</s>the", SpecialTokens::Omit).unwrap();
    assert_eq!(ids, [&[2], &PIECES.encode("the")[..]].concat());
}

proptest! {
    #[test]
    fn sentence_pieces_agree_on_any_text(text in any::<String>(), tail in "([ \n-=]{0,4}[0-9A-Za-z'.,]{0,5}){0,12}") {
        // SentencePiece's mark of a space is itself text that decodes to a space.
        prop_assume!(!text.contains('\u{2581}'));
        compare_pieces(&text);
        compare_pieces(&format!("{tail}{text}{tail}"));
    }
}
