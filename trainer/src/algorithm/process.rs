//! Process supervision (DeepSeekMath, arXiv 2402.03300): the advantage of a token sums the rewards of its turn and
//! later turns.
//!
//! The environment assigns rewards to turns. A trajectory without turn rewards counts as one turn, whose advantage is
//! that of GRPO.

use super::Algorithm;
use crate::advantage::AdvantageEstimator;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn process() -> Self {
        Self { advantage: AdvantageEstimator::Process, ..Self::grpo() }
    }
}
