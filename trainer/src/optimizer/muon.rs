//! Muon (Jordan 2024) in the form of Moonlight (arXiv 2502.16982): the update is the orthogonalised momentum.
//!
//! ```text
//! M <- momentum * M + G;  O = newton_schulz(G + momentum * M)
//! W <- W - learning_rate * (0.2 * sqrt(max(rows, columns)) * O + weight_decay * W)
//! ```
//!
//! An orthogonal `[rows, columns]` matrix has entries of root mean square `1 / sqrt(max(rows, columns))`. The factor
//! scales the root mean square of an update to 0.2 times the learning rate for every shape, which is about that of
//! AdamW.
//!
//! Invariant: the new bits of a matrix depend on itself, its gradient and its momentum; one thread computes it.

use model::ThreadPool;
use model::products::{StridedMatrix, multiply, multiply_add};

use super::MatrixFactors;
use crate::norm::norm;

/// Coefficients of the quintic `a x + b x^3 + c x^5` (Jordan 2024), whose iteration maps singular values above 0.001 to
/// about 1.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Newton-Schulz iterations, as in the paper.
const ITERATIONS: usize = 5;
/// Root mean square of an update at learning rate 1, that of AdamW as the paper measures it.
const RMS: f32 = 0.2;
/// Added to the norm before the division, so that zero momentum gives a zero update.
const EPS: f32 = 1e-7;

/// One matrix `[rows, columns]` with its gradient and momentum.
#[derive(Debug)]
pub(super) struct MuonUpdate<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) gradients: &'a [f32],
    pub(super) momentum: &'a mut [f32],
    pub(super) columns: usize,
    pub(super) factors: MatrixFactors,
}

impl MuonUpdate<'_> {
    /// Updates the matrix and its momentum.
    pub(super) fn run(self) {
        let MatrixFactors { gradient, momentum: decay, learning_rate, weight_decay } = self.factors;
        let mut ahead = Vec::with_capacity(self.values.len());
        for (m, g) in self.momentum.iter_mut().zip(self.gradients) {
            let g = g * gradient;
            *m = decay * *m + g;
            ahead.push(g + decay * *m);
        }
        let rows = ahead.len() / self.columns;
        let orthogonal = newton_schulz(ahead, self.columns);
        let step = learning_rate * RMS * (rows.max(self.columns) as f32).sqrt();
        let keep = 1.0 - learning_rate * weight_decay;
        for (value, o) in self.values.iter_mut().zip(&orthogonal) {
            *value = *value * keep - step * o;
        }
    }
}

/// Scratch memory of [`newton_schulz`] for a matrix `[rows, columns]`, values.
pub(super) fn scratch(rows: usize, columns: usize) -> usize {
    let side = rows.min(columns);
    2 * rows * columns + 2 * side * side
}

/// Orthogonalises `x [rows, columns]` approximately: singular values above a thousandth of its norm are mapped to
/// [0.68, 1.14].
fn newton_schulz(mut x: Vec<f32>, columns: usize) -> Vec<f32> {
    let [a, b, c] = COEFFICIENTS;
    let rows = x.len() / columns;
    let side = rows.min(columns);
    let inverse = 1.0 / (norm(&x, &ThreadPool::single()) + EPS);
    x.iter_mut().for_each(|value| *value *= inverse);
    let (mut gram, mut square) = (vec![0.0; side * side], vec![0.0; side * side]);
    let mut next = vec![0.0; x.len()];
    for _ in 0..ITERATIONS {
        // The polynomial of the smaller of X X^T and X^T X; both give the same result.
        let matrix = StridedMatrix::new(&x, columns);
        if rows <= columns {
            multiply(matrix, matrix.transposed(), &mut gram);
        } else {
            multiply(matrix.transposed(), matrix, &mut gram);
        }
        multiply(StridedMatrix::new(&gram, side), StridedMatrix::new(&gram, side), &mut square);
        gram.iter_mut().zip(&square).for_each(|(gram, square)| *gram = b * *gram + c * square);
        next.iter_mut().zip(&x).for_each(|(next, x)| *next = a * x);
        if rows <= columns {
            multiply_add(StridedMatrix::new(&gram, side), matrix, &mut next);
        } else {
            multiply_add(matrix, StridedMatrix::new(&gram, side), &mut next);
        }
        std::mem::swap(&mut x, &mut next);
    }
    x
}

#[cfg(test)]
mod tests {
    use super::super::check::{random, singular_values};
    use super::*;

    const FACTORS: MatrixFactors =
        MatrixFactors { gradient: 1.0, momentum: 0.95, learning_rate: 1.0, weight_decay: 0.0 };

    fn step(columns: usize, gradients: &[f32], factors: MatrixFactors) -> Vec<f32> {
        let (mut values, mut momentum) = (vec![0.0; gradients.len()], vec![0.0; gradients.len()]);
        MuonUpdate { values: &mut values, gradients, momentum: &mut momentum, columns, factors }.run();
        values
    }

    #[test]
    fn singular_values_come_near_one() {
        for (rows, columns) in [(24, 24), (16, 80), (80, 16), (1, 50), (50, 1), (3, 3)] {
            let x = random(rows * columns, 1 + rows as u32);
            let before = singular_values(&x, columns);
            let norm = before.iter().map(|s| s * s).sum::<f64>().sqrt();
            let after = singular_values(&newton_schulz(x, columns), columns);
            for (before, after) in before.iter().zip(&after) {
                assert!(*after < 1.2, "[{rows}, {columns}]: {after}");
                assert!(
                    *after > 0.65 || before / norm < 2e-3,
                    "[{rows}, {columns}]: {before} became {after}"
                );
            }
        }
    }

    #[test]
    fn an_update_has_the_root_mean_square_of_the_paper() {
        for shape in [(40, 40), (16, 96), (96, 16)] {
            let update = step(shape.1, &random(shape.0 * shape.1, 7), FACTORS);
            let squares: f64 = update.iter().map(|x| f64::from(*x).powi(2)).sum();
            let rms = (squares / update.len() as f64).sqrt();
            assert!((rms / f64::from(RMS) - 1.0).abs() < 0.2, "{shape:?}: {rms}");
        }
    }

    #[test]
    fn updates_do_not_depend_on_the_gradient_scale_and_zero_gives_no_update() {
        let gradients = random(12 * 20, 3);
        let plain = step(20, &gradients, FACTORS);
        let clipped = step(20, &gradients, MatrixFactors { gradient: 1e-3, ..FACTORS });
        assert!(plain.iter().zip(&clipped).all(|(a, b)| (a - b).abs() < 1e-3));
        assert!(step(20, &[0.0; 240], FACTORS).iter().all(|x| *x == 0.0));
    }

    #[test]
    fn momentum_is_nesterovs_and_weights_decay() {
        let (g, mut momentum) = (random(30, 1), random(30, 2));
        let expected: Vec<f32> = momentum.iter().zip(&g).map(|(m, g)| 0.95 * m + 0.5 * g).collect();
        let ahead: Vec<f32> = expected.iter().zip(&g).map(|(m, g)| 0.5 * g + 0.95 * m).collect();
        let factors = MatrixFactors { gradient: 0.5, momentum: 0.95, learning_rate: 0.1, weight_decay: 0.3 };
        let mut values = random(30, 3);
        let o = newton_schulz(ahead, 6);
        let wanted: Vec<f32> =
            values.iter().zip(&o).map(|(w, o)| w - 0.1 * (0.2 * 6.0_f32.sqrt() * o + 0.3 * w)).collect();
        MuonUpdate { values: &mut values, gradients: &g, momentum: &mut momentum, columns: 6, factors }.run();
        assert_eq!(momentum, expected);
        assert!(values.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-5), "{values:?} {wanted:?}");
    }
}
