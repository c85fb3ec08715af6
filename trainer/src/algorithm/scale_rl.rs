//! ScaleRL (arXiv 2510.13786): CISPO with batch-normalised rewards and a mean over prompts.
//!
//! Groups with equal rewards leave the batch, its denominators and its standard deviation. The other parts are recipe
//! keys: `curation.max_pass_rate` is no-positive-resampling, `rollout.interrupt_text` forced interruption for length
//! control. Logits are always computed in f32.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, ScaleRewards};
use crate::loss::{Aggregation, Correction, PolicyLoss};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn scale_rl() -> Self {
        Self {
            advantage: AdvantageEstimator::Group { scale: ScaleRewards::Batch },
            loss: PolicyLoss::Cispo { low: 0.0, high: 5.0 },
            correction: Correction::None,
            aggregation: Aggregation::PromptMean,
            drop_zero_variance: true,
            ..Self::grpo()
        }
    }
}
