//! Gated linear units of the feed-forward block (Shazeer 2020, arXiv 2002.05202): `silu(gate) * up`, or `gelu(gate) * up` with GELU's
//! approximation by a hyperbolic tangent (Hendrycks and Gimpel 2016, arXiv 1606.08415):
//! `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) = x * sigmoid(2 sqrt(2 / pi) * (x + 0.044715 x^3))`.

use candle_core::{Result, Tensor};

use super::simd::{exp, vectorized};
use super::{matrix, rows_each, unwritten, values};
use crate::ThreadPool;

/// `2 sqrt(2 / pi)`
const SLOPE: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

/// The activation of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GateActivation {
    Silu,
    Gelu,
}

/// The activation of one gate.
struct ActivatedGate {
    value: f32,
    /// The sigmoid that the gate is multiplied with.
    sigmoid: f32,
    /// The derivative of the argument of the sigmoid.
    slope: f32,
}

#[inline(always)]
fn silu(gate: f32) -> ActivatedGate {
    let below = 1.0 + exp(-gate);
    ActivatedGate { value: gate / below, sigmoid: 1.0 / below, slope: 1.0 }
}

#[inline(always)]
fn gelu(gate: f32) -> ActivatedGate {
    let sigmoid = 1.0 / (1.0 + exp(-SLOPE * gate * (1.0 + CUBIC * gate * gate)));
    ActivatedGate { value: gate * sigmoid, sigmoid, slope: SLOPE * (1.0 + 3.0 * CUBIC * gate * gate) }
}

/// `gate_up [T, 2 m]`, the gate in the first half of each row, to `[T, m]`.
pub(crate) fn gated_unit(gate_up: &Tensor, activation: GateActivation, pool: &ThreadPool) -> Result<Tensor> {
    let (rows, width) = gate_up.dims2()?;
    let mut out = unwritten(rows * width / 2);
    let gate_up = values(gate_up)?;
    let each = rows_each(rows, gate_up.len(), pool);
    let parts = gate_up.chunks(each * width).zip(out.chunks_mut(each * width / 2));
    pool.map(parts.collect(), |(gate_up, out)| forward(activation, gate_up, width / 2, out));
    matrix(out, width / 2)
}

/// Results of [`gated_unit_backward`].
pub(crate) struct GatedUnitReverse {
    /// `[T, m]` the result of the forward, once more.
    pub(crate) activated: Tensor,
    /// `[T, 2 m]` gradient of `gate_up`.
    pub(crate) d_gate_up: Tensor,
}

/// Backward for `gate_up [T, 2 m]` and the gradient `g [T, m]` of the result. One pass computes the result again, which the next
/// weight gradient needs, in the memory of `g`.
pub(crate) fn gated_unit_backward(
    gate_up: &Tensor,
    activation: GateActivation,
    mut g: Vec<f32>,
) -> Result<GatedUnitReverse> {
    let (_, width) = gate_up.dims2()?;
    let mut out = unwritten(gate_up.elem_count());
    backward(activation, &values(gate_up)?, width / 2, &mut g, &mut out);
    Ok(GatedUnitReverse { activated: matrix(g, width / 2)?, d_gate_up: matrix(out, width)? })
}

vectorized! {
    fn forward(activation: GateActivation, gate_up: &[f32], width: usize, out: &mut [f32]) {
        match activation {
            GateActivation::Silu => forward_by(silu, gate_up, width, out),
            GateActivation::Gelu => forward_by(gelu, gate_up, width, out),
        }
    }
}

#[inline(always)]
fn forward_by(activate: impl Fn(f32) -> ActivatedGate, gate_up: &[f32], width: usize, out: &mut [f32]) {
    for (row, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = activate(*gate).value * up;
        }
    }
}

vectorized! {
    /// Turns `g` into the result of the forward.
    fn backward(activation: GateActivation, gate_up: &[f32], width: usize, g: &mut [f32], out: &mut [f32]) {
        match activation {
            GateActivation::Silu => backward_by(silu, gate_up, width, g, out),
            GateActivation::Gelu => backward_by(gelu, gate_up, width, g, out),
        }
    }
}

#[inline(always)]
fn backward_by(
    activate: impl Fn(f32) -> ActivatedGate,
    gate_up: &[f32],
    width: usize,
    g: &mut [f32],
    out: &mut [f32],
) {
    let rows = gate_up.chunks_exact(2 * width).zip(g.chunks_exact_mut(width));
    for ((row, g), out) in rows.zip(out.chunks_exact_mut(2 * width)) {
        let (gate, up) = row.split_at(width);
        let (d_gate, d_up) = out.split_at_mut(width);
        let operands = gate.iter().zip(up).zip(g);
        for (((gate, up), g), (d_gate, d_up)) in operands.zip(d_gate.iter_mut().zip(d_up)) {
            let ActivatedGate { value, sigmoid, slope } = activate(*gate);
            *d_up = *g * gate * sigmoid;
            *d_gate = *g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid) * slope);
            *g = value * up;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    const ACTIVATIONS: [GateActivation; 2] = [GateActivation::Silu, GateActivation::Gelu];

    #[test]
    fn backward_is_the_derivative() {
        for (width, activation) in
            [1, 5, 16, 21].into_iter().flat_map(|width| ACTIVATIONS.map(|of| (width, of)))
        {
            let (x, c) = (noise(3 * 2 * width, 1), noise(3 * width, 2));
            let loss = |x: &[f32]| {
                let mut out = vec![0.0; 3 * width];
                forward(activation, x, width, &mut out);
                weighted(&out, &c)
            };
            let (mut again, mut out, mut dx) = (c.clone(), c.clone(), vec![0.0; x.len()]);
            backward(activation, &x, width, &mut again, &mut dx);
            gradient(loss, &x, &dx, 1e-2);
            forward(activation, &x, width, &mut out);
            assert_eq!(again, out);
        }
    }

    #[test]
    fn large_gates_do_not_overflow() {
        for activation in ACTIVATIONS {
            let mut out = [0.0; 2];
            forward(activation, &[-200.0, 200.0, 1.0, 1.0], 2, &mut out);
            assert!(out[0].abs() < 1e-30, "{}", out[0]);
            assert_eq!(out[1], 200.0);
        }
    }
}
