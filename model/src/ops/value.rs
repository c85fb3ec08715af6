//! The value head: one number per hidden state, `value = weight . hidden`.
//!
//! Invariant: without the head the weights are empty, and both operations do nothing.

use candle_core::{Result, Tensor};

use super::head::{Prediction, PredictionGradient};
use super::{matrix, values};

/// Writes the value of every row of `hidden [M, d]` into its prediction.
pub(crate) fn predict(hidden: &Tensor, weight: &[f32], predictions: &mut [Prediction]) -> Result<()> {
    if weight.is_empty() {
        return Ok(());
    }
    for (row, prediction) in values(hidden)?.chunks_exact(weight.len()).zip(predictions) {
        prediction.value = row.iter().zip(weight).map(|(h, w)| h * w).sum();
    }
    Ok(())
}

/// `d_hidden [M, d]` with the gradient of the values added; adds that of the head to `weight_gradient [d]`, empty if it is frozen.
pub(crate) fn backward(
    hidden: &Tensor,
    weight: &[f32],
    gradients: &[PredictionGradient],
    weight_gradient: &mut [f32],
    d_hidden: Tensor,
) -> Result<Tensor> {
    if gradients.iter().all(|gradient| gradient.value == 0.0) {
        return Ok(d_hidden);
    }
    let width = weight.len();
    let mut d = values(&d_hidden)?.to_vec();
    for ((row, d), gradient) in
        values(hidden)?.chunks_exact(width).zip(d.chunks_exact_mut(width)).zip(gradients)
    {
        d.iter_mut().zip(weight).for_each(|(d, w)| *d += gradient.value * w);
        weight_gradient.iter_mut().zip(row).for_each(|(total, h)| *total += gradient.value * h);
    }
    matrix(d, width)
}
