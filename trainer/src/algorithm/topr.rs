//! TOPR (arXiv 2503.14286): good trajectories as in supervised learning, bad ones tapered by their importance ratio.
//!
//! A trajectory that the policy has unlearnt already is not pushed down further.

use super::Algorithm;
use crate::credit::{Advantage, ScaleRewards};
use crate::loss::{Correction, PolicyLoss};

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn topr() -> Self {
        Self {
            advantage: Advantage::Group { scale: ScaleRewards::None },
            loss: PolicyLoss::Topr { positive: (1.0, 1.0), negative: (0.0, 1.0) },
            correction: Correction::None,
            ..Self::grpo()
        }
    }
}
