//! Matrix product of activations with weights that are packed once per policy version.
//!
//! Invariant: a row of the result depends on its own row of the left matrix only, bit for bit. Every element is one
//! chain of fused multiply-adds over the inner dimension in ascending order, however many rows are multiplied
//! together: a sequence gets the same logits alone, in any decode batch and in a training pack. It does no threading:
//! callers run one product per core.

use super::simd::Vector;

/// Columns of a panel: two AVX2 or one AVX-512 register of f32.
const NR: usize = 16;
/// Rows of the register tile: 6 x 16 accumulators fill 12 of the 16 AVX2 registers.
const MR: usize = 6;
/// Rows of the left matrix that stay in the cache while all panels pass by.
const ROW_BLOCK: usize = 96;
/// Inner length of one pass: a panel of it (32 KiB) fits the first-level cache beside the rows.
const INNER_BLOCK: usize = 384;

/// The right matrix `[inner, columns]` as panels of 16 columns, each `[inner, 16]`, the last padded with zeros.
#[derive(Clone, Debug, Default)]
pub(crate) struct Panels {
    inner: usize,
    columns: usize,
    values: Vec<f32>,
}

impl Panels {
    /// Packs `W` transposed: `weight` is `[columns, inner]` row-major, as Hugging Face stores linear layers.
    pub(crate) fn transposed(weight: &[f32], inner: usize) -> Self {
        let columns = weight.len().checked_div(inner).unwrap_or(0);
        let mut values = vec![0.0; columns.div_ceil(NR) * NR * inner];
        for (panel, rows) in values.chunks_exact_mut(NR * inner.max(1)).zip(weight.chunks(NR * inner.max(1)))
        {
            for (c, row) in rows.chunks_exact(inner).enumerate() {
                for (slot, v) in panel[c..].iter_mut().step_by(NR).zip(row) {
                    *slot = *v;
                }
            }
        }
        Self { inner, columns, values }
    }

    /// Packs a matrix as it is: `matrix` is `[inner, columns]` row-major.
    pub(crate) fn straight(matrix: &[f32], columns: usize) -> Self {
        let inner = matrix.len().checked_div(columns).unwrap_or(0);
        let mut values = vec![0.0; columns.div_ceil(NR) * NR * inner];
        for (p, panel) in values.chunks_exact_mut(NR * inner.max(1)).enumerate() {
            let width = NR.min(columns - p * NR);
            for (slots, row) in panel.chunks_exact_mut(NR).zip(matrix.chunks_exact(columns)) {
                slots[..width].copy_from_slice(&row[p * NR..p * NR + width]);
            }
        }
        Self { inner, columns, values }
    }

    /// Length of the inner dimension.
    pub(crate) fn inner(&self) -> usize {
        self.inner
    }

    /// Number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }
}

/// A left matrix `[rows, inner]` by strides, so that a transposed one needs no copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left<'a> {
    values: &'a [f32],
    rows: usize,
    row_stride: usize,
    inner_stride: usize,
}

impl<'a> Left<'a> {
    /// `values` is `[rows, inner]` row-major.
    pub(crate) fn straight(values: &'a [f32], inner: usize) -> Self {
        Self {
            values,
            rows: values.len().checked_div(inner).unwrap_or(0),
            row_stride: inner,
            inner_stride: 1,
        }
    }

    /// `values` is `[inner, rows]` row-major; the left matrix is its transpose.
    pub(crate) fn transposed(values: &'a [f32], rows: usize) -> Self {
        Self { values, rows, row_stride: 1, inner_stride: rows }
    }
}

/// `out [rows, columns] = left [rows, inner] x right [inner, columns]`.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn multiply(left: Left<'_>, right: &Panels, out: &mut [f32]) {
    out.fill(0.0);
    multiply_add(left, right, out);
}

/// `out [rows, columns] += left [rows, inner] x right [inner, columns]`.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn multiply_add(left: Left<'_>, right: &Panels, out: &mut [f32]) {
    assert_eq!(out.len(), left.rows * right.columns, "the result is [{}, {}]", left.rows, right.columns);
    assert_eq!(left.values.len(), left.rows * right.inner, "the inner dimensions agree");
    multiply_blocks(left, right, out);
}

#[cfg(target_arch = "x86_64")]
fn multiply_blocks(left: Left<'_>, right: &Panels, out: &mut [f32]) {
    use std::arch::x86_64::{__m256, __m512};

    #[target_feature(enable = "avx512f")]
    fn avx512(left: Left<'_>, right: &Panels, out: &mut [f32]) {
        blocks::<__m512, 1>(left, right, out);
    }
    #[target_feature(enable = "avx2,fma")]
    fn avx2(left: Left<'_>, right: &Panels, out: &mut [f32]) {
        blocks::<__m256, 2>(left, right, out);
    }
    #[expect(unsafe_code, reason = "the features of each callee are detected in the line above it")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        unsafe { avx512(left, right, out) }
    } else if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        unsafe { avx2(left, right, out) }
    } else {
        blocks::<[f32; 4], 4>(left, right, out);
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_blocks(left: Left<'_>, right: &Panels, out: &mut [f32]) {
    blocks::<[f32; 4], 4>(left, right, out);
}

/// `N` registers of type `V` make the width of a panel.
#[inline(always)]
fn blocks<V: Vector, const N: usize>(left: Left<'_>, right: &Panels, out: &mut [f32]) {
    const { assert!(V::WIDTH * N == NR) };
    if right.inner == 0 {
        return;
    }
    for row_start in (0..left.rows).step_by(ROW_BLOCK) {
        let row_end = (row_start + ROW_BLOCK).min(left.rows);
        for inner_start in (0..right.inner).step_by(INNER_BLOCK) {
            let inner = inner_start..(inner_start + INNER_BLOCK).min(right.inner);
            for (p, panel) in right.values.chunks_exact(NR * right.inner).enumerate() {
                let panel = &panel[inner.start * NR..inner.end * NR];
                let width = NR.min(right.columns - p * NR);
                let mut row = row_start;
                while row < row_end {
                    let place =
                        Place { row, inner: inner.start, column: p * NR, width, columns: right.columns };
                    row += match row_end - row {
                        1 => tile::<V, N, 1>(left, panel, place, out),
                        2 => tile::<V, N, 2>(left, panel, place, out),
                        3 => tile::<V, N, 3>(left, panel, place, out),
                        4 => tile::<V, N, 4>(left, panel, place, out),
                        5 => tile::<V, N, 5>(left, panel, place, out),
                        _ => tile::<V, N, MR>(left, panel, place, out),
                    };
                }
            }
        }
    }
}

/// Where a tile begins, and how far its panel reaches into the result.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    inner: usize,
    column: usize,
    /// Columns of the panel that exist.
    width: usize,
    /// Columns of the result.
    columns: usize,
}

/// `R` rows by one panel: continues the chains that stand in `out`. Returns `R`.
#[inline(always)]
fn tile<V: Vector, const N: usize, const R: usize>(
    left: Left<'_>,
    panel: &[f32],
    place: Place,
    out: &mut [f32],
) -> usize {
    let at = |r: usize| (place.row + r) * place.columns + place.column;
    let mut edge = [0.0_f32; NR];
    let mut sums = [[V::zero(); N]; R];
    for (r, sum) in sums.iter_mut().enumerate() {
        edge[..place.width].copy_from_slice(&out[at(r)..at(r) + place.width]);
        for (n, sum) in sum.iter_mut().enumerate() {
            *sum = V::load(&edge[n * V::WIDTH..]);
        }
    }
    let steps = panel.len() / NR;
    let first = place.row * left.row_stride + place.inner * left.inner_stride;
    let last = first + (R - 1) * left.row_stride + (steps - 1) * left.inner_stride;
    assert!(last < left.values.len(), "the tile lies inside the left matrix");
    let mut rows: [*const f32; R] =
        std::array::from_fn(|r| left.values[first + r * left.row_stride..].as_ptr());
    for b in panel.chunks_exact(NR) {
        let b: [V; N] = std::array::from_fn(|n| V::load(&b[n * V::WIDTH..]));
        for (sum, row) in sums.iter_mut().zip(&mut rows) {
            #[expect(
                unsafe_code,
                reason = "the last element read is `last`, which was checked against the length"
            )]
            let a = unsafe { **row };
            *row = row.wrapping_add(left.inner_stride);
            for (sum, b) in sum.iter_mut().zip(b) {
                *sum = b.mul_add(a, *sum);
            }
        }
    }
    for (r, sum) in sums.into_iter().enumerate() {
        for (n, sum) in sum.into_iter().enumerate() {
            sum.store(&mut edge[n * V::WIDTH..]);
        }
        out[at(r)..at(r) + place.width].copy_from_slice(&edge[..place.width]);
    }
    R
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matrix(rows: usize, columns: usize, seed: u32) -> Vec<f32> {
        (0..rows * columns)
            .map(|i| {
                let x = (i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(97)) >> 8;
                x as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    proptest! {
        #[test]
        fn agrees_with_f64_and_does_not_depend_on_the_batch(m in 1..120usize, k in 1..500usize, n in 1..50usize) {
            let (a, w) = (matrix(m, k, 1), matrix(n, k, 2));
            let mut out = vec![f32::NAN; m * n];
            multiply(Left::straight(&a, k), &Panels::transposed(&w, k), &mut out);
            for r in 0..m {
                for c in 0..n {
                    let exact: f64 = (0..k).map(|i| f64::from(a[r * k + i]) * f64::from(w[c * k + i])).sum();
                    prop_assert!((f64::from(out[r * n + c]) - exact).abs() < 1e-5 * k as f64);
                }
            }
            let row = m / 2;
            let mut alone = vec![f32::NAN; n];
            multiply(Left::straight(&a[row * k..(row + 1) * k], k), &Panels::transposed(&w, k), &mut alone);
            prop_assert_eq!(&alone[..], &out[row * n..(row + 1) * n]);
        }

        #[test]
        fn transposes_agree(m in 1..40usize, k in 1..40usize, n in 1..40usize) {
            let (a, b) = (matrix(m, k, 3), matrix(k, n, 4));
            let transpose = |x: &[f32], rows: usize, columns: usize| -> Vec<f32> {
                (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
            };
            let product = |left: Left<'_>, right: &Panels| {
                let mut out = vec![0.0; m * n];
                multiply(left, right, &mut out);
                out
            };
            let expected = product(Left::straight(&a, k), &Panels::straight(&b, n));
            let (at, bt) = (transpose(&a, m, k), transpose(&b, k, n));
            prop_assert_eq!(&product(Left::transposed(&at, m), &Panels::straight(&b, n)), &expected);
            prop_assert_eq!(&product(Left::straight(&a, k), &Panels::transposed(&bt, k)), &expected);
        }
    }
}
