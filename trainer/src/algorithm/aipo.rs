//! AIPO (LlamaRL, arXiv 2505.24034): the policy gradient with a weight bounded on one side.
//!
//! `sum min(exp(current - behavior), rho) (r - mean) grad log p`, with `rho` between 2 and 10. No clip, no lower bound.

use super::Algorithm;
use crate::credit::{Advantage, ScaleRewards};
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn aipo() -> Self {
        Self {
            advantage: Advantage::Group { scale: ScaleRewards::None },
            loss: PolicyLoss::Cispo { low: 0.0, high: 2.0 },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
