//! Gates on the result of attention (Qiu et al. 2025, arXiv 2505.06708): the result times a sigmoid of the token's own,
//! which is the second half of each head of the query projection.

use super::heads::HeadShape;
use super::vectors::{blocks, count};
use super::{THREADS, rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Number of rows, widths of queries and of keys and values together, and head dimension of a projection of `len`
/// values.
fn layout(len: usize, shape: HeadShape) -> (usize, [Argument; 4]) {
    let rows = rows_of(len, shape.width() + shape.query_width());
    let [queries, rest, dim] =
        [shape.query_width(), 2 * shape.kv_width(), shape.head_dim].map(|n| Argument::from(size(n)));
    // Columns are indexed with 32 bits.
    size(shape.width() + shape.query_width());
    (rows, [(rows as i64).into(), queries, rest, dim])
}

/// Divides `projection [rows, width + query_width]`, in which every query head has its gate behind it, into `qkv [rows,
/// width]` and `gates [rows, query_width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn split_gates<T: Storage>(
    device: &Device,
    projection: View<'_, T>,
    shape: HeadShape,
    qkv: ViewMut<'_, T>,
    gates: ViewMut<'_, T>,
) -> Result<()> {
    let (rows, [rows_of, queries, rest, dim]) = layout(projection.len(), shape);
    assert_eq!(qkv.len(), rows * shape.width(), "queries, keys and values are [rows, width]");
    assert_eq!(gates.len(), rows * shape.query_width(), "gates are [rows, query_width]");
    let grid = [blocks(projection.len()), 1, 1];
    let arguments = [projection.into(), rows_of, queries, rest, dim, qkv.into(), gates.into()];
    device.launch(&format!("split_gates_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// The inverse of [`split_gates`], into all of `projection [rows, width + query_width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn join_gates<T: Storage>(
    device: &Device,
    qkv: View<'_, T>,
    gates: View<'_, T>,
    shape: HeadShape,
    projection: ViewMut<'_, T>,
) -> Result<()> {
    let (rows, [rows_of, queries, rest, dim]) = layout(projection.len(), shape);
    assert_eq!(qkv.len(), rows * shape.width(), "queries, keys and values are [rows, width]");
    assert_eq!(gates.len(), rows * shape.query_width(), "gates are [rows, query_width]");
    let grid = [blocks(projection.len()), 1, 1];
    let arguments = [qkv.into(), gates.into(), rows_of, queries, rest, dim, projection.into()];
    device.launch(&format!("join_gates_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// `x [rows, query_width]` times the sigmoid of `gates [rows, query_width]`, into `out [rows, query_width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gate<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    gates: View<'_, T>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    assert_eq!([x.len(), out.len()], [gates.len(); 2], "a value has a gate");
    let arguments = [x.into(), gates.into(), count(gates.len()), out.into()];
    let grid = [blocks(gates.len()), 1, 1];
    device.launch(&format!("gate_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// [`gate`] of `x [rows, query_width]` in place, by `gates [rows, query_width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gate_in_place<T: Storage>(device: &Device, gates: View<'_, T>, x: ViewMut<'_, T>) -> Result<()> {
    assert_eq!(x.len(), gates.len(), "a value has a gate");
    let arguments = [Argument::from(&x), gates.into(), count(gates.len()), Argument::from(&x)];
    let grid = [blocks(gates.len()), 1, 1];
    device.launch(&format!("gate_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// Converts `g [rows, query_width]`, the gradient of the result of [`gate`], to that of `x [rows, query_width]` in place,
/// and writes that of the gates to `d_gates [rows, query_width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gate_backward<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    gates: View<'_, T>,
    g: ViewMut<'_, T>,
    d_gates: ViewMut<'_, T>,
) -> Result<()> {
    assert_eq!([x.len(), g.len(), d_gates.len()], [gates.len(); 3], "a value has a gate");
    let arguments = [x.into(), gates.into(), count(gates.len()), g.into(), d_gates.into()];
    let grid = [blocks(gates.len()), 1, 1];
    device.launch(&format!("gate_backward_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}
