//! What shape a model has: the part of Hugging Face's `config.json` that the decoder computes with.
//!
//! Invariant: a [`Config`] made by [`Config::load`] or [`Config::from_json`] describes a network that the decoder
//! computes exactly as transformers does for every sequence up to [`Config::max_context`]; whatever would make a
//! difference and is not supported is refused by name. It does not say how the weights are stored: every tensor
//! file says that itself, so `torch_dtype` and `dtype` are not read.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::ModelError;
use crate::config_keys::Keys;

/// Shape of a decoder-only transformer with grouped-query attention, rotary embedding, RMSNorm and SwiGLU.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Which family the files belong to; the flags below say what that means for the network.
    pub architecture: Architecture,
    /// Rows of the embedding; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head, even; `num_heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// Added to the mean square under the root.
    pub rms_norm_eps: f32,
    /// Base of the rotary wavelengths.
    pub rope_theta: f64,
    /// How the rotary frequencies are stretched for long contexts.
    pub rope_scaling: RopeScaling,
    /// The head is the embedding, and the files hold no `lm_head.weight`.
    pub tie_word_embeddings: bool,
    /// The query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// The output projection of attention has a bias.
    pub o_bias: bool,
    /// Queries and keys are normalised per head before the rotary embedding.
    pub qk_norm: bool,
    /// Tokens that the position embedding was made for.
    pub max_position_embeddings: usize,
    /// Width of the attention window where one is in use. Attention here is always full, which is the same thing up
    /// to this many tokens, so it only caps [`Config::max_context`].
    pub sliding_window: Option<usize>,
    /// Tokens that end a completion, ascending, without repeats; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// Token that starts a text, where the model has one.
    pub bos_token_id: Option<u32>,
    /// Token that fills batches elsewhere; rlrun never pads.
    pub pad_token_id: Option<u32>,
}

/// The supported model families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3.
    Llama,
    /// Mistral, dense.
    Mistral,
    /// Qwen 2 and 2.5, dense.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
}

/// How the rotary frequencies are stretched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All by the same factor.
    Linear {
        /// Divides every frequency.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths by the factor, short ones not at all, smooth in between.
    Llama3 {
        /// Divides the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are fully stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone.
        high_freq_factor: f64,
        /// Context that the model was pretrained with, tokens.
        original_max_position_embeddings: usize,
    },
}

/// Sizes of a fresh model; see [`Config::fresh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub num_layers: usize,
    /// Query heads; divides `hidden_size`.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Longest sequence, tokens.
    pub max_position_embeddings: usize,
}

impl Config {
    /// Reads `config.json` of a model directory, and the end-of-text tokens of its `generation_config.json` if there
    /// is one.
    ///
    /// # Errors
    /// If a file cannot be read, a key is missing or makes no sense, or asks for something the decoder cannot compute.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let mut config = Self::from_json(&path, &read_object(&path)?)?;
        let path = dir.join("generation_config.json");
        if path.exists() {
            let generation = read_object(&path)?;
            let keys = Keys { path: &path, map: &generation };
            // Generation configs list every token that ends a turn; config.json often only the one that ends a text.
            let ids = keys.token_ids("eos_token_id")?;
            keys.check_tokens("eos_token_id", &ids, config.vocab_size)?;
            config.eos_token_ids.extend(ids);
            config.eos_token_ids.sort_unstable();
            config.eos_token_ids.dedup();
        }
        Ok(config)
    }

    /// Reads the content of a `config.json`; `path` names it in errors.
    ///
    /// # Errors
    /// If a key is missing or makes no sense, or asks for something the decoder cannot compute.
    pub fn from_json(path: &Path, map: &Map<String, Value>) -> Result<Self, ModelError> {
        let keys = Keys { path, map };
        let architecture = architecture(&keys)?;
        refuse_other_networks(&keys)?;
        let hidden_size = keys.size("hidden_size")?;
        let num_layers = keys.size("num_hidden_layers")?;
        let num_heads = keys.size("num_attention_heads")?;
        let max_position_embeddings = keys.size("max_position_embeddings")?;
        let (rope_theta, rope_scaling) = rope(&keys, max_position_embeddings)?;
        let bias = keys.flag("attention_bias", false)?;
        let config = Self {
            architecture,
            vocab_size: keys.size("vocab_size")?,
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_layers,
            num_heads,
            num_kv_heads: num_kv_heads(&keys, architecture, num_heads)?,
            head_dim: match keys.optional_size("head_dim")? {
                Some(dim) => dim,
                None if architecture == Architecture::Qwen3 && !map.contains_key("head_dim") => 128,
                None => hidden_size / num_heads,
            },
            rms_norm_eps: keys.number("rms_norm_eps", 1e-6)? as f32,
            rope_theta,
            rope_scaling,
            tie_word_embeddings: keys.flag("tie_word_embeddings", false)?,
            qkv_bias: match architecture {
                Architecture::Llama | Architecture::Qwen3 => bias,
                Architecture::Mistral => false,
                Architecture::Qwen2 => true,
            },
            o_bias: matches!(architecture, Architecture::Llama | Architecture::Qwen3) && bias,
            qk_norm: architecture == Architecture::Qwen3,
            max_position_embeddings,
            sliding_window: sliding_window(&keys, architecture, num_layers)?,
            eos_token_ids: keys.token_ids("eos_token_id")?,
            bos_token_id: keys.token_ids("bos_token_id")?.first().copied(),
            pad_token_id: keys.token_ids("pad_token_id")?.first().copied(),
        };
        config.check(&keys)?;
        Ok(config)
    }

    /// A small Qwen2 with tied embeddings and the special tokens of the character tokenizer (pad 0, bos 1, eos 2).
    #[must_use]
    pub fn fresh(sizes: &Sizes) -> Self {
        Self {
            architecture: Architecture::Qwen2,
            vocab_size: sizes.vocab_size,
            hidden_size: sizes.hidden_size,
            intermediate_size: sizes.intermediate_size,
            num_layers: sizes.num_layers,
            num_heads: sizes.num_heads,
            num_kv_heads: sizes.num_kv_heads,
            head_dim: sizes.hidden_size / sizes.num_heads.max(1),
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::None,
            tie_word_embeddings: true,
            qkv_bias: true,
            o_bias: false,
            qk_norm: false,
            max_position_embeddings: sizes.max_position_embeddings,
            sliding_window: None,
            eos_token_ids: vec![2],
            bos_token_id: Some(1),
            pad_token_id: Some(0),
        }
    }

    /// Longest sequence, in tokens, that the model computes as it was trained to: the position range, or the attention
    /// window where that is narrower.
    #[must_use]
    pub fn max_context(&self) -> usize {
        self.sliding_window.map_or(self.max_position_embeddings, |w| w.min(self.max_position_embeddings))
    }

    /// `[head_dim / 2]` radians per position of each rotary pair, scaling applied, in the order and rounding of
    /// transformers.
    #[must_use]
    pub fn inv_freq(&self) -> Vec<f32> {
        let pairs = self.head_dim / 2;
        let plain = |i: usize| {
            let exponent = (2 * i) as f32 / self.head_dim as f32;
            1.0 / libm::powf(self.rope_theta as f32, exponent)
        };
        match self.rope_scaling {
            RopeScaling::None => (0..pairs).map(plain).collect(),
            RopeScaling::Linear { factor } => (0..pairs).map(|i| plain(i) / factor as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let context = original_max_position_embeddings as f64;
                let stretch = |freq: f32| {
                    let turns = context * f64::from(freq) / std::f64::consts::TAU;
                    if turns < low_freq_factor {
                        freq / factor as f32
                    } else if turns > high_freq_factor {
                        freq
                    } else {
                        let smooth =
                            ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)) as f32;
                        (1.0 - smooth) * freq / factor as f32 + smooth * freq
                    }
                };
                (0..pairs).map(plain).map(stretch).collect()
            }
        }
    }

    /// The content of a `config.json` that transformers and [`Config::from_json`] both read back as this model.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut map = json!({
            "architectures": [self.architecture.class_name()],
            "model_type": self.architecture.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": decimal(self.rms_norm_eps),
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling.to_json(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "use_cache": true,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": match self.eos_token_ids.as_slice() {
                [] => Value::Null,
                [one] => json!(one),
                many => json!(many),
            },
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "float32",
            "sliding_window": self.sliding_window,
        });
        match self.architecture {
            Architecture::Llama => map["attention_bias"] = json!(self.qkv_bias),
            Architecture::Mistral => {}
            Architecture::Qwen2 | Architecture::Qwen3 => {
                map["use_sliding_window"] = json!(self.sliding_window.is_some());
                map["max_window_layers"] =
                    json!(if self.sliding_window.is_some() { 0 } else { self.num_layers });
            }
        }
        if self.architecture == Architecture::Qwen3 {
            map["attention_bias"] = json!(self.qkv_bias);
        }
        map
    }

    fn check(&self, keys: &Keys<'_>) -> Result<(), ModelError> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(keys.bad(
                "num_key_value_heads",
                &format!("a divisor of num_attention_heads, which is {}", self.num_heads),
            ));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            let key = if keys.has("head_dim") { "head_dim" } else { "num_attention_heads" };
            return Err(keys.bad(key, &format!("an even head width, got {}", self.head_dim)));
        }
        // A file that states neither head_dim nor a divisible width would silently lose part of every head.
        if !keys.has("head_dim")
            && self.architecture != Architecture::Qwen3
            && !self.hidden_size.is_multiple_of(self.num_heads)
        {
            return Err(keys.bad(
                "num_attention_heads",
                &format!("a divisor of hidden_size, which is {}", self.hidden_size),
            ));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 0.1) {
            return Err(keys.bad("rms_norm_eps", "a small number above 0, such as 1e-6"));
        }
        keys.check_tokens("eos_token_id", &self.eos_token_ids, self.vocab_size)?;
        keys.check_tokens("bos_token_id", self.bos_token_id.as_slice(), self.vocab_size)?;
        keys.check_tokens("pad_token_id", self.pad_token_id.as_slice(), self.vocab_size)
    }
}

impl Architecture {
    /// All families.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The value of `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The class in `architectures` of `config.json`.
    #[must_use]
    pub fn class_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

impl RopeScaling {
    fn to_json(self) -> Value {
        match self {
            Self::None => Value::Null,
            Self::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                json!({
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_max_position_embeddings,
                })
            }
        }
    }
}

fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
    serde_json::from_str(&text)
        .map_err(|err| ModelError::Json { path: path.to_owned(), reason: err.to_string() })
}

/// The shortest decimal that reads back as this f32; as an f64 it would be written with all its noise.
fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}

fn architecture(keys: &Keys<'_>) -> Result<Architecture, ModelError> {
    let found = keys.text("model_type")?;
    let Some(architecture) = Architecture::ALL.into_iter().find(|a| a.model_type() == found) else {
        return Err(keys.unsupported("model_type", "llama, mistral, qwen2, qwen3"));
    };
    let classes = keys.map.get("architectures").and_then(Value::as_array);
    if let Some(class) = classes.and_then(|list| list.first()).and_then(Value::as_str)
        && class != architecture.class_name()
        && !class.ends_with("Model")
    {
        return Err(keys.unsupported("architectures", architecture.class_name()));
    }
    Ok(architecture)
}

fn refuse_other_networks(keys: &Keys<'_>) -> Result<(), ModelError> {
    if keys.has("hidden_act") && !matches!(keys.text("hidden_act")?, "silu" | "swish") {
        return Err(keys.unsupported("hidden_act", "silu"));
    }
    if keys.flag("mlp_bias", false)? {
        return Err(keys.unsupported("mlp_bias", "false"));
    }
    if keys.has("quantization_config") {
        return Err(keys.unsupported("quantization_config", "weights stored as f32, bf16 or f16"));
    }
    for key in [
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ] {
        if keys.has(key) {
            return Err(keys.unsupported(key, "dense models, which have no experts"));
        }
    }
    Ok(())
}

fn num_kv_heads(keys: &Keys<'_>, architecture: Architecture, num_heads: usize) -> Result<usize, ModelError> {
    if let Some(heads) = keys.optional_size("num_key_value_heads")? {
        return Ok(heads);
    }
    // Left out, the other families mean a fixed number of heads that fits no small model; `null` is always one per query head.
    if architecture == Architecture::Llama || keys.map.contains_key("num_key_value_heads") {
        return Ok(num_heads);
    }
    Err(keys.missing("num_key_value_heads"))
}

fn rope(keys: &Keys<'_>, max_position_embeddings: usize) -> Result<(f64, RopeScaling), ModelError> {
    // transformers lets the old key win where both are there.
    let found = ["rope_scaling", "rope_parameters"].into_iter().find(|key| keys.has(key));
    let empty = Map::new();
    let (name, object) = match found {
        None => ("rope_scaling", &empty),
        Some(name) => {
            (name, keys.map.get(name).and_then(Value::as_object).ok_or_else(|| keys.bad(name, "an object"))?)
        }
    };
    let inner = Keys { path: keys.path, map: object };
    let theta = if inner.has("rope_theta") {
        inner.number("rope_theta", 0.0)?
    } else {
        keys.number("rope_theta", 10_000.0)?
    };
    if theta <= 1.0 {
        return Err(keys.bad("rope_theta", "a number above 1"));
    }
    if keys.number("partial_rotary_factor", 1.0)? != 1.0 || inner.number("partial_rotary_factor", 1.0)? != 1.0
    {
        return Err(keys.unsupported("partial_rotary_factor", "1.0"));
    }
    let kind = ["rope_type", "type"].into_iter().find(|key| inner.has(key));
    let factor = || match inner.number("factor", 0.0)? {
        factor if factor >= 1.0 => Ok(factor),
        _ => Err(keys.bad(name, "an object with a `factor` of at least 1")),
    };
    let scaling = match kind.map(|key| inner.text(key)).transpose()? {
        None if inner.has("factor") => return Err(keys.bad(name, "an object with a `rope_type`")),
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor()? },
        Some("llama3") => llama3(keys, &inner, factor()?, max_position_embeddings)?,
        Some(_) => return Err(keys.unsupported(name, "rope_type default, linear, llama3")),
    };
    Ok((theta, scaling))
}

fn llama3(
    keys: &Keys<'_>,
    inner: &Keys<'_>,
    factor: f64,
    max_position_embeddings: usize,
) -> Result<RopeScaling, ModelError> {
    for key in ["low_freq_factor", "high_freq_factor"] {
        if !inner.has(key) {
            return Err(inner.missing(key));
        }
    }
    let (low, high) = (inner.number("low_freq_factor", 0.0)?, inner.number("high_freq_factor", 0.0)?);
    if !(0.0 < low && low < high) {
        return Err(inner.bad(
            "low_freq_factor",
            &format!("a number above 0 and below high_freq_factor, which is {high}"),
        ));
    }
    let original = match keys.optional_size("original_max_position_embeddings")? {
        Some(size) => size,
        None => inner.optional_size("original_max_position_embeddings")?.unwrap_or(max_position_embeddings),
    };
    Ok(RopeScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: original,
    })
}

/// The window, if any layer really uses one under the rules of its family.
fn sliding_window(
    keys: &Keys<'_>,
    architecture: Architecture,
    num_layers: usize,
) -> Result<Option<usize>, ModelError> {
    let default = if keys.map.contains_key("sliding_window") { None } else { Some(4096) };
    let window = keys.optional_size("sliding_window")?.or(default);
    match architecture {
        Architecture::Llama => return Ok(None),
        Architecture::Mistral => return Ok(window),
        Architecture::Qwen2 | Architecture::Qwen3 => {}
    }
    if !keys.flag("use_sliding_window", false)? {
        return Ok(None);
    }
    let sliding = match keys.map.get("layer_types").and_then(Value::as_array) {
        Some(types) => types.iter().any(|kind| kind == "sliding_attention"),
        None => keys.optional_size("max_window_layers")?.unwrap_or(28) < num_layers,
    };
    Ok(window.filter(|_| sliding))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A tied Qwen2 and an untied Qwen3 with every optional tensor, whose heads are wider than `hidden / heads`.
    pub(crate) fn tiny() -> [Config; 2] {
        let tied = Config::fresh(&Sizes {
            vocab_size: 100,
            hidden_size: 16,
            intermediate_size: 24,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        });
        let untied = Config {
            architecture: Architecture::Qwen3,
            head_dim: 6,
            tie_word_embeddings: false,
            o_bias: true,
            qk_norm: true,
            ..tied.clone()
        };
        [tied, untied]
    }

    /// The tiny Qwen2 with some keys replaced (`null` takes one away).
    fn with(changes: &Value) -> Result<Config, ModelError> {
        let mut map = tiny()[0].to_json().as_object().unwrap().clone();
        map.extend(changes.as_object().unwrap().clone());
        Config::from_json(Path::new("m/config.json"), &map)
    }

    fn message(changes: &Value) -> String {
        with(changes).unwrap_err().to_string()
    }

    #[test]
    fn what_is_written_reads_back() {
        let [tied, untied] = tiny();
        let llama = Config {
            architecture: Architecture::Llama,
            rms_norm_eps: 1e-5,
            rope_theta: 500_000.0,
            rope_scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 32,
            },
            qkv_bias: false,
            eos_token_ids: vec![2, 7],
            pad_token_id: None,
            ..tied.clone()
        };
        let mistral = Config {
            architecture: Architecture::Mistral,
            qkv_bias: false,
            sliding_window: Some(32),
            rope_scaling: RopeScaling::Linear { factor: 2.0 },
            eos_token_ids: vec![],
            ..tied.clone()
        };
        let windowed = Config { sliding_window: Some(16), ..tied.clone() };
        for config in [tied, untied, llama, mistral, windowed] {
            let map = config.to_json().as_object().unwrap().clone();
            assert_eq!(Config::from_json(Path::new("config.json"), &map).unwrap(), config);
        }
    }

    #[test]
    fn rope_is_read_from_either_place() {
        let expected = RopeScaling::Linear { factor: 4.0 };
        let new = json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}, "rope_theta": null});
        let old = json!({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5});
        for changes in [new, old] {
            let config = with(&changes).unwrap();
            assert_eq!((config.rope_theta, config.rope_scaling), (5e5, expected), "{changes}");
        }
        let plain = with(&json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})).unwrap();
        assert_eq!((plain.rope_theta, plain.rope_scaling), (1e6, RopeScaling::None));
        assert_eq!(with(&json!({"rope_theta": null})).unwrap().rope_theta, 1e4);
    }

    #[test]
    fn other_networks_are_refused_by_file_and_key() {
        for (changes, key, evidence) in [
            (json!({"model_type": "gemma3"}), "model_type", "llama, mistral, qwen2, qwen3"),
            (
                json!({"architectures": ["Qwen2ForSequenceClassification"]}),
                "architectures",
                "Qwen2ForCausalLM",
            ),
            (json!({"hidden_act": "gelu"}), "hidden_act", "silu"),
            (json!({"num_experts": 8}), "num_experts", "dense"),
            (json!({"mlp_bias": true}), "mlp_bias", "false"),
            (json!({"quantization_config": {"bits": 4}}), "quantization_config", "bf16"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor", "1.0"),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
                "rope_scaling",
                "default, linear, llama3",
            ),
            (json!({"rope_scaling": {"type": "dynamic", "factor": 4.0}}), "rope_scaling", "dynamic"),
            (
                json!({"rope_parameters": {"rope_type": "longrope"}, "rope_scaling": null}),
                "rope_parameters",
                "longrope",
            ),
        ] {
            let err = with(&changes).unwrap_err();
            assert!(matches!(err, ModelError::Unsupported { .. }), "{err}");
            let text = err.to_string();
            assert!(
                text.starts_with("m/config.json") && text.contains(key) && text.contains(evidence),
                "{text}"
            );
        }
    }

    #[test]
    fn nonsense_is_refused_by_file_and_key() {
        for (changes, key) in [
            (json!({"hidden_size": 0}), "hidden_size"),
            (json!({"hidden_size": "64"}), "hidden_size"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
            (json!({"num_attention_heads": 6, "head_dim": null}), "num_attention_heads"),
            (json!({"head_dim": 7}), "head_dim"),
            (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
            (json!({"rope_theta": 0.5}), "rope_theta"),
            (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling"),
            (json!({"rope_scaling": {"factor": 2.0}}), "rope_scaling"),
            (json!({"rope_scaling": "linear"}), "rope_scaling"),
            (json!({"eos_token_id": 100}), "eos_token_id"),
            (json!({"bos_token_id": [1, "x"]}), "bos_token_id"),
        ] {
            let text = message(&changes);
            assert!(text.starts_with("m/config.json") && text.contains(key), "{changes}: {text}");
        }
        for key in ["vocab_size", "num_hidden_layers", "model_type"] {
            assert_eq!(
                message(&json!({ key: null })),
                format!("m/config.json has no key `{key}`, which every model of this kind needs")
            );
        }
        let low = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}});
        assert!(message(&low).contains("`low_freq_factor`"));
    }

    #[test]
    fn defaults_are_those_of_the_family() {
        let family = |kind: &str, class: &str, changes: Value| {
            let mut map = json!({"model_type": kind, "architectures": [class], "head_dim": null});
            map.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            with(&map)
        };
        let llama = |changes| family("llama", "LlamaForCausalLM", changes).unwrap();
        assert_eq!(llama(json!({"num_key_value_heads": null})).num_kv_heads, 4);
        assert!(!llama(json!({})).qkv_bias);
        assert!(llama(json!({"attention_bias": true})).o_bias);
        let mistral = family("mistral", "MistralForCausalLM", json!({"sliding_window": 16})).unwrap();
        assert_eq!((mistral.max_context(), mistral.qkv_bias), (16, false));
        let qwen2 = with(&json!({"sliding_window": 16, "use_sliding_window": false})).unwrap();
        assert_eq!((qwen2.max_context(), qwen2.qkv_bias, qwen2.o_bias), (64, true, false));
        let upper = json!({"sliding_window": 16, "use_sliding_window": true, "max_window_layers": 1});
        assert_eq!(with(&upper).unwrap().max_context(), 16);
        let none = json!({"sliding_window": 16, "use_sliding_window": true, "max_window_layers": 2});
        assert_eq!(with(&none).unwrap().max_context(), 64);
        let mut qwen3 = tiny()[1].to_json().as_object().unwrap().clone();
        qwen3.remove("head_dim");
        assert_eq!(Config::from_json(Path::new("config.json"), &qwen3).unwrap().head_dim, 128);
    }

    #[test]
    fn ends_of_both_files_count() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), tiny()[0].to_json().to_string()).unwrap();
        assert_eq!(Config::load(dir.path()).unwrap().eos_token_ids, [2]);
        std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [7, 2, 5]}"#).unwrap();
        assert_eq!(Config::load(dir.path()).unwrap().eos_token_ids, [2, 5, 7]);
        std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 100}"#).unwrap();
        let err = Config::load(dir.path()).unwrap_err().to_string();
        assert!(err.contains("generation_config.json") && err.contains("vocab_size, which is 100"), "{err}");
    }

    #[test]
    fn a_missing_or_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let err = Config::load(dir.path()).unwrap_err().to_string();
        assert!(err.starts_with("cannot read ") && err.contains("config.json"), "{err}");
        std::fs::write(dir.path().join("config.json"), "{\n \"a\": }").unwrap();
        let err = Config::load(dir.path()).unwrap_err().to_string();
        assert!(err.contains("config.json is not valid") && err.contains("line 2"), "{err}");
    }

    #[test]
    fn llama3_leaves_short_waves_alone_and_stretches_long_ones() {
        let plain = Config { head_dim: 64, rope_theta: 5e5, ..tiny()[0].clone() };
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let scaled = Config { rope_scaling: scaling, ..plain.clone() };
        let (plain, scaled) = (plain.inv_freq(), scaled.inv_freq());
        assert_eq!((plain.len(), plain[0]), (32, 1.0));
        assert_eq!(plain[0], scaled[0]);
        assert_eq!(plain[31] / 8.0, scaled[31]);
        assert!(plain.iter().zip(&scaled).any(|(p, s)| s < p && *s > p / 8.0), "nothing in between");
    }
}
