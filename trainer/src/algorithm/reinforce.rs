//! REINFORCE (Williams 1992) with the batch mean as baseline.
//!
//! Groups are not needed. There is no clip; sequences that are too far off-policy are masked. `correction = "none"` is
//! the plain algorithm, which diverges off-policy.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;
use crate::loss::PolicyLoss;

impl Algorithm {
    /// The defaults.
    #[must_use]
    pub fn reinforce() -> Self {
        Self { advantage: AdvantageEstimator::BatchMean, loss: PolicyLoss::Reinforce, ..Self::decoupled() }
    }
}
