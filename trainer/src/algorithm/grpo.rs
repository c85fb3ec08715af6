//! GRPO (DeepSeekMath, arXiv 2402.03300): the advantage is the reward normalised in its group, the loss PPO's clip.
//!
//! The clip is anchored at the policy that sampled, so that it bounds how far a step moves from there however stale a token
//! is. Anchored at the policy before the step (`proximal = "recompute"`, AReaL's decoupled objective) it never acts where a
//! batch makes one update, and nothing bounds the step: `benches/async.py anchors` shows the collapse from staleness 4 on.
//! Tokens are averaged over the batch, as in DAPO; `loss_agg = "sequence_mean"` and a divergence of 0.04 are the paper's.

use super::Algorithm;
use crate::credit::{Advantage, ScaleRewards};
use crate::loss::{Aggregation, Correction, Divergence, PolicyLoss};

impl Algorithm {
    /// Its defaults, which the other algorithms change in part.
    #[must_use]
    pub fn grpo() -> Self {
        Self {
            advantage: Advantage::Group { scale: ScaleRewards::Group },
            loss: PolicyLoss::Clip { low: 0.2, high: 0.2, dual: None },
            proximal: super::Proximal::Behavior,
            correction: Correction::None,
            aggregation: Aggregation::TokenMean,
            divergence: Divergence::OFF,
            entropy_coef: 0.0,
            nll_coef: 0.0,
            entropy_share: 1.0,
            drop_zero_variance: false,
            demonstration_gate: None,
        }
    }
}
