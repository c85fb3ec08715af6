//! Reference computations for the optimizer tests.

use crate::moments::noise;

/// `len` deterministic values in [-1, 1).
pub(super) fn random(len: usize, seed: u32) -> Vec<f32> {
    let unit = |i: usize| (noise(i as u32 ^ noise(seed)) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..len).map(unit).collect()
}

/// Singular values of a row-major matrix `[rows, columns]`, descending, by one-sided Jacobi rotations in f64;
/// `min(rows, columns)` of them.
pub(super) fn singular_values(values: &[f32], columns: usize) -> Vec<f64> {
    let rows = values.len() / columns;
    // Vectors that are rotated until they are orthogonal: the rows, or the columns if there are fewer.
    let mut vectors: Vec<Vec<f64>> = if rows <= columns {
        values.chunks_exact(columns).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
    } else {
        (0..columns).map(|c| (0..rows).map(|r| f64::from(values[r * columns + c])).collect()).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for _ in 0..30 {
        for i in 0..vectors.len() {
            for j in 0..i {
                let (a, b) = (dot(&vectors[i], &vectors[i]), dot(&vectors[j], &vectors[j]));
                let c = dot(&vectors[i], &vectors[j]);
                if c.abs() <= 1e-15 * (a * b).sqrt() {
                    continue;
                }
                let zeta = (b - a) / (2.0 * c);
                let tangent = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                let cosine = 1.0 / (1.0 + tangent * tangent).sqrt();
                let sine = cosine * tangent;
                let (head, tail) = vectors.split_at_mut(i);
                for (x, y) in tail[0].iter_mut().zip(&mut head[j]) {
                    (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
                }
            }
        }
    }
    let mut lengths: Vec<f64> = vectors.iter().map(|v| dot(v, v).sqrt()).collect();
    lengths.sort_by(|a, b| b.total_cmp(a));
    lengths
}
