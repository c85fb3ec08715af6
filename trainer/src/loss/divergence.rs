//! Estimates of the divergence from a reference policy, token by token (Schulman 2020, "Approximating KL divergence").
//!
//! With `d = reference - current`: `k1 = -d`, `k2 = d^2 / 2`, `k3 = exp(d) - d - 1`, as in verl (`kl_penalty`): `k1` and `k2`
//! are not bounded; `k3` is at most 10, with `d` within 20, and has no gradient beyond either. In the loss, `k1` has a gradient
//! that is zero on average; `k2` has that of the divergence.

use serde::{Deserialize, Serialize};

use super::{MAX_LOG_RATIO, Ratio};

/// Largest value of `k3`, nats.
const MAX_K3: f64 = 10.0;

/// Which estimate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// Unbiased, of large variance.
    K1,
    /// Biased, of small variance; its gradient is that of the divergence.
    K2,
    /// Unbiased, of small variance, never negative (GRPO; verl `low_var_kl`). At most 10 nats a token.
    #[default]
    K3,
}

/// Where the divergence is charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Added to the loss of every token.
    #[default]
    Loss,
    /// Taken off the reward of every token.
    Reward,
}

/// A pull towards the reference policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Its strength; 0 is off.
    pub coef: f64,
    /// How it is estimated.
    pub estimator: Estimator,
    /// Where it is charged.
    pub place: Place,
}

impl Divergence {
    /// No pull.
    pub const OFF: Self = Self { coef: 0.0, estimator: Estimator::K3, place: Place::Loss };

    /// Whether it stands in the loss.
    #[must_use]
    pub fn in_loss(&self) -> bool {
        self.coef != 0.0 && self.place == Place::Loss
    }

    /// Whether it is taken off the reward.
    #[must_use]
    pub fn in_reward(&self) -> bool {
        self.coef != 0.0 && self.place == Place::Reward
    }
}

impl Estimator {
    /// The estimate at one token, and its derivative by the current log-probability.
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
