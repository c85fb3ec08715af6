//! Orthonormal rows by block Gram-Schmidt with reorthogonalisation.
//!
//! Invariant: rows are orthonormal up to rounding, in order, each in the span of itself and the rows before it. A row
//! that is linearly dependent on rows before it becomes zero instead of noise.

use model::products::{StridedMatrix, multiply, multiply_add};

/// Rows of a panel, which is orthonormalised in f64; projections on earlier panels are matrix products.
const PANEL: usize = 32;
/// Relative remainder below which a row is linearly dependent: rounding error of a product in f32.
const DEPENDENT: f64 = 1e-5;
/// Partial sums of a dot product.
const LANES: usize = 16;

/// Orthonormalises the rows of `values [rows, width]`.
pub(super) fn orthonormalize(values: &mut [f32], width: usize) {
    let rows = values.len() / width;
    let mut coefficients = vec![0.0; PANEL.min(rows) * rows];
    for first in (0..rows).step_by(PANEL) {
        let (before, rest) = values.split_at_mut(first * width);
        let panel = &mut rest[..PANEL.min(rows - first) * width];
        let mut lengths: Vec<f64> = panel.chunks_exact(width).map(length).collect();
        // The second pass removes the rounding error of the first: "twice is enough" (Kahan).
        for _ in 0..2 {
            if first > 0 {
                let coefficients = &mut coefficients[..panel.len() / width * first];
                let before = StridedMatrix::new(before, width);
                multiply(StridedMatrix::new(panel, width), before.transposed(), coefficients);
                coefficients.iter_mut().for_each(|c| *c = -*c);
                multiply_add(StridedMatrix::new(coefficients, first), before, panel);
            }
            gram_schmidt(panel, width, &mut lengths);
        }
    }
}

/// Euclidean norm of `row [width]`.
pub(super) fn length(row: &[f32]) -> f64 {
    dot(row, row).sqrt()
}

/// Orthonormalises `panel [rows, width]`; `lengths [rows]` are the original norms and become the new ones.
fn gram_schmidt(panel: &mut [f32], width: usize, lengths: &mut [f64]) {
    for (i, whole) in lengths.iter_mut().enumerate() {
        let (before, rest) = panel.split_at_mut(i * width);
        let row = &mut rest[..width];
        for other in before.chunks_exact(width) {
            let part = dot(row, other);
            row.iter_mut().zip(other).for_each(|(x, o)| *x = (f64::from(*x) - part * f64::from(*o)) as f32);
        }
        let left = length(row);
        if left > DEPENDENT * *whole {
            row.iter_mut().for_each(|x| *x = (f64::from(*x) / left) as f32);
            *whole = 1.0;
        } else {
            row.fill(0.0);
            *whole = 0.0;
        }
    }
}

model::vectorized! {
    /// Dot product in f64, in which the product of two f32 is exact.
    fn dot(a: &[f32], b: &[f32]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
                *lane += f64::from(*a) * f64::from(*b);
            }
        }
        for (lane, (a, b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
            *lane += f64::from(*a) * f64::from(*b);
        }
        lanes.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::random;
    use super::*;

    /// Largest deviation of the Gram matrix from the unit matrix, where the rows `zero` are zero.
    fn error(values: &[f32], width: usize, zero: &[usize]) -> f64 {
        let rows: Vec<&[f32]> = values.chunks_exact(width).collect();
        let mut worst = 0.0_f64;
        for (i, a) in rows.iter().enumerate() {
            for (j, b) in rows.iter().enumerate() {
                let expected = if i == j && !zero.contains(&i) { 1.0 } else { 0.0 };
                worst = worst.max((dot(a, b) - expected).abs());
            }
        }
        worst
    }

    #[test]
    fn any_number_of_rows_becomes_orthonormal() {
        for (rows, width) in [(1, 1), (1, 40), (5, 5), (31, 100), (33, 33), (70, 90), (100, 100)] {
            let mut values = random(rows * width, 5);
            // Norms over ten orders of magnitude.
            for (i, row) in values.chunks_exact_mut(width).enumerate() {
                row.iter_mut().for_each(|x| *x *= 10.0_f32.powi(i as i32 % 11 - 5));
            }
            let first = values[..width].to_vec();
            orthonormalize(&mut values, width);
            let error = error(&values, width, &[]);
            assert!(error < 1e-6, "[{rows}, {width}]: {error}");
            let along = dot(&values[..width], &first) / length(&first);
            assert!((along - 1.0).abs() < 1e-6, "the first row keeps its direction");
        }
    }

    #[test]
    fn nearly_dependent_rows_are_separated_and_dependent_ones_are_zero() {
        let (rows, width) = (40, 64);
        let mut values = random(rows * width, 9);
        let all = values.clone();
        for i in 0..width {
            values[3 * width + i] = all[width + i] + 1e-3 * all[3 * width + i];
            values[36 * width + i] = 2.0 * all[2 * width + i] - all[35 * width + i];
            values[38 * width + i] = 0.0;
        }
        orthonormalize(&mut values, width);
        let zero = [36, 38];
        assert!(zero.iter().all(|row| values[row * width..][..width].iter().all(|x| *x == 0.0)));
        let error = error(&values, width, &zero);
        assert!(error < 1e-6, "{error}");
    }
}
