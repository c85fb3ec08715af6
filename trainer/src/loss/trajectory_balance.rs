//! Trajectory balance with the VarGrad estimate of the partition function (TBA, arXiv 2503.18929).
//!
//! ```text
//! log Z = mean over the group of  log p_ref(y) - log p(y) + r(y) / beta         (no gradient)
//! loss  = mean over the group of (log Z + log p(y) - log p_ref(y) - r(y) / beta)^2
//! ```
//!
//! Log-probabilities are sums over tokens. The minimum is `p = p_ref * exp(r / beta) / Z` under any sampling policy, so
//! no importance weights are needed.

use super::{Clipped, TokenLoss};

/// Sequence log-probabilities and reward of one trajectory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// Log-probability of all its tokens under the current policy, nats.
    pub current: f64,
    /// Log-probability of all its tokens under the reference policy, nats.
    pub reference: f64,
    /// Its reward.
    pub reward: f64,
}

impl Balance {
    /// The trajectory's estimate of `log Z`.
    #[must_use]
    pub fn log_z(&self, beta: f64) -> f64 {
        self.reference - self.current + self.reward / beta
    }
}

/// `log Z` of a group: the mean of its trajectories' estimates. `group` is `[G]`.
#[must_use]
pub fn log_z(group: &[Balance], beta: f64) -> f64 {
    crate::advantage::mean(group.iter().map(|balance| balance.log_z(beta)))
}

/// Losses `[tokens]` of a trajectory, which sum to its squared residual.
#[must_use]
pub fn row(balance: Balance, log_z: f64, beta: f64, tokens: usize) -> Vec<TokenLoss> {
    let residual = log_z - balance.log_z(beta);
    let loss = residual * residual / tokens.max(1) as f64;
    vec![TokenLoss { loss, derivative: 2.0 * residual, weight: 1.0, clipped: Clipped::No }; tokens]
}
