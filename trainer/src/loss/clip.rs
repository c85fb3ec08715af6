//! PPO's clipped surrogate (arXiv 1707.06347), with the probability ratio of tokens or of whole sequences.
//!
//! ```text
//! loss = -min(r A, clip(r, 1 - low, 1 + high) A)            r = exp(current - proximal)
//! ```

use super::{Clipped, LossRow, Ratio, TokenLoss};

/// Clip bounds: beyond them the gradient is zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipBounds {
    /// Largest decrease of the ratio below 1, or of the log-ratio below 0.
    pub low: f64,
    /// Largest increase of the ratio above 1, or of the log-ratio above 0.
    pub high: f64,
    /// Dual clip (arXiv 1912.09729): for a negative advantage the loss is at most this factor times its size.
    pub dual: Option<f64>,
}

/// PPO (arXiv 1707.06347): the surrogate per token, `[T]`.
#[must_use]
pub fn tokens(row: LossRow<'_>, bounds: ClipBounds) -> Vec<TokenLoss> {
    let ratios =
        row.current.iter().zip(row.proximal).map(|(current, proximal)| Ratio::of(current - proximal));
    ratios.zip(row.advantages).map(|(ratio, advantage)| token(ratio, *advantage, bounds)).collect()
}

/// GSPO (arXiv 2507.18071): every token has the sequence ratio `s = exp(mean(current - proximal))`; the gradient of a
/// token is that of `sg[s] * exp(current - sg[current])`, with `sg` the stop-gradient. The result is `[T]`.
#[must_use]
pub fn gspo(row: LossRow<'_>, bounds: ClipBounds) -> Vec<TokenLoss> {
    let Ratio { value, .. } = Ratio::of(mean_log_ratio(row));
    let ratio = Ratio { value, slope: value };
    row.advantages.iter().map(|advantage| token(ratio, *advantage, bounds)).collect()
}

/// GMPO (arXiv 2507.20673): the loss of a sequence with advantage `A` is `-A exp(mean(m))`, where `m` is the log-ratio
/// of a token, at most `high` if `A` is above 0, at least `-low` otherwise. Every token of the result `[T]` has the
/// loss of its sequence.
#[must_use]
pub fn gmpo(row: LossRow<'_>, bounds: ClipBounds) -> Vec<TokenLoss> {
    let log_ratio =
        |t: usize| (row.current[t] - row.proximal[t]).clamp(-super::MAX_LOG_RATIO, super::MAX_LOG_RATIO);
    let clipped = |t: usize| {
        let (log_ratio, good) = (log_ratio(t), row.advantages[t] > 0.0);
        match good {
            true if log_ratio > bounds.high => (bounds.high, Clipped::High),
            false if log_ratio < -bounds.low => (-bounds.low, Clipped::Low),
            _ => (log_ratio, Clipped::No),
        }
    };
    let tokens = row.current.len();
    let mean = (0..tokens).map(|t| clipped(t).0).sum::<f64>() / tokens.max(1) as f64;
    let of = |t: usize| {
        let (loss, clipped) = (-row.advantages[t] * libm::exp(mean), clipped(t).1);
        let inside = (row.current[t] - row.proximal[t]).abs() <= super::MAX_LOG_RATIO;
        let derivative = if clipped == Clipped::No && inside { loss } else { 0.0 };
        TokenLoss { loss, derivative, weight: 1.0, clipped }
    };
    (0..tokens).map(of).collect()
}

fn mean_log_ratio(row: LossRow<'_>) -> f64 {
    let sum: f64 = row.current.iter().zip(row.proximal).map(|(current, proximal)| current - proximal).sum();
    sum / row.current.len().max(1) as f64
}

fn token(ratio: Ratio, advantage: f64, bounds: ClipBounds) -> TokenLoss {
    let Ratio { value, slope } = ratio;
    let bounded = value.clamp(1.0 - bounds.low, 1.0 + bounds.high);
    let clipped = if advantage > 0.0 && value > 1.0 + bounds.high {
        Clipped::High
    } else if advantage < 0.0 && value < 1.0 - bounds.low {
        Clipped::Low
    } else {
        Clipped::No
    };
    let objective = (value * advantage).min(bounded * advantage);
    if let Some(floor) =
        bounds.dual.map(|dual| dual * advantage).filter(|floor| advantage < 0.0 && objective < *floor)
    {
        return TokenLoss { loss: -floor, derivative: 0.0, weight: 1.0, clipped: Clipped::Dual };
    }
    let derivative = if clipped == Clipped::No { -slope * advantage } else { 0.0 };
    TokenLoss { loss: -objective, derivative, weight: 1.0, clipped }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: ClipBounds = ClipBounds { low: 0.2, high: 0.28, dual: None };

    fn one(log_ratio: f64, advantage: f64) -> TokenLoss {
        token(Ratio::of(log_ratio), advantage, BOUNDS)
    }

    #[test]
    fn on_policy_it_is_the_policy_gradient() {
        assert_eq!(
            one(0.0, 0.7),
            TokenLoss { loss: -0.7, derivative: -0.7, weight: 1.0, clipped: Clipped::No }
        );
    }

    #[test]
    fn the_clip_is_one_sided() {
        assert_eq!(
            one(0.5, 1.0),
            TokenLoss { loss: -1.28, derivative: 0.0, weight: 1.0, clipped: Clipped::High }
        );
        assert!(one(0.5, -1.0).derivative > 0.0);
        assert_eq!(one(-1.5, -1.0).clipped, Clipped::Low);
        assert!(one(1e4, -1.0).loss.is_finite());
    }
}
