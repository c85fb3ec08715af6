//! [`Config`] to `config.json`, for fresh models.
//!
//! Invariant: transformers and [`Config::from_json`] both read the same network back. An existing model's file is
//! never rewritten by this; exports copy it.

use serde_json::{Map, Value, json};

use super::experts::ExpertRule;
use super::families::{BiasRule, Family, MultiplierRule, WindowRule};
use super::{Config, Head, REDUCTION_KEY, Reduction, latent, recurrence};
use crate::layer::{LayerSpec, QueryKeyNorm};
use crate::rotary::{RopeScaling, Rotary};

impl Config {
    /// The content of a `config.json` that transformers and [`Config::from_json`] both read back as this model.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut map = json!({
            "architectures": [self.architecture.class_name(self.head)],
            "model_type": self.architecture.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers(),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": decimal(self.rms_norm_eps),
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
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
        });
        let family = self.architecture.family();
        if [family.qkv_bias, family.output_bias].contains(&BiasRule::AttentionBias) {
            map["attention_bias"] = json!(self.layers.iter().any(|layer| layer.qkv_bias));
        }
        map[family.activation.key] = json!(family.activation.names[0]);
        if let Some(map) = map.as_object_mut() {
            self.write_query_key_norm(map);
            self.write_rotary(map);
            self.latent().iter().for_each(|of| latent::write(of, map));
            self.write_windows(map);
            if family.recurrence.is_some() {
                recurrence::write(self, map);
            }
            self.write_multipliers(map);
            if let (ExpertRule::Keys(keys), Some(spec)) = (family.experts, self.experts()) {
                let has_experts = |layer: &LayerSpec| layer.feed_forward.experts().is_some();
                keys.write(&spec, &self.layers.iter().map(has_experts).collect::<Vec<_>>(), map);
            }
            self.write_head(map);
            self.write_reduction(map);
        }
        map
    }

    /// Writes whether queries and keys have a norm, where a key says it.
    fn write_query_key_norm(&self, map: &mut Map<String, Value>) {
        if let Some(flag) = self.architecture.family().query_key_norm_flag {
            let normed = self.layers.iter().any(|layer| layer.query_key_norm != QueryKeyNorm::None);
            map.insert(flag.to_owned(), json!(normed));
        }
    }

    /// Writes rotary embeddings.
    fn write_rotary(&self, map: &mut Map<String, Value>) {
        let rule = self.architecture.family().rotary;
        let of = |windowed: bool| {
            let mut layers = self.layers.iter().map(|layer| layer.attention);
            layers.find(|of| of.window.is_some() == windowed).and_then(|of| of.rotary)
        };
        let parameters = |rotary: Option<Rotary>| {
            let rotary = rotary.unwrap_or(Rotary::plain(rule.theta));
            let mut object = rotary.scaling.to_json();
            object["rope_theta"] = json!(rotary.theta);
            object
        };
        if rule.local.is_some() {
            let [full, sliding] = [false, true].map(|windowed| parameters(of(windowed)));
            let both = json!({"full_attention": full, "sliding_attention": sliding});
            map.insert("rope_parameters".to_owned(), both);
            return;
        }
        let rotary = self.rotaries().first().copied();
        map.insert("rope_theta".to_owned(), json!(rotary.map_or(rule.theta, |rotary| rotary.theta)));
        if let Some(rotary) = rotary.filter(|rotary| rotary.scaling != RopeScaling::None || !rule.plain) {
            map.insert("rope_scaling".to_owned(), rotary.scaling.to_json());
        }
        if let Some(rotary) = rotary.filter(|rotary| rotary.share != rule.share) {
            map.insert("partial_rotary_factor".to_owned(), json!(rotary.share));
        }
        if rule.skips {
            let flags = self.layers.iter().map(|layer| u8::from(layer.attention.rotary.is_some()));
            map.insert("no_rope_layers".to_owned(), json!(flags.collect::<Vec<_>>()));
        }
    }

    /// Writes attention windows.
    fn write_windows(&self, map: &mut Map<String, Value>) {
        let windows = self.layers.iter().map(|layer| layer.attention.window);
        let window = windows.clone().flatten().next();
        let Family { window: rule, sliding_window, .. } = self.architecture.family();
        // transformers wants a number even if no layer uses it.
        let unused = sliding_window.filter(|_| matches!(rule, WindowRule::Periodic { .. }));
        map.insert("sliding_window".to_owned(), json!(window.or(unused)));
        if matches!(rule, WindowRule::Flagged | WindowRule::FlaggedForAll | WindowRule::FlaggedUnrotated) {
            map.insert("use_sliding_window".to_owned(), json!(window.is_some()));
        }
        if !matches!(rule, WindowRule::Never | WindowRule::Always | WindowRule::FlaggedForAll) {
            let kind = |window: Option<usize>| match window {
                None => "full_attention",
                Some(_) => "sliding_attention",
            };
            map.insert("layer_types".to_owned(), json!(windows.map(kind).collect::<Vec<_>>()));
        }
    }

    /// Writes the numbers that multiply activations.
    fn write_multipliers(&self, map: &mut Map<String, Value>) {
        let layer = self.layers.first();
        let scale = layer.and_then(|layer| layer.attention.scale);
        match self.architecture.family().multipliers {
            MultiplierRule::None => {}
            MultiplierRule::Granite => {
                let residual = layer.map_or(1.0, |layer| layer.residual_multiplier);
                let usual = libm::powf(self.head_dim as f32, -0.5);
                for (key, value) in [
                    ("embedding_multiplier", self.embedding_multiplier),
                    ("attention_multiplier", scale.unwrap_or(usual)),
                    ("residual_multiplier", residual),
                    ("logits_scaling", self.logits_scaling),
                ] {
                    map.insert(key.to_owned(), json!(decimal(value)));
                }
            }
            MultiplierRule::Gemma => {
                let scalar = scale.map_or(self.head_dim as f32, |scale| scale.powi(-2).round());
                map.insert("query_pre_attn_scalar".to_owned(), json!(scalar as u64));
            }
        }
    }

    /// Writes the order of sums to `map`, the content of a `config.json`, if it is not the default.
    pub(crate) fn write_reduction(&self, map: &mut Map<String, Value>) {
        match self.reduction {
            Reduction::Chain => drop(map.remove(REDUCTION_KEY)),
            Reduction::Tree => drop(map.insert(REDUCTION_KEY.to_owned(), json!("tree"))),
        }
    }

    /// Writes the head of the model to `map`, the content of a `config.json`.
    pub(crate) fn write_head(&self, map: &mut Map<String, Value>) {
        map.insert("architectures".to_owned(), json!([self.architecture.class_name(self.head)]));
        match self.head {
            Head::Language | Head::None => {}
            // Our own key: transformers has no class for it and reads the language model.
            Head::LanguageAndValue => drop(map.insert("value_head".to_owned(), json!(true))),
            Head::Value => {
                map.insert("id2label".to_owned(), json!({ "0": "value" }));
                map.insert("label2id".to_owned(), json!({ "value": 0 }));
            }
        }
    }
}

impl RopeScaling {
    fn to_json(self) -> Value {
        match self {
            Self::None => json!({"rope_type": "default"}),
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
            Self::Yarn(yarn) => json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                "attention_factor": yarn.attention_factor,
                "mscale_all_dim": yarn.score_weight,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
                "original_max_position_embeddings": yarn.original_max_position_embeddings,
            }),
        }
    }
}

/// The shortest decimal that reads back as this f32; as an f64 it would be written with all its noise.
pub(super) fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}
