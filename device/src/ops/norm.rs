//! RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): `y = w * x / sqrt(mean(x^2) + eps)` per row.

use super::rows::add_partial_sums;
use super::{PACK, THREADS, rows_of, size, slabs};
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Smallest number of rows per block in the gradient of the weight, eight per warp.
const SLAB: usize = 64;

/// Threads per block for rows of `width`; one block per row.
fn threads<T>(width: usize) -> usize {
    width.div_ceil(PACK / size_of::<T>()).next_multiple_of(32).clamp(32, THREADS)
}

/// Normalises each row of `x [rows, width]` and scales it by `weight [width]`, into `out [rows, width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    weight: View<'_, T>,
    eps: f32,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let width = weight.len();
    let rows = rows_of(x.len(), width);
    assert_eq!(x.len(), out.len(), "the result is as large as what is normalised");
    let arguments = [x.into(), weight.into(), size(width).into(), eps.into(), out.into()];
    device.launch(&format!("rms_norm_{}", T::SUFFIX), [rows, 1, 1], threads::<T>(width), 0, &arguments)
}

/// Gradient of `x [rows, width]` from `g [rows, width]`, that of the result, plus `base [rows, width]`, into `dx [rows,
/// width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm_backward<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    weight: View<'_, T>,
    eps: f32,
    g: View<'_, T>,
    base: Option<View<'_, T>>,
    dx: ViewMut<'_, T>,
) -> Result<()> {
    let width = weight.len();
    let rows = rows_of(x.len(), width);
    assert!(x.len() == g.len() && x.len() == dx.len(), "{} values, {} and {}", x.len(), g.len(), dx.len());
    assert!(base.is_none_or(|base| base.len() == x.len()), "a gradient is added to one of its shape");
    let arguments =
        [x.into(), weight.into(), size(width).into(), eps.into(), g.into(), base.into(), dx.into()];
    let kernel = format!("rms_norm_backward_{}", T::SUFFIX);
    device.launch(&kernel, [rows, 1, 1], threads::<T>(width), 0, &arguments)
}

/// Adds the gradient of the weight to `gradient [width]`, from `x [rows, width]` and `g [rows, width]`, the gradient of
/// the result.
///
/// # Errors
/// If a launch fails, or there is no memory for partial sums.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm_weight_gradient<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    eps: f32,
    g: View<'_, T>,
    gradient: ViewMut<'_, f32>,
) -> Result<()> {
    let width = gradient.len();
    let rows = rows_of(x.len(), width);
    assert_eq!(x.len(), g.len(), "a gradient has the shape of what it is of");
    if rows == 0 {
        return Ok(());
    }
    let mut inverses = device.uninit::<f32>(rows)?;
    let arguments = [x.into(), size(width).into(), eps.into(), inverses.all_mut().into()];
    device.launch(
        &format!("rms_inverses_{}", T::SUFFIX),
        [rows, 1, 1],
        threads::<T>(width),
        0,
        &arguments,
    )?;
    let (slab, parts) = slabs(rows, SLAB);
    let mut partial = device.uninit::<f32>(parts * width)?;
    let arguments = [
        x.into(),
        g.into(),
        inverses.all().into(),
        size(rows).into(),
        size(slab).into(),
        size(width).into(),
        partial.all_mut().into(),
    ];
    let grid = [width.div_ceil(32 * PACK / size_of::<T>()), parts, 1];
    device.launch(&format!("rms_norm_slopes_{}", T::SUFFIX), grid, THREADS, 0, &arguments)?;
    add_partial_sums(device, partial.all(), gradient)
}
