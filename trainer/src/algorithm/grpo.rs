//! GRPO (DeepSeekMath, arXiv 2402.03300): group-normalised rewards as advantages, PPO's clipped loss.
//!
//! The clip is anchored at the behavior policy, so it bounds the distance of an update from the policy that sampled, at
//! any staleness. With the policy at the start of the step as anchor (`proximal = "recompute"`, AReaL's decoupled
//! objective) the clip never acts if a batch has one update, and nothing bounds the update: `benches/async.py anchors`
//! shows the collapse from staleness 4 on. Losses are averaged over tokens, as in DAPO; the paper has `loss_agg =
//! "sequence_mean"` and a KL coefficient of 0.04.

use super::Algorithm;
use crate::advantage::{AdvantageEstimator, ScaleRewards};
use crate::loss::{Aggregation, Correction, KlPenalty, PolicyLoss};

impl Algorithm {
    /// The defaults, which other algorithms modify.
    #[must_use]
    pub fn grpo() -> Self {
        Self {
            advantage: AdvantageEstimator::Group { scale: ScaleRewards::Group },
            loss: PolicyLoss::Clip { low: 0.2, high: 0.2, dual: None },
            proximal: super::Proximal::Behavior,
            correction: Correction::None,
            aggregation: Aggregation::TokenMean,
            kl: KlPenalty::OFF,
            entropy_coef: 0.0,
            nll_coef: 0.0,
            entropy_share: 1.0,
            entropy_unit: super::EntropyUnit::Token,
            drop_zero_variance: false,
            demonstration_gate: None,
        }
    }
}
