//! Losses of one trajectory's tokens, each with its derivative, and the parts that they are combined from.
//!
//! Invariant: a loss is arithmetic on host numbers in f64. It is handed log-probabilities and returns, per token, the
//! loss and its derivative by the current log-probability; it knows no tensor, so every formula stands in one place and
//! is tested against PyTorch's autograd.
//!
//! # Layout
//! - [`clip`]: PPO's surrogate, per token (PPO, GRPO) and per sequence (GSPO, GMPO); [`soft`]: without an edge (SAPO)
//! - [`weighted`]: REINFORCE with a bounded weight (CISPO, AIPO, TOPR, DPPO), supervised learning
//! - [`trajectory_balance`]: matching a target distribution
//! - [`value`]: the critic's; [`preference`]: pairs
//! - [`correction`]: for tokens that another policy sampled; [`divergence`]: from a reference
//! - [`aggregation`]: how tokens add up

pub mod aggregation;
pub mod clip;
pub mod correction;
pub mod divergence;
pub mod preference;
pub mod soft;
pub mod trajectory_balance;
pub mod value;
pub mod weighted;

use serde::{Deserialize, Serialize};

pub use aggregation::{Aggregation, Counts};
pub use correction::Correction;
pub use divergence::{Divergence, Estimator};

/// Log-ratios are clamped to this before they are exponentiated.
pub const MAX_LOG_RATIO: f64 = 20.0;

/// The `T` trained tokens of a trajectory as a loss sees them; all slices are `[T]`.
#[derive(Clone, Copy, Debug)]
pub struct RowTerms<'a> {
    /// Log-probabilities under the policy being differentiated, nats.
    pub current: &'a [f64],
    /// Under the policy that anchors the clip, nats.
    pub proximal: &'a [f64],
    /// Under the distribution that sampled the tokens, nats.
    pub behavior: &'a [f64],
    /// How much better each token was than what it is compared with.
    pub advantages: &'a [f64],
}

/// What a loss says of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLoss {
    /// The loss, without the factors of correction and aggregation.
    pub loss: f64,
    /// Derivative of the whole row's loss by the token's current log-probability.
    pub derivative: f64,
    /// The importance weight that is part of the loss; 1 for losses that have none.
    pub weight: f64,
    /// Which bound took the gradient away.
    pub clipped: Clipped,
}

/// Which bound took a token's gradient away.
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

/// Losses of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum PolicyLoss {
    /// PPO's clipped surrogate (arXiv 1707.06347); see [`clip::tokens`].
    Clip {
        /// The ratio may fall to `1 - low`.
        low: f64,
        /// The ratio may rise to `1 + high`.
        high: f64,
        /// Bound of the loss of bad tokens whose ratio rose (dual clip, arXiv 1912.09729).
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
        /// Least weight.
        low: f64,
        /// Largest weight.
        high: f64,
    },
    /// REINFORCE weighted by the sequence's importance ratio within bounds that depend on the sign of the advantage
    /// (TOPR, arXiv 2503.14286).
    Topr {
        /// Bounds for good trajectories.
        positive: (f64, f64),
        /// Bounds for bad trajectories.
        negative: (f64, f64),
    },
    /// REINFORCE without the tokens whose probability moved away too far (DPPO, arXiv 2602.04879, verl `dppo_tv`).
    Dppo {
        /// Bad tokens are left out once their probability fell by more than this.
        low: f64,
        /// Good tokens are left out once their probability rose by more than this.
        high: f64,
        /// Largest importance ratio.
        cap: f64,
    },
    /// A smooth gate instead of a clip (SAPO, arXiv 2511.20347); see [`soft::sapo`].
    Sapo {
        /// Sharpness for good tokens.
        tau_positive: f64,
        /// Sharpness for bad tokens.
        tau_negative: f64,
    },
    /// `-advantage * log-probability`.
    Reinforce,
    /// Negative log-likelihood, whatever the advantage.
    Nll,
    /// Trajectory balance (arXiv 2503.18929); see [`trajectory_balance`].
    TrajectoryBalance {
        /// The target is the reference times `exp(reward / beta)`.
        beta: f64,
    },
}

impl PolicyLoss {
    /// Losses of all tokens of a trajectory.
    ///
    /// # Panics
    /// For [`PolicyLoss::TrajectoryBalance`], which is a matter of the whole group: see [`trajectory_balance::row`].
    #[must_use]
    pub fn row(&self, row: RowTerms<'_>) -> Vec<TokenLoss> {
        match *self {
            Self::Clip { low, high, dual } => clip::tokens(row, clip::Bounds { low, high, dual }),
            Self::Gspo { low, high } => clip::gspo(row, clip::Bounds { low, high, dual: None }),
            Self::Gmpo { low, high } => clip::gmpo(row, clip::Bounds { low, high, dual: None }),
            Self::Cispo { low, high } => weighted::cispo(row, low, high),
            Self::Topr { positive, negative } => weighted::topr(row, positive, negative),
            Self::Dppo { low, high, cap } => weighted::dppo(row, (low, high), cap),
            Self::Sapo { tau_positive, tau_negative } => soft::sapo(row, tau_positive, tau_negative),
            Self::Reinforce => weighted::reinforce(row),
            Self::Nll => weighted::nll(row),
            Self::TrajectoryBalance { .. } => {
                unreachable!("the trainer asks trajectory balance for its rows")
            }
        }
    }

    /// Whether the loss looks at the policy that anchors the clip.
    #[must_use]
    pub fn uses_proximal(&self) -> bool {
        matches!(self, Self::Clip { .. } | Self::Gspo { .. } | Self::Gmpo { .. } | Self::Sapo { .. })
    }
}

/// `exp(log_ratio)` with the log-ratio clamped, and its derivative by the log-ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) value: f64,
    pub(crate) slope: f64,
}

impl Ratio {
    pub(crate) fn of(log_ratio: f64) -> Self {
        let value = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp();
        Self { value, slope: if log_ratio.abs() > MAX_LOG_RATIO { 0.0 } else { value } }
    }
}

/// `1 / (1 + exp(-x))`, without overflow.
pub(crate) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}
