//! Pass@k training (arXiv 2508.10751): a task counts as solved if one of k attempts is right.
//!
//! Pays for exploration: a right answer in a group that has others is worth little.

use super::Algorithm;
use crate::credit::Advantage;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn pass_at_k() -> Self {
        Self { advantage: Advantage::PassAtK { k: 4 }, ..Self::grpo() }
    }
}
