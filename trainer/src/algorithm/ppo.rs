//! PPO (arXiv 1707.06347) with a critic and generalised advantage estimation.
//!
//! `lambda_policy = 0.95` with a critic lambda of 1 and a pre-trained critic is VC-PPO (arXiv 2503.01491). Groups are
//! not needed.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, Gae};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn ppo() -> Self {
        Self {
            advantage: AdvantageEstimator::Gae(Gae {
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
