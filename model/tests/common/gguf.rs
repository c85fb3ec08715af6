//! GGUF files as llama.cpp's converter makes them of a Hugging Face model, for tests.
//!
//! Invariant: names, order of rows and metadata follow the converter, and nothing of the reader is used.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value as GgufValue};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use model::{Architecture, Config, ParameterSpec, Parameters};
use serde_json::Value;

/// The content of a GGUF file.
pub(crate) struct GgufContent {
    pub(crate) metadata: BTreeMap<String, GgufValue>,
    pub(crate) tensors: Vec<(String, QTensor)>,
}

impl GgufContent {
    /// A file of `parameters` with matrices as `dtype`. `tokenizer` is the content of a `tokenizer.json` with byte-level BPE,
    /// `pre` its name in GGUF files.
    pub(crate) fn of(
        config: &Config,
        parameters: &Parameters,
        dtype: GgmlDType,
        (tokenizer, pre): (&Value, &str),
    ) -> Self {
        let mut metadata = network(config);
        metadata.extend(byte_level(tokenizer, pre));
        metadata.extend(
            [("bos", config.bos_token_id), ("padding", config.pad_token_id)]
                .into_iter()
                .chain(config.eos_token_ids.iter().zip(["eos", "eot"]).map(|(id, name)| (name, Some(*id))))
                .filter_map(|(name, id)| {
                    Some((format!("tokenizer.ggml.{name}_token_id"), GgufValue::U32(id?)))
                }),
        );
        let specs = parameters.layout().specs().iter();
        let tensors = specs.map(|spec| stored(config, parameters, spec, dtype)).collect();
        Self { metadata, tensors }
    }

    pub(crate) fn set(&mut self, key: &str, value: GgufValue) {
        self.metadata.insert(key.to_owned(), value);
    }

    pub(crate) fn write(&self, path: &Path) {
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut file = std::fs::File::create(path).unwrap();
        gguf_file::write(&mut file, &metadata, &tensors).unwrap();
    }
}

/// A list of texts.
pub(crate) fn texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> GgufValue {
    GgufValue::Array(texts.into_iter().map(|text| GgufValue::String(text.to_owned())).collect())
}

/// `values` with `shape` as `dtype`.
pub(crate) fn quantized(values: &[f32], shape: &[usize], dtype: GgmlDType) -> QTensor {
    let tensor = Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
    QTensor::quantize(&tensor, dtype).unwrap()
}

fn network(config: &Config) -> BTreeMap<String, GgufValue> {
    let architecture = match config.architecture {
        Architecture::Llama | Architecture::Mistral => "llama",
        Architecture::Qwen2 => "qwen2",
        Architecture::Qwen3 => "qwen3",
        other => panic!("GGUF files of {other:?} are not read"),
    };
    let size = |n: usize| GgufValue::U32(n as u32);
    let mut metadata: BTreeMap<String, GgufValue> = [
        ("block_count", size(config.num_layers())),
        ("context_length", size(config.max_position_embeddings)),
        ("embedding_length", size(config.hidden_size)),
        ("feed_forward_length", size(config.intermediate_size)),
        ("attention.head_count", size(config.num_heads)),
        ("attention.head_count_kv", size(config.num_kv_heads)),
        ("attention.key_length", size(config.head_dim)),
        ("attention.value_length", size(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", GgufValue::F32(config.rms_norm_eps)),
        ("rope.freq_base", GgufValue::F32(config.rotaries()[0].theta as f32)),
    ]
    .into_iter()
    .map(|(key, value)| (format!("{architecture}.{key}"), value))
    .collect();
    if architecture == "llama" {
        metadata.insert("llama.rope.dimension_count".to_owned(), size(config.head_dim));
        metadata.insert("llama.vocab_size".to_owned(), size(config.vocab_size));
    }
    if let Some(window) = config.layers[0].attention.window {
        metadata.insert(format!("{architecture}.attention.sliding_window"), size(window));
    }
    metadata.insert("general.architecture".to_owned(), GgufValue::String(architecture.to_owned()));
    metadata.insert("general.type".to_owned(), GgufValue::String("model".to_owned()));
    metadata
}

/// The metadata of a byte-level tokenizer.
fn byte_level(tokenizer: &Value, pre: &str) -> BTreeMap<String, GgufValue> {
    let mut tokens = BTreeMap::new();
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        tokens.insert(id.as_u64().unwrap(), (token.as_str(), 1));
    }
    let unknown = tokenizer["model"]["unk_token"].as_str();
    let mut metadata = BTreeMap::new();
    for added in tokenizer["added_tokens"].as_array().unwrap() {
        let (id, token) = (added["id"].as_u64().unwrap(), added["content"].as_str().unwrap());
        tokens.insert(id, (token, if added["special"] == true { 3 } else { 4 }));
        if unknown == Some(token) {
            metadata.insert("tokenizer.ggml.unknown_token_id".to_owned(), GgufValue::U32(id as u32));
        }
    }
    let merges =
        tokenizer["model"]["merges"].as_array().unwrap().iter().map(|merge| match merge.as_array() {
            Some(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
            None => merge.as_str().unwrap().to_owned(),
        });
    let merges = GgufValue::Array(merges.map(GgufValue::String).collect());
    let kinds = tokens.values().map(|(_, kind)| GgufValue::I32(*kind)).collect();
    metadata.insert("tokenizer.ggml.model".to_owned(), GgufValue::String("gpt2".to_owned()));
    metadata.insert("tokenizer.ggml.pre".to_owned(), GgufValue::String(pre.to_owned()));
    metadata.insert("tokenizer.ggml.tokens".to_owned(), texts(tokens.values().map(|(token, _)| *token)));
    metadata.insert("tokenizer.ggml.token_type".to_owned(), GgufValue::Array(kinds));
    metadata.insert("tokenizer.ggml.merges".to_owned(), merges);
    metadata
}

/// A tensor under its name in GGUF files, in their order of rows.
fn stored(
    config: &Config,
    parameters: &Parameters,
    spec: &ParameterSpec,
    dtype: GgmlDType,
) -> (String, QTensor) {
    let mut name = spec.name.clone();
    for (from, to) in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ] {
        name = name.replace(from, to);
    }
    let mut values = parameters.get(&spec.name).to_vec();
    if matches!(config.architecture, Architecture::Llama | Architecture::Mistral) {
        if name.contains("attn_q.") {
            values = permuted(&values, spec, config.num_heads);
        } else if name.contains("attn_k.") {
            values = permuted(&values, spec, config.num_kv_heads);
        }
    }
    let dtype = if spec.shape.len() == 1 { GgmlDType::F32 } else { dtype };
    (name, quantized(&values, &spec.shape, dtype))
}

/// `permute` of llama.cpp's converter: `reshape(heads, 2, rows / heads / 2, columns).swapaxes(1, 2)`.
fn permuted(values: &[f32], spec: &ParameterSpec, heads: usize) -> Vec<f32> {
    let rows = spec.shape[0];
    let (columns, half) = (values.len() / rows, rows / heads / 2);
    let mut swapped = Vec::new();
    for head in 0..heads {
        for position in 0..half {
            for part in 0..2 {
                let row = (head * 2 + part) * half + position;
                swapped.extend_from_slice(&values[row * columns..][..columns]);
            }
        }
    }
    swapped
}
