//! The register tile: some rows of the left matrix by some registers of a panel.
//!
//! Invariant: its caller has checked that the result has the rows and columns of the tile; it checks the operands itself.

use super::NR;
use crate::ops::simd::{Vector, prefetch};

/// Prefetch distance within a panel, steps of the inner dimension.
pub(super) const PREFETCH_STEPS: usize = 16;

/// The rows of a tile of the left matrix.
#[derive(Clone, Copy)]
pub(super) enum TileRows<'a> {
    /// Each row contiguous; the distance of two rows.
    Strided(&'a [f32], usize),
    /// Packed: `[inner, R]`.
    Packed(&'a [f32]),
}

/// Sizes of a tile, and how its sums begin.
#[derive(Clone, Copy)]
pub(super) struct TileShape {
    /// Length of the inner dimension in this pass.
    pub(super) steps: usize,
    /// Columns of the packed panel.
    pub(super) stride: usize,
    /// Columns of the tile that exist.
    pub(super) width: usize,
    /// What the chains begin with, rows like those of the result; `None` for zero.
    pub(super) start: Option<*const f32>,
    /// Distance of two rows of the result.
    pub(super) out_stride: usize,
    /// Memory of the next panel: one cache line is prefetched per step, a panel's stride apart. `None` for a panel that is in a
    /// cache already, where prefetches would only take load slots.
    pub(super) ahead: Option<*const f32>,
}

#[inline(always)]
pub(super) fn rows_of<V: Vector, const N: usize, const R: usize>(
    height: usize,
    a: TileRows<'_>,
    b: &[f32],
    shape: TileShape,
    out: *mut f32,
) {
    match height {
        1 => tile::<V, N, 1, R>(a, b, shape, out),
        2 => tile::<V, N, 2, R>(a, b, shape, out),
        3 => tile::<V, N, 3, R>(a, b, shape, out),
        4 => tile::<V, N, 4, R>(a, b, shape, out),
        5 => tile::<V, N, 5, R>(a, b, shape, out),
        6 => tile::<V, N, 6, R>(a, b, shape, out),
        7 if R > 6 => tile::<V, N, 7, R>(a, b, shape, out),
        _ => tile::<V, N, R, R>(a, b, shape, out),
    }
}

/// `H` rows by `N` registers: continues the sums in `out`.
#[inline(always)]
fn tile<V: Vector, const N: usize, const H: usize, const R: usize>(
    a: TileRows<'_>,
    b: &[f32],
    shape: TileShape,
    out: *mut f32,
) {
    let TileShape { steps, stride, width, start, out_stride, .. } = shape;
    assert!((steps - 1) * stride + V::WIDTH * N <= b.len(), "the tile lies inside the panel");
    let mut sums = [[V::zero(); N]; H];
    if let Some(start) = start {
        // Nearly all tiles are whole. Their code has no trace of edges.
        match width == V::WIDTH * N {
            true => load_rows(&mut sums, start, out_stride, V::WIDTH * N),
            false => load_rows(&mut sums, start, out_stride, width),
        }
    }
    // Whole panels, which nearly all are, have a stride that the compiler knows; so have panels in a cache no prefetch.
    match (a, stride == NR) {
        (TileRows::Strided(a, row_stride), true) if shape.ahead.is_none() => {
            strided(&mut sums, a, row_stride, b, NR, TileShape { ahead: None, ..shape });
        }
        (TileRows::Strided(a, row_stride), _) => strided(&mut sums, a, row_stride, b, stride, shape),
        (TileRows::Packed(a), true) => packed::<V, N, H, R>(&mut sums, a, b, NR, steps),
        (TileRows::Packed(a), false) => packed::<V, N, H, R>(&mut sums, a, b, stride, steps),
    }
    match width == V::WIDTH * N {
        true => store_rows(sums, out, out_stride, V::WIDTH * N),
        false => store_rows(sums, out, out_stride, width),
    }
}

/// Adds the products of rows that lie `row_stride` apart.
#[inline(always)]
fn strided<V: Vector, const N: usize, const H: usize>(
    sums: &mut [[V; N]; H],
    a: &[f32],
    row_stride: usize,
    b: &[f32],
    stride: usize,
    shape: TileShape,
) {
    let TileShape { steps, ahead, .. } = shape;
    assert!((H - 1) * row_stride + steps <= a.len(), "the tile lies inside the left matrix");
    // Every third row has a pointer; the rows between are one and two strides further, which an address can express.
    let mut thirds: [*const f32; 3] =
        std::array::from_fn(|third| a.as_ptr().wrapping_add(3 * third * row_stride));
    let mut panel = b.as_ptr();
    for k in 0..steps {
        #[expect(unsafe_code, reason = "both ends were checked against the lengths above")]
        unsafe {
            if let Some(ahead) = ahead {
                prefetch(panel.wrapping_add(PREFETCH_STEPS * stride), V::WIDTH * N);
                prefetch(ahead.wrapping_add(k * stride), 1);
            } else {
                prefetch_part::<V, N>(panel, stride);
            }
            let b: [V; N] = std::array::from_fn(|n| V::load_at(panel.add(n * V::WIDTH)));
            for (r, sum) in sums.iter_mut().enumerate() {
                let a = *thirds[r / 3].wrapping_add(r % 3 * row_stride);
                for (sum, b) in sum.iter_mut().zip(b) {
                    *sum = b.mul_add(a, *sum);
                }
            }
        }
        thirds = thirds.map(|row| row.wrapping_add(1));
        panel = panel.wrapping_add(stride);
    }
}

/// Asks for a later step of a tile that is a part of a panel: the machine does not foresee lines with others between them.
#[inline(always)]
fn prefetch_part<V: Vector, const N: usize>(panel: *const f32, stride: usize) {
    if V::WIDTH * N < NR && stride == NR {
        prefetch(panel.wrapping_add(PREFETCH_STEPS * stride), V::WIDTH * N);
    }
}

/// Adds the products of packed rows.
#[inline(always)]
fn packed<V: Vector, const N: usize, const H: usize, const R: usize>(
    sums: &mut [[V; N]; H],
    a: &[f32],
    b: &[f32],
    stride: usize,
    steps: usize,
) {
    let mut panel = b.as_ptr();
    for a in a.chunks_exact(R).take(steps) {
        prefetch_part::<V, N>(panel, stride);
        #[expect(unsafe_code, reason = "the end was checked against the length before")]
        let b: [V; N] = std::array::from_fn(|n| unsafe { V::load_at(panel.add(n * V::WIDTH)) });
        for (sum, a) in sums.iter_mut().zip(a) {
            for (sum, b) in sum.iter_mut().zip(b) {
                *sum = b.mul_add(*a, *sum);
            }
        }
        panel = panel.wrapping_add(stride);
    }
}

#[inline(always)]
fn load_rows<V: Vector, const N: usize, const H: usize>(
    sums: &mut [[V; N]; H],
    start: *const f32,
    out_stride: usize,
    width: usize,
) {
    for (r, sum) in sums.iter_mut().enumerate() {
        *sum = load_row(start.wrapping_add(r * out_stride), width);
    }
}

#[inline(always)]
fn store_rows<V: Vector, const N: usize, const H: usize>(
    sums: [[V; N]; H],
    out: *mut f32,
    out_stride: usize,
    width: usize,
) {
    for (r, sum) in sums.into_iter().enumerate() {
        store_row(sum, out.wrapping_add(r * out_stride), width);
    }
}

/// `width` values of a row of the result, which `product` checked to have them.
#[inline(always)]
#[expect(unsafe_code, reason = "the row, or the copy of its edge, has all registers")]
pub(super) fn load_row<V: Vector, const N: usize>(row: *const f32, width: usize) -> [V; N] {
    if width == V::WIDTH * N {
        return std::array::from_fn(|n| unsafe { V::load_at(row.add(n * V::WIDTH)) });
    }
    let mut edge = [0.0_f32; NR];
    unsafe { row.copy_to_nonoverlapping(edge.as_mut_ptr(), width) };
    std::array::from_fn(|n| unsafe { V::load_at(edge.as_ptr().add(n * V::WIDTH)) })
}

/// Stores `width` values to a row of the result, which `product` checked to have them.
#[inline(always)]
#[expect(unsafe_code, reason = "the row, or the copy of its edge, has the length of all registers")]
pub(super) fn store_row<V: Vector, const N: usize>(sum: [V; N], row: *mut f32, width: usize) {
    let store = |to: *mut f32| {
        for (n, sum) in sum.into_iter().enumerate() {
            unsafe { sum.store_at(to.add(n * V::WIDTH)) };
        }
    };
    if width == V::WIDTH * N {
        return store(row);
    }
    let mut edge = [0.0_f32; NR];
    store(edge.as_mut_ptr());
    unsafe { row.copy_from_nonoverlapping(edge.as_ptr(), width) };
}
