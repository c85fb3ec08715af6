//! GDPO (arXiv 2601.05242): every reward is normalised by itself before they are added.
//!
//! With several rewards GRPO sees only their sum, in which one with a large spread drowns the others.

use super::Algorithm;
use crate::credit::Advantage;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn gdpo() -> Self {
        Self { advantage: Advantage::PerReward { weights: Vec::new() }, ..Self::grpo() }
    }
}
