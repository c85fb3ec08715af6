//! Process supervision (DeepSeekMath, arXiv 2402.03300): tokens are judged by the rewards of their turn and later ones.
//!
//! Turns get their rewards from the program that produced the group. A trajectory without any is one turn, whose advantage
//! is that of GRPO: that is what rlrun's own rollouts, which have a single turn without a reward of its own, are trained as.

use super::Algorithm;
use crate::credit::Advantage;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn process() -> Self {
        Self { advantage: Advantage::Process, ..Self::grpo() }
    }
}
