//! Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467):
//! `y = w * x / sqrt(mean(x^2) + eps)`.

use candle_core::{Result, Tensor};

use super::simd::{dot, vectorized};
use super::{matrix, rows_each, unwritten, values};
use crate::ThreadPool;

/// Normalises each row of `x [T, d]` and scales it by `weight [d]`.
pub(crate) fn rms_norm(x: &Tensor, weight: &[f32], eps: f32, pool: &ThreadPool) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let mut out = unwritten(x.elem_count());
    let each = rows_each(rows, out.len(), pool) * width;
    let x = values(x)?;
    let parts = x.chunks(each).zip(out.chunks_mut(each)).collect();
    pool.map(parts, |(x, out)| forward(x, weight, eps, out));
    matrix(out, width)
}

/// `base [T, d]` plus `dx [T, d]` for the gradient `g [T, d]` of the result.
pub(crate) fn rms_norm_backward(
    x: &Tensor,
    weight: &[f32],
    eps: f32,
    g: &Tensor,
    base: Option<&Tensor>,
) -> Result<Tensor> {
    let (_, width) = x.dims2()?;
    let mut dx = unwritten(x.elem_count());
    let base = base.map(values).transpose()?;
    backward(&values(x)?, weight, eps, &values(g)?, base.as_deref(), &mut dx);
    matrix(dx, width)
}

/// Adds the gradient of the weight to `gradient [d]`, for the gradient `g [T, d]` of the result.
pub(crate) fn rms_norm_weight_gradient(x: &Tensor, eps: f32, g: &Tensor, gradient: &mut [f32]) -> Result<()> {
    weight_backward(&values(x)?, eps, &values(g)?, gradient);
    Ok(())
}

vectorized! {
    fn forward(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
            out.copy_from_slice(x);
            norm_row(out, weight, eps);
        }
    }
}

vectorized! {
    /// `dx = base + gradient`.
    fn backward(x: &[f32], weight: &[f32], eps: f32, g: &[f32], base: Option<&[f32]>, dx: &mut [f32]) {
        let width = weight.len();
        let rows = x.chunks_exact(width).zip(g.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        for (row, ((x, g), dx)) in rows.enumerate() {
            dx.copy_from_slice(g);
            norm_row_backward(x, weight, eps, dx);
            if let Some(base) = base {
                for (dx, base) in dx.iter_mut().zip(&base[row * width..][..width]) {
                    *dx += base;
                }
            }
        }
    }
}

vectorized! {
    fn weight_backward(x: &[f32], eps: f32, g: &[f32], gradient: &mut [f32]) {
        let width = gradient.len();
        for (x, g) in x.chunks_exact(width).zip(g.chunks_exact(width)) {
            norm_row_weight_gradient(x, eps, g, gradient);
        }
    }
}

/// Normalises one row in place.
#[inline(always)]
pub(crate) fn norm_row(x: &mut [f32], weight: &[f32], eps: f32) {
    let inv = inverse_rms(x, eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * inv * w;
    }
}

/// Turns the gradient `g` of a normalised row into the gradient of the row `x`, in place.
#[inline(always)]
pub(crate) fn norm_row_backward(x: &[f32], weight: &[f32], eps: f32, g: &mut [f32]) {
    let inv = inverse_rms(x, eps);
    for (g, w) in g.iter_mut().zip(weight) {
        *g *= w;
    }
    let pull = dot(g, x) * inv * inv * inv / x.len() as f32;
    for (g, x) in g.iter_mut().zip(x) {
        *g = *g * inv - x * pull;
    }
}

/// Adds the gradient of the weight for the gradient `g` of one normalised row.
#[inline(always)]
pub(crate) fn norm_row_weight_gradient(x: &[f32], eps: f32, g: &[f32], gradient: &mut [f32]) {
    let inv = inverse_rms(x, eps);
    for ((dw, g), x) in gradient.iter_mut().zip(g).zip(x) {
        *dw += *g * x * inv;
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    #[test]
    fn backward_is_the_derivative() {
        for width in [1, 7, 16, 33] {
            let (x, w, c) = (noise(3 * width, 1), noise(width, 2), noise(3 * width, 3));
            let loss = |x: &[f32], w: &[f32]| {
                let mut out = vec![0.0; x.len()];
                forward(x, w, 1e-2, &mut out);
                weighted(&out, &c)
            };
            let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; width]);
            backward(&x, &w, 1e-2, &c, None, &mut dx);
            weight_backward(&x, 1e-2, &c, &mut dw);
            gradient(|x| loss(x, &w), &x, &dx, 2e-2);
            let mut sum = vec![0.0; x.len()];
            backward(&x, &w, 1e-2, &c, Some(&w.repeat(3)), &mut sum);
            let expected: Vec<f32> = dx.iter().zip(w.repeat(3)).map(|(dx, base)| base + dx).collect();
            assert_eq!(sum, expected);
            gradient(|w| loss(&x, w), &w, &dw, 1e-3);
        }
    }
}
