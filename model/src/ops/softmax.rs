//! The softmax normaliser of a row of logits. Sampler and trainer share it, so that their log-probabilities are equal.

use super::simd::{LANES, exp, max, sum, vectorized};

vectorized! {
    /// Scales `logits [V]` by `scale` in place and returns `ln(sum(exp(logits)))` of the scaled row.
    pub(crate) fn scale_and_normalizer(logits: &mut [f32], scale: f32) -> f32 {
        for z in logits.iter_mut() {
            *z *= scale;
        }
        normalizer(logits)
    }
}

vectorized! {
    /// Entropy in nats of scaled `logits [V]`.
    pub(crate) fn entropy(logits: &[f32], log_normalizer: f32) -> f32 {
        let mut expected = [0.0_f32; LANES];
        let (chunks, rest) = logits.as_chunks::<LANES>();
        for chunk in chunks {
            for (z, e) in chunk.iter().zip(&mut expected) {
                *e = exp(*z - log_normalizer).mul_add(*z, *e);
            }
        }
        for (z, e) in rest.iter().zip(&mut expected) {
            *e = exp(*z - log_normalizer).mul_add(*z, *e);
        }
        log_normalizer - sum(&expected)
    }
}

/// `ln(sum(exp(z)))`.
#[inline(always)]
fn normalizer(z: &[f32]) -> f32 {
    let top = max(z);
    let mut lanes = [0.0_f32; LANES];
    let (chunks, rest) = z.as_chunks::<LANES>();
    for chunk in chunks {
        for (z, lane) in chunk.iter().zip(&mut lanes) {
            *lane += exp(z - top);
        }
    }
    for (z, lane) in rest.iter().zip(&mut lanes) {
        *lane += exp(z - top);
    }
    top + libm::logf(sum(&lanes))
}

#[cfg(test)]
mod tests {
    use super::super::check::noise;
    use super::*;

    #[test]
    fn agrees_with_f64() {
        for n in [1, 3, 16, 100, 1001] {
            let mut z: Vec<f32> = noise(n, 7).iter().map(|z| z * 20.0).collect();
            let exact: Vec<f64> = z.iter().map(|z| f64::from(*z) * 0.7).collect();
            let log_sum = exact.iter().map(|z| z.exp()).sum::<f64>().ln();
            let expected: f64 = exact.iter().map(|z| (z - log_sum).exp() * (log_sum - z)).sum();
            let ours = scale_and_normalizer(&mut z, 0.7);
            assert!((f64::from(ours) - log_sum).abs() < 1e-5, "{ours} {log_sum}");
            assert!((f64::from(entropy(&z, ours)) - expected).abs() < 1e-4);
        }
    }
}
