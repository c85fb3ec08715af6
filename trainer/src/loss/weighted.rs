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

/// DPPO with binary total variation (arXiv 2602.04879): a token is left out if its probability moved by more than a bound
/// in the direction that its advantage pushes it; the others are weighted by their importance ratio, at most `cap`.
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
