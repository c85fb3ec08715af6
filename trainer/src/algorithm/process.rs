//! Process supervision (DeepSeekMath, arXiv 2402.03300): tokens are judged by the rewards of their turn and later ones.
//!
//! Turns get their rewards from whoever produced them; a trajectory without any is one turn.

use super::Algorithm;
use crate::credit::Advantage;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn process() -> Self {
        Self { advantage: Advantage::Process, ..Self::grpo() }
    }
}
