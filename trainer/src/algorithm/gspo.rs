//! GSPO (arXiv 2507.18071): the ratio and its clip are those of the whole sequence.
//!
//! The bounds are far narrower than a token's, because the ratio is a mean over tokens; the paper has 3e-4 and 4e-4, ScaleRL
//! (arXiv 2510.13786) found 4e-3 and 5e-3 better.
//!
//! The bounds are too narrow for the distance to an older policy, so the clip is anchored at the policy before the step, and
//! [`Algorithm::decoupled`] leaves out what is too far from it.

use super::Algorithm;
use crate::loss::{Aggregation, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn gspo() -> Self {
        Self {
            loss: PolicyLoss::Gspo { low: 4e-3, high: 5e-3 },
            aggregation: Aggregation::SequenceMean,
            ..Self::decoupled()
        }
    }
}
