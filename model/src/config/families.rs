//! The table of model families: what a `model_type` of Hugging Face means for `Config`.
//!
//! A new family is a variant of [`Architecture`] and a row of [`FAMILIES`]; a layer that computes something new needs a
//! variant in `layer.rs` and its operation too.

use serde::{Deserialize, Serialize};

use super::Head;
use super::experts::{ExpertKeys, ExpertLayers, ExpertRule, RouterRule};
use crate::layer::{AttentionSpec, ExpertSpec, FeedForward, LayerSpec, Norm, QueryKeyNorm};
use crate::rotary::Rotary;

/// The supported model families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// Llama 1 to 3.
    Llama,
    /// Mistral, dense.
    Mistral,
    /// Qwen 2 and 2.5, dense.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
    /// Qwen 3 with experts.
    Qwen3Moe,
    /// OLMoE.
    Olmoe,
    /// GLM 4.5 and 4.6, with experts.
    Glm4Moe,
    /// gpt-oss.
    GptOss,
}

/// One family.
pub(super) struct Family {
    pub(super) architecture: Architecture,
    /// The value of `model_type` in `config.json`.
    pub(super) model_type: &'static str,
    /// The start of the class names in `architectures`.
    pub(super) class: &'static str,
    /// `head_dim` if `config.json` has no such key; `None` for `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// Whether `num_key_value_heads` may be left out, for one per query head. The classes of the other families have a
    /// number that fits no small model.
    pub(super) optional_kv_heads: bool,
    pub(super) qkv_bias: BiasRule,
    pub(super) output_bias: BiasRule,
    pub(super) query_key_norm: QueryKeyNorm,
    /// The key that has to be true for this norm.
    pub(super) query_key_norm_flag: Option<&'static str>,
    /// Whether attention has sinks.
    pub(super) sinks: bool,
    /// Whether `partial_rotary_factor` may be other than 1.
    pub(super) partial_rotary: bool,
    pub(super) window: WindowRule,
    pub(super) experts: ExpertRule,
    /// Whether files may have layers after the last, which predict further tokens (MTP, DeepSeek-V3, arXiv 2412.19437) and
    /// which transformers does not read either.
    pub(super) further_layers: bool,
    pub(super) defaults: FamilyDefaults,
}

/// Values of keys that `config.json` may leave out.
pub(super) struct FamilyDefaults {
    pub(super) rms_norm_eps: f64,
    pub(super) attention_bias: bool,
    pub(super) rope_theta: f64,
    pub(super) partial_rotary_factor: f64,
    /// Whether the object of the rotary embedding may be left out, for one without scaling.
    pub(super) plain_rotary: bool,
}

const DEFAULTS: FamilyDefaults = FamilyDefaults {
    rms_norm_eps: 1e-6,
    attention_bias: false,
    rope_theta: 10_000.0,
    partial_rotary_factor: 1.0,
    plain_rotary: true,
};

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BiasRule {
    Never,
    Always,
    /// If `attention_bias` says so.
    AttentionBias,
}

/// When the attention window of `sliding_window` is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WindowRule {
    Never,
    Always,
    /// With `use_sliding_window`, in the layers of `layer_types` or from `max_window_layers` on.
    Flagged,
    /// With `use_sliding_window`, in all layers.
    FlaggedForAll,
    /// In the layers of `layer_types`, or else in every other layer from the first on.
    Alternate,
}

const LLAMA: Family = Family {
    architecture: Architecture::Llama,
    model_type: "llama",
    class: "Llama",
    head_dim: None,
    optional_kv_heads: true,
    qkv_bias: BiasRule::AttentionBias,
    output_bias: BiasRule::AttentionBias,
    query_key_norm: QueryKeyNorm::None,
    query_key_norm_flag: None,
    sinks: false,
    partial_rotary: false,
    window: WindowRule::Never,
    experts: ExpertRule::Never,
    further_layers: false,
    defaults: DEFAULTS,
};

const MISTRAL: Family = Family {
    architecture: Architecture::Mistral,
    model_type: "mistral",
    class: "Mistral",
    head_dim: None,
    optional_kv_heads: false,
    qkv_bias: BiasRule::Never,
    output_bias: BiasRule::Never,
    query_key_norm: QueryKeyNorm::None,
    query_key_norm_flag: None,
    sinks: false,
    partial_rotary: false,
    window: WindowRule::Always,
    experts: ExpertRule::Never,
    further_layers: false,
    defaults: DEFAULTS,
};

const QWEN2: Family = Family {
    architecture: Architecture::Qwen2,
    model_type: "qwen2",
    class: "Qwen2",
    head_dim: None,
    optional_kv_heads: false,
    qkv_bias: BiasRule::Always,
    output_bias: BiasRule::Never,
    query_key_norm: QueryKeyNorm::None,
    query_key_norm_flag: None,
    sinks: false,
    partial_rotary: false,
    window: WindowRule::Flagged,
    experts: ExpertRule::Never,
    further_layers: false,
    defaults: DEFAULTS,
};

const QWEN3: Family = Family {
    architecture: Architecture::Qwen3,
    model_type: "qwen3",
    class: "Qwen3",
    head_dim: Some(128),
    optional_kv_heads: false,
    qkv_bias: BiasRule::AttentionBias,
    output_bias: BiasRule::AttentionBias,
    query_key_norm: QueryKeyNorm::PerHead,
    query_key_norm_flag: None,
    sinks: false,
    partial_rotary: false,
    window: WindowRule::Flagged,
    experts: ExpertRule::Never,
    further_layers: false,
    defaults: DEFAULTS,
};

const QWEN3_MOE: Family = Family {
    architecture: Architecture::Qwen3Moe,
    model_type: "qwen3_moe",
    class: "Qwen3Moe",
    head_dim: None,
    window: WindowRule::FlaggedForAll,
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["num_experts", "num_local_experts"],
        width: "moe_intermediate_size",
        layers: ExpertLayers::Sparse,
        router: RouterRule::Softmax,
    }),
    ..QWEN3
};

const OLMOE: Family = Family {
    architecture: Architecture::Olmoe,
    model_type: "olmoe",
    class: "Olmoe",
    head_dim: None,
    optional_kv_heads: true,
    qkv_bias: BiasRule::AttentionBias,
    output_bias: BiasRule::AttentionBias,
    query_key_norm: QueryKeyNorm::Whole,
    query_key_norm_flag: None,
    sinks: false,
    partial_rotary: false,
    window: WindowRule::Never,
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["num_experts", "num_local_experts"],
        width: "intermediate_size",
        layers: ExpertLayers::All,
        router: RouterRule::Softmax,
    }),
    further_layers: false,
    defaults: FamilyDefaults { rms_norm_eps: 1e-5, ..DEFAULTS },
};

const GLM4_MOE: Family = Family {
    architecture: Architecture::Glm4Moe,
    model_type: "glm4_moe",
    class: "Glm4Moe",
    head_dim: None,
    optional_kv_heads: false,
    qkv_bias: BiasRule::AttentionBias,
    output_bias: BiasRule::Never,
    query_key_norm: QueryKeyNorm::PerHead,
    query_key_norm_flag: Some("use_qk_norm"),
    sinks: false,
    partial_rotary: true,
    window: WindowRule::Never,
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["n_routed_experts", "num_local_experts"],
        width: "moe_intermediate_size",
        layers: ExpertLayers::AfterDense,
        router: RouterRule::Sigmoid,
    }),
    further_layers: true,
    defaults: FamilyDefaults { rms_norm_eps: 1e-5, partial_rotary_factor: 0.5, ..DEFAULTS },
};

const GPT_OSS: Family = Family {
    architecture: Architecture::GptOss,
    model_type: "gpt_oss",
    class: "GptOss",
    head_dim: Some(64),
    optional_kv_heads: false,
    qkv_bias: BiasRule::AttentionBias,
    output_bias: BiasRule::AttentionBias,
    query_key_norm: QueryKeyNorm::None,
    query_key_norm_flag: None,
    sinks: true,
    partial_rotary: false,
    window: WindowRule::Alternate,
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["num_local_experts", "num_experts"],
        width: "intermediate_size",
        layers: ExpertLayers::All,
        router: RouterRule::SoftmaxOfChosen,
    }),
    further_layers: false,
    defaults: FamilyDefaults {
        rms_norm_eps: 1e-5,
        attention_bias: true,
        rope_theta: 150_000.0,
        plain_rotary: false,
        ..DEFAULTS
    },
};

pub(super) const FAMILIES: [Family; 8] = [LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, OLMOE, GLM4_MOE, GPT_OSS];

/// The values of `model_type` that are supported, for messages.
pub(super) fn model_types() -> String {
    FAMILIES.map(|family| family.model_type).join(", ")
}

/// The supported families by the names of their classes, for messages.
pub(crate) fn class_prefixes() -> String {
    FAMILIES.map(|family| family.class).join(", ")
}

impl BiasRule {
    /// Whether there is a bias, given the value of `attention_bias`.
    fn applies(self, attention_bias: bool) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::AttentionBias => attention_bias,
        }
    }
}

impl Family {
    /// The layer of the family, given the value of `attention_bias` and its experts, if it has any.
    pub(super) fn layer(&self, attention_bias: bool, experts: Option<ExpertSpec>) -> LayerSpec {
        LayerSpec {
            norm: Norm::RmsBefore,
            attention: AttentionSpec {
                window: None,
                rotary: Some(Rotary::plain(10_000.0)),
                scale: None,
                sinks: self.sinks,
            },
            query_key_norm: self.query_key_norm,
            qkv_bias: self.qkv_bias.applies(attention_bias),
            output_bias: self.output_bias.applies(attention_bias),
            feed_forward: experts.map_or(FeedForward::SwiGlu, FeedForward::Experts),
        }
    }
}

impl Architecture {
    /// Its row of the table.
    pub(super) fn family(self) -> &'static Family {
        match self {
            Self::Llama => &LLAMA,
            Self::Mistral => &MISTRAL,
            Self::Qwen2 => &QWEN2,
            Self::Qwen3 => &QWEN3,
            Self::Qwen3Moe => &QWEN3_MOE,
            Self::Olmoe => &OLMOE,
            Self::Glm4Moe => &GLM4_MOE,
            Self::GptOss => &GPT_OSS,
        }
    }

    /// The value of `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        self.family().model_type
    }

    /// Whether its layers have experts.
    #[must_use]
    pub fn has_experts(self) -> bool {
        self.family().experts != ExpertRule::Never
    }

    /// Whether files may have layers after the last, which predict further tokens.
    pub(crate) fn predicts_further_tokens(self) -> bool {
        self.family().further_layers
    }

    /// The class in `architectures` of `config.json`.
    #[must_use]
    pub fn class_name(self, head: Head) -> String {
        let family = self.family().class;
        match head {
            Head::Language | Head::LanguageAndValue => format!("{family}ForCausalLM"),
            Head::Value => format!("{family}ForSequenceClassification"),
        }
    }
}
