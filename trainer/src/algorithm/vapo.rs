//! VAPO (arXiv 2504.05118): PPO with a length-adaptive lambda, a higher upper clip bound and a likelihood loss on
//! correct answers.
//!
//! The policy's lambda is `1 - 1 / (0.05 T)`, the critic's is 1. The negative log-likelihood of correct answers, a mean
//! over their tokens only, is added with coefficient 0.1. The paper pre-trains the critic (`critic.pretrain_steps`).

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, Gae};
use crate::loss::PolicyLoss;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn vapo() -> Self {
        Self {
            advantage: AdvantageEstimator::Gae(Gae {
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
