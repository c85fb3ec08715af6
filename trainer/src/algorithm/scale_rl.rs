//! ScaleRL (arXiv 2510.13786): CISPO, rewards normalised over the batch, tasks count the same.
//!
//! Groups whose rewards are all equal leave the batch, its denominators and its deviation. Its other parts live elsewhere:
//! `curation.max_pass_rate` is no-positive-resampling, `rollout.interrupt_text` its length control; the head is computed
//! in f32 in any case.

use super::Algorithm;
use crate::credit::{Advantage, ScaleRewards};
use crate::loss::{Aggregation, Correction, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn scale_rl() -> Self {
        Self {
            advantage: Advantage::Group { scale: ScaleRewards::Batch },
            loss: PolicyLoss::Cispo { low: 0.0, high: 5.0 },
            correction: Correction::None,
            aggregation: Aggregation::PromptMean,
            drop_zero_variance: true,
            ..Self::grpo()
        }
    }
}
