//! DPPO (arXiv 2602.04879): the trust region bounds the divergence of the policies instead of their ratio.
//!
//! Binary total variation as in the authors' verl code (`loss_mode = "dppo_tv"`): bounds of 0.2 on the probability,
//! importance ratios up to 20 (section 5.4 of the paper: a small cap is harmful). prime-rl has the same bounds, no cap,
//! and an additional KL penalty to the sampling policy.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, ScaleRewards};
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn dppo() -> Self {
        Self {
            advantage: AdvantageEstimator::Group { scale: ScaleRewards::None },
            loss: PolicyLoss::Dppo { low: 0.2, high: 0.2, cap: 20.0 },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
