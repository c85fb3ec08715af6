//! GRPO with the decoupled off-policy correction.
//!
//! Per token, with advantage `A`, `u = exp(current - proximal)` and `w = min(exp(proximal - behavior), cap)`, which
//! carries no gradient:
//!
//! ```text
//! loss = -w * min(u A, clip(u, 1 - clip_eps_low, 1 + clip_eps_high) A)
//! ```
//!
//! The clipped surrogate is PPO's (arXiv 1707.06347), the advantage GRPO's (arXiv 2402.03300), the decoupling of the
//! policy that anchors the clip from the policy that sampled AReaL's (arXiv 2505.24298, equation 5), the cap that of
//! truncated importance sampling.

use serde::{Deserialize, Serialize};

use super::advantage::ScaleRewards;
use super::{Aggregation, Clipped, TokenLogprobs, TokenLoss};

/// Log-ratios are clamped to this before they are exponentiated.
const MAX_LOG_RATIO: f32 = 20.0;

/// Parameters of the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grpo {
    /// Lower bound of the clip is `1 - clip_eps_low`.
    pub clip_eps_low: f32,
    /// Upper bound of the clip is `1 + clip_eps_high`.
    pub clip_eps_high: f32,
    /// Largest factor by which a token is weighted up because the behavior policy was unlikely to sample it.
    pub behavior_weight_cap: f32,
    /// What the deviation from the group's mean is divided by.
    pub scale_rewards: ScaleRewards,
    /// How token losses add up.
    pub loss_agg: Aggregation,
}

impl Grpo {
    /// Loss of one token and its derivative by the current log-probability.
    #[must_use]
    pub fn token_loss(&self, logprobs: TokenLogprobs, advantage: f32) -> TokenLoss {
        let behavior_weight = ratio(logprobs.proximal - logprobs.behavior).min(self.behavior_weight_cap);
        let u = ratio(logprobs.current - logprobs.proximal);
        let clipped = if advantage > 0.0 && u > 1.0 + self.clip_eps_high {
            Clipped::High
        } else if advantage < 0.0 && u < 1.0 - self.clip_eps_low {
            Clipped::Low
        } else {
            Clipped::No
        };
        let bounded = u.clamp(1.0 - self.clip_eps_low, 1.0 + self.clip_eps_high);
        let objective = (u * advantage).min(bounded * advantage);
        let slope = if clipped == Clipped::No { u * advantage } else { 0.0 };
        TokenLoss {
            loss: -behavior_weight * objective,
            derivative: -behavior_weight * slope,
            clipped,
            behavior_weight,
        }
    }
}

fn ratio(log_ratio: f32) -> f32 {
    log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRPO: Grpo = Grpo {
        clip_eps_low: 0.2,
        clip_eps_high: 0.28,
        behavior_weight_cap: 2.0,
        scale_rewards: ScaleRewards::Group,
        loss_agg: Aggregation::TokenMean,
    };

    fn token(current: f32, proximal: f32, behavior: f32) -> TokenLogprobs {
        TokenLogprobs { current, proximal, behavior }
    }

    #[test]
    fn on_policy_it_is_the_policy_gradient() {
        let it = GRPO.token_loss(token(-1.5, -1.5, -1.5), 0.7);
        assert_eq!((it.loss, it.derivative, it.behavior_weight, it.clipped), (-0.7, -0.7, 1.0, Clipped::No));
    }

    #[test]
    fn the_clip_is_one_sided() {
        assert_eq!(GRPO.token_loss(token(0.0, -0.5, -0.5), 1.0).derivative, 0.0);
        assert_eq!(GRPO.token_loss(token(0.0, -0.5, -0.5), 1.0).loss, -1.28);
        assert!(GRPO.token_loss(token(0.0, -0.5, -0.5), -1.0).derivative > 0.0);
        assert_eq!(GRPO.token_loss(token(-2.0, -0.5, -0.5), -1.0).clipped, Clipped::Low);
    }

    #[test]
    fn unlikely_behavior_is_capped_and_likely_behavior_weighted_down() {
        assert_eq!(GRPO.token_loss(token(-0.1, -0.1, -9.0), 1.0).behavior_weight, 2.0);
        let weight = GRPO.token_loss(token(-2.0, -2.0, -1.0), 1.0).behavior_weight;
        assert!((weight - (-1.0_f32).exp()).abs() < 1e-6);
        assert!(GRPO.token_loss(token(-1e4, 0.0, -1e4), -1.0).loss.is_finite());
    }

    proptest! {
        #[test]
        fn the_derivative_is_the_derivative(c in -3.0..0.0f32, p in -3.0..0.0f32, b in -3.0..0.0f32, a in -2.0..2.0f32) {
            let u = (c - p).exp();
            prop_assume!((u - 0.8).abs() > 0.02 && (u - 1.28).abs() > 0.02);
            let h = 1e-3;
            let numeric = (GRPO.token_loss(token(c + h, p, b), a).loss - GRPO.token_loss(token(c - h, p, b), a).loss) / (2.0 * h);
            let exact = GRPO.token_loss(token(c, p, b), a).derivative;
            prop_assert!((numeric - exact).abs() < 2e-2 * (1.0 + exact.abs()), "{numeric} {exact}");
        }
    }
}
