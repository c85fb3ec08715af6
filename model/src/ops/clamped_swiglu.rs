//! The gated activation of gpt-oss (OpenAI 2025, arXiv 2508.10925): SwiGLU with bounded operands and `1` added to the linear one.
//!
//! ```text
//! g = min(gate, limit),  u = min(max(up, -limit), limit)
//! result = (u + 1) * g * sigmoid(alpha * g)
//! ```
//!
//! Invariant: rows are as in `gated_unit`: the gate in the first half of each, whatever the order in files. A bound passes no gradient.

use candle_core::{Result, Tensor};

use super::gated_unit::GatedUnitReverse;
use super::simd::{exp, vectorized};
use super::{matrix, rows_each, unwritten, values};
use crate::ThreadPool;
use crate::layer::SwigluClamp;

/// `gate_up [T, 2 m]`, the gate in the first half of each row, to `[T, m]`.
pub(crate) fn clamped_swiglu(gate_up: &Tensor, clamp: SwigluClamp, pool: &ThreadPool) -> Result<Tensor> {
    let (rows, width) = gate_up.dims2()?;
    let mut out = unwritten(rows * width / 2);
    let gate_up = values(gate_up)?;
    let each = rows_each(rows, gate_up.len(), pool);
    let parts = gate_up.chunks(each * width).zip(out.chunks_mut(each * width / 2));
    pool.map(parts.collect(), |(gate_up, out)| forward(gate_up, width / 2, clamp, out));
    matrix(out, width / 2)
}

/// Backward for `gate_up [T, 2 m]` and the gradient `g [T, m]` of the result. One pass computes the result again, in the memory
/// of `g`.
pub(crate) fn clamped_swiglu_backward(
    gate_up: &Tensor,
    clamp: SwigluClamp,
    mut g: Vec<f32>,
) -> Result<GatedUnitReverse> {
    let (_, width) = gate_up.dims2()?;
    let mut out = unwritten(gate_up.elem_count());
    backward(&values(gate_up)?, width / 2, clamp, &mut g, &mut out);
    Ok(GatedUnitReverse { activated: matrix(g, width / 2)?, d_gate_up: matrix(out, width)? })
}

vectorized! {
    fn forward(gate_up: &[f32], width: usize, clamp: SwigluClamp, out: &mut [f32]) {
        let SwigluClamp { alpha, limit } = clamp;
        for (row, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
            let (gate, up) = row.split_at(width);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                let (gate, up) = (gate.min(limit), up.max(-limit).min(limit));
                *out = (up + 1.0) * (gate / (1.0 + exp(-alpha * gate)));
            }
        }
    }
}

vectorized! {
    /// Turns `g` into the result of the forward.
    fn backward(gate_up: &[f32], width: usize, clamp: SwigluClamp, g: &mut [f32], out: &mut [f32]) {
        let SwigluClamp { alpha, limit } = clamp;
        let rows = gate_up.chunks_exact(2 * width).zip(g.chunks_exact_mut(width));
        for ((row, g), out) in rows.zip(out.chunks_exact_mut(2 * width)) {
            let (gate, up) = row.split_at(width);
            let (d_gate, d_up) = out.split_at_mut(width);
            let operands = gate.iter().zip(up).zip(g);
            for (((raw_gate, raw_up), g), (d_gate, d_up)) in operands.zip(d_gate.iter_mut().zip(d_up)) {
                let (gate, up) = (raw_gate.min(limit), raw_up.max(-limit).min(limit));
                let below = 1.0 + exp(-alpha * gate);
                let sigmoid = 1.0 / below;
                let of_gate = *g * (up + 1.0) * sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid));
                *d_gate = if *raw_gate <= limit { of_gate } else { 0.0 };
                *d_up = if raw_up.abs() <= limit { *g * gate * sigmoid } else { 0.0 };
                *g = (up + 1.0) * (gate / below);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    const CLAMP: SwigluClamp = SwigluClamp { alpha: 1.702, limit: 0.7 };

    fn run(x: &[f32], width: usize) -> Vec<f32> {
        let mut out = vec![0.0; x.len() / 2];
        forward(x, width, CLAMP, &mut out);
        out
    }

    #[test]
    fn backward_is_the_derivative() {
        for width in [1, 5, 16, 21] {
            // No value so close to a bound that a small change crosses it.
            let apart = |x: &f32| if (x.abs() - 0.7).abs() < 0.02 { 0.5 } else { *x };
            let x: Vec<f32> = noise(3 * 2 * width, 1).iter().map(apart).collect();
            let c = noise(3 * width, 2);
            let (mut again, mut dx) = (c.clone(), vec![0.0; x.len()]);
            backward(&x, width, CLAMP, &mut again, &mut dx);
            gradient(|x| weighted(&run(x, width), &c), &x, &dx, 1e-2);
            assert_eq!(again, run(&x, width));
        }
    }

    #[test]
    fn operands_are_bounded() {
        // Gates 5, 0.7, -5; up -5, -0.7, 5.
        let bounded = run(&[5.0, 0.7, -5.0, -5.0, -0.7, 5.0], 3);
        assert_eq!(bounded[0], bounded[1], "both operands are at their bounds");
        let sigmoid = 1.0 / (1.0 + (1.702_f32 * 5.0).exp());
        assert!((bounded[2] + 1.7 * 5.0 * sigmoid).abs() < 1e-6, "a gate has no lower bound: {bounded:?}");
        let (mut g, mut d) = ([1.0; 3], [7.0; 6]);
        backward(&[5.0, 0.6, -5.0, -5.0, -0.6, 5.0], 3, CLAMP, &mut g, &mut d);
        assert!(
            d[0] == 0.0 && d[3] == 0.0 && d[5] == 0.0 && d[1] != 0.0 && d[2] != 0.0 && d[4] != 0.0,
            "{d:?}"
        );
    }
}
