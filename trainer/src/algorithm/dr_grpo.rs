//! Dr.GRPO (arXiv 2503.20783): GRPO without its two biases.
//!
//! Rewards are not divided by the group's standard deviation, which favours tasks that are almost always or almost
//! never solved. Losses are divided by a constant instead of the completion length, which favours long wrong answers.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, ScaleRewards};
use crate::loss::Aggregation;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn dr_grpo() -> Self {
        Self {
            advantage: AdvantageEstimator::Group { scale: ScaleRewards::None },
            aggregation: Aggregation::Constant,
            ..Self::grpo()
        }
    }
}
