//! Trajectory balance (TBA, arXiv 2503.18929): the policy is fitted to `reference * exp(reward / beta)`.
//!
//! Off-policy by construction: whoever sampled a trajectory, the target is the same, so there is no correction.

use super::Algorithm;
use crate::credit::Advantage;
use crate::loss::{Aggregation, Correction, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn tb() -> Self {
        Self {
            advantage: Advantage::None,
            loss: PolicyLoss::TrajectoryBalance { beta: 0.05 },
            correction: Correction::None,
            aggregation: Aggregation::SequenceSum,
            ..Self::grpo()
        }
    }
}
