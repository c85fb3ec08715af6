//! REINFORCE (Williams 1992) with the mean of the batch as its baseline.
//!
//! Needs no groups. It has no clip: sequences too far from the policy that sampled them are left out. `correction = "none"` is
//! the plain algorithm, which breaks off-policy.

use super::Algorithm;
use crate::credit::Advantage;
use crate::loss::PolicyLoss;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn reinforce() -> Self {
        Self { advantage: Advantage::BatchMean, loss: PolicyLoss::Reinforce, ..Self::decoupled() }
    }
}
