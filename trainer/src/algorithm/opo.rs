//! OPO (arXiv 2505.23585): exact on-policy training with a length-weighted baseline of minimum variance.
//!
//! Designed for `max_staleness = 0`; above that the off-policy correction applies.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;
use crate::loss::PolicyLoss;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn opo() -> Self {
        Self {
            advantage: AdvantageEstimator::LengthWeighted,
            loss: PolicyLoss::Reinforce,
            ..Self::decoupled()
        }
    }
}
