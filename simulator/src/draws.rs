//! Random numbers of a simulation.
//!
//! Invariant: a draw depends on the seed, its purpose and its number, never on the order of events.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The random numbers of one `(seed, purpose, number)`.
#[derive(Debug)]
pub(crate) struct Draws(ChaCha8Rng);

/// What is drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DrawPurpose {
    Lengths,
    Rewards,
    Tools,
}

impl Draws {
    pub(crate) fn new(seed: u64, purpose: DrawPurpose, number: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&number.to_le_bytes());
        key[16] = purpose as u8;
        Self(ChaCha8Rng::from_seed(key))
    }

    /// Uniform in (0, 1), from 53 random bits.
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller 1958), with the same bits on every platform.
    pub(crate) fn normal(&mut self) -> f64 {
        let (radius, angle) = (self.uniform(), self.uniform());
        libm::sqrt(-2.0 * libm::log(radius)) * libm::cos(2.0 * std::f64::consts::PI * angle)
    }

    /// Uniform in `0..bound`; `bound` is at least 1.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((self.uniform() * bound as f64) as usize).min(bound - 1)
    }
}
