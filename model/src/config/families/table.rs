//! The rows of the table of model families. Many differ from another row in a few fields.

use super::super::experts::{ExpertKeys, ExpertLayers, ExpertRule, RouterRule};
use super::{
    Activation, Architecture, BiasRule, Family, FurtherLayers, LocalRotary, MultiplierRule, RotaryRule,
    WindowRule,
};
use crate::layer::{DeltaNetFiles, FeedForward, Norm, QueryKeyNorm};

/// The rotary embedding of most families.
const ROTARY: RotaryRule = RotaryRule {
    theta: 10_000.0,
    scaling: true,
    partial: false,
    share: 1.0,
    plain: true,
    skips: false,
    local: None,
};

const LLAMA: Family = Family {
    architecture: Architecture::Llama,
    model_type: "llama",
    other_types: &[],
    class: "Llama",
    classifier: "Llama",
    head_dim: None,
    optional_kv_heads: true,
    tied: false,
    eps: 1e-6,
    attention_bias: false,
    norm: Norm::RmsBefore,
    norm_offset: 0.0,
    qkv_bias: BiasRule::AttentionBias,
    output_bias: BiasRule::AttentionBias,
    query_key_norm: QueryKeyNorm::None,
    query_key_norm_flag: None,
    sinks: false,
    latent: false,
    gated: false,
    recurrence: None,
    with_images: None,
    rotary: ROTARY,
    window: WindowRule::Never,
    sliding_window: Some(4096),
    multipliers: MultiplierRule::None,
    activation: Activation { key: "hidden_act", names: &["silu", "swish"], network: FeedForward::SwiGlu },
    experts: ExpertRule::Never,
    fused: false,
    further_layers: FurtherLayers::Never,
};

const MISTRAL: Family = Family {
    architecture: Architecture::Mistral,
    model_type: "mistral",
    class: "Mistral",
    classifier: "Mistral",
    optional_kv_heads: false,
    qkv_bias: BiasRule::Never,
    output_bias: BiasRule::Never,
    window: WindowRule::Always,
    ..LLAMA
};

const QWEN2: Family = Family {
    architecture: Architecture::Qwen2,
    model_type: "qwen2",
    class: "Qwen2",
    classifier: "Qwen2",
    qkv_bias: BiasRule::Always,
    window: WindowRule::Flagged,
    ..MISTRAL
};

const QWEN3: Family = Family {
    architecture: Architecture::Qwen3,
    model_type: "qwen3",
    class: "Qwen3",
    classifier: "Qwen3",
    head_dim: Some(128),
    optional_kv_heads: false,
    query_key_norm: QueryKeyNorm::PerHead,
    window: WindowRule::Flagged,
    ..LLAMA
};

const QWEN3_MOE: Family = Family {
    architecture: Architecture::Qwen3Moe,
    model_type: "qwen3_moe",
    class: "Qwen3Moe",
    classifier: "Qwen3Moe",
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
    classifier: "Olmoe",
    query_key_norm: QueryKeyNorm::Whole,
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["num_experts", "num_local_experts"],
        width: "intermediate_size",
        layers: ExpertLayers::All,
        router: RouterRule::Softmax,
    }),
    ..LLAMA
};

const GLM4_MOE: Family = Family {
    architecture: Architecture::Glm4Moe,
    model_type: "glm4_moe",
    class: "Glm4Moe",
    classifier: "Glm4Moe",
    optional_kv_heads: false,
    eps: 1e-5,
    output_bias: BiasRule::Never,
    query_key_norm: QueryKeyNorm::PerHead,
    query_key_norm_flag: Some("use_qk_norm"),
    rotary: RotaryRule { partial: true, share: 0.5, ..ROTARY },
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["n_routed_experts", "num_local_experts"],
        width: "moe_intermediate_size",
        layers: ExpertLayers::AfterDense,
        router: RouterRule::Sigmoid,
    }),
    further_layers: FurtherLayers::AfterLast,
    ..LLAMA
};

const GPT_OSS: Family = Family {
    architecture: Architecture::GptOss,
    model_type: "gpt_oss",
    class: "GptOss",
    classifier: "GptOss",
    head_dim: Some(64),
    optional_kv_heads: false,
    eps: 1e-5,
    attention_bias: true,
    sinks: true,
    rotary: RotaryRule { theta: 150_000.0, plain: false, ..ROTARY },
    window: WindowRule::Periodic { key: None, period: 2 },
    sliding_window: Some(128),
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["num_local_experts", "num_experts"],
        width: "intermediate_size",
        layers: ExpertLayers::All,
        router: RouterRule::SoftmaxOfChosen,
    }),
    ..LLAMA
};

const OLMO2: Family = Family {
    architecture: Architecture::Olmo2,
    model_type: "olmo2",
    class: "Olmo2",
    classifier: "Olmo2",
    eps: 1e-5,
    norm: Norm::RmsAfter,
    query_key_norm: QueryKeyNorm::Whole,
    ..LLAMA
};

const OLMO3: Family = Family {
    architecture: Architecture::Olmo3,
    model_type: "olmo3",
    class: "Olmo3",
    classifier: "Olmo3",
    rotary: RotaryRule {
        theta: 500_000.0,
        local: Some(LocalRotary { key: None, theta: 500_000.0 }),
        ..ROTARY
    },
    window: WindowRule::Periodic { key: None, period: 4 },
    ..OLMO2
};

const SMOLLM3: Family = Family {
    architecture: Architecture::Smollm3,
    model_type: "smollm3",
    class: "SmolLM3",
    classifier: "SmolLM3",
    optional_kv_heads: false,
    tied: true,
    rotary: RotaryRule { theta: 2_000_000.0, skips: true, ..ROTARY },
    window: WindowRule::FlaggedUnrotated,
    sliding_window: None,
    ..LLAMA
};

const PHI3: Family = Family {
    architecture: Architecture::Phi3,
    model_type: "phi3",
    class: "Phi3",
    classifier: "Phi3",
    eps: 1e-5,
    qkv_bias: BiasRule::Never,
    output_bias: BiasRule::Never,
    rotary: RotaryRule { scaling: false, partial: true, ..ROTARY },
    window: WindowRule::Always,
    sliding_window: None,
    fused: true,
    ..LLAMA
};

const GRANITE: Family = Family {
    architecture: Architecture::Granite,
    model_type: "granite",
    class: "Granite",
    classifier: "Granite",
    multipliers: MultiplierRule::Granite,
    ..LLAMA
};

const GEMMA3: Family = Family {
    architecture: Architecture::Gemma3,
    model_type: "gemma3_text",
    class: "Gemma3",
    classifier: "Gemma3Text",
    head_dim: Some(256),
    optional_kv_heads: false,
    tied: true,
    norm: Norm::RmsAround,
    norm_offset: 1.0,
    query_key_norm: QueryKeyNorm::PerHead,
    rotary: RotaryRule {
        theta: 1_000_000.0,
        local: Some(LocalRotary { key: Some("rope_local_base_freq"), theta: 10_000.0 }),
        ..ROTARY
    },
    window: WindowRule::Periodic { key: Some("sliding_window_pattern"), period: 6 },
    multipliers: MultiplierRule::Gemma,
    activation: Activation {
        key: "hidden_activation",
        names: &["gelu_pytorch_tanh"],
        network: FeedForward::GeGlu,
    },
    ..LLAMA
};

const DEEPSEEK_V3: Family = Family {
    architecture: Architecture::DeepseekV3,
    model_type: "deepseek_v3",
    other_types: &["kimi_k2"],
    class: "DeepseekV3",
    classifier: "DeepseekV3",
    eps: 1e-6,
    output_bias: BiasRule::AttentionBias,
    query_key_norm: QueryKeyNorm::None,
    query_key_norm_flag: None,
    latent: true,
    rotary: ROTARY,
    ..GLM4_MOE
};

const GLM4_MOE_LITE: Family = Family {
    architecture: Architecture::Glm4MoeLite,
    model_type: "glm4_moe_lite",
    other_types: &[],
    class: "Glm4MoeLite",
    classifier: "Glm4MoeLite",
    eps: 1e-5,
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["n_routed_experts", "num_local_experts"],
        width: "moe_intermediate_size",
        layers: ExpertLayers::Listed,
        router: RouterRule::Sigmoid,
    }),
    ..DEEPSEEK_V3
};

const QWEN3_NEXT: Family = Family {
    architecture: Architecture::Qwen3Next,
    model_type: "qwen3_next",
    class: "Qwen3Next",
    classifier: "Qwen3Next",
    head_dim: Some(256),
    optional_kv_heads: false,
    norm_offset: 1.0,
    query_key_norm: QueryKeyNorm::PerHead,
    gated: true,
    recurrence: Some(DeltaNetFiles::ByKeyHead),
    rotary: RotaryRule { partial: true, share: 0.25, ..ROTARY },
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["num_experts", "num_local_experts"],
        width: "moe_intermediate_size",
        layers: ExpertLayers::Sparse,
        router: RouterRule::SoftmaxAndShared { flag: true },
    }),
    further_layers: FurtherLayers::Apart,
    ..LLAMA
};

const QWEN3_5: Family = Family {
    architecture: Architecture::Qwen35,
    model_type: "qwen3_5_text",
    class: "Qwen3_5",
    classifier: "Qwen3_5Text",
    recurrence: Some(DeltaNetFiles::Apart),
    with_images: Some("qwen3_5"),
    experts: ExpertRule::Never,
    ..QWEN3_NEXT
};

const QWEN3_5_MOE: Family = Family {
    architecture: Architecture::Qwen35Moe,
    model_type: "qwen3_5_moe_text",
    class: "Qwen3_5Moe",
    classifier: "Qwen3_5MoeText",
    with_images: Some("qwen3_5_moe"),
    experts: ExpertRule::Keys(ExpertKeys {
        count: &["num_experts", "num_local_experts"],
        width: "moe_intermediate_size",
        layers: ExpertLayers::All,
        router: RouterRule::SoftmaxAndShared { flag: false },
    }),
    ..QWEN3_5
};

pub(in crate::config) const FAMILIES: [Family; 19] = [
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    OLMOE,
    GLM4_MOE,
    GPT_OSS,
    OLMO2,
    OLMO3,
    SMOLLM3,
    PHI3,
    GRANITE,
    GEMMA3,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
];

impl Architecture {
    /// Its row of the table.
    pub(in crate::config) fn family(self) -> &'static Family {
        match self {
            Self::Llama => &LLAMA,
            Self::Mistral => &MISTRAL,
            Self::Qwen2 => &QWEN2,
            Self::Qwen3 => &QWEN3,
            Self::Qwen3Moe => &QWEN3_MOE,
            Self::Olmoe => &OLMOE,
            Self::Glm4Moe => &GLM4_MOE,
            Self::GptOss => &GPT_OSS,
            Self::Olmo2 => &OLMO2,
            Self::Olmo3 => &OLMO3,
            Self::Smollm3 => &SMOLLM3,
            Self::Phi3 => &PHI3,
            Self::Granite => &GRANITE,
            Self::Gemma3 => &GEMMA3,
            Self::DeepseekV3 => &DEEPSEEK_V3,
            Self::Glm4MoeLite => &GLM4_MOE_LITE,
            Self::Qwen3Next => &QWEN3_NEXT,
            Self::Qwen35 => &QWEN3_5,
            Self::Qwen35Moe => &QWEN3_5_MOE,
        }
    }
}
