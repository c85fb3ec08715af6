//! AIPO (LlamaRL, arXiv 2505.24034): policy gradient with an importance weight that is bounded from above.
//!
//! `sum min(exp(current - behavior), rho) (r - mean) grad log p`, with `rho` between 2 and 10. No clip, no lower bound.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, ScaleRewards};
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn aipo() -> Self {
        Self {
            advantage: AdvantageEstimator::Group { scale: ScaleRewards::None },
            loss: PolicyLoss::Cispo { low: 0.0, high: 2.0 },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
