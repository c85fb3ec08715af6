//! GSPO (arXiv 2507.18071): ratio and clip of the whole sequence.
//!
//! The bounds are far narrower than for tokens, because the log-ratio is a mean over tokens. The paper has 3e-4 and
//! 4e-4; ScaleRL (arXiv 2510.13786) found 4e-3 and 5e-3 better.
//!
//! The bounds are too narrow for an older behavior policy. The clip is therefore anchored at the policy at the start of
//! the step, and [`Algorithm::decoupled`] masks sequences that are too far off-policy.

use super::Algorithm;
use crate::loss::{Aggregation, PolicyLoss};

impl Algorithm {
    /// The defaults.
    #[must_use]
    pub fn gspo() -> Self {
        Self {
            loss: PolicyLoss::Gspo { low: 4e-3, high: 5e-3 },
            aggregation: Aggregation::SequenceMean,
            ..Self::decoupled()
        }
    }
}
