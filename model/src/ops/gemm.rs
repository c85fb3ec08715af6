//! Matrix products (GEMM) of strided matrices. The right matrix is packed into panels, once or block by block (Goto and van
//! de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication").
//!
//! Invariant: every element of a result is one chain of fused multiply-adds over the inner dimension in ascending order,
//! from zero or from the element's old value. It depends neither on the number of rows nor on the machine: a sequence has the
//! same logits alone, in any decode batch and in a training pack. Products run on the calling thread; callers split rows or
//! columns. [`tree`] has the same products with another order of summation.

mod pack;
mod tile;
mod tree;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use super::simd::{LANES, Vector, prefetch, widest};
use crate::machine::second_level_cache;
use pack::{pack_block, pack_rows};
use tile::{TileRows, TileShape, rows_of};
pub(crate) use tree::{CHUNKS, TreeChunks, TreePart, WHOLE, tree_product};

/// Columns of a panel: three AVX-512 registers of f32, or three times two of AVX2. The last panel of a matrix may be
/// narrower, in steps of [`STEP`].
pub(crate) const NR: usize = 48;
/// Columns that panels are padded to.
const STEP: usize = 16;
/// Rows of the left matrix for which a block of panels is packed.
const ROW_BLOCK: usize = 1024;
/// Longest inner length of one pass; results are read and written once per pass. A tile reads this much of each of its rows,
/// which a first-level cache keeps for all panels of a block.
const INNER_BLOCK: usize = 512;
/// Least and most bytes of the panels of a block.
const BLOCK_BYTES: [usize; 2] = [192 << 10, 512 << 10];
/// A cache line, in bytes: a register that is loaded across two of them takes twice the time.
const LINE: usize = 64;

/// A matrix `[rows, columns]` by strides.
#[derive(Clone, Copy, Debug)]
pub struct StridedMatrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> StridedMatrix<'a> {
    /// `values` is `[rows, columns]` row-major.
    #[must_use]
    pub fn new(values: &'a [f32], columns: usize) -> Self {
        let rows = values.len().checked_div(columns).unwrap_or(0);
        Self::strided(values, rows, columns, columns)
    }

    /// Row `r` begins at `r * row_stride`.
    ///
    /// # Panics
    /// If `values` ends before the matrix.
    pub(crate) fn strided(values: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        let end = if rows * columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(end <= values.len(), "a matrix [{rows}, {columns}] needs {end} values, not {}", values.len());
        Self { values, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transpose, without a copy.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    /// Number of its rows.
    pub(crate) fn height(self) -> usize {
        self.rows
    }

    /// Some of its columns.
    ///
    /// # Panics
    /// If it has fewer.
    pub(crate) fn columns(self, columns: Range<usize>) -> Self {
        self.transposed().rows(columns).transposed()
    }

    /// Some of its rows.
    ///
    /// # Panics
    /// If it has fewer.
    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let start = (rows.start * self.row_stride).min(self.values.len());
        Self { values: &self.values[start..], rows: rows.len(), ..self }
    }
}

/// A right matrix `[inner, columns]` packed whole: panels of 48 columns, each `[inner, width]`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Panels {
    inner: usize,
    columns: usize,
    /// Where the first panel begins: at a cache line.
    start: usize,
    values: Vec<f32>,
}

impl Panels {
    /// Memory of the packed values, bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }

    pub(crate) fn new(matrix: StridedMatrix<'_>) -> Self {
        let (inner, columns) = (matrix.rows, matrix.columns);
        let mut values = vec![0.0; inner * columns.next_multiple_of(STEP) + LINE / size_of::<f32>()];
        let start = line_start(&values);
        for first in (0..columns).step_by(NR) {
            let width = NR.min(columns - first).next_multiple_of(STEP);
            pack_panel(matrix, 0..inner, first, &mut values[start + first * inner..][..inner * width]);
        }
        Self { inner, columns, start, values }
    }

    /// All of it.
    #[cfg(test)]
    pub(crate) fn whole(&self) -> Right<'_> {
        self.part(self.inner, self.columns)
    }

    /// The first `inner` rows and `columns` columns.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn part(&self, inner: usize, columns: usize) -> Right<'_> {
        assert!(inner <= self.inner && columns <= self.columns, "a part is not larger than the whole");
        Right::Panels { panels: self, inner, first: 0, columns }
    }

    /// Cuts the columns into at most `count` ranges of whole panels.
    pub(crate) fn split(&self, count: usize) -> Vec<Range<usize>> {
        super::row_ranges(self.columns, count, NR)
    }

    /// Columns of [`Panels::split`].
    pub(crate) fn columns_of(&self, columns: Range<usize>) -> Right<'_> {
        assert!(columns.start.is_multiple_of(NR) && columns.end <= self.columns, "whole panels");
        Right::Panels { panels: self, inner: self.inner, first: columns.start, columns: columns.len() }
    }

    /// Number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Copies a column to `out [inner]`.
    pub(crate) fn copy_column(&self, column: usize, out: &mut [f32]) {
        let first = column / NR * NR;
        let padded = NR.min(self.columns - first).next_multiple_of(STEP);
        let panel = &self.values[self.start + first * self.inner + (column - first)..];
        out.iter_mut().zip(panel.iter().step_by(padded)).for_each(|(to, from)| *to = *from);
    }
}

/// Index of the first value at the beginning of a cache line.
fn line_start(values: &[f32]) -> usize {
    values.as_ptr().align_offset(LINE).min(LINE / size_of::<f32>())
}

/// The right matrix of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Right<'a> {
    /// Packed once, for few rows or for many products: the first `inner` rows and `columns` columns from `first`, which begins
    /// a panel.
    Panels { panels: &'a Panels, inner: usize, first: usize, columns: usize },
    /// Packed block by block during the product, for many rows: there is no copy of the whole.
    Unpacked(StridedMatrix<'a>),
}

/// A packed panel of columns.
struct PackedPanel<'a> {
    values: &'a [f32],
    /// Its padded width.
    padded: usize,
    /// The start of the next panel, for prefetching; `None` for a panel that was packed just now, which is in a cache.
    next: Option<*const f32>,
}

impl Right<'_> {
    fn shape(self) -> (usize, usize) {
        match self {
            Self::Panels { inner, columns, .. } => (inner, columns),
            Self::Unpacked(matrix) => (matrix.rows, matrix.columns),
        }
    }
}

impl<'a> Right<'a> {
    /// The panel of columns from `first` on for some `steps` of the inner dimension: one that was packed before, or one of the
    /// panels of a block from column `block` on, packed in `buffer` one behind the other.
    fn panel<'b>(self, first: usize, steps: &Range<usize>, block: usize, buffer: &'b [f32]) -> PackedPanel<'b>
    where
        'a: 'b,
    {
        match self {
            Self::Panels { panels, first: before, .. } => {
                let column = before + first;
                // A panel keeps its packed width if only some of its columns are used.
                let padded = NR.min(panels.columns - column).next_multiple_of(STEP);
                let at = panels.start + column * panels.inner;
                let values = &panels.values[at + steps.start * padded..][..steps.len() * padded];
                let next = panels.values.as_ptr().wrapping_add(at + (panels.inner + steps.start) * NR);
                PackedPanel { values, padded, next: Some(next) }
            }
            Self::Unpacked(matrix) => {
                let padded = NR.min(matrix.columns - first).next_multiple_of(STEP);
                let values = &buffer[(first - block) * steps.len()..][..steps.len() * padded];
                PackedPanel { values, padded, next: None }
            }
        }
    }
}

/// Where a result goes: rows that lie `row_stride` apart, of which `width` columns may be written.
#[derive(Debug)]
pub(crate) struct ProductOut<'a> {
    first: *mut f32,
    /// Values from `first` to the end of the buffer.
    len: usize,
    row_stride: usize,
    width: usize,
    values: PhantomData<&'a mut [f32]>,
}

#[expect(unsafe_code, reason = "it is the only mutable borrow of its columns")]
unsafe impl Send for ProductOut<'_> {}

impl<'a> ProductOut<'a> {
    /// Rows of `values`, `row_stride` apart.
    pub(crate) fn new(values: &'a mut [f32], row_stride: usize) -> Self {
        Self {
            first: values.as_mut_ptr(),
            len: values.len(),
            row_stride,
            width: row_stride,
            values: PhantomData,
        }
    }

    /// Disjoint, ascending ranges of the columns of rows that lie `row_stride` apart, for a thread each.
    ///
    /// # Panics
    /// If ranges overlap.
    pub(crate) fn columns(values: &'a mut [f32], row_stride: usize, ranges: &[Range<usize>]) -> Vec<Self> {
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "columns have one writer");
        let (first, len) = (values.as_mut_ptr(), values.len());
        let part = |range: &Range<usize>| {
            assert!(range.start <= range.end && range.end <= row_stride, "columns {range:?} of {row_stride}");
            let start = range.start.min(len);
            Self {
                first: first.wrapping_add(start),
                len: len - start,
                row_stride,
                width: range.len(),
                values: PhantomData,
            }
        };
        ranges.iter().map(part).collect()
    }

    /// `columns` of row `row`.
    ///
    /// # Panics
    /// If they lie beyond the result.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize, columns: Range<usize>) -> &mut [f32] {
        let start = row * self.row_stride + columns.start;
        assert!(columns.end <= self.width && start + columns.len() <= self.len, "{columns:?} of row {row}");
        #[expect(unsafe_code, reason = "the columns lie in the part of the result that this borrows")]
        unsafe {
            std::slice::from_raw_parts_mut(self.first.add(start), columns.len())
        }
    }

    /// Number of columns that may be written.
    pub(crate) fn width(&self) -> usize {
        self.width
    }
}

/// What the chains of a product begin with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProductStart<'a> {
    /// Zero.
    Zero,
    /// The old values of the result.
    Result,
    /// Other values, whose rows lie as far apart as those of the result.
    Values(&'a [f32]),
}

impl ProductStart<'_> {
    /// Zero, or the old values of the result.
    pub(crate) fn of(fresh: bool) -> Self {
        if fresh { Self::Zero } else { Self::Result }
    }

    /// Where the rows that a pass over the inner dimension begins with are; `None` for zero.
    fn of_pass(self, is_first: bool, out: &ProductOut<'_>) -> Option<*const f32> {
        match self {
            Self::Zero if is_first => None,
            Self::Values(values) if is_first => Some(values.as_ptr()),
            _ => Some(out.first),
        }
    }

    /// The same for the columns of a result from `column` on.
    pub(crate) fn at_column(self, column: usize) -> Self {
        match self {
            Self::Values(values) => Self::Values(&values[column.min(values.len())..]),
            other => other,
        }
    }
}

/// `out = left [rows, inner] x right [inner, columns]`, the result `[rows, columns]` row-major.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn multiply(left: StridedMatrix<'_>, right: Right<'_>, out: &mut [f32]) {
    let row_stride = right.shape().1;
    product(left, right, ProductOut::new(out, row_stride), true);
}

/// `out [rows, columns] += left [rows, inner] x right [inner, columns]`.
pub(crate) fn multiply_add(left: StridedMatrix<'_>, right: Right<'_>, out: &mut [f32]) {
    let row_stride = right.shape().1;
    product(left, right, ProductOut::new(out, row_stride), false);
}

/// `out = left x right` if `fresh`, else `out += left x right`.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn product(left: StridedMatrix<'_>, right: Right<'_>, out: ProductOut<'_>, fresh: bool) {
    product_from(left, right, out, ProductStart::of(fresh));
}

/// `out = start + left x right`.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn product_from(
    left: StridedMatrix<'_>,
    right: Right<'_>,
    mut out: ProductOut<'_>,
    start: ProductStart<'_>,
) {
    let (inner, columns) = right.shape();
    assert_eq!(left.columns, inner, "the inner dimensions agree");
    if left.rows == 0 || columns == 0 {
        return;
    }
    let end = (left.rows - 1) * out.row_stride + columns;
    assert!(columns <= out.width && end <= out.len, "the result is [{}, {columns}]", left.rows);
    if let ProductStart::Values(values) = start {
        assert!(
            end <= values.len(),
            "{} values begin the chains of [{}, {columns}]",
            values.len(),
            left.rows
        );
    }
    if inner == 0 {
        for row in 0..left.rows {
            let at = row * out.row_stride;
            let to = out.row(row, 0..columns);
            match start {
                ProductStart::Zero => to.fill(0.0),
                ProductStart::Result => {}
                ProductStart::Values(values) => to.copy_from_slice(&values[at..at + columns]),
            }
        }
        return;
    }
    // The packing buffers outlive the call: a fresh one would cost more than a small product.
    thread_local! {
        static BUFFERS: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
    }
    BUFFERS.with_borrow_mut(|(panel, tiles)| {
        panel.resize(block_values().max(NR * INNER_BLOCK) + LINE / size_of::<f32>(), 0.0);
        let first = line_start(panel);
        multiply_blocks(left, right, &mut out, start, &mut panel[first..], tiles);
    });
}

widest! {
    fn multiply_blocks(
        left: StridedMatrix<'_>,
        right: Right<'_>,
        out: &mut ProductOut<'_>,
        start: ProductStart<'_>,
        buffer: &mut [f32],
        tiles: &mut Vec<f32>,
    ) = blocks::<__m512, 3, 8> | <__m256, 2, 6> | <4, 6>
}

widest! {
    /// Packs one panel of a matrix, as [`pack_block`].
    fn pack_panel(matrix: StridedMatrix<'_>, steps: Range<usize>, first: usize, panel: &mut [f32]) =
        pack_block::<__m512> | <__m256> | <>
}

/// `N` registers of type `V` by at most `R` rows make the largest tile. A block of panels stays in the second-level cache while
/// all rows pass it; the rows of a tile stay in the first-level cache while they pass the panels of the block, so that the
/// results of a tile are written one behind the other.
#[inline(always)]
fn blocks<V: Vector, const N: usize, const R: usize>(
    left: StridedMatrix<'_>,
    right: Right<'_>,
    out: &mut ProductOut<'_>,
    start: ProductStart<'_>,
    buffer: &mut [f32],
    tiles: &mut Vec<f32>,
) {
    let (inner, columns) = right.shape();
    let pass = even_part(inner, INNER_BLOCK);
    let block = block_columns(right, pass);
    for row_start in (0..left.rows).step_by(ROW_BLOCK) {
        let rows = row_start..(row_start + ROW_BLOCK).min(left.rows);
        for inner_start in (0..inner).step_by(pass) {
            let steps = inner_start..(inner_start + pass).min(inner);
            let start = start.of_pass(inner_start == 0, out);
            let gathered = left.column_stride != 1;
            if gathered {
                pack_rows::<R>(left, rows.clone(), steps.clone(), tiles);
            }
            for block_start in (0..columns).step_by(block) {
                let block = block_start..(block_start + block).min(columns);
                if let Right::Unpacked(matrix) = right {
                    pack_panels::<V>(matrix, &steps, &block, buffer);
                }
                for row in rows.clone().step_by(R) {
                    let height = (rows.end - row).min(R);
                    let a = if gathered {
                        TileRows::Packed(&tiles[(row - rows.start) * steps.len()..][..R * steps.len()])
                    } else {
                        let values = &left.values[row * left.row_stride + steps.start..];
                        TileRows::Strided(values, left.row_stride)
                    };
                    for first in block.clone().step_by(NR) {
                        let wide = NR.min(columns - first);
                        let PackedPanel { values: panel, padded, next } =
                            right.panel(first, &steps, block_start, buffer);
                        // Stores wait for their lines too.
                        let (below, column) = match next {
                            // One panel at a time passes all rows.
                            Some(_) => (row + height, first),
                            None if first + NR < block.end => (row, first + NR),
                            None => (row + height, block.start),
                        };
                        for row in below..(below + R).min(rows.end) {
                            prefetch(out.first.wrapping_add(row * out.row_stride + column), NR);
                        }
                        for sub in (0..wide).step_by(V::WIDTH * N) {
                            let width = (wide - sub).min(V::WIDTH * N);
                            let at = row * out.row_stride + first + sub;
                            let shape = TileShape {
                                steps: steps.len(),
                                stride: padded,
                                width,
                                start: start.map(|start| start.wrapping_add(at)),
                                out_stride: out.row_stride,
                                ahead: next.map(|next| {
                                    next.wrapping_add((row - rows.start) / R % (NR / LANES) * LANES)
                                }),
                            };
                            let c = out.first.wrapping_add(at);
                            let b = &panel[sub..];
                            let registers = width.div_ceil(V::WIDTH);
                            // Registers of one panel come in multiples of STEP columns, so few combinations exist.
                            if registers == N {
                                rows_of::<V, N, R>(height, a, b, shape, c);
                            } else if registers == 2 {
                                rows_of::<V, 2, R>(height, a, b, shape, c);
                            } else if registers == 3 {
                                rows_of::<V, 3, R>(height, a, b, shape, c);
                            } else {
                                rows_of::<V, 1, R>(height, a, b, shape, c);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Packs the panels of the columns `block` one behind the other.
#[inline(always)]
fn pack_panels<V: Vector>(
    matrix: StridedMatrix<'_>,
    steps: &Range<usize>,
    block: &Range<usize>,
    buffer: &mut [f32],
) {
    for first in block.clone().step_by(NR) {
        let padded = NR.min(matrix.columns - first).next_multiple_of(STEP);
        let panel = &mut buffer[(first - block.start) * steps.len()..][..steps.len() * padded];
        pack_block::<V>(matrix, steps.clone(), first, panel);
    }
}

/// Columns of a block of panels that have `steps` of the inner dimension. Packed panels come from memory one by one, the next
/// while the rows pass this one.
fn block_columns(right: Right<'_>, steps: usize) -> usize {
    match right {
        Right::Panels { .. } => NR,
        Right::Unpacked(matrix) => {
            NR * even_part(matrix.columns.div_ceil(NR), (block_values() / (steps * NR).max(1)).max(1))
        }
    }
}

/// Values of the panels of a block: three eighths of the second-level cache, which keeps them beside the rows and results that pass.
fn block_values() -> usize {
    let [least, most] = BLOCK_BYTES;
    (second_level_cache() * 3 / 8).clamp(least, most) / size_of::<f32>()
}

/// The length of the parts, none longer than `most`, into which `whole` is cut evenly.
fn even_part(whole: usize, most: usize) -> usize {
    whole.div_ceil(whole.div_ceil(most))
}

#[cfg(test)]
mod tests;
