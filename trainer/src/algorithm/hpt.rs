//! HPT (arXiv 2509.04419): reinforcement learning where the policy solves the task, a demonstration where it does not.
//!
//! A group whose share of right answers is at most the gate is replaced by one demonstration and its negative
//! log-likelihood; the others are Dr.GRPO.

use super::Algorithm;
use crate::credit::{Advantage, ScaleRewards};
use crate::loss::Aggregation;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn hpt() -> Self {
        Self {
            advantage: Advantage::Group { scale: ScaleRewards::None },
            aggregation: Aggregation::Constant,
            demonstration_gate: Some(0.0),
            ..Self::grpo()
        }
    }
}
