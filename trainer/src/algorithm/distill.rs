//! On-policy distillation: the advantage of a token is the teacher's log-probability minus the policy's.
//!
//! The gradient is that of the reverse KL divergence from the teacher (arXiv 2306.13649) on samples of the policy.
//! Rewards are only logged. Groups are not needed.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// The defaults.
    #[must_use]
    pub fn distill() -> Self {
        Self {
            advantage: AdvantageEstimator::Teacher,
            loss: PolicyLoss::Cispo { low: 0.0, high: 5.0 },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
