//! CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a clipped importance weight; no token loses its gradient.
//!
//! The weight corrects for the behavior policy, so there is no other off-policy correction.

use super::Algorithm;
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn cispo() -> Self {
        Self { loss: PolicyLoss::Cispo { low: 0.0, high: 5.0 }, correction: Correction::None, ..Self::grpo() }
    }
}
