//! The gate on the result of a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): the result, normalised before, times SiLU of the
//! token's own gate, which is the end of each row of a projection.

use super::vectors::blocks;
use super::{THREADS, rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Rows, and where gates `[rows, width]` are among the values of a projection of `len` values.
fn places(len: usize, values: usize, width: usize) -> [Argument; 4] {
    let rows = rows_of(values, width);
    let stride = len.checked_div(rows).unwrap_or(width);
    assert!(stride >= width && rows * stride == len, "{rows} rows of {width} gates in {len} values");
    [(rows as i64).into(), size(width).into(), size(stride - width).into(), size(stride).into()]
}

/// `x [rows, width]` times SiLU of the gates that `projection [rows, stride]` ends with, into `out [rows, width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gate_result<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    projection: View<'_, T>,
    width: usize,
    out: ViewMut<'_, T>,
) -> Result<()> {
    assert_eq!(x.len(), out.len(), "the result is as large as what is gated");
    let [rows, of_gates, first, stride] = places(projection.len(), x.len(), width);
    let arguments = [x.into(), projection.into(), rows, of_gates, first, stride, out.into()];
    device.launch(&format!("gate_result_{}", T::SUFFIX), [blocks(x.len()), 1, 1], THREADS, 0, &arguments)
}

/// Converts `g [rows, width]`, the gradient of the result of [`gate_result`], to that of `x [rows, width]` in place, and writes that of
/// the gates to their place in `d_projection [rows, stride]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gate_result_backward<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    projection: View<'_, T>,
    width: usize,
    g: ViewMut<'_, T>,
    d_projection: ViewMut<'_, T>,
) -> Result<()> {
    assert_eq!(x.len(), g.len(), "a gradient has the shape of what it is of");
    assert_eq!(projection.len(), d_projection.len(), "a gradient has the shape of what it is of");
    let [rows, of_gates, first, stride] = places(projection.len(), x.len(), width);
    let grid = [blocks(x.len()), 1, 1];
    let arguments =
        [x.into(), projection.into(), rows, of_gates, first, stride, g.into(), d_projection.into()];
    device.launch(&format!("gate_result_backward_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}
