//! OPO (arXiv 2505.23585): exact on-policy training with the length-weighted baseline of least variance.
//!
//! Meant for `max_staleness = 0`; beyond, the correction keeps it sound.

use super::Algorithm;
use crate::credit::Advantage;
use crate::loss::PolicyLoss;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn opo() -> Self {
        Self { advantage: Advantage::LengthWeighted, loss: PolicyLoss::Reinforce, ..Self::decoupled() }
    }
}
