//! The norm of the gradients, and the factor that scales them down where it is too large.
//!
//! Invariant: the sum of squares has the same bits on every machine and for every division of the gradients among threads
//! and ranks. Blocks of a tensor are summed in f64 in fixed lanes; no ZeRO shard cuts a block. The sums of blocks are added
//! exactly, so their order does not matter. Where tensor ranks on the processor may share the rows of a matrix ([`Reduction::Tree`]), every
//! square is added exactly. On devices the gradients themselves differ by rounding with the number of tensor ranks.

use model::{Reduction, ThreadPool};

use crate::moments::BLOCK;

/// Values that one thread sums at a time; a multiple of [`BLOCK`].
const PART: usize = 1 << 16;
/// Partial sums of a block.
const LANES: usize = 16;
/// Digits of an exact sum, of [`DIGIT`] bits each.
const DIGITS: usize = 22;
const DIGIT: u32 = 32;
/// A sum is counted in multiples of 2 to the minus this: a square of an f32 is at least 2^-298, and an f64 has 52 bits
/// below its first.
const UNIT: i32 = 298 + 52;

/// An exact sum of squares of f32 values, or of f64 sums of them: an integer, in multiples of `2^-350`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SquareSum {
    /// The least significant digit comes first. A digit takes 2^32 additions before carries move up.
    digits: [u64; DIGITS],
    /// Sum of what is not finite.
    not_finite: f64,
}

impl SquareSum {
    /// Length of the encoded form, bytes.
    pub(crate) const BYTES: usize = 8 * (DIGITS + 1);

    /// Adds a sum of squares of f32 values.
    pub(crate) fn add(&mut self, squares: f64) {
        if !squares.is_finite() {
            self.not_finite += squares;
            return;
        }
        let bits = squares.to_bits();
        let (exponent, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
        // Zero, because a sum of squares is not below 2^-298.
        let Ok(shift) = u32::try_from(exponent - 1075 + UNIT) else { return };
        self.add_shifted(u128::from(fraction | 1 << 52), shift);
    }

    /// Adds `integer`, of at most 64 bits, times `2^(shift - UNIT)`.
    fn add_shifted(&mut self, integer: u128, shift: u32) {
        let shifted = integer << (shift % DIGIT);
        match self.digits.get_mut((shift / DIGIT) as usize..) {
            Some(digits) if digits.len() > 2 => {
                for (digit, part) in digits.iter_mut().zip(0..3) {
                    *digit += (shifted >> (part * DIGIT)) as u64 & u64::from(u32::MAX);
                }
            }
            _ => self.not_finite = f64::INFINITY,
        }
    }

    /// Adds another sum.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.carry();
        let mut other = other.clone();
        other.carry();
        self.digits.iter_mut().zip(other.digits).for_each(|(digit, other)| *digit += other);
        self.not_finite += other.not_finite;
    }

    /// Square root of the sum.
    pub(crate) fn norm(&self) -> f32 {
        let mut sum = self.clone();
        sum.carry();
        let digits = sum.digits.iter().enumerate().rev();
        let weight = |place: usize| 2_f64.powi(DIGIT as i32 * place as i32 - UNIT);
        let value: f64 = digits.map(|(place, digit)| *digit as f64 * weight(place)).sum();
        (value + self.not_finite).sqrt() as f32
    }

    /// The sum as a message.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut sum = self.clone();
        sum.carry();
        let numbers = sum.digits.into_iter().chain([self.not_finite.to_bits()]);
        numbers.flat_map(u64::to_le_bytes).collect()
    }

    /// What [`Self::to_bytes`] wrote; `None` for anything else.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (numbers, rest) = bytes.as_chunks::<8>();
        let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        let mut sum = Self::default();
        if bytes.len() != Self::BYTES || !rest.is_empty() {
            return None;
        }
        sum.digits.iter_mut().zip(&mut numbers).for_each(|(digit, number)| *digit = number);
        sum.not_finite = f64::from_bits(numbers.next()?);
        Some(sum)
    }

    /// Leaves [`DIGIT`] bits in every digit but the last.
    fn carry(&mut self) {
        let mut carried = 0;
        for digit in &mut self.digits {
            *digit += carried;
            carried = *digit >> DIGIT;
            *digit &= u64::from(u32::MAX);
        }
    }
}

/// The sum of the squares of `tensors`, each the values of a tensor or of a part of one. With [`Reduction::Tree`] it does not depend on where
/// the parts begin; with [`Reduction::Chain`] only if each begins at a multiple of [`BLOCK`].
pub(crate) fn squares<'a>(
    tensors: impl IntoIterator<Item = &'a [f32]>,
    reduction: Reduction,
    pool: &ThreadPool,
) -> SquareSum {
    let parts: Vec<&[f32]> = tensors.into_iter().flat_map(|values| values.chunks(PART)).collect();
    let of_part = |values: &[f32]| match reduction {
        Reduction::Chain => {
            let mut sum = SquareSum::default();
            values.chunks(BLOCK).for_each(|block| sum.add(squares_of_block(block)));
            sum
        }
        Reduction::Tree => exact_squares(values),
    };
    let mut sum = SquareSum::default();
    pool.map(parts, of_part).iter().for_each(|part| sum.merge(part));
    sum
}

/// The exact sum of the squares of at most [`PART`] `values`. The squares of values with one exponent are integers in a common unit, of
/// 48 bits.
fn exact_squares(values: &[f32]) -> SquareSum {
    const FRACTION: u32 = f32::MANTISSA_DIGITS - 1;
    const EXPONENTS: usize = 1 << 8;
    let mut of_exponent = [0_u64; EXPONENTS];
    let mut sum = SquareSum::default();
    for value in values {
        let bits = value.to_bits();
        let (exponent, fraction) = ((bits >> FRACTION) as usize % EXPONENTS, bits & ((1 << FRACTION) - 1));
        if exponent == EXPONENTS - 1 {
            sum.not_finite += f64::from(*value) * f64::from(*value);
            continue;
        }
        let integer = u64::from(if exponent == 0 { fraction } else { fraction | 1 << FRACTION });
        of_exponent[exponent] += integer * integer;
    }
    for (exponent, squares) in of_exponent.into_iter().enumerate().filter(|(_, squares)| *squares > 0) {
        // A value is its integer times 2^(exponent - 150); without the hidden bit the exponent counts as 1.
        let shift = 2 * exponent.max(1) as u32 + (UNIT as u32 - 300);
        sum.add_shifted(u128::from(squares), shift);
    }
    sum
}

/// Euclidean norm of `values`, `[n]`.
pub(crate) fn norm(values: &[f32], pool: &ThreadPool) -> f32 {
    squares([values], Reduction::Chain, pool).norm()
}

/// Factor that scales gradients of this norm down to `max_norm`; 1 if their norm is not above it.
pub(crate) fn clip(norm: f32, max_norm: f32) -> f32 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

model::vectorized! {
    /// Sum of squares; the square of an f32 is exact in f64.
    fn squares_of_block(values: &[f32]) -> f64 {
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
    use proptest::prelude::*;

    use super::*;

    fn norm(values: &[f32]) -> f32 {
        super::norm(values, &ThreadPool::single())
    }

    #[test]
    fn the_norm_of_many_values_is_that_of_their_exact_sum() {
        for len in [0, 1, 15, 16, 17, 1000, PART, PART + 1, 3 * PART + 37] {
            let values: Vec<f32> = (0..len).map(|i| ((i * 37 % 1001) as f32 - 500.0) / 16.0).collect();
            let exact = (0..len).map(|i| (i as i64 * 37 % 1001 - 500).pow(2)).sum::<i64>() as f64 / 256.0;
            assert_eq!(norm(&values), exact.sqrt() as f32, "{len} values");
        }
        assert!(norm(&[1.0, f32::INFINITY]).is_infinite() && norm(&[f32::NAN]).is_nan());
        assert_eq!(norm(&[3e38, 3e38]), f32::INFINITY);
        let smallest = f32::from_bits(1);
        assert_eq!(norm(&[smallest]), smallest);
        assert_eq!(norm(&vec![f32::MAX / 300.0; 1 << 16]), (f64::from(f32::MAX / 300.0) * 256.0) as f32);
    }

    proptest! {
        #[test]
        fn the_norm_does_not_depend_on_how_blocks_are_divided(
            values in prop::collection::vec(prop::num::f32::NORMAL, 1..3000),
            cuts in prop::collection::vec(0..12_usize, 0..4),
        ) {
            let whole = squares([&values[..]], Reduction::Chain, &ThreadPool::single());
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| (cut * BLOCK).min(values.len())).collect();
            cuts.extend([0, values.len()]);
            cuts.sort_unstable();
            let mut sum = SquareSum::default();
            for cut in cuts.windows(2).rev() {
                let part = squares([&values[cut[0]..cut[1]]], Reduction::Chain, &ThreadPool::single());
                sum.merge(&SquareSum::from_bytes(&part.to_bytes()).unwrap());
            }
            prop_assert_eq!(sum.norm().to_bits(), whole.norm().to_bits());
            let exact = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt() as f32;
            prop_assert!((sum.norm() - exact).abs() <= 1e-6 * exact || sum.norm() == exact);
        }
    }

    proptest! {
        #[test]
        fn the_norm_of_values_that_ranks_share_does_not_depend_on_how(
            values in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL, 1..3000),
            ranks in 1..9_usize,
        ) {
            let of = |values: &[f32]| squares([values], Reduction::Tree, &ThreadPool::single());
            let (whole, mut sum) = (of(&values), SquareSum::default());
            for rank in (0..ranks).rev() {
                let own: Vec<f32> = values.iter().skip(rank).step_by(ranks).copied().collect();
                sum.merge(&SquareSum::from_bytes(&of(&own).to_bytes()).unwrap());
            }
            prop_assert_eq!(sum.norm().to_bits(), whole.norm().to_bits());
            let blocks = norm(&values);
            prop_assert!((whole.norm() - blocks).abs() <= 1e-6 * blocks || whole.norm() == blocks);
        }
    }

    #[test]
    fn what_is_not_finite_has_no_norm_in_any_order() {
        let of = |values: &[f32]| squares([values], Reduction::Tree, &ThreadPool::single()).norm();
        assert!(of(&[1.0, f32::INFINITY]).is_infinite() && of(&[f32::NAN, 2.0]).is_nan());
        assert_eq!((of(&[3e38, 3e38]), of(&[])), (f32::INFINITY, 0.0));
        assert_eq!(of(&[f32::from_bits(1)]), f32::from_bits(1));
    }

    #[test]
    fn gradients_below_the_limit_are_not_clipped() {
        assert_eq!(clip(0.5, 1.0), 1.0);
        assert_eq!(clip(0.0, 1.0), 1.0);
        assert!((clip(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}
