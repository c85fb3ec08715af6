//! Elementwise operations on flat vectors, and the sum of squares.

use super::THREADS;
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Largest number of blocks of a launch; more than a GPU runs at once.
const BLOCKS: usize = 4096;
/// Values per vectorised memory access.
const VALUES: usize = 4;
/// Smallest number of values per block in a sum.
const SUMMED: usize = 1 << 14;

/// Number of blocks for a vector of `len` values.
pub(super) fn blocks(len: usize) -> usize {
    len.div_ceil(VALUES * THREADS).min(BLOCKS)
}

/// The length of a vector as a kernel argument.
pub(super) fn count(len: usize) -> Argument {
    (len as i64).into()
}

/// Converts `from [n]` to the nearest values of type `B`, into `to [n]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the lengths differ.
pub fn cast<A: Storage, B: Storage>(device: &Device, from: View<'_, A>, to: ViewMut<'_, B>) -> Result<()> {
    assert_eq!(from.len(), to.len(), "source and destination have one length");
    let grid = [blocks(from.len()), 1, 1];
    let arguments = [from.into(), count(from.len()), to.into()];
    device.launch(&format!("cast_{}_{}", A::SUFFIX, B::SUFFIX), grid, THREADS, 0, &arguments)
}

/// Adds `from [n]` to `to [n]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the lengths differ.
pub fn add(device: &Device, from: View<'_, f32>, to: ViewMut<'_, f32>) -> Result<()> {
    assert_eq!(from.len(), to.len(), "both vectors have one length");
    let grid = [blocks(from.len()), 1, 1];
    device.launch("add_f32", grid, THREADS, 0, &[from.into(), count(from.len()), to.into()])
}

/// Adds `factor` times `from [n]` to `to [n]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the lengths differ.
pub fn add_multiple<T: Storage>(
    device: &Device,
    from: View<'_, T>,
    factor: f32,
    to: ViewMut<'_, T>,
) -> Result<()> {
    assert_eq!(from.len(), to.len(), "both vectors have one length");
    let (grid, len) = ([blocks(from.len()), 1, 1], count(from.len()));
    let arguments = [from.into(), factor.into(), len, to.into()];
    device.launch(&format!("add_multiple_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// Multiplies `x [n]` by `by`.
///
/// # Errors
/// If the launch fails.
pub fn scale<T: Storage>(device: &Device, by: f32, x: ViewMut<'_, T>) -> Result<()> {
    let (grid, len) = ([blocks(x.len()), 1, 1], count(x.len()));
    device.launch(&format!("scale_{}", T::SUFFIX), grid, THREADS, 0, &[by.into(), len, x.into()])
}

/// Sum of the squares of `x [n]` in f64; NaN or infinite if a value is. Waits.
///
/// # Errors
/// If the launch or an earlier operation fails, or there is no memory for partial sums.
pub fn sum_of_squares(device: &Device, x: View<'_, f32>) -> Result<f64> {
    let parts = x.len().div_ceil(SUMMED).min(BLOCKS);
    let mut sums = device.uninit::<f64>(parts)?;
    let arguments = [x.into(), count(x.len()), sums.all_mut().into()];
    device.launch("squares_f32", [parts, 1, 1], THREADS, 0, &arguments)?;
    Ok(device.download(sums.all())?.iter().sum())
}
