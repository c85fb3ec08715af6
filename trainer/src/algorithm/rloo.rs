//! RLOO (arXiv 2402.14740): the baseline is the mean reward of the other trajectories of the group.
//!
//! The loss is PPO's clip, as in TRL; with one on-policy update per batch its gradient is that of REINFORCE.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn rloo() -> Self {
        Self { advantage: AdvantageEstimator::LeaveOneOut, ..Self::grpo() }
    }
}
