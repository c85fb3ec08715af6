//! TOPR (arXiv 2503.14286): imitation of positive trajectories, tapered importance sampling of negative ones.
//!
//! A negative trajectory whose probability already fell contributes little.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, ScaleRewards};
use crate::loss::{Correction, PolicyLoss, WeightBounds};

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn topr() -> Self {
        Self {
            advantage: AdvantageEstimator::Group { scale: ScaleRewards::None },
            loss: PolicyLoss::Topr {
                positive: WeightBounds { low: 1.0, high: 1.0 },
                negative: WeightBounds { low: 0.0, high: 1.0 },
            },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
