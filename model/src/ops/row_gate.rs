//! A gate of whole rows: the sigmoid of one number of a token multiplies all that a network gives for it.

use candle_core::{Result, Tensor};

use super::simd::{dot, exp, vectorized};
use super::{matrix, unwritten, values};

/// `base [T, d]` plus `sigmoid(gate [T, 1])` times `x [T, d]`.
pub(crate) fn add_gated(base: &Tensor, x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let (_, width) = x.dims2()?;
    let mut out = values(base)?.to_vec();
    forward(&values(x)?, &values(gate)?, &mut out);
    matrix(out, width)
}

/// Gradients `[T, d]` of `x` and `[T, 1]` of `gate` for the gradient `g [T, d]` of the result of [`add_gated`].
pub(crate) fn gated_backward(x: &Tensor, gate: &Tensor, g: &Tensor) -> Result<(Tensor, Tensor)> {
    let (_, width) = x.dims2()?;
    let (mut dx, mut d_gate) = (values(g)?.to_vec(), unwritten(gate.elem_count()));
    backward(&values(x)?, &values(gate)?, &mut dx, &mut d_gate);
    Ok((matrix(dx, width)?, matrix(d_gate, 1)?))
}

vectorized! {
    fn forward(x: &[f32], gate: &[f32], out: &mut [f32]) {
        let width = (x.len() / gate.len().max(1)).max(1);
        for (gate, (x, out)) in gate.iter().zip(x.chunks(width).zip(out.chunks_mut(width))) {
            let sigmoid = 1.0 / (1.0 + exp(-gate));
            out.iter_mut().zip(x).for_each(|(out, x)| *out = sigmoid.mul_add(*x, *out));
        }
    }
}

vectorized! {
    fn backward(x: &[f32], gate: &[f32], g: &mut [f32], d_gate: &mut [f32]) {
        let width = (x.len() / gate.len().max(1)).max(1);
        for ((gate, d_gate), (x, g)) in gate.iter().zip(d_gate).zip(x.chunks(width).zip(g.chunks_mut(width))) {
            let sigmoid = 1.0 / (1.0 + exp(-gate));
            *d_gate = dot(x, g) * sigmoid * (1.0 - sigmoid);
            g.iter_mut().for_each(|g| *g *= sigmoid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    #[test]
    fn backward_is_the_derivative() {
        let (x, gate, c) = (noise(3 * 9, 1), noise(3, 2), noise(3 * 9, 3));
        let loss = |x: &[f32], gate: &[f32]| {
            let mut out = vec![0.5; x.len()];
            forward(x, gate, &mut out);
            weighted(&out, &c)
        };
        let (mut dx, mut d_gate) = (c.clone(), vec![0.0; 3]);
        backward(&x, &gate, &mut dx, &mut d_gate);
        gradient(|x| loss(x, &gate), &x, &dx, 1e-2);
        gradient(|gate| loss(&x, gate), &gate, &d_gate, 1e-2);
    }
}
