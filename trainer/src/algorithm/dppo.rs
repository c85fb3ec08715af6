//! DPPO (arXiv 2602.04879): the trust region is measured by the divergence of the policies, not by their ratio.
//!
//! Binary total variation with bounds of 0.2, as in prime-rl.

use super::Algorithm;
use crate::credit::{Advantage, ScaleRewards};
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn dppo() -> Self {
        Self {
            advantage: Advantage::Group { scale: ScaleRewards::None },
            loss: PolicyLoss::Dppo { low: 0.2, high: 0.2, cap: 5.0 },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
