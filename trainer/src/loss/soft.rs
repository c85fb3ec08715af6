//! SAPO (arXiv 2511.20347): a smooth gate on the ratio instead of a clip, sharper for negative advantages.

use super::{Clipped, LossRow, Ratio, TokenLoss, sigmoid};

/// `loss = -f(r) A` with `f(r) = sigmoid(tau (r - 1)) * 4 / tau` and `r = exp(current - proximal)`; `tau` depends on
/// the sign of the advantage. The result is `[T]`.
#[must_use]
pub fn sapo(row: LossRow<'_>, tau_positive: f64, tau_negative: f64) -> Vec<TokenLoss> {
    let of = |((current, proximal), advantage): ((&f64, &f64), &f64)| {
        let ratio = Ratio::of(current - proximal);
        let tau = if *advantage > 0.0 { tau_positive } else { tau_negative };
        let gate = sigmoid(tau * (ratio.value - 1.0));
        TokenLoss {
            loss: -gate * 4.0 / tau * advantage,
            derivative: -4.0 * gate * (1.0 - gate) * ratio.slope * advantage,
            weight: 1.0,
            clipped: Clipped::No,
        }
    };
    row.current.iter().zip(row.proximal).zip(row.advantages).map(of).collect()
}
