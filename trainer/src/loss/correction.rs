//! Off-policy corrections: what a token weighs because another policy than the proximal one sampled it.
//!
//! With `rho = exp(proximal - behavior)` per token. Weights carry no gradient and are bounded: what a mask keeps is weighted
//! as in the source of the mask, so that no token of a kept sequence has a weight beyond the cap. A masked token leaves the
//! loss and every denominator: a step on masked data is a step on what is left, not a smaller one.

use serde::{Deserialize, Serialize};

use super::{MAX_LOG_RATIO, Ratio};

/// Largest weight of a token of a sequence that a geometric or k3 mask keeps (verl `rollout_is_threshold`): the bounds of
/// these masks are of a mean over the sequence, and one token can be far outside where the mean is within.
pub const KEPT_TOKEN_CAP: f64 = 2.0;

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
    /// The product of rho for all tokens of the sequence if it is within `low..=high`, otherwise the sequence is masked
    /// (Seq-MIS: verl `decoupled_seq_is_rs`, TRL `sequence_mask`).
    SequenceMask {
        /// Least ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
    },
    /// `min(rho, 2)`; a sequence is masked unless `low <= geometric mean of rho <= high` (verl
    /// `decoupled_geo_rs_token_tis`).
    GeometricMask {
        /// Least ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
    },
    /// `min(rho, 2)`; a sequence is masked unless the mean of `rho - log rho - 1` is at most `high` (verl
    /// `decoupled_k3_rs_token_tis`).
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
                Corrected { weights, kept }
            }
            Self::SequenceMask { low, high } => {
                let product = Ratio::of(log_rho().sum()).value;
                let keep = (low..=high).contains(&product);
                Corrected {
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

/// A proximal policy between behavior and current without a forward pass (A-3PO): `behavior + a (current - behavior)`
/// with `a = d / (d + 1)` for a token of staleness `d`, so that a fresh token is anchored at the policy that sampled it.
#[must_use]
pub fn interpolated(current: f64, behavior: f64, staleness: u64) -> f64 {
    let d = staleness as f64;
    behavior + d / (d + 1.0) * (current - behavior)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two tokens whose ratios are 35 and 1 / 35: every mean over the sequence is that of a fresh one.
    const OPPOSED: ([f64; 2], [f64; 2]) = ([-1.0, -4.555_348_061_489_413], [-4.555_348_061_489_413, -1.0]);

    #[test]
    fn what_a_mask_keeps_has_a_bounded_weight() {
        let (proximal, behavior) = OPPOSED;
        let weights = |correction: Correction| correction.of(&proximal, &behavior).weights;
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
        fn no_weight_is_beyond_its_cap(
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
                    let Corrected { weights, kept } = correction.of(proximal, behavior);
                    prop_assert!(weights.iter().all(|weight| *weight <= cap), "{correction:?} {weights:?}");
                    prop_assert!(weights.iter().zip(&kept).all(|(weight, kept)| *kept || *weight == 0.0));
                }
            }
        }
    }
}
