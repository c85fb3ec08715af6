//! The gated activation of Gemma's feed-forward block (GeGLU, Shazeer 2020, arXiv 2002.05202): `gelu(gate) * up`, with GELU's
//! approximation by a hyperbolic tangent (Hendrycks and Gimpel 2016, arXiv 1606.08415):
//! `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) = x * sigmoid(2 sqrt(2 / pi) * (x + 0.044715 x^3))`.

use candle_core::{Result, Tensor};

use super::simd::{exp, vectorized};
use super::swiglu::SwigluReverse;
use super::{matrix, rows_each, unwritten, values};
use crate::ThreadPool;

/// `2 sqrt(2 / pi)`
const SLOPE: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

/// `gate_up [T, 2 m]`, the gate in the first half of each row, to `[T, m]`.
pub(crate) fn geglu(gate_up: &Tensor, pool: &ThreadPool) -> Result<Tensor> {
    let (rows, width) = gate_up.dims2()?;
    let mut out = unwritten(rows * width / 2);
    let gate_up = values(gate_up)?;
    let each = rows_each(rows, gate_up.len(), pool);
    let parts = gate_up.chunks(each * width).zip(out.chunks_mut(each * width / 2));
    pool.map(parts.collect(), |(gate_up, out)| forward(gate_up, width / 2, out));
    matrix(out, width / 2)
}

/// Backward for `gate_up [T, 2 m]` and the gradient `g [T, m]` of the result, in the memory of `g`; as that of SwiGLU.
pub(crate) fn geglu_backward(gate_up: &Tensor, mut g: Vec<f32>) -> Result<SwigluReverse> {
    let (_, width) = gate_up.dims2()?;
    let mut out = unwritten(gate_up.elem_count());
    backward(&values(gate_up)?, width / 2, &mut g, &mut out);
    Ok(SwigluReverse { activated: matrix(g, width / 2)?, d_gate_up: matrix(out, width)? })
}

/// The share of `gate` that passes.
#[inline(always)]
fn passed(gate: f32) -> f32 {
    1.0 / (1.0 + exp(-SLOPE * gate * (1.0 + CUBIC * gate * gate)))
}

vectorized! {
    fn forward(gate_up: &[f32], width: usize, out: &mut [f32]) {
        for (row, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
            let (gate, up) = row.split_at(width);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate * passed(*gate) * up;
            }
        }
    }
}

vectorized! {
    /// Turns `g` into the result of the forward.
    fn backward(gate_up: &[f32], width: usize, g: &mut [f32], out: &mut [f32]) {
        let rows = gate_up.chunks_exact(2 * width).zip(g.chunks_exact_mut(width));
        for ((row, g), out) in rows.zip(out.chunks_exact_mut(2 * width)) {
            let (gate, up) = row.split_at(width);
            let (d_gate, d_up) = out.split_at_mut(width);
            let operands = gate.iter().zip(up).zip(g);
            for (((gate, up), g), (d_gate, d_up)) in operands.zip(d_gate.iter_mut().zip(d_up)) {
                let passed = passed(*gate);
                let slope = SLOPE * (1.0 + 3.0 * CUBIC * gate * gate);
                *d_up = *g * gate * passed;
                *d_gate = *g * up * passed * (1.0 + gate * (1.0 - passed) * slope);
                *g = gate * passed * up;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    #[test]
    fn backward_is_the_derivative() {
        for width in [1, 5, 16, 21] {
            let (x, c) = (noise(3 * 2 * width, 1), noise(3 * width, 2));
            let loss = |x: &[f32]| {
                let mut out = vec![0.0; 3 * width];
                forward(x, width, &mut out);
                weighted(&out, &c)
            };
            let (mut again, mut out, mut dx) = (c.clone(), c.clone(), vec![0.0; x.len()]);
            backward(&x, width, &mut again, &mut dx);
            gradient(loss, &x, &dx, 1e-2);
            forward(&x, width, &mut out);
            assert_eq!(again, out);
        }
    }

    #[test]
    fn large_gates_do_not_overflow() {
        let mut out = [0.0; 2];
        forward(&[-200.0, 200.0, 1.0, 1.0], 2, &mut out);
        assert!(out[0].abs() < 1e-30, "{}", out[0]);
        assert_eq!(out[1], 200.0);
    }
}
