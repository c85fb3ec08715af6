//! SwiGLU (Shazeer 2020, arXiv 2002.05202): `silu(gate) * up`, the activation of the feed-forward block.

use super::{rows_of, size, tiles};
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// `silu(gate) * up` of `gate_up [rows, 2 width]`, with the gate in the first half of each row, into `out [rows,
/// width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn swiglu<T: Storage>(
    device: &Device,
    gate_up: View<'_, T>,
    width: usize,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let rows = rows_of(gate_up.len(), 2 * width);
    assert_eq!(out.len(), rows * width, "the result has a value for each gate");
    let (blocks, threads) = tiles::<T>(width);
    let arguments = [gate_up.into(), size(width).into(), out.into()];
    device.launch(&format!("swiglu_{}", T::SUFFIX), [rows, blocks, 1], threads, 0, &arguments)
}

/// Gradient of `gate_up [rows, 2 width]` from `g [rows, width]`, that of the result, into `out [rows, 2 width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn swiglu_backward<T: Storage>(
    device: &Device,
    gate_up: View<'_, T>,
    width: usize,
    g: View<'_, T>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let rows = rows_of(gate_up.len(), 2 * width);
    assert_eq!(g.len(), rows * width, "a gradient has the shape of what it is of");
    assert_eq!(out.len(), gate_up.len(), "a gradient has the shape of what it is of");
    let (blocks, threads) = tiles::<T>(width);
    let arguments = [gate_up.into(), size(width).into(), g.into(), out.into()];
    device.launch(&format!("swiglu_backward_{}", T::SUFFIX), [rows, blocks, 1], threads, 0, &arguments)
}
