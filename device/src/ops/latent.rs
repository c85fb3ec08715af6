//! The heads of multi-head latent attention (MLA, DeepSeek-V2, DeepSeek-AI 2024, arXiv 2405.04434): queries, keys and values
//! of all heads, made of their parts.
//!
//! A query or a key has a part without position, then one that is rotated; the rotated part of the keys is common to all
//! heads. Values may be narrower than keys, and are padded with zeros, so that attention runs over heads of one width.

use super::heads::{HeadAngles, HeadShape};
use super::vectors::{blocks, count};
use super::{THREADS, rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Widths of the parts of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentHeads {
    /// Number of heads.
    pub heads: usize,
    /// Of a query or a key, without position.
    pub nope: usize,
    /// Of a query or a key, rotated; even.
    pub rope: usize,
    /// Of a value; at most that of a key.
    pub value: usize,
    /// Whether the values of a rotated pair are neighbours.
    pub interleaved: bool,
}

/// Parts of queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct HeadParts<'a, T: Storage> {
    /// `[rows, heads * (nope + rope)]`
    pub queries: View<'a, T>,
    /// `[rows, heads * (nope + value)]` keys without position, and values, of each head.
    pub expanded: View<'a, T>,
    /// `[rows, rope]` what is rotated of the keys.
    pub rotary: View<'a, T>,
}

/// Gradients of [`HeadParts`].
#[derive(Debug)]
pub struct HeadPartsMut<'a, T: Storage> {
    /// `[rows, heads * (nope + rope)]`
    pub queries: ViewMut<'a, T>,
    /// `[rows, heads * (nope + value)]`
    pub expanded: ViewMut<'a, T>,
    /// `[rows, rope]`
    pub rotary: ViewMut<'a, T>,
}

impl LatentHeads {
    /// The heads of attention.
    #[must_use]
    pub fn padded(self) -> HeadShape {
        HeadShape { heads: self.heads, kv_heads: self.heads, head_dim: self.nope + self.rope }
    }

    /// Widths of a row of queries, of keys without position with values, and of what is rotated of the keys.
    #[must_use]
    pub fn widths(self) -> [usize; 3] {
        let Self { heads, nope, rope, value, .. } = self;
        [heads * (nope + rope), heads * (nope + value), rope]
    }

    /// Width of a row of the results of all heads without padding.
    #[must_use]
    pub fn value_width(self) -> usize {
        self.heads * self.value
    }

    /// Arguments of the kernels for `len` values of prepared queries, keys and values.
    fn arguments(self, len: usize, angles: Option<HeadAngles<'_>>) -> Vec<Argument> {
        let Self { heads, nope, rope, value, interleaved } = self;
        assert!(rope.is_multiple_of(2) && value <= nope + rope, "parts of {self:?}");
        // Kernels index the columns of a row with 32 bits.
        size(self.padded().width());
        let rows = rows_of(len, self.padded().width());
        let sizes = [heads, nope, rope, value].map(|n| Argument::from(size(n)));
        let tables = angles.map_or([Argument::null(); 2], |HeadAngles { pairs, cos, sin }| {
            assert_eq!(2 * pairs, rope, "the rotated part is all pairs");
            assert_eq!([cos.len(), sin.len()], [rows * pairs; 2], "an angle of each pair of {rows} rows");
            [cos.into(), sin.into()]
        });
        let neighbours = i32::from(interleaved).into();
        [count(rows)].into_iter().chain(sizes).chain([neighbours]).chain(tables).collect()
    }

    /// Checks the lengths of parts for `len` values of prepared queries, keys and values.
    fn check(self, len: usize, parts: [usize; 3]) {
        let rows = rows_of(len, self.padded().width());
        assert_eq!(parts, self.widths().map(|width| rows * width), "parts of {rows} rows");
    }
}

/// `out [rows, width]` prepared queries, keys and padded values of `parts`. Rotates with `angles`, if there are any.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn assemble<T: Storage>(
    device: &Device,
    heads: LatentHeads,
    parts: HeadParts<'_, T>,
    angles: Option<HeadAngles<'_>>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let HeadParts { queries, expanded, rotary } = parts;
    heads.check(out.len(), [queries, expanded, rotary].map(|part| part.len()));
    let (mut arguments, grid) = (heads.arguments(out.len(), angles), [blocks(out.len()), 1, 1]);
    arguments.extend([Argument::from(queries), expanded.into(), rotary.into(), out.into()]);
    device.launch(&format!("assemble_latents_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// The gradients `d` of the parts, for the gradient `g [rows, width]` of the result of [`assemble`].
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn assemble_backward<T: Storage>(
    device: &Device,
    heads: LatentHeads,
    g: View<'_, T>,
    angles: Option<HeadAngles<'_>>,
    d: HeadPartsMut<'_, T>,
) -> Result<()> {
    let HeadPartsMut { queries, expanded, rotary } = d;
    heads.check(g.len(), [queries.len(), expanded.len(), rotary.len()]);
    let arguments = heads.arguments(g.len(), angles);
    let with = |last: &[Argument]| [&arguments, last].concat();
    let (of_heads, of_rotary) = ([blocks(queries.len() + expanded.len()), 1, 1], blocks(rotary.len()));
    let own = with(&[g.into(), queries.into(), expanded.into()]);
    device.launch(&format!("assemble_latents_backward_{}", T::SUFFIX), of_heads, THREADS, 0, &own)?;
    let own = with(&[g.into(), rotary.into()]);
    device.launch(&format!("rotary_keys_backward_{}", T::SUFFIX), [of_rotary, 1, 1], THREADS, 0, &own)
}

/// Columns that are copied from rows to others.
struct ColumnCopy {
    rows: usize,
    /// From the start of a row to that of the next, in the source and in the destination.
    strides: [usize; 2],
    /// Columns that are copied, and zeros behind them.
    width: usize,
    zeros: usize,
}

impl ColumnCopy {
    /// Copies `from` to `to`, which begin at the first column of the first row.
    fn launch<T: Storage>(&self, device: &Device, from: View<'_, T>, to: ViewMut<'_, T>) -> Result<()> {
        let Self { rows, strides: [from_stride, to_stride], width, zeros } = *self;
        let sizes = [from_stride, to_stride, width, width + zeros].map(|n| Argument::from(size(n)));
        let [a, b, c, d] = sizes;
        let arguments = [from.into(), count(rows), a, b, c, d, to.into()];
        let grid = [blocks(rows * (width + zeros)), 1, 1];
        device.launch(&format!("copy_columns_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
    }
}

/// Divides `both [rows, left + right]` into `first [rows, left]` and `second [rows, right]`, where `right` is
/// `second.len() / rows`.
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn split_columns<T: Storage>(
    device: &Device,
    both: View<'_, T>,
    left: usize,
    first: ViewMut<'_, T>,
    second: ViewMut<'_, T>,
) -> Result<()> {
    let rows = rows_of(first.len(), left);
    let right = columns_of(rows, [both.len(), first.len(), second.len()], left);
    let of = |width, to_stride| ColumnCopy { rows, strides: [left + right, to_stride], width, zeros: 0 };
    of(left, left).launch(device, both, first)?;
    of(right, right).launch(device, both.slice(left.min(both.len())..both.len()), second)
}

/// The inverse of [`split_columns`], into all of `both [rows, left + right]`.
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn join_columns<T: Storage>(
    device: &Device,
    first: View<'_, T>,
    left: usize,
    second: View<'_, T>,
    mut both: ViewMut<'_, T>,
) -> Result<()> {
    let rows = rows_of(first.len(), left);
    let right = columns_of(rows, [both.len(), first.len(), second.len()], left);
    let of = |width, from_stride| ColumnCopy { rows, strides: [from_stride, left + right], width, zeros: 0 };
    of(left, left).launch(device, first, both.reborrow())?;
    let len = both.len();
    of(right, right).launch(device, second, both.slice_mut(left.min(len)..len))
}

/// Columns right of the `left` ones in `rows` rows, of the lengths of both together, and of each.
fn columns_of(rows: usize, [both, first, second]: [usize; 3], left: usize) -> usize {
    assert_eq!(both, first + second, "both parts together");
    let right = second.checked_div(rows).unwrap_or(0);
    assert_eq!(second, rows * right, "{second} values in {rows} rows beside columns of {left}");
    right
}

/// `out [rows, heads * value]` of the results `attended [rows, heads * (nope + rope)]` of attention over padded values.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn narrow_values<T: Storage>(
    device: &Device,
    heads: LatentHeads,
    attended: View<'_, T>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let (wide, width) = (heads.nope + heads.rope, heads.value);
    let rows = rows_of(attended.len(), wide);
    assert_eq!(out.len(), rows * width, "a value of each head");
    ColumnCopy { rows, strides: [wide, width], width, zeros: 0 }.launch(device, attended, out)
}

/// The gradient `out [rows, heads * (nope + rope)]` of these results for the gradient `g [rows, heads * value]` of the
/// narrow ones.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn widen_values<T: Storage>(
    device: &Device,
    heads: LatentHeads,
    g: View<'_, T>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let (wide, width) = (heads.nope + heads.rope, heads.value);
    let rows = rows_of(out.len(), wide);
    assert_eq!(g.len(), rows * width, "a value of each head");
    ColumnCopy { rows, strides: [width, wide], width, zeros: wide - width }.launch(device, g, out)
}
