//! REINFORCE++ (arXiv 2501.03262): returns whitened over the batch, PPO's clip, no critic.
//!
//! The paper takes the divergence off the reward: `kl_coef` with `kl_in = "reward"`.

use super::Algorithm;
use crate::credit::Advantage;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn reinforce_pp() -> Self {
        Self { advantage: Advantage::Whiten { baseline: false, gamma: 1.0 }, ..Self::grpo() }
    }
}
