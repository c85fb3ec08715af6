//! Off-policy corrections: what a token weighs because another policy than the proximal one sampled it.
//!
//! With `rho = exp(proximal - behavior)` per token. Weights carry no gradient. A masked token leaves the loss and every
//! denominator: a step on masked data is a step on what is left, not a smaller one.

use serde::{Deserialize, Serialize};

use super::{MAX_LOG_RATIO, Ratio};

/// How tokens are weighted, or left out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Correction {
    /// Not at all.
    None,
    /// `min(rho, cap)`: truncated importance sampling (TIS; decoupled PPO of AReaL, arXiv 2505.24298).
    TokenTruncate {
        /// Largest weight.
        cap: f64,
    },
    /// `min(product of rho, cap)` for all tokens of the sequence.
    SequenceTruncate {
        /// Largest weight.
        cap: f64,
    },
    /// `rho` if `low <= rho <= high`, otherwise masked (IcePop).
    TokenMask {
        /// Least ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
    },
    /// `rho`; a sequence is masked unless `low <= product of rho <= high` (masked importance sampling).
    SequenceMask {
        /// Least ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
    },
    /// `rho`; a sequence is masked unless `low <= geometric mean of rho <= high`.
    GeometricMask {
        /// Least ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
    },
    /// `rho`; a sequence is masked unless the mean of `rho - log rho - 1` is at most `high`.
    K3Mask {
        /// Largest divergence, nats.
        high: f64,
    },
}

/// Weights of the tokens of a trajectory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Corrected {
    /// `[T]` 0 where a token is masked.
    pub weights: Vec<f64>,
    /// `[T]` whether the token is trained on.
    pub kept: Vec<bool>,
}

impl Correction {
    /// Whether it can leave tokens out.
    #[must_use]
    pub fn masks(&self) -> bool {
        match self {
            Self::None | Self::TokenTruncate { .. } | Self::SequenceTruncate { .. } => false,
            Self::TokenMask { .. }
            | Self::SequenceMask { .. }
            | Self::GeometricMask { .. }
            | Self::K3Mask { .. } => true,
        }
    }

    /// Weights of a trajectory whose log-probabilities are `proximal` and `behavior`, `[T]` nats.
    #[must_use]
    pub fn of(&self, proximal: &[f64], behavior: &[f64]) -> Corrected {
        let log_rho = || proximal.iter().zip(behavior).map(|(p, b)| p - b);
        let rho = || log_rho().map(|log| Ratio::of(log).value);
        let tokens = proximal.len();
        let mean = |sum: f64| sum / tokens.max(1) as f64;
        let all = |weights: Vec<f64>| Corrected { weights, kept: vec![true; tokens] };
        let whole = |keep: bool| Corrected {
            weights: rho().map(|rho| if keep { rho } else { 0.0 }).collect(),
            kept: vec![keep; tokens],
        };
        match *self {
            Self::None => all(vec![1.0; tokens]),
            Self::TokenTruncate { cap } => all(rho().map(|rho| rho.min(cap)).collect()),
            Self::SequenceTruncate { cap } => all(vec![Ratio::of(log_rho().sum()).value.min(cap); tokens]),
            Self::TokenMask { low, high } => {
                let kept: Vec<bool> = rho().map(|rho| (low..=high).contains(&rho)).collect();
                let weights = rho().zip(&kept).map(|(rho, kept)| if *kept { rho } else { 0.0 }).collect();
                Corrected { weights, kept }
            }
            Self::SequenceMask { low, high } => {
                whole((low..=high).contains(&Ratio::of(log_rho().sum()).value))
            }
            Self::GeometricMask { low, high } => {
                whole((low..=high).contains(&Ratio::of(mean(log_rho().sum())).value))
            }
            Self::K3Mask { high } => {
                let clamped = |log: f64| log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO);
                whole(mean(log_rho().map(|log| Ratio::of(log).value - clamped(log) - 1.0).sum()) <= high)
            }
        }
    }
}

/// A proximal policy between behavior and current without a forward pass (A-3PO): `behavior + a (current - behavior)`
/// with `a = d / (d + 1)` for a token of staleness `d`, so that a fresh token is anchored at the policy that sampled it.
#[must_use]
pub fn interpolated(current: f64, behavior: f64, staleness: u64) -> f64 {
    let d = staleness as f64;
    behavior + d / (d + 1.0) * (current - behavior)
}
