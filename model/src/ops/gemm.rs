//! Matrix products of strided matrices, with the right one packed into panels once or on the way.
//!
//! Invariant: every element of a result is one chain of fused multiply-adds over the inner dimension in ascending
//! order, from what stands there (or zero), however many rows are multiplied together and on whatever machine: a
//! sequence gets the same logits alone, in any decode batch and in a training pack. Nothing here starts a thread:
//! callers split rows or columns.

use std::cell::RefCell;
use std::ops::Range;

use super::simd::{Vector, prefetch};
use crate::machine::{Level, level};

/// Columns of a panel: three AVX-512 registers of f32, or three times two of AVX2. The last panel of a matrix may be
/// narrower, in steps of [`STEP`].
const NR: usize = 48;
/// Columns that panels are padded to.
const STEP: usize = 16;
/// Rows of the left matrix that pass by a packed block: with `INNER_BLOCK` they take 768 KiB of the second-level cache.
const ROW_BLOCK: usize = 384;
/// Inner length of one pass; results are read and written once per pass.
const INNER_BLOCK: usize = 512;
/// How many rows further on memory is asked for while rows are packed, of which each is in other lines and pages.
const AHEAD: usize = 8;
/// How many steps of the inner dimension further on a panel is asked for.
const SOON: usize = 16;
/// A cache line, in bytes: a register that is loaded across two of them takes twice the time.
const LINE: usize = 64;

/// A matrix `[rows, columns]` by strides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `values` is `[rows, columns]` row-major.
    pub(crate) fn new(values: &'a [f32], columns: usize) -> Self {
        let rows = values.len().checked_div(columns).unwrap_or(0);
        Self::strided(values, (rows, columns), columns)
    }

    /// Row `r` begins at `r * row_stride`.
    ///
    /// # Panics
    /// If `values` ends before the matrix.
    pub(crate) fn strided(values: &'a [f32], (rows, columns): (usize, usize), row_stride: usize) -> Self {
        let end = if rows * columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(end <= values.len(), "a matrix [{rows}, {columns}] needs {end} values, not {}", values.len());
        Self { values, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transpose, without a copy.
    pub(crate) fn transposed(self) -> Self {
        Self {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
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
    pub(crate) fn new(matrix: Matrix<'_>) -> Self {
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
    pub(crate) fn whole(&self) -> Right<'_> {
        self.part(self.inner, self.columns)
    }

    /// The first `inner` rows and `columns` columns.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn part(&self, inner: usize, columns: usize) -> Right<'_> {
        assert!(inner <= self.inner && columns <= self.columns, "a part is not larger than the whole");
        Right::Panels { panels: self, inner, columns }
    }

    /// Number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }
}

/// Index of the first value at the beginning of a cache line.
fn line_start(values: &[f32]) -> usize {
    values.as_ptr().align_offset(LINE).min(LINE / size_of::<f32>())
}

/// The right matrix of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Right<'a> {
    /// Packed before: for few rows, or for many products. Of a matrix `[inner, columns]` only the first so many.
    Panels { panels: &'a Panels, inner: usize, columns: usize },
    /// Packed block by block on the way: for many rows, without a copy of the whole.
    Matrix(Matrix<'a>),
}

impl Right<'_> {
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Panels { inner, columns, .. } => (*inner, *columns),
            Self::Matrix(matrix) => (matrix.rows, matrix.columns),
        }
    }
}

/// Where a result goes: `[rows, columns]`, row `r` at `r * row_stride`.
#[derive(Debug)]
pub(crate) struct Out<'a> {
    pub(crate) values: &'a mut [f32],
    pub(crate) row_stride: usize,
}

/// `out = left [rows, inner] x right [inner, columns]`, the result `[rows, columns]` row-major.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn multiply(left: Matrix<'_>, right: Right<'_>, out: &mut [f32]) {
    let row_stride = right.shape().1;
    product(left, right, Out { values: out, row_stride }, true);
}

/// `out += left x right`, as [`multiply`].
pub(crate) fn multiply_add(left: Matrix<'_>, right: Right<'_>, out: &mut [f32]) {
    let row_stride = right.shape().1;
    product(left, right, Out { values: out, row_stride }, false);
}

/// `out = left x right` if `fresh`, else `out += left x right`.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn product(left: Matrix<'_>, right: Right<'_>, mut out: Out<'_>, fresh: bool) {
    let (inner, columns) = right.shape();
    assert_eq!(left.columns, inner, "the inner dimensions agree");
    if left.rows == 0 || columns == 0 {
        return;
    }
    let end = (left.rows - 1) * out.row_stride + columns;
    assert!(columns <= out.row_stride && end <= out.values.len(), "the result is [{}, {columns}]", left.rows);
    if inner == 0 {
        if fresh {
            out.values.chunks_mut(out.row_stride).take(left.rows).for_each(|row| row[..columns].fill(0.0));
        }
        return;
    }
    // The packing buffers outlive the call: a fresh one would cost more than a small product.
    thread_local! {
        static BUFFERS: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
    }
    BUFFERS.with_borrow_mut(|(panel, tiles)| {
        panel.resize(NR * INNER_BLOCK + LINE / size_of::<f32>(), 0.0);
        let start = line_start(panel);
        multiply_blocks(left, right, &mut out, fresh, &mut panel[start..], tiles);
    });
}

/// Calls a generic function with the widest registers that the machine has.
macro_rules! widest {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) =
        $callee:ident::<$v512:ident $(, $p512:literal)*> | <$v256:ident $(, $p256:literal)*> | <$($p128:literal),*>) => {
        $(#[$meta])*
        fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::x86_64::{$v256, $v512};
                #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) {
                    $callee::<$v512 $(, $p512)*>($($arg),*);
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) {
                    $callee::<$v256 $(, $p256)*>($($arg),*);
                }
                match level() {
                    #[expect(unsafe_code, reason = "the machine has the features of this level")]
                    Level::Avx512 => return unsafe { avx512($($arg),*) },
                    #[expect(unsafe_code, reason = "the machine has the features of this level")]
                    Level::Avx2 => return unsafe { avx2($($arg),*) },
                    Level::Portable => {}
                }
            }
            $callee::<[f32; 4] $(, $p128)*>($($arg),*);
        }
    };
}

widest! {
    fn multiply_blocks(
        left: Matrix<'_>,
        right: Right<'_>,
        out: &mut Out<'_>,
        fresh: bool,
        buffer: &mut [f32],
        tiles: &mut Vec<f32>,
    ) = blocks::<__m512, 3, 8> | <__m256, 2, 6> | <4, 6>
}

widest! {
    /// Packs one panel of a matrix, as [`pack_block`].
    fn pack_panel(matrix: Matrix<'_>, steps: Range<usize>, first: usize, panel: &mut [f32]) =
        pack_block::<__m512> | <__m256> | <>
}

/// `N` registers of type `V` by at most `R` rows make the largest tile.
#[inline(always)]
fn blocks<V: Vector, const N: usize, const R: usize>(
    left: Matrix<'_>,
    right: Right<'_>,
    out: &mut Out<'_>,
    fresh: bool,
    buffer: &mut [f32],
    tiles: &mut Vec<f32>,
) {
    let (inner, columns) = right.shape();
    for row_start in (0..left.rows).step_by(ROW_BLOCK) {
        let rows = row_start..(row_start + ROW_BLOCK).min(left.rows);
        for inner_start in (0..inner).step_by(INNER_BLOCK) {
            let steps = inner_start..(inner_start + INNER_BLOCK).min(inner);
            let fresh = fresh && inner_start == 0;
            let gathered = left.column_stride != 1;
            if gathered {
                pack_rows::<R>(left, rows.clone(), steps.clone(), tiles);
            }
            for first in (0..columns).step_by(NR) {
                let wide = NR.min(columns - first);
                // A panel of which only some columns are wanted is still as wide as it was packed.
                let padded = match right {
                    Right::Panels { panels, .. } => NR.min(panels.columns - first),
                    Right::Matrix(_) => wide,
                }
                .next_multiple_of(STEP);
                let panel: &[f32] = match right {
                    Right::Panels { panels, .. } => {
                        &panels.values[panels.start + first * panels.inner + steps.start * padded..]
                            [..steps.len() * padded]
                    }
                    Right::Matrix(matrix) => {
                        let panel = &mut buffer[..steps.len() * padded];
                        pack_block::<V>(matrix, steps.clone(), first, panel);
                        panel
                    }
                };
                let mut row = rows.start;
                while row < rows.end {
                    let height = (rows.end - row).min(R);
                    for next in row + height..(row + 2 * height).min(rows.end) {
                        prefetch(&out.values[next * out.row_stride + first..][..wide]);
                    }
                    let a = if gathered {
                        Rows::Packed(&tiles[(row - rows.start) * steps.len()..][..R * steps.len()])
                    } else {
                        Rows::Strided(&left.values[row * left.row_stride + steps.start..], left.row_stride)
                    };
                    for sub in (0..wide).step_by(V::WIDTH * N) {
                        let width = (wide - sub).min(V::WIDTH * N);
                        let place = Place {
                            steps: steps.len(),
                            stride: padded,
                            width,
                            fresh,
                            out_stride: out.row_stride,
                        };
                        let at = row * out.row_stride + first + sub;
                        let c = &mut out.values[at..];
                        let b = &panel[sub..];
                        let registers = width.div_ceil(V::WIDTH);
                        // Registers of one panel come in multiples of STEP columns, so few combinations exist.
                        if registers == N {
                            rows_of::<V, N, R>(height, a, b, place, c);
                        } else if registers == 2 {
                            rows_of::<V, 2, R>(height, a, b, place, c);
                        } else if registers == 3 {
                            rows_of::<V, 3, R>(height, a, b, place, c);
                        } else {
                            rows_of::<V, 1, R>(height, a, b, place, c);
                        }
                    }
                    row += height;
                }
            }
        }
    }
}

/// The rows of a tile of the left matrix.
#[derive(Clone, Copy)]
enum Rows<'a> {
    /// Each row contiguous; the distance of two rows.
    Strided(&'a [f32], usize),
    /// Packed: `[inner, R]`.
    Packed(&'a [f32]),
}

#[derive(Clone, Copy)]
struct Place {
    /// Length of the inner dimension in this pass.
    steps: usize,
    /// Columns of the packed panel.
    stride: usize,
    /// Columns of the tile that exist.
    width: usize,
    /// Whether the chains begin at zero.
    fresh: bool,
    /// Distance of two rows of the result.
    out_stride: usize,
}

#[inline(always)]
fn rows_of<V: Vector, const N: usize, const R: usize>(
    height: usize,
    a: Rows<'_>,
    b: &[f32],
    place: Place,
    out: &mut [f32],
) {
    match height {
        1 => tile::<V, N, 1, R>(a, b, place, out),
        2 => tile::<V, N, 2, R>(a, b, place, out),
        3 => tile::<V, N, 3, R>(a, b, place, out),
        4 => tile::<V, N, 4, R>(a, b, place, out),
        5 => tile::<V, N, 5, R>(a, b, place, out),
        6 => tile::<V, N, 6, R>(a, b, place, out),
        7 if R > 6 => tile::<V, N, 7, R>(a, b, place, out),
        _ => tile::<V, N, R, R>(a, b, place, out),
    }
}

/// `H` rows by `N` registers: continues the chains that stand in `out`.
#[inline(always)]
fn tile<V: Vector, const N: usize, const H: usize, const R: usize>(
    a: Rows<'_>,
    b: &[f32],
    place: Place,
    out: &mut [f32],
) {
    let Place { steps, stride, width, fresh, out_stride } = place;
    assert!((steps - 1) * stride + V::WIDTH * N <= b.len(), "the tile lies inside the panel");
    let whole = width == V::WIDTH * N;
    let mut sums = [[V::zero(); N]; H];
    if !fresh {
        for (r, sum) in sums.iter_mut().enumerate() {
            let row = &out[r * out_stride..][..width];
            if whole {
                for (n, sum) in sum.iter_mut().enumerate() {
                    *sum = V::load(&row[n * V::WIDTH..]);
                }
            } else {
                let mut edge = [0.0_f32; NR];
                edge[..width].copy_from_slice(row);
                for (n, sum) in sum.iter_mut().enumerate() {
                    *sum = V::load(&edge[n * V::WIDTH..]);
                }
            }
        }
    }
    match a {
        Rows::Strided(a, row_stride) => {
            assert!((H - 1) * row_stride + steps <= a.len(), "the tile lies inside the left matrix");
            let rows: [*const f32; H] = std::array::from_fn(|r| a[r * row_stride..].as_ptr());
            let mut panel = b.as_ptr();
            for k in 0..steps {
                #[expect(unsafe_code, reason = "both ends were checked against the lengths above")]
                unsafe {
                    V::prefetch_at(panel.wrapping_add(SOON * stride));
                    if N > 1 {
                        V::prefetch_at(panel.wrapping_add(SOON * stride + V::WIDTH));
                    }
                    if N > 2 {
                        V::prefetch_at(panel.wrapping_add(SOON * stride + 2 * V::WIDTH));
                    }
                    let b: [V; N] = std::array::from_fn(|n| V::load_at(panel.add(n * V::WIDTH)));
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        let a = *row.add(k);
                        for (sum, b) in sum.iter_mut().zip(b) {
                            *sum = b.mul_add(a, *sum);
                        }
                    }
                }
                panel = panel.wrapping_add(stride);
            }
        }
        Rows::Packed(a) => {
            for (k, a) in a.chunks_exact(R).take(steps).enumerate() {
                #[expect(unsafe_code, reason = "the end was checked against the length above")]
                let b: [V; N] =
                    std::array::from_fn(|n| unsafe { V::load_at(b.as_ptr().add(k * stride + n * V::WIDTH)) });
                for (sum, a) in sums.iter_mut().zip(a) {
                    for (sum, b) in sum.iter_mut().zip(b) {
                        *sum = b.mul_add(*a, *sum);
                    }
                }
            }
        }
    }
    for (r, sum) in sums.into_iter().enumerate() {
        let row = &mut out[r * out_stride..][..width];
        if whole {
            for (n, sum) in sum.into_iter().enumerate() {
                sum.store(&mut row[n * V::WIDTH..]);
            }
        } else {
            let mut edge = [0.0_f32; NR];
            for (n, sum) in sum.into_iter().enumerate() {
                sum.store(&mut edge[n * V::WIDTH..]);
            }
            row.copy_from_slice(&edge[..width]);
        }
    }
}

/// Packs rows of a transposed left matrix as tiles `[inner, R]`.
#[inline(always)]
fn pack_rows<const R: usize>(
    left: Matrix<'_>,
    rows: Range<usize>,
    steps: Range<usize>,
    tiles: &mut Vec<f32>,
) {
    let size = steps.len() * R;
    tiles.resize(tiles.len().max(rows.len().div_ceil(R) * size), 0.0);
    // A few tiles at a time: whole cache lines are read, and few streams are written.
    const TILES: usize = 4;
    for (group, first) in rows.clone().step_by(TILES * R).enumerate() {
        let width = (rows.end - first).min(TILES * R);
        let tiles = &mut tiles[group * TILES * size..];
        for (k, step) in steps.clone().enumerate() {
            if step + AHEAD < steps.end {
                prefetch(&left.values[(step + AHEAD) * left.column_stride + first..][..width]);
            }
            let from = &left.values[step * left.column_stride + first..][..width];
            let whole = from.chunks_exact(R);
            let rest = whole.remainder();
            let mut at = k * R;
            for from in whole {
                tiles[at..at + R].copy_from_slice(from);
                at += size;
            }
            if !rest.is_empty() {
                tiles[at..at + rest.len()].copy_from_slice(rest);
            }
        }
    }
}

/// Packs columns from `first` on of `steps` of the inner dimension as `[steps, width]`, zeros beyond the last column.
#[inline(always)]
fn pack_block<V: Vector>(matrix: Matrix<'_>, steps: Range<usize>, first: usize, panel: &mut [f32]) {
    let wide = NR.min(matrix.columns - first);
    let padded = wide.next_multiple_of(STEP);
    if matrix.column_stride == 1 {
        for (to, step) in panel.chunks_exact_mut(padded).zip(steps.clone()) {
            if step + AHEAD < steps.end {
                prefetch(&matrix.values[(step + AHEAD) * matrix.row_stride + first..][..wide]);
            }
            let from = &matrix.values[step * matrix.row_stride + first..][..wide];
            if wide == NR {
                to[..NR].copy_from_slice(&from[..NR]);
            } else {
                to[..wide].copy_from_slice(from);
                to[wide..].fill(0.0);
            }
        }
        return;
    }
    for c in (0..padded).step_by(STEP) {
        let width = STEP.min(wide - c);
        let row =
            |i: usize| &matrix.values[(first + c + i) * matrix.column_stride + steps.start..][..steps.len()];
        if width == STEP {
            let rows: [&[f32]; STEP] = std::array::from_fn(row);
            let whole = steps.len() / STEP * STEP;
            for k in (0..whole).step_by(STEP) {
                V::transpose(&rows, k, &mut panel[k * padded + c..], padded);
            }
            for k in whole..steps.len() {
                for (to, row) in panel[k * padded + c..][..STEP].iter_mut().zip(rows) {
                    *to = row[k];
                }
            }
        } else {
            for i in 0..STEP {
                let to = panel[c + i..].iter_mut().step_by(padded);
                if i < width {
                    to.zip(row(i)).for_each(|(to, v)| *to = *v);
                } else {
                    to.take(steps.len()).for_each(|to| *to = 0.0);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::check::noise;
    use super::*;

    fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
    }

    fn blocks_of(level: Level) -> fn(Matrix<'_>, Right<'_>, &mut Out<'_>, bool, &mut [f32], &mut Vec<f32>) {
        match level {
            Level::Portable => blocks::<[f32; 4], 4, 6>,
            _ => multiply_blocks,
        }
    }

    proptest! {
        #[test]
        fn agrees_with_f64_and_does_not_depend_on_the_batch(m in 1..120usize, k in 1..800usize, n in 1..130usize) {
            let (a, w) = (noise(m * k, 1), noise(n * k, 2));
            let right = Matrix::new(&w, k).transposed();
            let mut out = vec![f32::NAN; m * n];
            multiply(Matrix::new(&a, k), Right::Matrix(right), &mut out);
            for r in 0..m {
                for c in 0..n {
                    let exact: f64 = (0..k).map(|i| f64::from(a[r * k + i]) * f64::from(w[c * k + i])).sum();
                    prop_assert!((f64::from(out[r * n + c]) - exact).abs() < 1e-5 * k as f64);
                }
            }
            let row = m / 2;
            let mut alone = vec![f32::NAN; n];
            multiply(Matrix::new(&a[row * k..][..k], k), Panels::new(right).whole(), &mut alone);
            prop_assert_eq!(&alone[..], &out[row * n..(row + 1) * n]);
        }

        /// However the operands lie in memory, and whatever the registers: one chain per element.
        #[test]
        fn layouts_and_machines_give_the_same_bits(m in 1..40usize, k in 1..40usize, n in 1..110usize) {
            let (a, b, c) = (noise(m * k, 3), noise(k * n, 4), noise(m * n, 5));
            let (at, bt) = (transposed(&a, m, k), transposed(&b, k, n));
            let expected: Vec<f32> = (0..m * n)
                .map(|i| (0..k).fold(c[i], |sum, l| a[i / n * k + l].mul_add(b[l * n + i % n], sum)))
                .collect();
            let panels = Panels::new(Matrix::new(&b, n));
            for left in [Matrix::new(&a, k), Matrix::new(&at, m).transposed()] {
                for right in [Right::Matrix(Matrix::new(&b, n)), Right::Matrix(Matrix::new(&bt, k).transposed()), panels.whole()] {
                    for level in [Level::Portable, level()] {
                        let mut out = c.clone();
                        let (mut buffer, mut tiles) = (vec![0.0; NR * INNER_BLOCK], Vec::new());
                        let to = &mut Out { values: &mut out, row_stride: n };
                        blocks_of(level)(left, right, to, false, &mut buffer, &mut tiles);
                        prop_assert_eq!(&out, &expected);
                    }
                }
            }
        }

        #[test]
        fn a_part_of_panels_is_the_product_of_that_part(k in 1..60usize, n in 1..110usize, m in 1..10usize, cut in 0..100usize) {
            let b = noise(k * n, 6);
            let (inner, columns) = (1 + cut % k, 1 + (cut * 7) % n);
            let a = noise(m * inner, 7);
            let part: Vec<f32> = (0..inner).flat_map(|r| b[r * n..][..columns].to_vec()).collect();
            let (mut out, mut expected) = (vec![f32::NAN; m * (columns + 3)], vec![0.0; m * columns]);
            multiply(Matrix::new(&a, inner), Right::Matrix(Matrix::new(&part, columns)), &mut expected);
            let to = Out { values: &mut out, row_stride: columns + 3 };
            product(Matrix::new(&a, inner), Panels::new(Matrix::new(&b, n)).part(inner, columns), to, true);
            for (row, expected) in out.chunks(columns + 3).zip(expected.chunks(columns)) {
                prop_assert_eq!(&row[..columns], expected);
                prop_assert!(row[columns..].iter().all(|v| v.is_nan()), "nothing is written beyond the result");
            }
        }
    }
}
