//! Sums of the residual stream with a multiplied result: `base + factor * x`.

use candle_core::{Result, Tensor};

use super::{matrix, unwritten, values};

/// `base [T, d]` plus `factor` times `x [T, d]`.
pub(crate) fn add_multiple(base: &Tensor, x: &Tensor, factor: f32) -> Result<Tensor> {
    let (_, width) = base.dims2()?;
    let mut out = unwritten(base.elem_count());
    let (base, x) = (values(base)?, values(x)?);
    for ((out, base), x) in out.iter_mut().zip(&base[..]).zip(&x[..]) {
        *out = factor.mul_add(*x, *base);
    }
    matrix(out, width)
}

/// `factor` times `x [T, d]`.
pub(crate) fn multiple(x: &Tensor, factor: f32) -> Result<Tensor> {
    if factor == 1.0 {
        return Ok(x.clone());
    }
    let (_, width) = x.dims2()?;
    matrix(values(x)?.iter().map(|x| factor * x).collect(), width)
}
