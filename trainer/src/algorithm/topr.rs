//! TOPR (arXiv 2503.14286): imitation of positive trajectories, tapered importance sampling of negative ones.
//!
//! A negative trajectory whose probability already fell contributes little.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, ScaleRewards};
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn topr() -> Self {
        Self {
            advantage: AdvantageEstimator::Group { scale: ScaleRewards::None },
            loss: PolicyLoss::Topr { positive: (1.0, 1.0), negative: (0.0, 1.0) },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
