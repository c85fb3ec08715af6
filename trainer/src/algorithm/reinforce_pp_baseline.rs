//! REINFORCE++-baseline (arXiv 2501.03262): the group mean is subtracted before whitening over the batch.
//!
//! Unlike GRPO it does not divide by the group's standard deviation, which is tiny for tasks that are almost always
//! solved.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn reinforce_pp_baseline() -> Self {
        Self { advantage: AdvantageEstimator::Whiten { baseline: true, gamma: 1.0 }, ..Self::grpo() }
    }
}
