//! GMPO (arXiv 2507.20673): the geometric mean of clipped token ratios, with wide bounds.
//!
//! One token of an extreme ratio moves it less than it moves an arithmetic mean.

use super::Algorithm;
use crate::loss::{Aggregation, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn gmpo() -> Self {
        Self {
            loss: PolicyLoss::Gmpo { low: 0.4, high: 0.4 },
            aggregation: Aggregation::SequenceMean,
            ..Self::grpo()
        }
    }
}
