//! REINFORCE++-baseline (arXiv 2501.03262): the group's mean is taken off before whitening over the batch.
//!
//! Unlike GRPO it does not divide by the deviation of a group, which is tiny for tasks that are almost solved.

use super::Algorithm;
use crate::credit::Advantage;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn reinforce_pp_baseline() -> Self {
        Self { advantage: Advantage::Whiten { baseline: true, gamma: 1.0 }, ..Self::grpo() }
    }
}
