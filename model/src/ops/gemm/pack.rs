//! Operands copied into the order in which the tile reads them.

use std::ops::Range;

use super::{NR, STEP, StridedMatrix};
use crate::ops::simd::{Vector, prefetch};

/// Prefetch distance while rows are packed, rows: each row is in other cache lines and pages.
const AHEAD: usize = 8;

/// Packs rows of a transposed left matrix as tiles `[inner, R]`.
#[inline(always)]
pub(super) fn pack_rows<const R: usize>(
    left: StridedMatrix<'_>,
    rows: Range<usize>,
    steps: Range<usize>,
    tiles: &mut Vec<f32>,
) {
    let size = steps.len() * R;
    tiles.resize(tiles.len().max(rows.len().div_ceil(R) * size), 0.0);
    // A few tiles at a time: whole cache lines are read, of tiles of 6 rows as of 8, and few streams are written.
    const TILES: usize = 8;
    for (group, first) in rows.clone().step_by(TILES * R).enumerate() {
        let width = (rows.end - first).min(TILES * R);
        let tiles = &mut tiles[group * TILES * size..];
        for (k, step) in steps.clone().enumerate() {
            if step + AHEAD < steps.end {
                prefetch(left.values[(step + AHEAD) * left.column_stride + first..].as_ptr(), width);
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

/// Copies `W` values of each of `steps` rows, which lie `row_stride` apart, to `panel [steps, W]`.
#[inline(always)]
fn copy_steps<const W: usize>(from: &[f32], row_stride: usize, steps: usize, panel: &mut [f32]) {
    for (step, to) in panel.as_chunks_mut::<W>().0.iter_mut().take(steps).enumerate() {
        prefetch(from.as_ptr().wrapping_add((step + AHEAD) * row_stride), W);
        to.copy_from_slice(&from[step * row_stride..][..W]);
    }
}

/// Packs columns from `first` on of `steps` of the inner dimension as `[steps, width]`, zeros beyond the last column.
#[inline(always)]
pub(super) fn pack_block<V: Vector>(
    matrix: StridedMatrix<'_>,
    steps: Range<usize>,
    first: usize,
    panel: &mut [f32],
) {
    let wide = NR.min(matrix.columns - first);
    let padded = wide.next_multiple_of(STEP);
    if steps.is_empty() {
        return; // its values may end before the first column
    }
    if matrix.column_stride == 1 {
        let from = &matrix.values[steps.start * matrix.row_stride + first..];
        // A copy of a length that the compiler knows is no call.
        match wide {
            NR => copy_steps::<NR>(from, matrix.row_stride, steps.len(), panel),
            32 => copy_steps::<32>(from, matrix.row_stride, steps.len(), panel),
            16 => copy_steps::<16>(from, matrix.row_stride, steps.len(), panel),
            _ => {
                for (step, to) in panel.chunks_exact_mut(padded).take(steps.len()).enumerate() {
                    to[..wide].copy_from_slice(&from[step * matrix.row_stride..][..wide]);
                    to[wide..].fill(0.0);
                }
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
