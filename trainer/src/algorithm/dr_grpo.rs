//! Dr.GRPO (arXiv 2503.20783): GRPO without its two biases.
//!
//! Rewards are not divided by their deviation, which favours tasks that are almost solved or almost not; losses are
//! divided by a constant, not by the length of the completion, which favours long wrong answers.

use super::Algorithm;
use crate::credit::{Advantage, ScaleRewards};
use crate::loss::Aggregation;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn dr_grpo() -> Self {
        Self {
            advantage: Advantage::Group { scale: ScaleRewards::None },
            aggregation: Aggregation::Constant,
            ..Self::grpo()
        }
    }
}
