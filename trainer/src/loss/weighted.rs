//! REINFORCE with a weight per token that carries no gradient: `loss = -weight * advantage * current`.
//!
//! The losses differ in the weight alone. Weights are of the behavior policy, so these losses need no other correction.

use super::{Clipped, Ratio, RowTerms, TokenLoss};

/// `clip(exp(current - behavior), low, high)`: CISPO (arXiv 2506.13585); with `low = 0` AIPO (arXiv 2505.24034) and
/// ScaleRL (arXiv 2510.13786), which bound the weight on one side.
#[must_use]
pub fn cispo(row: RowTerms<'_>, low: f64, high: f64) -> Vec<TokenLoss> {
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

/// TOPR (arXiv 2503.14286): the importance ratio of the sequence, within bounds by the sign of the advantage.
#[must_use]
pub fn topr(row: RowTerms<'_>, positive: (f64, f64), negative: (f64, f64)) -> Vec<TokenLoss> {
    let sum: f64 = row.current.iter().zip(row.behavior).map(|(current, behavior)| current - behavior).sum();
    let ratio = Ratio::of(sum).value;
    let weight = |t: usize| {
        let (low, high) = if row.advantages[t] > 0.0 { positive } else { negative };
        (ratio.clamp(low, high), Clipped::No)
    };
    weighted(row, weight)
}

/// DPPO with binary total variation (arXiv 2602.04879) as its authors wrote it for verl (`dppo_tv`): a token is left out if
/// its probability moved by more than a bound in the direction that its advantage pushes it; the others are weighted by their
/// importance ratio, at most `cap`, without a gradient. prime-rl's loss has the same gradient without a cap.
#[must_use]
pub fn dppo(row: RowTerms<'_>, (low, high): (f64, f64), cap: f64) -> Vec<TokenLoss> {
    let weight = |t: usize| {
        let moved = row.current[t].exp() - row.behavior[t].exp();
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

/// Weight 1: REINFORCE (Williams 1992).
#[must_use]
pub fn reinforce(row: RowTerms<'_>) -> Vec<TokenLoss> {
    weighted(row, |_| (1.0, Clipped::No))
}

/// Negative log-likelihood: every token as if its advantage were 1.
#[must_use]
pub fn nll(row: RowTerms<'_>) -> Vec<TokenLoss> {
    row.current
        .iter()
        .map(|current| TokenLoss { loss: -current, derivative: -1.0, weight: 1.0, clipped: Clipped::No })
        .collect()
}

fn weighted(row: RowTerms<'_>, weight: impl Fn(usize) -> (f64, Clipped)) -> Vec<TokenLoss> {
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

    /// The weight that the default of `dppo` gives a token whose probability rose from `behavior` by a factor of `ratio`.
    fn dppo_weight(behavior: f64, ratio: f64, advantage: f64) -> (f64, Clipped) {
        let (behavior, current) = ([behavior.ln()], [(behavior * ratio).ln()]);
        let row =
            RowTerms { current: &current, proximal: &current, behavior: &behavior, advantages: &[advantage] };
        let token = Algorithm::dppo().loss.row(row)[0];
        (token.weight, token.clipped)
    }

    #[test]
    fn dppo_keeps_large_ratios_of_small_probabilities_up_to_its_cap() {
        let close = |(weight, clipped): (f64, Clipped), expected: f64| {
            (weight - expected).abs() < 1e-9 && clipped == Clipped::No
        };
        // 0.001 to 0.035: the ratio is large, the probability has hardly moved.
        for (ratio, weight) in [(1.0, 1.0), (5.0, 5.0), (15.0, 15.0), (35.0, 20.0)] {
            assert!(close(dppo_weight(1e-3, ratio, 1.0), weight), "{ratio}");
            assert!(close(dppo_weight(1e-3, ratio, -1.0), weight), "{ratio}");
        }
        // 0.01 to 0.35: it moved by more than 0.2, which leaves out a good token and no bad one.
        assert_eq!(dppo_weight(1e-2, 35.0, 1.0), (0.0, Clipped::High));
        assert!(close(dppo_weight(1e-2, 35.0, -1.0), 20.0));
        assert_eq!(dppo_weight(0.5, 0.5, -1.0), (0.0, Clipped::Low));
    }
}
