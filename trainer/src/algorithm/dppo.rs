//! DPPO (arXiv 2602.04879): the trust region is measured by the divergence of the policies, not by their ratio.
//!
//! Binary total variation as in the code of its authors in verl (`loss_mode = "dppo_tv"`): bounds of 0.2 on the probability,
//! importance ratios up to 20 (section 5.4 of the paper: a small cap does harm). prime-rl has the same bounds, no cap, and
//! a pull towards the sampler beside it.

use super::Algorithm;
use crate::credit::{Advantage, ScaleRewards};
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn dppo() -> Self {
        Self {
            advantage: Advantage::Group { scale: ScaleRewards::None },
            loss: PolicyLoss::Dppo { low: 0.2, high: 0.2, cap: 20.0 },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
