//! The table of model families: what a `model_type` of Hugging Face means for `Config`.
//!
//! A new family is a variant of [`Architecture`] and a row of [`FAMILIES`]; a layer that computes something new needs a
//! variant in `layer.rs` and its operation too.

use serde::{Deserialize, Serialize};

use super::Head;
use crate::layer::{FeedForward, LayerSpec, Norm, QueryKeyNorm};

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
    pub(super) window: WindowRule,
}

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
    window: WindowRule::Never,
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
    window: WindowRule::Always,
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
    window: WindowRule::Flagged,
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
    window: WindowRule::Flagged,
};

pub(super) const FAMILIES: [Family; 4] = [LLAMA, MISTRAL, QWEN2, QWEN3];

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
    /// The layer of the family, given the value of `attention_bias`.
    pub(super) fn layer(&self, attention_bias: bool) -> LayerSpec {
        LayerSpec {
            norm: Norm::RmsBefore,
            query_key_norm: self.query_key_norm,
            qkv_bias: self.qkv_bias.applies(attention_bias),
            output_bias: self.output_bias.applies(attention_bias),
            feed_forward: FeedForward::SwiGlu,
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
        }
    }

    /// The value of `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        self.family().model_type
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
