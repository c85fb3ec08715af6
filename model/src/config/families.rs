//! The table of model families: what a `model_type` of Hugging Face means for `Config`.
//!
//! A new family is a variant of [`Architecture`] and a row of [`FAMILIES`]; a layer that computes something new needs a
//! variant in `layer.rs` and its operation too.

mod table;

use serde::{Deserialize, Serialize};

use super::Head;
use super::experts::ExpertRule;
use crate::layer::{AttentionSpec, DeltaNetFiles, ExpertSpec, FeedForward, LayerSpec, Norm, QueryKeyNorm};
use crate::rotary::Rotary;

pub(super) use self::table::FAMILIES;

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
    /// OLMo 2.
    Olmo2,
    /// OLMo 3.
    Olmo3,
    /// SmolLM3.
    Smollm3,
    /// Phi-3 and Phi-4.
    Phi3,
    /// Granite 3, dense.
    Granite,
    /// Gemma 3, of text alone.
    Gemma3,
    /// DeepSeek-V3 and R1, Moonlight, Kimi K2.
    DeepseekV3,
    /// GLM 4.7 Flash.
    Glm4MoeLite,
    /// Qwen3-Next, with a recurrence in most layers.
    Qwen3Next,
    /// Qwen 3.5, dense, with a recurrence in most layers; the part of text.
    #[serde(rename = "qwen3_5")]
    Qwen35,
    /// The same with experts.
    #[serde(rename = "qwen3_5_moe")]
    Qwen35Moe,
}

/// One family.
pub(super) struct Family {
    pub(super) architecture: Architecture,
    /// The value of `model_type` in `config.json`.
    pub(super) model_type: &'static str,
    /// Further values that mean the same network.
    pub(super) other_types: &'static [&'static str],
    /// The start of the class names in `architectures`.
    pub(super) class: &'static str,
    /// The same of the classifier.
    pub(super) classifier: &'static str,
    /// `head_dim` if `config.json` has no such key; `None` for `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// Whether `num_key_value_heads` may be left out, for one per query head. The classes of the other families have a
    /// number that fits no small model.
    pub(super) optional_kv_heads: bool,
    /// `tie_word_embeddings` if `config.json` has no such key.
    pub(super) tied: bool,
    /// `rms_norm_eps` if `config.json` has no such key.
    pub(super) eps: f64,
    /// `attention_bias` if `config.json` has no such key.
    pub(super) attention_bias: bool,
    pub(super) norm: Norm,
    /// Added to the weights of norms.
    pub(super) norm_offset: f32,
    pub(super) qkv_bias: BiasRule,
    pub(super) output_bias: BiasRule,
    pub(super) query_key_norm: QueryKeyNorm,
    /// The key that has to be true for this norm.
    pub(super) query_key_norm_flag: Option<&'static str>,
    /// Whether attention has sinks.
    pub(super) sinks: bool,
    /// Whether queries, keys and values have latents.
    pub(super) latent: bool,
    /// Whether the result of attention has a gate.
    pub(super) gated: bool,
    /// How files have the recurrence of layers without attention, if the family has such layers.
    pub(super) recurrence: Option<DeltaNetFiles>,
    /// The value of `model_type` of models that read images too, whose part of text is of this family.
    pub(super) with_images: Option<&'static str>,
    pub(super) rotary: RotaryRule,
    pub(super) window: WindowRule,
    /// `sliding_window`, tokens, if `config.json` has no such key.
    pub(super) sliding_window: Option<usize>,
    pub(super) multipliers: MultiplierRule,
    pub(super) activation: Activation,
    pub(super) experts: ExpertRule,
    /// Whether files have one tensor of query, key and value projections, and one of gate and up projections.
    pub(super) fused: bool,
    /// Where files may have layers that predict further tokens (MTP, DeepSeek-V3, arXiv 2412.19437) and which transformers does not
    /// read either.
    pub(super) further_layers: FurtherLayers,
}

/// Where layers are that predict further tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FurtherLayers {
    Never,
    /// After the last layer.
    AfterLast,
    /// In `mtp`.
    Apart,
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BiasRule {
    Never,
    Always,
    /// If `attention_bias` says so.
    AttentionBias,
}

/// The rotary embeddings of the layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RotaryRule {
    /// `rope_theta` if `config.json` has no such key.
    pub(super) theta: f64,
    /// Whether frequencies may be scaled.
    pub(super) scaling: bool,
    /// Whether `partial_rotary_factor` may be other than 1.
    pub(super) partial: bool,
    /// `partial_rotary_factor` if `config.json` has no such key.
    pub(super) share: f64,
    /// Whether the object of the embedding may be left out, for one without scaling.
    pub(super) plain: bool,
    /// Whether layers are without one: those of `no_rope_layers`, or the last of each `no_rope_layer_interval`.
    pub(super) skips: bool,
    /// The embedding of layers with a window, if it is their own.
    pub(super) local: Option<LocalRotary>,
}

/// The rotary embedding of layers with a window: that of `rope_parameters.sliding_attention`, or one without scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LocalRotary {
    /// The key of its base.
    pub(super) key: Option<&'static str>,
    /// Its base without such a key.
    pub(super) theta: f64,
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
    /// With `use_sliding_window`, in the layers of `layer_types` or in those without rotary embedding.
    FlaggedUnrotated,
    /// In the layers of `layer_types`, or in all but the last of each period; the key of the period, and its default.
    Periodic {
        key: Option<&'static str>,
        period: usize,
    },
}

/// Numbers that multiply activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MultiplierRule {
    None,
    /// `embedding_multiplier`, `attention_multiplier` for scores, `residual_multiplier`, `logits_scaling`.
    Granite,
    /// The square root of `hidden_size` for embedded tokens, that of `query_pre_attn_scalar` divides scores.
    Gemma,
}

/// The activation of the gated network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Activation {
    /// Its key.
    pub(super) key: &'static str,
    /// The names that mean it; the first is written.
    pub(super) names: &'static [&'static str],
    pub(super) network: FeedForward,
}

/// The values of `model_type` that are supported, for messages.
pub(super) fn model_types() -> String {
    let with_images = FAMILIES.iter().filter_map(|family| family.with_images);
    FAMILIES.iter().map(|family| family.model_type).chain(with_images).collect::<Vec<_>>().join(", ")
}

/// The supported families by the names of their classifiers, for messages.
pub(crate) fn class_prefixes() -> String {
    FAMILIES.map(|family| family.classifier).join(", ")
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
    /// A layer of the family with all keys and its rotary embedding without scaling, given the value of `attention_bias` and its
    /// experts, if it has any.
    pub(super) fn layer(&self, attention_bias: bool, experts: Option<ExpertSpec>) -> LayerSpec {
        LayerSpec {
            norm: self.norm,
            attention: AttentionSpec {
                window: None,
                rotary: Some(Rotary::plain(self.rotary.theta)),
                scale: None,
                sinks: self.sinks,
                latent: None,
                gated: self.gated,
            },
            delta_net: None,
            query_key_norm: self.query_key_norm,
            qkv_bias: self.qkv_bias.applies(attention_bias),
            output_bias: self.output_bias.applies(attention_bias),
            feed_forward: experts.map_or(self.activation.network, FeedForward::Experts),
            residual_multiplier: 1.0,
        }
    }

    /// What multiplies embedded tokens of `hidden_size` values, where no key says it.
    pub(super) fn embedding_multiplier(&self, hidden_size: usize) -> f32 {
        match self.multipliers {
            MultiplierRule::None | MultiplierRule::Granite => 1.0,
            MultiplierRule::Gemma => (hidden_size as f64).sqrt() as f32,
        }
    }
}

impl Architecture {
    /// The value of `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        self.family().model_type
    }

    /// Whether files have one tensor of query, key and value projections, and one of gate and up projections.
    #[must_use]
    pub fn has_fused_files(self) -> bool {
        self.family().fused
    }

    /// Whether its layers have experts.
    #[must_use]
    pub fn has_experts(self) -> bool {
        self.family().experts != ExpertRule::Never
    }

    /// Where files may have layers that predict further tokens.
    pub(crate) fn further_layers(self) -> FurtherLayers {
        self.family().further_layers
    }

    /// Whether files may be those of a model that reads images too.
    pub(crate) fn has_files_with_images(self) -> bool {
        self.family().with_images.is_some()
    }

    /// The class in `architectures` of `config.json`.
    #[must_use]
    pub fn class_name(self, head: Head) -> String {
        let family = self.family();
        match head {
            Head::Language | Head::LanguageAndValue | Head::None => format!("{}ForCausalLM", family.class),
            Head::Value => format!("{}ForSequenceClassification", family.classifier),
        }
    }
}
