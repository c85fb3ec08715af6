//! ReMax (arXiv 2310.10505): the baseline is the reward of the greedy completion of the task.
//!
//! The sampler decodes one additional greedy completion per group, which is not trained on.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;
use crate::loss::PolicyLoss;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn remax() -> Self {
        Self { advantage: AdvantageEstimator::Greedy, loss: PolicyLoss::Reinforce, ..Self::decoupled() }
    }
}
