//! SAPO (arXiv 2511.20347): a smooth gate where PPO clips, which closes faster for bad tokens.
//!
//! Temperatures 1.0 and 1.05 are the paper's.

use super::Algorithm;
use crate::loss::{Aggregation, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn sapo() -> Self {
        Self {
            loss: PolicyLoss::Sapo { tau_positive: 1.0, tau_negative: 1.05 },
            aggregation: Aggregation::SequenceMean,
            ..Self::grpo()
        }
    }
}
