//! HPT (arXiv 2509.04419): reinforcement learning on tasks that the policy solves, supervised fine-tuning on the
//! others.
//!
//! If the share of correct answers in a group is at most the gate, one demonstration with its negative log-likelihood
//! replaces the group; other groups are trained as in Dr.GRPO.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, ScaleRewards};
use crate::loss::Aggregation;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn hpt() -> Self {
        Self {
            advantage: AdvantageEstimator::Group { scale: ScaleRewards::None },
            aggregation: Aggregation::Constant,
            demonstration_gate: Some(0.0),
            ..Self::grpo()
        }
    }
}
