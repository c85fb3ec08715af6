//! On-policy distillation: the advantage of a token is how much likelier the teacher finds it.
//!
//! The gradient is that of the reverse divergence from the teacher (arXiv 2306.13649) on what the policy samples. Rewards
//! are only watched. Needs no groups.

use super::Algorithm;
use crate::credit::Advantage;
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn distill() -> Self {
        Self {
            advantage: Advantage::Teacher,
            loss: PolicyLoss::Cispo { low: 0.0, high: 5.0 },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
