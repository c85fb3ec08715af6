//! Metadata of a GGUF file to [`Config`].
//!
//! Invariant: every key of the architecture is honoured, known to change nothing, or refused by name.

use serde_json::{Map, Value, json};

use super::GgufFile;
use super::tensors::dequantize;
use crate::{Config, ModelError};

/// The tensor with the divisors of the rotary frequencies.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";

/// Values of `general.architecture`, which are values of `model_type` too.
const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Keys of the architecture that are read below.
const READ: [&str; 19] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "expert_count",
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
];
/// Keys that do not change what a model of these architectures computes.
const NEUTRAL: [&str; 4] = [
    "expert_used_count",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
];

/// Numbers of Llama 3.1, 3.2 and 3.3. The file has only the divisors that follow from them and from the factor.
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;
/// Context of the pretraining, tokens.
const ORIGINAL_CONTEXT: f64 = 8192.0;
/// Largest relative difference of a divisor, which is stored as f32.
const TOLERANCE: f64 = 1e-4;

impl GgufFile {
    /// The network.
    ///
    /// # Errors
    /// If a key is missing or makes no sense, or asks for something that the decoder cannot compute.
    pub(crate) fn config(&self) -> Result<Config, ModelError> {
        let keys = self.keys();
        self.refuse_other_files()?;
        let architecture = keys.text("general.architecture")?;
        if !ARCHITECTURES.contains(&architecture) {
            let supported = format!("{} (Mistral models declare llama)", ARCHITECTURES.join(", "));
            return Err(keys.unsupported("general.architecture", &supported));
        }
        let of = |key: &str| format!("{architecture}.{key}");
        self.refuse_other_networks(architecture)?;
        let Some(vocab_size) = self.tensors.get(EMBEDDING).and_then(|tensor| tensor.shape.first()) else {
            return Err(self.unusable(format!("it has no tensor {EMBEDDING}; fetch it again")));
        };
        if keys.optional_size(&of("vocab_size"))?.is_some_and(|size| size != *vocab_size) {
            return Err(keys.bad(&of("vocab_size"), &format!("the rows of {EMBEDDING}, {vocab_size}")));
        }
        let (hidden, heads) = (keys.size(&of("embedding_length"))?, keys.size(&of("attention.head_count"))?);
        let rotated = keys.optional_size(&of("rope.dimension_count"))?;
        let key_length = keys.optional_size(&of("attention.key_length"))?;
        let head_dim = key_length.or(rotated).unwrap_or(hidden / heads);
        if keys.optional_size(&of("attention.value_length"))?.is_some_and(|length| length != head_dim) {
            return Err(keys.unsupported(&of("attention.value_length"), &format!("{head_dim}, that of keys")));
        }
        if rotated.is_some_and(|rotated| rotated != head_dim) {
            return Err(keys.unsupported(&of("rope.dimension_count"), &format!("{head_dim}, the whole head")));
        }
        let theta = keys.number(&of("rope.freq_base"), 10_000.0)?;
        let mut map = json!({
            "model_type": architecture,
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": keys.size(&of("feed_forward_length"))?,
            "num_hidden_layers": keys.size(&of("block_count"))?,
            "num_attention_heads": heads,
            "num_key_value_heads": keys.optional_size(&of("attention.head_count_kv"))?.unwrap_or(heads),
            "head_dim": head_dim,
            "rope_theta": theta,
            "tie_word_embeddings": !self.tensors.contains_key(HEAD),
            "max_position_embeddings": keys.size(&of("context_length"))?,
            "attention_bias": self.tensors.contains_key("blk.0.attn_q.bias"),
            "eos_token_id": self.stop_tokens()?,
            "bos_token_id": keys.token_ids("tokenizer.ggml.bos_token_id")?,
            "pad_token_id": keys.token_ids("tokenizer.ggml.padding_token_id")?,
        });
        let epsilon = of("attention.layer_norm_rms_epsilon");
        if !keys.has(&epsilon) {
            return Err(keys.missing(&epsilon));
        }
        map["rms_norm_eps"] = keys.number(&epsilon, 0.0)?.into();
        if let Some(window) = keys.optional_size(&of("attention.sliding_window"))? {
            if architecture == "llama" {
                map["model_type"] = "mistral".into();
            }
            map["sliding_window"] = window.into();
            map["use_sliding_window"] = true.into();
            map["max_window_layers"] = 0.into();
        }
        map["rope_scaling"] = self.rope_scaling(architecture, theta, head_dim)?;
        let empty = Map::new();
        Config::from_json(&self.path, map.as_object().unwrap_or(&empty))
    }

    /// `[n]` ids of the tokens that end a text, a turn or a message.
    fn stop_tokens(&self) -> Result<Vec<u32>, ModelError> {
        let mut ids = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            ids.extend(self.keys().token_ids(&format!("tokenizer.ggml.{key}"))?);
        }
        Ok(ids)
    }

    /// Refuses adapters, projectors and parts of a model.
    fn refuse_other_files(&self) -> Result<(), ModelError> {
        let keys = self.keys();
        if keys.has("general.type") && keys.text("general.type")? != "model" {
            return Err(keys.unsupported("general.type", "model"));
        }
        if keys.optional_size("split.count")?.is_some_and(|count| count > 1) {
            return Err(keys.unsupported(
                "split.count",
                "models in one file; join the parts with llama.cpp's `llama-gguf-split --merge`",
            ));
        }
        Ok(())
    }

    fn refuse_other_networks(&self, architecture: &str) -> Result<(), ModelError> {
        let keys = self.keys();
        let prefix = format!("{architecture}.");
        let own = self.metadata.keys().filter_map(|key| key.strip_prefix(&prefix));
        if let Some(other) = own.into_iter().find(|key| !READ.contains(key) && !NEUTRAL.contains(key)) {
            let supported = "models without it; use the Hugging Face directory that the file was made from";
            return Err(keys.unsupported(&format!("{prefix}{other}"), supported));
        }
        let experts = format!("{prefix}expert_count");
        if self.metadata.get(&experts).is_some_and(|count| count != 0) {
            return Err(keys.unsupported(&experts, "dense models, which have no experts"));
        }
        let causal = format!("{prefix}attention.causal");
        if !keys.flag(&causal, true)? {
            return Err(keys.unsupported(&causal, "true"));
        }
        let factor = format!("{prefix}rope.scaling.attn_factor");
        if keys.number(&factor, 1.0)? != 1.0 {
            return Err(keys.unsupported(&factor, "1.0"));
        }
        Ok(())
    }

    /// `rope_scaling` of `config.json`.
    fn rope_scaling(&self, architecture: &str, theta: f64, head_dim: usize) -> Result<Value, ModelError> {
        let keys = self.keys();
        let kind = format!("{architecture}.rope.scaling.type");
        let declared = if keys.has(&kind) { keys.text(&kind)? } else { "none" };
        let old = keys.number(&format!("{architecture}.rope.scale_linear"), 1.0)?;
        let factor = keys.number(&format!("{architecture}.rope.scaling.factor"), old)?;
        match (declared, self.tensors.contains_key(ROPE_FACTORS)) {
            // The old key has no type.
            ("none", false) if old == 1.0 => Ok(Value::Null),
            ("none" | "linear", false) => Ok(json!({ "rope_type": "linear", "factor": factor })),
            ("none", true) => self.llama3(theta, head_dim),
            ("linear", true) => Err(keys.unsupported(&kind, &format!("none in a file with {ROPE_FACTORS}"))),
            _ => Err(keys.unsupported(&kind, "none, linear")),
        }
    }

    /// The scaling of Llama 3.1 whose divisors are those of the file: they are the factor for long wavelengths, 1 for short
    /// ones, and smooth in between.
    fn llama3(&self, theta: f64, head_dim: usize) -> Result<Value, ModelError> {
        let tensor = &self.tensors[ROPE_FACTORS];
        if tensor.shape != [head_dim / 2] {
            let (found, expected) = (&tensor.shape, head_dim / 2);
            return Err(self.unusable(format!(
                "tensor {ROPE_FACTORS} has shape {found:?}, expected [{expected}]; fetch it again"
            )));
        }
        let mut divisors = vec![0.0; head_dim / 2];
        dequantize(tensor.dtype, &self.bytes[tensor.bytes.clone()], &mut divisors)
            .map_err(|error| self.unusable(format!("tensor {ROPE_FACTORS} cannot be read: {error}")))?;
        let factor = f64::from(divisors.iter().copied().fold(1.0, f32::max));
        let scaled = |index: usize| {
            let frequency = theta.powf(-2.0 * index as f64 / head_dim as f64);
            let turns = ORIGINAL_CONTEXT * frequency / std::f64::consts::TAU;
            let share = (turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR);
            let share = share.clamp(0.0, 1.0);
            1.0 / ((1.0 - share) / factor + share)
        };
        let same =
            |(index, divisor): (usize, &f32)| (f64::from(*divisor) / scaled(index) - 1.0).abs() < TOLERANCE;
        if !divisors.iter().enumerate().all(same) {
            return Err(self.unusable(format!(
                "{ROPE_FACTORS} is not the scaling of Llama 3.1 to 3.3 (low_freq_factor {LOW_FREQ_FACTOR}, high_freq_factor \
                 {HIGH_FREQ_FACTOR}, original context {ORIGINAL_CONTEXT}); use the Hugging Face directory that the file was \
                 made from"
            )));
        }
        if factor == 1.0 {
            return Ok(Value::Null);
        }
        Ok(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LOW_FREQ_FACTOR,
            "high_freq_factor": HIGH_FREQ_FACTOR,
            "original_max_position_embeddings": ORIGINAL_CONTEXT as u64,
        }))
    }
}
