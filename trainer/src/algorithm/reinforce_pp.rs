//! REINFORCE++ (arXiv 2501.03262): returns whitened over the batch, PPO's clip, no critic.
//!
//! The paper subtracts the KL penalty from the reward: `kl_coef` with `kl_in = "reward"`.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn reinforce_pp() -> Self {
        Self { advantage: AdvantageEstimator::Whiten { baseline: false, gamma: 1.0 }, ..Self::grpo() }
    }
}
