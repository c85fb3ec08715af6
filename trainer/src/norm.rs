//! Gradient norm and gradient clipping.
//!
//! Invariant: sums are over fixed blocks and lanes in a fixed order, so the bits are the same on every machine.

use model::ThreadPool;

/// Values of a block.
const BLOCK: usize = 1 << 16;
/// Partial sums of a block.
const LANES: usize = 16;

/// Euclidean norm of `values [n]`, summed in f64.
pub(crate) fn norm(values: &[f32], pool: &ThreadPool) -> f32 {
    sum_of_squares(values, pool).sqrt() as f32
}

/// Sum of the squares of `values [n]` in f64.
pub(crate) fn sum_of_squares(values: &[f32], pool: &ThreadPool) -> f64 {
    pool.map(values.chunks(BLOCK).collect(), squares).into_iter().sum()
}

/// Gradient clipping: the factor that limits `norm` to `max_norm`, at most 1 (`torch.nn.utils.clip_grad_norm_`).
pub(crate) fn clip(norm: f32, max_norm: f32) -> f32 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

model::vectorized! {
    /// Sum of squares; the square of an f32 is exact in f64.
    fn squares(values: &[f32]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        let (chunks, tail) = values.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(*value) * f64::from(*value);
            }
        }
        for (lane, value) in lanes.iter_mut().zip(tail) {
            *lane += f64::from(*value) * f64::from(*value);
        }
        lanes.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_matches_the_exact_sum() {
        for len in [0, 1, 15, 16, 17, 1000, BLOCK, BLOCK + 1, 3 * BLOCK + 37] {
            let values: Vec<f32> = (0..len).map(|i| ((i * 37 % 1001) as f32 - 500.0) / 16.0).collect();
            let exact = (0..len).map(|i| (i as i64 * 37 % 1001 - 500).pow(2)).sum::<i64>() as f64 / 256.0;
            assert_eq!(norm(&values, &ThreadPool::single()), exact.sqrt() as f32, "{len} values");
        }
        assert!(
            norm(&[1.0, f32::INFINITY], &ThreadPool::single()).is_infinite()
                && norm(&[f32::NAN], &ThreadPool::single()).is_nan()
        );
        assert_eq!(norm(&[3e38, 3e38], &ThreadPool::single()), f32::INFINITY);
    }

    #[test]
    fn gradients_below_the_limit_are_not_clipped() {
        assert_eq!(clip(0.5, 1.0), 1.0);
        assert_eq!(clip(0.0, 1.0), 1.0);
        assert!((clip(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}
