//! `[lora]`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::super::words::TargetModule;

/// `[lora]`: training a low-rank change of the linear layers instead of all weights. With the section, everything else
/// is frozen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lora {
    /// Rank of the change. PEFT `r`, TRL `lora_r`, verl `lora_rank`.
    // resume = state, worker = ignored
    pub rank: usize,
    /// The change is multiplied with `alpha / rank`. PEFT `lora_alpha`.
    // resume = state, worker = ignored
    pub alpha: f64,
    /// The layers that change, in every block. PEFT `target_modules`, TRL `lora_target_modules`.
    // resume = state, worker = ignored
    pub target_modules: Vec<TargetModule>,
    /// A directory with a PEFT adapter to go on from, whose rank, alpha and layers must be those above; a fresh one if
    /// not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = state, worker = ignored
    pub path: Option<PathBuf>,
}

impl Default for Lora {
    fn default() -> Self {
        // Rank and alpha as in TRL; all linear layers, without which LoRA learns less (Biderman et al. 2024, arXiv
        // 2405.09673).
        Self { rank: 16, alpha: 32.0, target_modules: TargetModule::ALL.to_vec(), path: None }
    }
}
