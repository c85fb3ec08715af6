//! SAPO (arXiv 2511.20347): a smooth gate on the ratio instead of a clip, sharper for negative advantages.
//!
//! The temperatures 1.0 and 1.05 are those of the paper.

use super::Algorithm;
use crate::loss::{Aggregation, PolicyLoss};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn sapo() -> Self {
        Self {
            loss: PolicyLoss::Sapo { tau_positive: 1.0, tau_negative: 1.05 },
            aggregation: Aggregation::SequenceMean,
            ..Self::grpo()
        }
    }
}
