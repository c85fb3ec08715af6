//! GMPO (arXiv 2507.20673): the geometric mean of clipped token ratios, with wide bounds.
//!
//! An outlier ratio changes a geometric mean less than an arithmetic mean.

use super::Algorithm;
use crate::loss::{Aggregation, PolicyLoss};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn gmpo() -> Self {
        Self {
            loss: PolicyLoss::Gmpo { low: 0.4, high: 0.4 },
            aggregation: Aggregation::SequenceMean,
            ..Self::grpo()
        }
    }
}
