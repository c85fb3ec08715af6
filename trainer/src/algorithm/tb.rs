//! Trajectory balance (TBA, arXiv 2503.18929): fits the policy to `reference * exp(reward / beta)`.
//!
//! Off-policy by construction: the target does not depend on the behavior policy, so there is no off-policy correction.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;
use crate::loss::{Aggregation, Correction, PolicyLoss};

impl Algorithm {
    /// The defaults.
    #[must_use]
    pub fn tb() -> Self {
        Self {
            advantage: AdvantageEstimator::None,
            loss: PolicyLoss::TrajectoryBalance { beta: 0.05 },
            correction: Correction::None,
            aggregation: Aggregation::SequenceSum,
            ..Self::grpo()
        }
    }
}
