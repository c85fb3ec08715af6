//! GDPO (arXiv 2601.05242): every reward component is normalised separately before the sum.
//!
//! GRPO normalises the sum of several rewards, in which a component with a large spread dominates.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn gdpo() -> Self {
        Self { advantage: AdvantageEstimator::PerReward { weights: Vec::new() }, ..Self::grpo() }
    }
}
