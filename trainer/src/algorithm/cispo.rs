//! CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a bounded importance weight; no token loses its gradient.
//!
//! The weight is of the behavior policy, so there is no other correction.

use super::Algorithm;
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn cispo() -> Self {
        Self { loss: PolicyLoss::Cispo { low: 0.0, high: 5.0 }, correction: Correction::None, ..Self::grpo() }
    }
}
