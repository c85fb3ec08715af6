//! The section `[lora]`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::super::words::TargetModule;

/// `[lora]`: low-rank adapters of layers are trained; all other weights are frozen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lora {
    /// Rank of the adapters. PEFT `r`, TRL `lora_r`, verl `lora_rank`.
    // resume = state, worker = run
    pub rank: usize,
    /// Scale of the adapters: their product is multiplied by `alpha / rank`. PEFT `lora_alpha`.
    // resume = state, worker = run
    pub alpha: f64,
    /// Layers with adapters, in every block; with experts those of every expert. Default: all linear layers of a block without
    /// latents and without a recurrence. For multi-head latent attention (`deepseek_v3`, `glm4_moe_lite`) `q_a_proj`, `q_b_proj`,
    /// `kv_a_proj_with_mqa` and `kv_b_proj`; for a recurrence `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` and `out_proj`
    /// (`qwen3_5`), or `in_proj_qkvz`, `in_proj_ba` and `out_proj` (`qwen3_next`); `embed_tokens` and `lm_head` too, if the model
    /// does not tie them. A layer that the model lacks has no adapter.
    /// PEFT `target_modules`, TRL `lora_target_modules`.
    // resume = state, worker = run
    pub target_modules: Vec<TargetModule>,
    /// Directory of a PEFT adapter that training starts from. Its rank, alpha and layers must equal those of this section.
    /// Default: a new adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = state, worker = ignored
    pub path: Option<PathBuf>,
    /// Whether the frozen weights stay in memory as the files of `model.path` store them (GGUF, FP8, MXFP4, 16 bits), and the adapter is
    /// not merged into them (QLoRA); samplers in other processes read those files too. bitsandbytes `load_in_4bit`.
    // resume = state, worker = run
    pub quantized_base: bool,
}

impl Default for Lora {
    fn default() -> Self {
        // Rank and alpha as in TRL; all linear layers, because LoRA on fewer layers learns less (Biderman et al. 2024,
        // arXiv 2405.09673).
        Self {
            rank: 16,
            alpha: 32.0,
            target_modules: TargetModule::BLOCK.to_vec(),
            path: None,
            quantized_base: false,
        }
    }
}
