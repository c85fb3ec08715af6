//! PPO (arXiv 1707.06347) with a critic and generalised advantage estimation.
//!
//! `lambda_policy = 0.95` with a critic lambda of 1 and a pre-trained critic are VC-PPO (arXiv 2503.01491). Needs no groups.

use super::Algorithm;
use crate::credit::{Advantage, Gae};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn ppo() -> Self {
        Self {
            advantage: Advantage::Gae(Gae {
                gamma: 1.0,
                lambda_policy: 1.0,
                length_adaptive: 0.0,
                lambda_critic: 1.0,
                whiten: true,
            }),
            ..Self::grpo()
        }
    }
}
