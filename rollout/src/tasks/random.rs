//! Unbiased draws from counter-based random streams, one per seed, purpose and number.
//!
//! Invariant: the same seed, purpose and number give the same draws on every machine and in every release: resumed
//! runs depend on it.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The random stream of one `(seed, purpose, number)`.
pub(crate) struct RandomStream(ChaCha8Rng);

/// Which of the streams of one seed.
pub(crate) struct Purpose {
    /// What is drawn; eight letters.
    pub(crate) name: [u8; 8],
    /// Which draw of this purpose.
    pub(crate) number: u64,
}

impl RandomStream {
    pub(crate) fn new(seed: u64, purpose: &Purpose) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&purpose.number.to_le_bytes());
        key[16..24].copy_from_slice(&purpose.name);
        Self(ChaCha8Rng::from_seed(key))
    }

    /// Uniform in `0..bound`; `bound` is at least 1.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 0, "nothing lies below 0");
        // Lemire's multiplication: the high word is the draw, and the few low words that would make some draws more
        // likely than others are drawn again.
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.0.next_u64()) * u128::from(bound);
            let (high, low) = ((product >> 64) as u64, product as u64);
            if low >= threshold {
                return high;
            }
        }
    }

    /// A uniformly random permutation (Fisher-Yates).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let chosen = self.below(last as u64 + 1);
            items.swap(last, usize::try_from(chosen).unwrap_or(last));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(number: u64) -> RandomStream {
        RandomStream::new(7, &Purpose { name: *b"testing.", number })
    }

    #[test]
    fn draws_stay_below_their_bound() {
        let mut draws = stream(0);
        for bound in [1, 2, 3, 1 << 40, u64::MAX] {
            assert!((0..100).all(|_| draws.below(bound) < bound));
        }
    }

    /// Chi-square over the 24 orders of 4 items, 23 degrees of freedom: above 58 by chance once in 10^4 seeds.
    #[test]
    fn every_order_is_equally_likely() {
        let mut draws = stream(1);
        let mut counts = std::collections::HashMap::new();
        for _ in 0..24_000 {
            let mut items = [0, 1, 2, 3];
            draws.shuffle(&mut items);
            *counts.entry(items).or_insert(0.0) += 1.0;
        }
        assert_eq!(counts.len(), 24);
        let chi_square: f64 = counts.values().map(|n: &f64| (n - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi_square < 58.0, "{chi_square}");
    }
}
