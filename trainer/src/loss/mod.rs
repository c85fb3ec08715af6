//! Losses of the tokens of one trajectory with their derivatives, and the parts that losses are combined from.
//!
//! Invariant: a loss is arithmetic on host numbers in f64. Its input is log-probabilities; its output per token is the
//! loss and the derivative by the current log-probability. It uses no tensors, so every formula has one implementation,
//! which is tested against PyTorch's autograd.
//!
//! # Layout
//! - [`clip`]: PPO's clipped surrogate, per token (PPO, GRPO) and per sequence (GSPO, GMPO); [`soft`]: a smooth gate
//!   (SAPO)
//! - [`weighted`]: REINFORCE with a bounded importance weight (CISPO, AIPO, TOPR, DPPO); negative log-likelihood
//! - [`trajectory_balance`]: matching a target distribution (TBA)
//! - [`value`]: value loss of the critic; [`preference`]: losses of preference pairs (DPO, IPO, Bradley-Terry)
//! - [`correction`]: off-policy corrections; [`kl`]: KL penalty from a reference policy
//! - [`aggregation`]: denominators of token losses

pub mod aggregation;
pub mod clip;
pub mod correction;
pub mod kl;
pub mod preference;
pub mod soft;
pub mod trajectory_balance;
pub mod value;
pub mod weighted;

use serde::{Deserialize, Serialize};

pub use aggregation::{Aggregation, TokenCounts};
pub use correction::Correction;
pub use kl::{KlEstimator, KlPenalty};

/// Log-ratios are clamped to this before they are exponentiated, as in verl.
pub const MAX_LOG_RATIO: f64 = 20.0;

/// The `T` trained tokens of a trajectory as input of a loss; all slices are `[T]`.
#[derive(Clone, Copy, Debug)]
pub struct LossRow<'a> {
    /// Log-probabilities under the current policy, which is differentiated, nats.
    pub current: &'a [f64],
    /// Under the proximal policy, which anchors the clip, nats.
    pub proximal: &'a [f64],
    /// Under the behavior policy, which sampled the tokens, nats.
    pub behavior: &'a [f64],
    /// Advantages.
    pub advantages: &'a [f64],
}

/// The loss of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLoss {
    /// The loss, before correction weight and aggregation.
    pub loss: f64,
    /// Derivative of the row's whole loss by the token's current log-probability.
    pub derivative: f64,
    /// The importance weight inside the loss; 1 for losses without one.
    pub weight: f64,
    /// Which bound set the gradient to zero.
    pub clipped: Clipped,
}

/// Which bound set a token's gradient to zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clipped {
    /// None.
    #[default]
    No,
    /// The ratio fell below its lower bound with a negative advantage.
    Low,
    /// The ratio rose above its upper bound with a positive advantage.
    High,
    /// The ratio rose above the dual clip with a negative advantage.
    Dual,
}

/// The policy loss of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum PolicyLoss {
    /// PPO's clipped surrogate (arXiv 1707.06347); see [`clip::tokens`].
    Clip {
        /// The ratio may fall to `1 - low`.
        low: f64,
        /// The ratio may rise to `1 + high`.
        high: f64,
        /// Dual clip: bound of the loss for a negative advantage (arXiv 1912.09729).
        dual: Option<f64>,
    },
    /// The ratio of the whole sequence, clipped (GSPO, arXiv 2507.18071); see [`clip::gspo`].
    Gspo {
        /// The ratio may fall to `1 - low`.
        low: f64,
        /// The ratio may rise to `1 + high`.
        high: f64,
    },
    /// The geometric mean of clipped ratios (GMPO, arXiv 2507.20673); see [`clip::gmpo`].
    Gmpo {
        /// The log-ratio may fall to `-low`.
        low: f64,
        /// The log-ratio may rise to `high`.
        high: f64,
    },
    /// REINFORCE weighted by the clipped importance ratio (CISPO, arXiv 2506.13585; AIPO, arXiv 2505.24034).
    Cispo {
        /// Smallest weight.
        low: f64,
        /// Largest weight.
        high: f64,
    },
    /// REINFORCE weighted by the sequence's importance ratio within bounds that depend on the sign of the advantage
    /// (TOPR, arXiv 2503.14286).
    Topr {
        /// Bounds for a positive advantage.
        positive: WeightBounds,
        /// Bounds for a negative advantage.
        negative: WeightBounds,
    },
    /// REINFORCE with a mask on tokens whose probability moved too far (DPPO, arXiv 2602.04879, verl `dppo_tv`).
    Dppo {
        /// A token with a negative advantage is masked once its probability fell by more than this.
        low: f64,
        /// A token with a positive advantage is masked once its probability rose by more than this.
        high: f64,
        /// Largest importance ratio.
        cap: f64,
    },
    /// A smooth gate instead of a clip (SAPO, arXiv 2511.20347); see [`soft::sapo`].
    Sapo {
        /// Temperature for a positive advantage.
        tau_positive: f64,
        /// Temperature for a negative advantage.
        tau_negative: f64,
    },
    /// REINFORCE (Williams 1992): `-advantage * log-probability`.
    Reinforce,
    /// Negative log-likelihood, without an advantage.
    Nll,
    /// Trajectory balance (arXiv 2503.18929); see [`trajectory_balance`].
    TrajectoryBalance {
        /// Temperature of the target `reference * exp(reward / beta)`.
        beta: f64,
    },
}

/// Bounds of an importance weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightBounds {
    /// Smallest weight.
    pub low: f64,
    /// Largest weight.
    pub high: f64,
}

impl PolicyLoss {
    /// Losses of all tokens of a trajectory, `[T]`.
    ///
    /// # Panics
    /// For [`PolicyLoss::TrajectoryBalance`], which needs the whole group: see [`trajectory_balance::row`].
    #[must_use]
    pub fn row(&self, row: LossRow<'_>) -> Vec<TokenLoss> {
        match *self {
            Self::Clip { low, high, dual } => clip::tokens(row, clip::ClipBounds { low, high, dual }),
            Self::Gspo { low, high } => clip::gspo(row, clip::ClipBounds { low, high, dual: None }),
            Self::Gmpo { low, high } => clip::gmpo(row, clip::ClipBounds { low, high, dual: None }),
            Self::Cispo { low, high } => weighted::cispo(row, low, high),
            Self::Topr { positive, negative } => weighted::topr(row, positive, negative),
            Self::Dppo { low, high, cap } => weighted::dppo(row, low, high, cap),
            Self::Sapo { tau_positive, tau_negative } => soft::sapo(row, tau_positive, tau_negative),
            Self::Reinforce => weighted::reinforce(row),
            Self::Nll => weighted::nll(row),
            Self::TrajectoryBalance { .. } => {
                unreachable!("its loss is over a group: see `trajectory_balance::row`")
            }
        }
    }

    /// Whether the loss uses the proximal policy.
    #[must_use]
    pub fn uses_proximal(&self) -> bool {
        matches!(self, Self::Clip { .. } | Self::Gspo { .. } | Self::Gmpo { .. } | Self::Sapo { .. })
    }
}

/// Probability ratio `exp(log_ratio)` with the log-ratio clamped, and its derivative by the log-ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) value: f64,
    pub(crate) slope: f64,
}

impl Ratio {
    pub(crate) fn of(log_ratio: f64) -> Self {
        let value = libm::exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO));
        Self { value, slope: if log_ratio.abs() > MAX_LOG_RATIO { 0.0 } else { value } }
    }
}

/// `1 / (1 + exp(-x))`, without overflow.
pub(crate) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + libm::exp(-x))
    } else {
        let e = libm::exp(x);
        e / (1.0 + e)
    }
}
