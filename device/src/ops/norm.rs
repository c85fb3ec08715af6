//! RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): `y = factor * (w + offset) * x / sqrt(mean(x^2) + eps)` per row.

use super::rows::add_partial_sums;
use super::{PACK, THREADS, rows_of, size, slabs};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Smallest number of rows per block in the gradient of the weight, eight per warp.
const SLAB: usize = 64;

/// A norm of rows.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a, T: Storage> {
    /// `[width]`
    pub weight: View<'a, T>,
    /// Added to the weight: 1 for Gemma, 0 for others.
    pub offset: f32,
    /// Multiplies the result.
    pub factor: f32,
    /// Added to the mean square.
    pub eps: f32,
}

/// The rows that a norm applies to: columns from `first` of rows of `stride`.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowColumns {
    pub(super) first: usize,
    pub(super) stride: usize,
}

impl<'a, T: Storage> RmsNorm<'a, T> {
    /// The norm with `weight [width]`, without offset and factor.
    #[must_use]
    pub fn new(weight: View<'a, T>, eps: f32) -> Self {
        Self { weight, offset: 0.0, factor: 1.0, eps }
    }

    /// Whole rows.
    fn whole(&self) -> RowColumns {
        RowColumns { first: 0, stride: self.weight.len() }
    }

    /// Number of rows of `len` values, whose first row begins at [`first_of`].
    fn rows(&self, len: usize, columns: RowColumns) -> usize {
        let RowColumns { first, stride } = columns;
        let end = first + self.weight.len();
        assert!(end <= stride, "columns {first}..{end} of rows of {stride}");
        rows_of(len, stride)
    }

    fn arguments(&self, columns: RowColumns) -> [Argument; 6] {
        let [width, stride] = [self.weight.len(), columns.stride].map(|n| size(n).into());
        [self.weight.into(), width, stride, self.eps.into(), self.offset.into(), self.factor.into()]
    }

    /// Launches `kernel` with a block per row of `x`, `columns` of which it is about.
    fn launch<const N: usize>(
        &self,
        device: &Device,
        kernel: &str,
        rows: usize,
        (x, columns): (Argument, RowColumns),
        operands: [Argument; N],
    ) -> Result<()> {
        let arguments = [x].into_iter().chain(self.arguments(columns)).chain(operands);
        let (name, threads) = (format!("{kernel}_{}", T::SUFFIX), threads::<T>(self.weight.len()));
        device.launch(&name, [rows, 1, 1], threads, 0, &arguments.collect::<Vec<_>>())
    }
}

/// Threads per block for rows of `width`; one block per row.
fn threads<T>(width: usize) -> usize {
    width.div_ceil(PACK / size_of::<T>()).next_multiple_of(32).clamp(32, THREADS)
}

/// `values` from the first of the columns; empty without values.
fn first_of<T: Storage>(values: View<'_, T>, columns: RowColumns) -> View<'_, T> {
    values.slice(columns.first.min(values.len())..values.len())
}

/// Normalises each row of `x [rows, width]` into `out [rows, width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    norm: RmsNorm<'_, T>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let rows = norm.rows(x.len(), norm.whole());
    assert_eq!(x.len(), out.len(), "the result is as large as what is normalised");
    norm.launch(device, "rms_norm", rows, (x.into(), norm.whole()), [Argument::null(), out.into()])
}

/// Adds the normalised rows of `x [rows, width]` to `to [rows, width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn add_rms_norm<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    norm: RmsNorm<'_, T>,
    to: ViewMut<'_, T>,
) -> Result<()> {
    let rows = norm.rows(x.len(), norm.whole());
    assert_eq!(x.len(), to.len(), "the sum is as large as what is normalised");
    norm.launch(
        device,
        "rms_norm",
        rows,
        (x.into(), norm.whole()),
        [Argument::from(&to), Argument::from(&to)],
    )
}

/// Normalises `columns` of the rows `x [rows, stride]` in place.
pub(super) fn rms_norm_in_place<T: Storage>(
    device: &Device,
    x: &ViewMut<'_, T>,
    columns: RowColumns,
    norm: RmsNorm<'_, T>,
) -> Result<()> {
    let rows = norm.rows(x.len(), columns);
    let from = first_of(x.as_view(), columns).into();
    norm.launch(device, "rms_norm", rows, (from, columns), [Argument::null(), from])
}

/// Gradient of `x [rows, width]` from `g [rows, width]`, that of the result, plus `base [rows, width]`, into `dx [rows,
/// width]`. Adds the gradient of the weight to `of_weight [width]`.
///
/// # Errors
/// If a launch fails, or there is no memory for partial sums.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm_backward<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    norm: RmsNorm<'_, T>,
    g: View<'_, T>,
    base: Option<View<'_, T>>,
    dx: ViewMut<'_, T>,
    of_weight: Option<ViewMut<'_, f32>>,
) -> Result<()> {
    let rows = norm.rows(x.len(), norm.whole());
    assert!(x.len() == g.len() && x.len() == dx.len(), "{} values, {} and {}", x.len(), g.len(), dx.len());
    assert!(base.is_none_or(|base| base.len() == x.len()), "a gradient is added to one of its shape");
    let mut inverses = device.uninit::<f32>(if of_weight.is_some() { rows } else { 0 })?;
    let to = if of_weight.is_some() { inverses.all_mut().into() } else { Argument::null() };
    let operands = [g.into(), base.into(), dx.into(), to];
    norm.launch(device, "rms_norm_backward", rows, (x.into(), norm.whole()), operands)?;
    let Some(of_weight) = of_weight else { return Ok(()) };
    add_slopes(device, (x, g), norm.whole(), inverses.all(), of_weight)
}

/// Converts `columns` of `g [rows, stride]`, the gradient of a normalised row, to that of `x [rows, stride]` in place.
pub(super) fn rms_norm_backward_in_place<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    columns: RowColumns,
    norm: RmsNorm<'_, T>,
    g: &ViewMut<'_, T>,
) -> Result<()> {
    let rows = norm.rows(x.len(), columns);
    assert_eq!(x.len(), g.len(), "a gradient has the shape of what it is of");
    let g = first_of(g.as_view(), columns).into();
    let x = first_of(x, columns).into();
    let operands = [g, Argument::null(), g, Argument::null()];
    norm.launch(device, "rms_norm_backward", rows, (x, columns), operands)
}

/// Adds the gradient of the weight to `gradient [width]`, from `columns` of the rows of `x [rows, stride]` and of `g [rows, stride]`, the
/// gradient of the result.
pub(super) fn weight_gradient_of<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    columns: RowColumns,
    norm: RmsNorm<'_, T>,
    g: View<'_, T>,
    gradient: ViewMut<'_, f32>,
) -> Result<()> {
    let (width, rows) = (gradient.len(), norm.rows(x.len(), columns));
    assert_eq!(width, norm.weight.len(), "a gradient has the shape of what it is of");
    assert_eq!(x.len(), g.len(), "a gradient has the shape of what it is of");
    if rows == 0 {
        return Ok(());
    }
    let (x, g) = (first_of(x, columns), first_of(g, columns));
    let mut inverses = device.uninit::<f32>(rows)?;
    let [width_of, stride] = [width, columns.stride].map(|n| Argument::from(size(n)));
    let arguments =
        [x.into(), width_of, stride, norm.eps.into(), norm.factor.into(), inverses.all_mut().into()];
    let (name, threads) = (format!("rms_inverses_{}", T::SUFFIX), threads::<T>(width));
    device.launch(&name, [rows, 1, 1], threads, 0, &arguments)?;
    add_slopes(device, (x, g), columns, inverses.all(), gradient)
}

/// Adds `g * x * inverses` of `columns` of all rows to `gradient [width]`; `x` and `g` begin at the first of the columns.
fn add_slopes<T: Storage>(
    device: &Device,
    (x, g): (View<'_, T>, View<'_, T>),
    columns: RowColumns,
    inverses: View<'_, f32>,
    gradient: ViewMut<'_, f32>,
) -> Result<()> {
    let (width, rows) = (gradient.len(), inverses.len());
    if rows == 0 {
        return Ok(());
    }
    let [width_of, stride] = [width, columns.stride].map(|n| Argument::from(size(n)));
    let (slab, parts) = slabs(rows, SLAB);
    let mut partial = device.uninit::<f32>(parts * width)?;
    let arguments = [
        x.into(),
        g.into(),
        inverses.into(),
        size(rows).into(),
        size(slab).into(),
        width_of,
        stride,
        partial.all_mut().into(),
    ];
    let grid = [width.div_ceil(32 * PACK / size_of::<T>()), parts, 1];
    device.launch(&format!("rms_norm_slopes_{}", T::SUFFIX), grid, THREADS, 0, &arguments)?;
    add_partial_sums(device, partial.all(), gradient)
}
