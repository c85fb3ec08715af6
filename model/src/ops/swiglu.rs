//! The gated activation of the feed-forward block (Shazeer 2020, arXiv 2002.05202): `silu(gate) * up`.

use candle_core::{Result, Tensor};

use super::simd::{exp, vectorized};
use super::{matrix, row_ranges, unwritten, values};
use crate::ThreadPool;

/// `gate_up [T, 2 m]`, the gate in the first half of each row, to `[T, m]`.
pub(crate) fn swiglu(gate_up: &Tensor, pool: &ThreadPool) -> Result<Tensor> {
    let (rows, width) = gate_up.dims2()?;
    let mut out = unwritten(rows * width / 2);
    let gate_up = values(gate_up)?;
    let each = row_ranges(rows, pool.threads(), 1)[0].len().max(1);
    let parts = gate_up.chunks(each * width).zip(out.chunks_mut(each * width / 2));
    pool.map(parts.collect(), |(gate_up, out)| forward(gate_up, width / 2, out));
    matrix(out, width / 2)
}

/// Gradient `[T, 2 m]` of `gate_up` for the gradient `g [T, m]` of the result.
pub(crate) fn swiglu_backward(gate_up: &Tensor, g: &Tensor) -> Result<Tensor> {
    let (_, width) = gate_up.dims2()?;
    let mut out = unwritten(gate_up.elem_count());
    backward(&values(gate_up)?, width / 2, &values(g)?, &mut out);
    matrix(out, width)
}

vectorized! {
    fn forward(gate_up: &[f32], width: usize, out: &mut [f32]) {
        for (row, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
            let (gate, up) = row.split_at(width);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + exp(-gate)) * up;
            }
        }
    }
}

vectorized! {
    fn backward(gate_up: &[f32], width: usize, g: &[f32], out: &mut [f32]) {
        for ((row, g), out) in gate_up.chunks_exact(2 * width).zip(g.chunks_exact(width)).zip(out.chunks_exact_mut(2 * width)) {
            let (gate, up) = row.split_at(width);
            let (d_gate, d_up) = out.split_at_mut(width);
            for i in 0..width {
                let sigmoid = 1.0 / (1.0 + exp(-gate[i]));
                d_up[i] = g[i] * gate[i] * sigmoid;
                d_gate[i] = g[i] * up[i] * sigmoid * (1.0 + gate[i] * (1.0 - sigmoid));
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
            let mut dx = vec![0.0; x.len()];
            backward(&x, width, &c, &mut dx);
            gradient(loss, &x, &dx, 1e-2);
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
