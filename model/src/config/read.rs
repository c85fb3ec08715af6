//! `config.json` to [`Config`]: the defaults of each family, and what is refused.
//!
//! Invariant: a key that would change what the network computes is either honoured or refused, never skipped. Keys
//! that only steer training or storage elsewhere (dropout, cache, initialisation, number format) are not looked at.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::families::{Activation, FAMILIES, Family, MultiplierRule, model_types};
use super::keys::JsonKeys;
use super::text::text_part;
use super::{Architecture, Config, Head, REDUCTION_KEY, Reduction, attention, experts, latent, recurrence};
use crate::gguf::{self, GgufFile};
use crate::layer::{AttentionSpec, ExpertSpec, FeedForward, LatentSpec, LayerSpec, QueryKeyNorm};
use crate::{ModelError, files, float8};

/// Far above any model that exists, and low enough that no size computed from a config overflows.
pub const MAX_WEIGHTS: u128 = 1 << 44;
/// Far above any model that exists.
pub const MAX_LAYERS: usize = 10_000;

impl Config {
    /// Reads `config.json` of a model directory, and the end-of-text tokens of its `generation_config.json` if there
    /// is one; or the metadata of a GGUF file.
    ///
    /// # Errors
    /// If a file cannot be read, a key is missing or makes no sense, or asks for something the decoder cannot compute.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        if gguf::is_gguf(dir) {
            return GgufFile::open(dir)?.config();
        }
        let path = dir.join("config.json");
        let mut config = Self::from_json(&path, &read_object(&path)?)?;
        let path = dir.join("generation_config.json");
        if path.exists() {
            let generation = read_object(&path)?;
            let keys = JsonKeys { path: &path, map: &generation };
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
        let text = text_part(&JsonKeys { path, map })?;
        let map = text.as_ref().unwrap_or(map);
        let keys = JsonKeys { path, map };
        let (architecture, head) = architecture(&keys)?;
        let family = architecture.family();
        refuse_other_networks(&keys, family)?;
        let hidden_size = keys.size("hidden_size")?;
        let num_layers = keys.size("num_hidden_layers")?;
        if num_layers > MAX_LAYERS {
            return Err(keys.bad("num_hidden_layers", &format!("at most {MAX_LAYERS} layers")));
        }
        let num_heads = keys.size("num_attention_heads")?;
        let max_position_embeddings = keys.size("max_position_embeddings")?;
        let latent = latent::read(&keys, family)?;
        let head_dim = match (latent, keys.optional_size("head_dim")?) {
            (Some(latent), _) => latent.head_dim(),
            (None, Some(dim)) => dim,
            // `null` is not an absent key: transformers then divides.
            (None, None) => {
                family.head_dim.filter(|_| !map.contains_key("head_dim")).unwrap_or(hidden_size / num_heads)
            }
        };
        let multipliers = multipliers(&keys, family, hidden_size, head_dim)?;
        let experts = experts::read(&keys, family.experts, num_layers)?;
        let config = Self {
            architecture,
            head,
            vocab_size: keys.size("vocab_size")?,
            hidden_size,
            intermediate_size: match &experts {
                Some((spec, layers)) if !layers.contains(&false) => spec.width,
                _ => keys.size("intermediate_size")?,
            },
            num_heads,
            num_kv_heads: num_kv_heads(&keys, family, num_heads)?,
            head_dim,
            rms_norm_eps: keys.number("rms_norm_eps", family.eps)? as f32,
            norm_offset: family.norm_offset,
            embedding_multiplier: multipliers.embedding,
            logits_scaling: multipliers.logits,
            tie_word_embeddings: keys.flag("tie_word_embeddings", family.tied)?,
            layers: layers(&keys, family, latent, &multipliers, (num_layers, experts.as_ref()))?,
            max_position_embeddings,
            eos_token_ids: keys.token_ids("eos_token_id")?,
            bos_token_id: keys.token_ids("bos_token_id")?.first().copied(),
            pad_token_id: keys.token_ids("pad_token_id")?.first().copied(),
            initializer_range: keys.number("initializer_range", 0.02)?,
            reduction: reduction(&keys)?,
        };
        config.check(&keys)?;
        Ok(config)
    }

    fn check(&self, keys: &JsonKeys<'_>) -> Result<(), ModelError> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(keys.bad(
                "num_key_value_heads",
                &format!("a divisor of num_attention_heads, which is {}", self.num_heads),
            ));
        }
        if self.latent().is_some() && self.num_kv_heads != self.num_heads {
            let expected =
                format!("num_attention_heads, which is {}: latents expand to all heads", self.num_heads);
            return Err(keys.bad("num_key_value_heads", &expected));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            let key = if keys.has("head_dim") { "head_dim" } else { "num_attention_heads" };
            return Err(keys.bad(key, &format!("an even head width, got {}", self.head_dim)));
        }
        // A file that states neither head_dim nor a divisible width would silently lose part of every head.
        if !keys.has("head_dim")
            && self.architecture.family().head_dim.is_none()
            && self.latent().is_none()
            && !self.hidden_size.is_multiple_of(self.num_heads)
        {
            return Err(keys.bad(
                "num_attention_heads",
                &format!("a divisor of hidden_size, which is {}", self.hidden_size),
            ));
        }
        let weights = self.approximate_weights();
        if weights > MAX_WEIGHTS {
            return Err(
                keys.bad("num_hidden_layers", &format!("at most {MAX_WEIGHTS} weights, got {weights}"))
            );
        }
        for rotary in self.rotaries() {
            let width = rotary.width(self.rotary_dim());
            if width == 0 || !width.is_multiple_of(2) {
                let expected = format!("the share of an even width in head_dim, which is {}", self.head_dim);
                return Err(keys.bad("partial_rotary_factor", &expected));
            }
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 0.1) {
            return Err(keys.bad("rms_norm_eps", "a small number above 0, such as 1e-6"));
        }
        keys.check_tokens("eos_token_id", &self.eos_token_ids, self.vocab_size)?;
        keys.check_tokens("bos_token_id", self.bos_token_id.as_slice(), self.vocab_size)?;
        keys.check_tokens("pad_token_id", self.pad_token_id.as_slice(), self.vocab_size)
    }

    /// Weights of the matrices, without overflow whatever the sizes.
    fn approximate_weights(&self) -> u128 {
        let n = |size: usize| size as u128;
        let heads = n(self.head_dim) * (2 * n(self.num_heads) + 2 * n(self.num_kv_heads));
        // A head has at most two of its width for each value of a latent.
        let of_latents = self.latent().map_or(0, |latent| {
            let ranks = n(latent.query_rank.unwrap_or(0)) + n(latent.key_rank) + n(latent.rope);
            n(self.num_layers()) * ranks * (n(self.hidden_size) + 2 * n(self.num_heads) * n(self.head_dim))
        });
        let of_experts = self
            .experts()
            .map_or(0, |spec| n(spec.count) * (3 * n(spec.width) + 1) + 3 * n(spec.shared_width));
        let feed_forward = of_experts.max(3 * n(self.intermediate_size));
        let of_delta_net = self.delta_net().map_or(0, |spec| {
            let values = n(spec.value_heads) * n(spec.value_dim);
            2 * n(spec.key_heads) * n(spec.key_dim) + 3 * values + 2 * n(spec.value_heads)
        });
        let mixer = heads.max(of_delta_net);
        of_latents
            + n(self.hidden_size) * (2 * n(self.vocab_size) + n(self.num_layers()) * (mixer + feed_forward))
    }
}

/// What each of `num_layers` layers computes, of which some may have `experts`.
fn layers(
    keys: &JsonKeys<'_>,
    family: &Family,
    latent: Option<LatentSpec>,
    multipliers: &Multipliers,
    (num_layers, experts): (usize, Option<&(ExpertSpec, Vec<bool>)>),
) -> Result<Vec<LayerSpec>, ModelError> {
    let mut layer = family.layer(keys.flag("attention_bias", family.attention_bias)?, None);
    layer.residual_multiplier = multipliers.residual;
    if let Some(flag) = family.query_key_norm_flag
        && !keys.flag(flag, false)?
    {
        layer.query_key_norm = QueryKeyNorm::None;
    }
    let feed_forward = |index: usize| match experts {
        Some((spec, layers)) if layers[index] => FeedForward::Experts(*spec),
        _ => layer.feed_forward,
    };
    let delta_net = recurrence::read(keys, family, num_layers)?;
    let of = |(index, attention): (usize, AttentionSpec)| {
        let with_attention = LayerSpec {
            attention: AttentionSpec { scale: multipliers.scores.or(attention.scale), ..attention },
            feed_forward: feed_forward(index),
            ..layer
        };
        match &delta_net {
            Some((spec, layers)) if layers[index] => recurrence::in_place_of_attention(with_attention, *spec),
            _ => with_attention,
        }
    };
    Ok(attention::of_layers(keys, family, latent, num_layers)?.into_iter().enumerate().map(of).collect())
}

/// Our own key; transformers ignores it.
fn reduction(keys: &JsonKeys<'_>) -> Result<Reduction, ModelError> {
    if !keys.has(REDUCTION_KEY) {
        return Ok(Reduction::Chain);
    }
    match keys.text(REDUCTION_KEY)? {
        "chain" => Ok(Reduction::Chain),
        "tree" => Ok(Reduction::Tree),
        _ => Err(keys.unsupported(REDUCTION_KEY, "chain, tree")),
    }
}

fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let text = files::read_text(path, files::MAX_JSON_BYTES)
        .map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
    serde_json::from_str(&text)
        .map_err(|err| ModelError::Json { path: path.to_owned(), reason: err.to_string() })
}

fn architecture(keys: &JsonKeys<'_>) -> Result<(Architecture, Head), ModelError> {
    let found = keys.text("model_type")?;
    let is_found = |family: &&Family| family.model_type == found || family.other_types.contains(&found);
    let Some(Family { architecture, .. }) = FAMILIES.iter().find(is_found) else {
        return Err(keys.unsupported("model_type", &model_types()));
    };
    let architecture = *architecture;
    let classes = keys.map.get("architectures").and_then(Value::as_array);
    let class = classes.and_then(|list| list.first()).and_then(Value::as_str);
    let language = architecture.class_name(Head::Language);
    let head = match class {
        Some(class) if class == architecture.class_name(Head::Value) => {
            let labels = keys.map.get("id2label").and_then(Value::as_object).map_or(2, Map::len);
            if labels != 1 {
                return Err(keys.unsupported("id2label", "one label, whose score is the value"));
            }
            Head::Value
        }
        Some(class) if class != language && !class.ends_with("Model") => {
            return Err(keys.unsupported("architectures", &language));
        }
        _ if keys.flag("value_head", false)? => Head::LanguageAndValue,
        _ => Head::Language,
    };
    Ok((architecture, head))
}

/// Numbers that multiply activations.
struct Multipliers {
    embedding: f32,
    /// `None` for `1 / sqrt(head_dim)`.
    scores: Option<f32>,
    residual: f32,
    /// Divides logits.
    logits: f32,
}

fn multipliers(
    keys: &JsonKeys<'_>,
    family: &Family,
    hidden_size: usize,
    head_dim: usize,
) -> Result<Multipliers, ModelError> {
    let positive = |key: &str, default: f64| match keys.number(key, default)? {
        number if number > 0.0 => Ok(number),
        _ => Err(keys.bad(key, "a number above 0")),
    };
    let usual = libm::powf(head_dim as f32, -0.5);
    let mut all = Multipliers {
        embedding: family.embedding_multiplier(hidden_size),
        scores: None,
        residual: 1.0,
        logits: 1.0,
    };
    match family.multipliers {
        MultiplierRule::None => {}
        MultiplierRule::Granite => {
            all.embedding = positive("embedding_multiplier", 1.0)? as f32;
            all.residual = positive("residual_multiplier", 1.0)? as f32;
            all.logits = positive("logits_scaling", 1.0)? as f32;
            all.scores = Some(positive("attention_multiplier", 1.0)? as f32).filter(|scale| *scale != usual);
        }
        MultiplierRule::Gemma => {
            let scalar = positive("query_pre_attn_scalar", 256.0)? as f32;
            all.scores = (scalar != head_dim as f32).then(|| libm::powf(scalar, -0.5));
        }
    }
    Ok(all)
}

fn refuse_other_networks(keys: &JsonKeys<'_>, family: &Family) -> Result<(), ModelError> {
    let Activation { key, names, .. } = family.activation;
    if keys.has(key) && !names.contains(&keys.text(key)?) {
        return Err(keys.unsupported(key, &names.join(", ")));
    }
    for key in ["clip_qkv", "attn_logit_softcapping", "final_logit_softcapping"] {
        if keys.has(key) {
            return Err(keys.unsupported(key, "null"));
        }
    }
    if keys.flag("use_bidirectional_attention", false)? {
        return Err(keys.unsupported("use_bidirectional_attention", "false"));
    }
    if keys.flag("mlp_bias", false)? {
        return Err(keys.unsupported("mlp_bias", "false"));
    }
    match keys.map.get("quantization_config").filter(|value| !value.is_null()) {
        Some(config) if !is_read(config, family) => {
            let supported = "weights stored as f32, bf16 or f16, matrices in fp8 (e4m3, a weight_block_size of [128, 128]), and \
                             experts of gpt-oss in mxfp4";
            Err(keys.unsupported("quantization_config", supported))
        }
        _ => Ok(()),
    }
}

/// Whether weights that are quantised as `config` says can be read.
fn is_read(config: &Value, family: &Family) -> bool {
    match config["quant_method"].as_str() {
        Some("mxfp4") => family.experts.reads_mxfp4(),
        Some("fp8") => {
            let e4m3 = config["fmt"].as_str().is_none_or(|format| format == "e4m3");
            let squares = [float8::SQUARE; 2];
            e4m3 && config["weight_block_size"] == json!(squares)
        }
        _ => false,
    }
}

fn num_kv_heads(keys: &JsonKeys<'_>, family: &Family, num_heads: usize) -> Result<usize, ModelError> {
    if let Some(heads) = keys.optional_size("num_key_value_heads")? {
        return Ok(heads);
    }
    // `null` is one per query head in every family.
    if family.optional_kv_heads || keys.map.contains_key("num_key_value_heads") {
        return Ok(num_heads);
    }
    Err(keys.missing("num_key_value_heads"))
}
