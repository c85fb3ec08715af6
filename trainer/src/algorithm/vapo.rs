//! VAPO (arXiv 2504.05118): PPO whose lambda grows with the length, with a wider clip and imitation of what was right.
//!
//! Lambda is `1 - 1 / (0.05 T)`, that of the critic 1; the negative log-likelihood of right answers, a mean over their tokens
//! alone, is added with 0.1.
//! The critic is to be pre-trained (`critic.pretrain_steps`).

use super::Algorithm;
use crate::credit::{Advantage, Gae};
use crate::loss::PolicyLoss;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn vapo() -> Self {
        Self {
            advantage: Advantage::Gae(Gae {
                gamma: 1.0,
                lambda_policy: 0.95,
                length_adaptive: 0.05,
                lambda_critic: 1.0,
                whiten: true,
            }),
            loss: PolicyLoss::Clip { low: 0.2, high: 0.28, dual: None },
            nll_coef: 0.1,
            ..Self::grpo()
        }
    }
}
