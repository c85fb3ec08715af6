//! Off-policy corrections: importance weights and masks for tokens that another policy than the proximal one sampled.
//!
//! With the importance ratio `rho = exp(proximal - behavior)` per token. Weights carry no gradient and are bounded.
//! Kept tokens are weighted as in the source of each mask, so no token has a weight above the cap. A masked token
//! leaves the loss and every denominator: masking does not shrink the step.

use serde::{Deserialize, Serialize};

use super::{MAX_LOG_RATIO, Ratio};

/// Largest weight of a token in a sequence that a geometric or k3 mask keeps (verl `rollout_is_threshold`). These masks
/// bound a mean over the sequence, and a single token can be far outside the bound.
pub const KEPT_TOKEN_CAP: f64 = 2.0;

/// Which correction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Correction {
    /// No correction.
    None,
    /// `min(rho, cap)`: truncated importance sampling (TIS; decoupled PPO of AReaL, arXiv 2505.24298).
    TokenTruncate {
        /// Largest weight.
        cap: f64,
    },
    /// `min(product of rho, cap)` for all tokens of the sequence (sequence-level TIS; verl `seq_is`).
    SequenceTruncate {
        /// Largest weight.
        cap: f64,
    },
    /// `rho` if `low <= rho <= high`, otherwise the token is masked (IcePop).
    TokenMask {
        /// Smallest ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
    },
    /// The product of rho for all tokens of the sequence if it is within `low..=high`, otherwise the sequence is masked
    /// (Seq-MIS: verl `decoupled_seq_is_rs`, TRL `sequence_mask`).
    SequenceMask {
        /// Smallest ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
    },
    /// `min(rho, 2)`; a sequence is masked unless `low <= geometric mean of rho <= high` (verl
    /// `decoupled_geo_rs_token_tis`).
    GeometricMask {
        /// Smallest ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
    },
    /// `min(rho, 2)`; a sequence is masked unless the mean of `rho - log rho - 1` is at most `high` (verl
    /// `decoupled_k3_rs_token_tis`).
    K3Mask {
        /// Largest KL estimate, nats.
        high: f64,
    },
}

/// Importance weights and mask of the tokens of a trajectory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CorrectionWeights {
    /// `[T]` importance weights; 0 for masked tokens.
    pub weights: Vec<f64>,
    /// `[T]` false for masked tokens.
    pub kept: Vec<bool>,
}

impl Correction {
    /// Whether the correction can mask tokens.
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

    /// Weights of a trajectory with log-probabilities `proximal` and `behavior`, `[tokens]`, nats.
    #[must_use]
    pub fn weights(&self, proximal: &[f64], behavior: &[f64]) -> CorrectionWeights {
        let log_rho = || proximal.iter().zip(behavior).map(|(p, b)| p - b);
        let rho = || log_rho().map(|log| Ratio::of(log).value);
        let tokens = proximal.len();
        let mean = |sum: f64| sum / tokens.max(1) as f64;
        let all = |weights: Vec<f64>| CorrectionWeights { weights, kept: vec![true; tokens] };
        let whole = |keep: bool| CorrectionWeights {
            weights: rho().map(|rho| if keep { rho.min(KEPT_TOKEN_CAP) } else { 0.0 }).collect(),
            kept: vec![keep; tokens],
        };
        match *self {
            Self::None => all(vec![1.0; tokens]),
            Self::TokenTruncate { cap } => all(rho().map(|rho| rho.min(cap)).collect()),
            Self::SequenceTruncate { cap } => all(vec![Ratio::of(log_rho().sum()).value.min(cap); tokens]),
            Self::TokenMask { low, high } => {
                let kept: Vec<bool> = rho().map(|rho| (low..=high).contains(&rho)).collect();
                let weights = rho().zip(&kept).map(|(rho, kept)| if *kept { rho } else { 0.0 }).collect();
                CorrectionWeights { weights, kept }
            }
            Self::SequenceMask { low, high } => {
                let product = Ratio::of(log_rho().sum()).value;
                let keep = (low..=high).contains(&product);
                CorrectionWeights {
                    weights: vec![if keep { product } else { 0.0 }; tokens],
                    kept: vec![keep; tokens],
                }
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

/// Proximal log-probability without a forward pass (A-3PO): `behavior + a (current - behavior)` with `a = d / (d + 1)`
/// for a token of staleness `d` versions. A token of staleness 0 has its behavior policy as the proximal policy. Nats.
#[must_use]
pub fn interpolated(current: f64, behavior: f64, staleness: u64) -> f64 {
    let d = staleness as f64;
    behavior + d / (d + 1.0) * (current - behavior)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two tokens with ratios 35 and 1 / 35: all sequence means equal those of an on-policy sequence.
    const OPPOSED: ([f64; 2], [f64; 2]) = ([-1.0, -4.555_348_061_489_413], [-4.555_348_061_489_413, -1.0]);

    #[test]
    fn kept_tokens_have_a_bounded_weight() {
        let (proximal, behavior) = OPPOSED;
        let weights = |correction: Correction| correction.weights(&proximal, &behavior).weights;
        let close = |weights: &[f64], expected: [f64; 2]| {
            weights.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9)
        };
        let sequence = weights(Correction::SequenceMask { low: 0.5, high: 2.0 });
        assert!(close(&sequence, [1.0, 1.0]), "{sequence:?}");
        let geometric = weights(Correction::GeometricMask { low: 0.999, high: 1.001 });
        assert!(close(&geometric, [2.0, 1.0 / 35.0]), "{geometric:?}");
        let k3 = weights(Correction::K3Mask { high: 20.0 });
        assert!(close(&k3, [2.0, 1.0 / 35.0]), "{k3:?}");
    }

    proptest! {
        #[test]
        fn no_weight_exceeds_its_cap(
            pairs in prop::collection::vec((-40.0..0.0f64, -40.0..0.0f64), 0..12),
            near in prop::collection::vec(-0.5..0.5f64, 0..12),
        ) {
            let mut rows: Vec<(Vec<f64>, Vec<f64>)> = vec![pairs.into_iter().unzip()];
            rows.push((near.iter().map(|d| d - 1.0).collect(), vec![-1.0; near.len()]));
            for (correction, cap) in [
                (Correction::None, 1.0),
                (Correction::TokenTruncate { cap: 2.0 }, 2.0),
                (Correction::SequenceTruncate { cap: 5.0 }, 5.0),
                (Correction::TokenMask { low: 0.5, high: 5.0 }, 5.0),
                (Correction::SequenceMask { low: 0.5, high: 2.0 }, 2.0),
                (Correction::GeometricMask { low: 0.5, high: 2.0 }, KEPT_TOKEN_CAP),
                (Correction::K3Mask { high: 5.0 }, KEPT_TOKEN_CAP),
            ] {
                for (proximal, behavior) in &rows {
                    let CorrectionWeights { weights, kept } = correction.weights(proximal, behavior);
                    prop_assert!(weights.iter().all(|weight| *weight <= cap), "{correction:?} {weights:?}");
                    prop_assert!(weights.iter().zip(&kept).all(|(weight, kept)| *kept || *weight == 0.0));
                }
            }
        }
    }
}
