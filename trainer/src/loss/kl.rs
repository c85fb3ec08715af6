//! KL penalty: per-token estimates of the KL divergence from a reference policy (Schulman 2020, "Approximating KL
//! divergence").
//!
//! With `d = reference - current`: `k1 = -d`, `k2 = d^2 / 2`, `k3 = exp(d) - d - 1`, as in verl (`kl_penalty`). `k1`
//! and `k2` are unbounded. `k3` is at most 10, `d` is clamped to 20, and the gradient is 0 beyond either bound. In the
//! loss, the expected gradient of `k1` is zero; that of `k2` is the gradient of the KL divergence.

use serde::{Deserialize, Serialize};

use super::{MAX_LOG_RATIO, Ratio};

/// Largest value of `k3`, nats.
const MAX_K3: f64 = 10.0;

/// Estimator of the KL divergence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// Unbiased, high variance.
    K1,
    /// Biased, low variance; its gradient is that of the KL divergence.
    K2,
    /// Unbiased, low variance, never negative (GRPO; verl `low_var_kl`). At most 10 nats a token.
    #[default]
    K3,
}

/// Where the KL penalty is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlPlacement {
    /// Added to the loss of every token.
    #[default]
    Loss,
    /// Subtracted from the reward of every token.
    Reward,
}

/// Penalty on the KL divergence from the reference policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KlPenalty {
    /// Coefficient; 0 disables the penalty.
    pub coef: f64,
    /// Estimator.
    pub estimator: KlEstimator,
    /// Where the penalty is applied.
    pub placement: KlPlacement,
}

impl KlPenalty {
    /// No penalty.
    pub const OFF: Self = Self { coef: 0.0, estimator: KlEstimator::K3, placement: KlPlacement::Loss };

    /// Whether the penalty is part of the loss.
    #[must_use]
    pub fn in_loss(&self) -> bool {
        self.coef != 0.0 && self.placement == KlPlacement::Loss
    }

    /// Whether the penalty is subtracted from the reward.
    #[must_use]
    pub fn in_reward(&self) -> bool {
        self.coef != 0.0 && self.placement == KlPlacement::Reward
    }
}

impl KlEstimator {
    /// The estimate at one token and its derivative by the current log-probability; log-probabilities in nats.
    #[must_use]
    pub fn token(self, current: f64, reference: f64) -> (f64, f64) {
        let d = reference - current;
        match self {
            Self::K1 => (-d, 1.0),
            Self::K2 => (0.5 * d * d, -d),
            Self::K3 => {
                let Ratio { value, slope } = Ratio::of(d);
                let divergence = value - d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - 1.0;
                let free = divergence <= MAX_K3 && d.abs() <= MAX_LOG_RATIO;
                (divergence.min(MAX_K3), if free { 1.0 - slope } else { 0.0 })
            }
        }
    }
}
