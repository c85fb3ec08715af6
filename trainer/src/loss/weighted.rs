//! REINFORCE with an importance weight per token that carries no gradient: `loss = -weight * advantage * current`.
//!
//! The losses differ only in the weight. It already corrects for the behavior policy, so no other correction is needed.

use super::{Clipped, LossRow, Ratio, TokenLoss, WeightBounds};

/// `clip(exp(current - behavior), low, high)`: CISPO (arXiv 2506.13585); with `low = 0` AIPO (arXiv 2505.24034) and
/// ScaleRL (arXiv 2510.13786), which bound the weight from above only. The result is `[T]`.
#[must_use]
pub fn cispo(row: LossRow<'_>, low: f64, high: f64) -> Vec<TokenLoss> {
    let weight = |t: usize| {
        let ratio = Ratio::of(row.current[t] - row.behavior[t]).value;
        let clipped = if ratio > high {
            Clipped::High
        } else if ratio < low {
            Clipped::Low
        } else {
            Clipped::No
        };
        (ratio.clamp(low, high), clipped)
    };
    weighted(row, weight)
}

/// TOPR (arXiv 2503.14286): the importance ratio of the sequence, clamped to bounds by the sign of the advantage,
/// `[T]`.
#[must_use]
pub fn topr(row: LossRow<'_>, positive: WeightBounds, negative: WeightBounds) -> Vec<TokenLoss> {
    let sum: f64 = row.current.iter().zip(row.behavior).map(|(current, behavior)| current - behavior).sum();
    let ratio = Ratio::of(sum).value;
    let weight = |t: usize| {
        let WeightBounds { low, high } = if row.advantages[t] > 0.0 { positive } else { negative };
        (ratio.clamp(low, high), Clipped::No)
    };
    weighted(row, weight)
}

/// DPPO with binary total variation (arXiv 2602.04879), as in the authors' verl code (`dppo_tv`): a token is masked if
/// its probability moved by more than a bound in the direction of its advantage; the others are weighted by their
/// importance ratio, at most `cap`, without a gradient. prime-rl's loss has the same gradient without a cap. The result
/// is `[T]`.
#[must_use]
pub fn dppo(row: LossRow<'_>, low: f64, high: f64, cap: f64) -> Vec<TokenLoss> {
    let weight = |t: usize| {
        let moved = libm::exp(row.current[t]) - libm::exp(row.behavior[t]);
        if row.advantages[t] > 0.0 && moved > high {
            (0.0, Clipped::High)
        } else if row.advantages[t] < 0.0 && moved < -low {
            (0.0, Clipped::Low)
        } else {
            (Ratio::of(row.current[t] - row.behavior[t]).value.min(cap), Clipped::No)
        }
    };
    weighted(row, weight)
}

/// REINFORCE (Williams 1992): weight 1, `[T]`.
#[must_use]
pub fn reinforce(row: LossRow<'_>) -> Vec<TokenLoss> {
    weighted(row, |_| (1.0, Clipped::No))
}

/// Negative log-likelihood `[T]`, as in supervised fine-tuning.
#[must_use]
pub fn nll(row: LossRow<'_>) -> Vec<TokenLoss> {
    row.current
        .iter()
        .map(|current| TokenLoss { loss: -current, derivative: -1.0, weight: 1.0, clipped: Clipped::No })
        .collect()
}

fn weighted(row: LossRow<'_>, weight: impl Fn(usize) -> (f64, Clipped)) -> Vec<TokenLoss> {
    let of = |(t, (current, advantage)): (usize, (&f64, &f64))| {
        let (weight, clipped) = weight(t);
        let derivative = -weight * advantage;
        TokenLoss { loss: derivative * current, derivative, weight, clipped }
    };
    row.current.iter().zip(row.advantages).enumerate().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Algorithm;

    /// The weight under the default `dppo` of a token whose probability rose from `behavior` by a factor of `ratio`.
    fn dppo_weight(behavior: f64, ratio: f64, advantage: f64) -> (f64, Clipped) {
        let (behavior, current) = ([behavior.ln()], [(behavior * ratio).ln()]);
        let row =
            LossRow { current: &current, proximal: &current, behavior: &behavior, advantages: &[advantage] };
        let token = Algorithm::dppo().loss.row(row)[0];
        (token.weight, token.clipped)
    }

    #[test]
    fn dppo_keeps_large_ratios_of_small_probabilities_up_to_its_cap() {
        let close = |(weight, clipped): (f64, Clipped), expected: f64| {
            (weight - expected).abs() < 1e-9 && clipped == Clipped::No
        };
        // 0.001 to 0.035: a large ratio, but a small change of probability.
        for (ratio, weight) in [(1.0, 1.0), (5.0, 5.0), (15.0, 15.0), (35.0, 20.0)] {
            assert!(close(dppo_weight(1e-3, ratio, 1.0), weight), "{ratio}");
            assert!(close(dppo_weight(1e-3, ratio, -1.0), weight), "{ratio}");
        }
        // 0.01 to 0.35: a change above 0.2, which masks the token for a positive advantage only.
        assert_eq!(dppo_weight(1e-2, 35.0, 1.0), (0.0, Clipped::High));
        assert!(close(dppo_weight(1e-2, 35.0, -1.0), 20.0));
        assert_eq!(dppo_weight(0.5, 0.5, -1.0), (0.0, Clipped::Low));
    }
}
