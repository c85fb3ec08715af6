//! Loops that show what a machine can do at best, for `rlrun bench` to hold the decoder against.
//!
//! Invariant: a loop says how much it did and nothing else. It reads no clock and starts no thread; whoever measures
//! does both.

use std::hint::black_box;

use crate::ops::simd::{LANES, Vector, vectorized};

/// Sums that do not wait for each other: more than two units of latency four can keep busy, few enough for the 16
/// registers of AVX2.
const CHAINS: usize = 12;

/// Vectors of 16 numbers that [`read`] adds up independently, for the same reason.
const READERS: usize = 8;

/// Does fused multiply-adds on registers alone, on the widest vectors of this machine that the decoder uses, and
/// returns the floating-point operations: two per multiply-add and lane.
#[must_use]
pub fn multiply_adds(rounds: u32) -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m256, __m512};

        #[target_feature(enable = "avx512f")]
        fn avx512(rounds: u32) -> f64 {
            chains::<__m512>(rounds)
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(rounds: u32) -> f64 {
            chains::<__m256>(rounds)
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            #[expect(unsafe_code, reason = "the feature of the callee was detected in the line above")]
            return unsafe { avx512(rounds) };
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            #[expect(unsafe_code, reason = "the features of the callee were detected in the line above")]
            return unsafe { avx2(rounds) };
        }
    }
    chains::<[f32; 4]>(rounds)
}

#[inline(always)]
fn chains<V: Vector>(rounds: u32) -> f64 {
    // Unknown to the compiler; the sums stay normal numbers, since slow ones would be no peak.
    let (values, factor) = black_box(([0.5_f32; LANES], 1e-3_f32));
    let values = V::load(&values);
    let mut sums = [V::zero(); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = values.mul_add(factor, *sum);
        }
    }
    for sum in sums {
        let mut out = [0.0; LANES];
        sum.store(&mut out);
        black_box(out);
    }
    f64::from(rounds) * (2 * CHAINS * V::WIDTH) as f64
}

vectorized! {
    /// Reads all of `values` but the last few and returns their sum, so that nothing is left out.
    #[must_use]
    pub fn read(values: &[f32]) -> f32 {
        let mut sums = [[0.0_f32; LANES]; READERS];
        for chunk in values.chunks_exact(LANES * READERS) {
            for (sum, part) in sums.iter_mut().zip(chunk.chunks_exact(LANES)) {
                for (sum, value) in sum.iter_mut().zip(part) {
                    *sum += value;
                }
            }
        }
        sums.iter().flatten().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_counted_by_the_round() {
        let one = multiply_adds(1);
        assert!([4.0, 8.0, 16.0].contains(&(one / 24.0)), "{one} operations in a round");
        assert_eq!(multiply_adds(1000), 1000.0 * one);
    }

    #[test]
    fn everything_is_read() {
        let mut values = vec![1.0; 3 * LANES * READERS];
        assert_eq!(read(&values), 384.0);
        values[200] = 3.0;
        assert_eq!(read(&values), 386.0);
    }
}
