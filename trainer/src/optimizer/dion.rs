//! Dion (arXiv 2504.05295): low-rank orthonormal updates with error feedback.
//!
//! ```text
//! B = M + G                                  P = orthonormal(B Q)       R = B^T P
//! M <- B - (1 - momentum) P R^T              Q <- R with columns of length 1
//! W <- (1 - learning_rate * weight_decay) W - learning_rate * sqrt(rows / columns) * P Q^T
//! ```
//!
//! The part of `B` outside the `rank` directions stays in the momentum (error feedback). `Q` persists between updates,
//! so one power iteration per update tracks the leading singular vectors.
//!
//! Invariant: the new bits of a matrix depend on itself, its gradient and its state; one thread computes it. `Q` and
//! `P` are stored transposed, `[rank, columns]` and `[rank, rows]`. A direction that is zero in `B` (all of them for a
//! zero gradient) updates nothing and keeps its vector in `Q`, where the formula would divide by zero.

use model::ThreadPool;
use model::products::{StridedMatrix, multiply, multiply_add};

use super::MatrixFactors;
use super::orthonormal::{length, orthonormalize};
use crate::moments::noise;
use crate::norm::norm;

/// Directions below this share of the norm of `B` are rounding noise.
const NOTHING: f64 = 1e-6;

/// One matrix `[rows, columns]` with its gradient and optimizer state.
#[derive(Debug)]
pub(super) struct DionUpdate<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) gradients: &'a [f32],
    pub(super) momentum: &'a mut [f32],
    /// `Q^T [rank, columns]`
    pub(super) basis: &'a mut [f32],
    pub(super) columns: usize,
    pub(super) factors: MatrixFactors,
}

/// Rank of the update of a matrix `[rows, columns]`: `fraction` of the full rank, at least 1.
pub(super) fn rank(rows: usize, columns: usize, fraction: f32) -> usize {
    let full = rows.min(columns);
    ((f64::from(fraction) * full as f64).round() as usize).clamp(1, full)
}

/// Initial directions `Q^T [rank, columns]` of the power iteration: random, with a seed per tensor.
pub(super) fn first_basis(rank: usize, columns: usize, tensor: u32) -> Vec<f32> {
    let seed = noise(tensor ^ 0x9e37_79b9);
    let unit = |i: usize| (noise(i as u32 ^ seed) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    let mut basis: Vec<f32> = (0..rank * columns).map(unit).collect();
    for row in basis.chunks_exact_mut(columns) {
        let inverse = (1.0 / length(row).max(f64::from(f32::MIN_POSITIVE))) as f32;
        row.iter_mut().for_each(|x| *x *= inverse);
    }
    basis
}

/// Scratch memory of an update of a matrix `[rows, columns]`, values.
pub(super) fn scratch(rows: usize, columns: usize, fraction: f32) -> usize {
    rank(rows, columns, fraction) * (rows + columns)
}

impl DionUpdate<'_> {
    /// Updates the matrix and its optimizer state.
    pub(super) fn run(self) {
        let Self { values, gradients, momentum, basis, columns, factors } = self;
        let rows = values.len() / columns;
        let rank = basis.len() / columns;
        momentum.iter_mut().zip(gradients).for_each(|(m, g)| *m += factors.gradient * g);

        // P^T = orthonormal(Q^T B^T), R^T = P^T B.
        let (mut left, mut right) = (vec![0.0; rank * rows], vec![0.0; rank * columns]);
        let b = StridedMatrix::new(momentum, columns);
        multiply(StridedMatrix::new(basis, columns), b.transposed(), &mut left);
        orthonormalize(&mut left, rows);
        multiply(StridedMatrix::new(&left, rows), b, &mut right);

        let whole = f64::from(norm(momentum, &ThreadPool::single()));
        let lengths: Vec<f64> = right.chunks_exact(columns).map(length).collect();
        for ((r, length), q) in right.chunks_exact(columns).zip(&lengths).zip(basis.chunks_exact_mut(columns))
        {
            if *length > NOTHING * whole {
                let inverse = (1.0 / length) as f32;
                q.iter_mut().zip(r).for_each(|(q, r)| *q = r * inverse);
            }
        }
        right.iter_mut().for_each(|r| *r *= factors.momentum - 1.0);
        multiply_add(
            StridedMatrix::new(&left, rows).transposed(),
            StridedMatrix::new(&right, columns),
            momentum,
        );

        let step = factors.learning_rate * (rows as f32 / columns as f32).sqrt();
        for (p, length) in left.chunks_exact_mut(rows).zip(&lengths) {
            let step = if *length > NOTHING * whole { -step } else { 0.0 };
            p.iter_mut().for_each(|p| *p *= step);
        }
        let keep = 1.0 - factors.learning_rate * factors.weight_decay;
        values.iter_mut().for_each(|value| *value *= keep);
        multiply_add(
            StridedMatrix::new(&left, rows).transposed(),
            StridedMatrix::new(basis, columns),
            values,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{random, singular_values};
    use super::*;

    const FACTORS: MatrixFactors =
        MatrixFactors { gradient: 1.0, momentum: 0.0, learning_rate: 1.0, weight_decay: 0.0 };

    /// Optimizer state and update (the negative of the change of the weights) after some gradients.
    struct DionRun {
        momentum: Vec<f32>,
        basis: Vec<f32>,
        update: Vec<f32>,
    }

    fn run(
        rows: usize,
        columns: usize,
        rank: usize,
        gradients: &[Vec<f32>],
        factors: MatrixFactors,
    ) -> DionRun {
        let mut basis = first_basis(rank, columns, 3);
        let mut momentum = vec![0.0; rows * columns];
        let mut update = Vec::new();
        for gradients in gradients {
            let mut values = vec![0.0; rows * columns];
            let basis = &mut basis[..];
            let momentum = &mut momentum[..];
            DionUpdate { values: &mut values, gradients, momentum, basis, columns, factors }.run();
            update = values.iter().map(|x| -x).collect();
        }
        DionRun { momentum, basis, update }
    }

    /// `sum_k 2^-k u_k v_k^T [rows, columns]`: singular values that a power iteration separates.
    fn graded(rows: usize, columns: usize, seed: u32) -> Vec<f32> {
        let full = rows.min(columns);
        let (mut u, mut v) = (random(full * rows, seed), random(full * columns, seed + 1));
        orthonormalize(&mut u, rows);
        orthonormalize(&mut v, columns);
        for (k, row) in u.chunks_exact_mut(rows).enumerate() {
            row.iter_mut().for_each(|x| *x *= 0.5_f32.powi(k as i32));
        }
        let mut out = vec![0.0; rows * columns];
        multiply(StridedMatrix::new(&u, rows).transposed(), StridedMatrix::new(&v, columns), &mut out);
        out
    }

    #[test]
    fn at_full_rank_no_error_remains() {
        for shape in [(12, 12), (8, 30), (30, 8), (1, 9), (9, 1)] {
            let full = shape.0.min(shape.1);
            let b = random(shape.0 * shape.1, 11);
            // Without momentum the remainder is B - P R^T.
            let left = run(shape.0, shape.1, full, std::slice::from_ref(&b), FACTORS).momentum;
            let worst = left.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            assert!(worst < 1e-4, "{shape:?}: {worst}");
            // With momentum, that share of B remains.
            let kept = run(
                shape.0,
                shape.1,
                full,
                std::slice::from_ref(&b),
                MatrixFactors { momentum: 0.9, ..FACTORS },
            );
            assert!(kept.momentum.iter().zip(&b).all(|(m, b)| (m - 0.9 * b).abs() < 1e-4), "{shape:?}");
        }
    }

    #[test]
    fn at_full_rank_updates_become_orthonormal() {
        for shape in [(6, 6), (6, 20), (20, 6)] {
            // Nothing remains in the momentum, so B is the same gradient each time.
            let gradients = vec![graded(shape.0, shape.1, 21); 30];
            let update = run(shape.0, shape.1, 6, &gradients, FACTORS).update;
            let scale = (shape.0 as f64 / shape.1 as f64).sqrt();
            for s in singular_values(&update, shape.1) {
                assert!((s / scale - 1.0).abs() < 1e-3, "{shape:?}: {s}, expected {scale}");
            }
        }
    }

    #[test]
    fn at_low_rank_the_unused_part_is_fed_back() {
        let (rows, columns) = (14, 10);
        let b = graded(rows, columns, 31);
        let once = run(rows, columns, 3, std::slice::from_ref(&b), FACTORS);
        let used: Vec<f32> = b.iter().zip(&once.momentum).map(|(b, m)| b - m).collect();
        let values = singular_values(&used, columns);
        assert!(values[2] > 1e-3 && values[3] < 1e-5, "what was used has rank 3: {values:?}");
        // The used part is a projection of B, so the remainder is orthogonal to it.
        let inner: f64 = used.iter().zip(&once.momentum).map(|(u, m)| f64::from(*u) * f64::from(*m)).sum();
        assert!(inner.abs() < 1e-6, "{inner}");
        assert!(norm(&once.momentum, &ThreadPool::single()) > 0.05);
        assert_eq!(once.basis.len(), 3 * columns);
        let update = singular_values(&once.update, columns);
        assert!(update[3] < 1e-5, "an update has the rank of its basis: {update:?}");
    }

    #[test]
    fn a_zero_gradient_gives_no_update_and_directions_recover() {
        let none = run(8, 5, 4, &[vec![0.0; 40]], FACTORS);
        assert!(none.update.iter().chain(&none.momentum).all(|x| *x == 0.0));
        assert_eq!(none.basis, first_basis(4, 5, 3));
        // A gradient of rank 1 leaves three directions unset; the next gradient sets them.
        let mut one = vec![0.0; 40];
        one[..5].copy_from_slice(&[1.0, -2.0, 0.5, 3.0, 1.0]);
        let later = run(8, 5, 4, &[one, random(40, 2), random(40, 2)], FACTORS);
        let values = singular_values(&later.update, 5);
        assert!(values[3] > 0.3, "{values:?}");
    }

    #[test]
    fn ranks_are_a_fraction_of_the_full_rank() {
        assert_eq!([1.0, 0.5, 0.25, 0.001].map(|f| rank(100, 40, f)), [40, 20, 10, 1]);
        assert_eq!(rank(1, 1, 0.1), 1);
        assert_eq!(scratch(100, 40, 0.5), 20 * 140);
    }
}
