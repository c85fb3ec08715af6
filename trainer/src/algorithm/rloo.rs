//! RLOO (arXiv 2402.14740): the advantage is the reward minus the mean of the others of the group.
//!
//! The loss is the clip, as in TRL; with one update per batch its gradient is that of REINFORCE.

use super::Algorithm;
use crate::credit::Advantage;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn rloo() -> Self {
        Self { advantage: Advantage::LeaveOneOut, ..Self::grpo() }
    }
}
