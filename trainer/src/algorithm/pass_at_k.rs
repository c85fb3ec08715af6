//! Pass@k training (arXiv 2508.10751): a task counts as solved if one of k attempts is correct.
//!
//! Encourages exploration: a correct answer has a small advantage if its group has others.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;

impl Algorithm {
    /// The defaults.
    #[must_use]
    pub fn pass_at_k() -> Self {
        Self { advantage: AdvantageEstimator::PassAtK { k: 4 }, ..Self::grpo() }
    }
}
