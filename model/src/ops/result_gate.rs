//! Gates on the result of a mixer: a sigmoid of the token's own (Qiu et al. 2025, arXiv 2505.06708) on that of attention, and
//! RMSNorm of each head with SiLU of the token's own on that of a DeltaNet (Yang et al. 2024, arXiv 2412.06464).

use candle_core::{Result, Tensor};

use super::heads::HeadShape;
use super::norm::{norm_row, norm_row_backward, norm_row_weight_gradient};
use super::simd::{exp, vectorized};
use super::{matrix, rows_each, unwritten, values};
use crate::ThreadPool;

/// The norm of each head of a result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResultNorm<'a> {
    /// `[value_dim]`
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
}

/// `[T, width]` the result `x [T, width]` with its `gate [T, width]`.
pub(crate) fn gated(
    x: &Tensor,
    gate: &Tensor,
    norm: Option<ResultNorm<'_>>,
    pool: &ThreadPool,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let mut out = values(x)?.to_vec();
    let each = rows_each(rows, out.len(), pool) * width;
    let gate = values(gate)?;
    let parts = out.chunks_mut(each).zip(gate.chunks(each)).collect();
    pool.map(parts, |(out, gate)| match norm {
        None => by_sigmoid(out, gate),
        Some(norm) => by_silu(out, gate, norm),
    });
    matrix(out, width)
}

/// Gradients of `x` and of `gate` for the gradient `g [T, width]` of [`gated`].
pub(crate) fn gated_backward(
    x: &Tensor,
    gate: &Tensor,
    norm: Option<ResultNorm<'_>>,
    g: &Tensor,
) -> Result<[Tensor; 2]> {
    let (_, width) = x.dims2()?;
    let (mut dx, mut d_gate) = (values(g)?.to_vec(), unwritten(g.elem_count()));
    match norm {
        None => by_sigmoid_backward(&values(x)?, &values(gate)?, &mut dx, &mut d_gate),
        Some(norm) => by_silu_backward(&values(x)?, &values(gate)?, norm, &mut dx, &mut d_gate),
    }
    Ok([matrix(dx, width)?, matrix(d_gate, width)?])
}

/// Adds the gradient of the weight of the norm to `gradient [value_dim]`, for the gradient `g [T, width]` of [`gated`].
pub(crate) fn norm_weight_gradient(
    x: &Tensor,
    gate: &Tensor,
    norm: ResultNorm<'_>,
    g: &Tensor,
    gradient: &mut [f32],
) -> Result<()> {
    weight_backward(&values(x)?, &values(gate)?, norm, &values(g)?, gradient);
    Ok(())
}

/// Cuts the projection `[T, 2 queries + keys + values]`, in which every query head has its gate behind it, into what attention
/// reads, `[T, width]`, and the gates `[T, queries]`.
pub(crate) fn split_gates(projection: &[f32], shape: HeadShape) -> [Vec<f32>; 2] {
    let queries = shape.query_width();
    let rows = projection.len() / (shape.width() + queries);
    let (mut qkv, mut gates) = (Vec::with_capacity(rows * shape.width()), Vec::with_capacity(rows * queries));
    for row in projection.chunks_exact(shape.width() + queries) {
        let (heads, rest) = row.split_at(2 * queries);
        for head in heads.chunks_exact(2 * shape.head_dim) {
            let (query, gate) = head.split_at(shape.head_dim);
            qkv.extend_from_slice(query);
            gates.extend_from_slice(gate);
        }
        qkv.extend_from_slice(rest);
    }
    [qkv, gates]
}

/// Puts what [`split_gates`] cut together again.
pub(crate) fn join_gates(qkv: &[f32], gates: &[f32], shape: HeadShape) -> Vec<f32> {
    let queries = shape.query_width();
    let mut projection = Vec::with_capacity(qkv.len() + gates.len());
    for (row, gates) in qkv.chunks_exact(shape.width()).zip(gates.chunks_exact(queries)) {
        let (heads, rest) = row.split_at(queries);
        for (query, gate) in heads.chunks_exact(shape.head_dim).zip(gates.chunks_exact(shape.head_dim)) {
            projection.extend_from_slice(query);
            projection.extend_from_slice(gate);
        }
        projection.extend_from_slice(rest);
    }
    projection
}

vectorized! {
    fn by_sigmoid(x: &mut [f32], gate: &[f32]) {
        for (x, gate) in x.iter_mut().zip(gate) {
            *x /= 1.0 + exp(-gate);
        }
    }
}

vectorized! {
    fn by_sigmoid_backward(x: &[f32], gate: &[f32], g: &mut [f32], d_gate: &mut [f32]) {
        for (((x, gate), g), d_gate) in x.iter().zip(gate).zip(g).zip(d_gate) {
            let sigmoid = 1.0 / (1.0 + exp(-gate));
            *d_gate = *g * x * sigmoid * (1.0 - sigmoid);
            *g *= sigmoid;
        }
    }
}

vectorized! {
    fn by_silu(x: &mut [f32], gate: &[f32], norm: ResultNorm<'_>) {
        let width = norm.weight.len();
        for (x, gate) in x.chunks_exact_mut(width).zip(gate.chunks_exact(width)) {
            norm_row(x, norm.weight, norm.eps);
            x.iter_mut().zip(gate).for_each(|(x, gate)| *x *= gate / (1.0 + exp(-gate)));
        }
    }
}

vectorized! {
    fn by_silu_backward(x: &[f32], gate: &[f32], norm: ResultNorm<'_>, g: &mut [f32], d_gate: &mut [f32]) {
        let width = norm.weight.len();
        let mut normed = vec![0.0; width];
        let heads = x.chunks_exact(width).zip(gate.chunks_exact(width));
        let gradients = g.chunks_exact_mut(width).zip(d_gate.chunks_exact_mut(width));
        for ((x, gate), (g, d_gate)) in heads.zip(gradients) {
            normed.copy_from_slice(x);
            norm_row(&mut normed, norm.weight, norm.eps);
            for (((gate, normed), g), d_gate) in gate.iter().zip(&normed).zip(&mut *g).zip(d_gate) {
                let sigmoid = 1.0 / (1.0 + exp(-gate));
                *d_gate = *g * normed * sigmoid * (1.0 + gate * (1.0 - sigmoid));
                *g *= gate * sigmoid;
            }
            norm_row_backward(x, norm.weight, norm.eps, g);
        }
    }
}

vectorized! {
    fn weight_backward(x: &[f32], gate: &[f32], norm: ResultNorm<'_>, g: &[f32], gradient: &mut [f32]) {
        let width = norm.weight.len();
        let mut scaled = vec![0.0; width];
        for ((x, gate), g) in x.chunks_exact(width).zip(gate.chunks_exact(width)).zip(g.chunks_exact(width)) {
            for ((scaled, g), gate) in scaled.iter_mut().zip(g).zip(gate) {
                *scaled = g * gate / (1.0 + exp(-gate));
            }
            norm_row_weight_gradient(x, norm.eps, &scaled, gradient);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    #[test]
    fn backward_is_the_derivative() {
        let (rows, width) = (3, 14);
        let (x, gate, weight) = (noise(rows * width, 1), noise(rows * width, 2), noise(7, 3));
        let c = noise(rows * width, 4);
        for with_norm in [false, true] {
            let of = |weight: &'_ [f32]| with_norm.then(|| weight.to_vec());
            let loss = |x: &[f32], gate: &[f32], weight: &[f32]| {
                let weight = of(weight);
                let norm = weight.as_deref().map(|weight| ResultNorm { weight, eps: 1e-2 });
                let [x, gate] = [x, gate].map(|values| matrix(values.to_vec(), width).unwrap());
                let out = gated(&x, &gate, norm, &ThreadPool::single()).unwrap();
                weighted(&values(&out).unwrap(), &c)
            };
            let [tx, t_gate, tg] = [&x, &gate, &c].map(|values| matrix(values.clone(), width).unwrap());
            let norm = with_norm.then_some(ResultNorm { weight: &weight, eps: 1e-2 });
            let [dx, d_gate] = gated_backward(&tx, &t_gate, norm, &tg).unwrap();
            gradient(|x| loss(x, &gate, &weight), &x, &values(&dx).unwrap(), 2e-2);
            gradient(|gate| loss(&x, gate, &weight), &gate, &values(&d_gate).unwrap(), 1e-2);
            let mut dw = vec![0.0; weight.len()];
            if let Some(norm) = norm {
                norm_weight_gradient(&tx, &t_gate, norm, &tg, &mut dw).unwrap();
                gradient(|weight| loss(&x, &gate, weight), &weight, &dw, 1e-3);
            }
        }
    }

    #[test]
    fn gates_lie_behind_the_query_of_their_head() {
        let shape = HeadShape { heads: 2, kv_heads: 1, head_dim: 2 };
        let projection: Vec<f32> = (0..24).map(|x| x as f32).collect();
        let [qkv, gates] = split_gates(&projection, shape);
        assert_eq!(qkv[..8], [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 10.0, 11.0]);
        assert_eq!(gates[..4], [2.0, 3.0, 6.0, 7.0]);
        assert_eq!(join_gates(&qkv, &gates, shape), projection);
    }
}
