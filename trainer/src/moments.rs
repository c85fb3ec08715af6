//! First and second moment of one tensor, in f32 or in 8 bits, and the loop of an AdamW update over them.
//!
//! 8-bit moments (after Dettmers et al. 2021, arXiv 2110.02861) have one f32 scale per block of [`BLOCK`] values. A
//! code is a small float: `code(n) = 2^(n / 16) * (1 + (n % 16) / 16) - 1` with integer division, which is linear near
//! zero and has a mantissa of 4 bits above; a value is `code * scale`. The first moment has a sign and 128 magnitudes
//! (the largest 247), the second 256 (the largest 63487). Values between two codes are rounded stochastically: the
//! second moment changes by a thousandth per update, and rounding to nearest would never change its code.
//!
//! Invariant: the new bits of a value depend on the update and on the values of its block, so chunks that begin at
//! block boundaries can be updated in any order, by any thread or rank.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::TrainerError;

/// Values per scale; as in bitsandbytes and torchao.
pub const BLOCK: usize = 256;
/// Values of a chunk, a multiple of [`BLOCK`]: an update reads and writes at most 1 MiB for it.
const CHUNK: usize = 1 << 16;
/// Smaller tensors have f32 moments, as in bitsandbytes: norms and biases are few and sensitive.
pub const MIN_CODED: usize = 4096;

/// Bits of an f32 mantissa below that of a code.
const SHIFT: u32 = f32::MANTISSA_DIGITS - 1 - 4;
/// Bits of 1.0: code 0.
const ONE: u32 = 1.0_f32.to_bits();
/// Largest code of the first moment; the highest bit is the sign.
const SIGNED: u32 = 127;
/// Largest code of the second moment.
const UNSIGNED: u32 = 255;
/// A block whose values are all smaller is stored as zeros, because its scale has no inverse.
const SMALLEST: f32 = f32::MIN_POSITIVE * 65536.0;

/// Both moments of one tensor or fragment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Moments {
    /// In f32, `[n]` each.
    Full {
        /// Moving average of the gradients.
        first: Vec<f32>,
        /// Moving average of the squared gradients.
        second: Vec<f32>,
    },
    /// In 8 bits.
    Coded {
        /// Moving average of the gradients: magnitude, and the sign in the highest bit.
        first: Coded,
        /// Moving average of the squared gradients.
        second: Coded,
    },
}

/// One moment of a tensor or fragment in 8 bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Coded {
    /// Codes, `[n]`.
    pub codes: Vec<u8>,
    /// Scale of each block, `[n / BLOCK]` rounded up.
    pub scales: Vec<f32>,
}

/// Factors of one AdamW update, equal for all values of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamwFactors {
    /// Gradient scale; below 1 if the gradient is clipped.
    pub(crate) gradient: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) eps: f32,
    /// Learning rate divided by the bias correction of the first moment: `learning_rate / (1 - beta1^t)`.
    pub(crate) step_size: f32,
    /// Bias correction of the second moment: `1 / (1 - beta2^t)`.
    pub(crate) second_scale: f32,
    /// Weight decay: `1 - learning_rate * weight_decay`, or 1.
    pub(crate) keep: f32,
    /// Seed of the stochastic rounding, per update and tensor.
    pub(crate) seed: u32,
}

/// A weight and its moments after an update.
struct UpdatedWeight {
    value: f32,
    first: f32,
    second: f32,
}

/// A chunk of one tensor with its gradients and moments.
#[derive(Debug)]
pub(crate) struct MomentChunk<'a> {
    /// Index of the first value in its tensor.
    offset: usize,
    values: &'a mut [f32],
    gradients: &'a [f32],
    moments: ChunkMoments<'a>,
    factors: AdamwFactors,
}

#[derive(Debug)]
enum ChunkMoments<'a> {
    Full(&'a mut [f32], &'a mut [f32]),
    Coded(CodedMut<'a>, CodedMut<'a>),
}

/// A slice of [`Coded`] that begins at a block boundary.
#[derive(Debug)]
struct CodedMut<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

impl Moments {
    /// Zero f32 moments of `len` values.
    pub(crate) fn full(len: usize) -> Self {
        Self::Full { first: vec![0.0; len], second: vec![0.0; len] }
    }

    /// Zero 8-bit moments of `len` values.
    pub(crate) fn coded(len: usize) -> Self {
        let zeros = || Coded { codes: vec![0; len], scales: vec![0.0; len.div_ceil(BLOCK)] };
        Self::Coded { first: zeros(), second: zeros() }
    }

    /// Number of values.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a tensor without values does not exist")]
    pub fn len(&self) -> usize {
        match self {
            Self::Full { first, .. } => first.len(),
            Self::Coded { first, .. } => first.codes.len(),
        }
    }

    /// The moments of the values `within`, which begin at a block boundary.
    pub(crate) fn cut(&self, within: &Range<usize>) -> Self {
        match self {
            Self::Full { first, second } => {
                Self::Full { first: first[within.clone()].to_vec(), second: second[within.clone()].to_vec() }
            }
            Self::Coded { first, second } => {
                Self::Coded { first: first.cut(within), second: second.cut(within) }
            }
        }
    }

    /// Inverse of [`Self::cut`].
    ///
    /// # Errors
    /// If `part` has another precision.
    pub(crate) fn paste(&mut self, within: &Range<usize>, part: &Self) -> Result<(), TrainerError> {
        match (self, part) {
            (Self::Full { first, second }, Self::Full { first: m, second: v }) => {
                first[within.clone()].copy_from_slice(m);
                second[within.clone()].copy_from_slice(v);
            }
            (Self::Coded { first, second }, Self::Coded { first: m, second: v }) => {
                first.paste(within, m);
                second.paste(within, v);
            }
            (Self::Full { .. }, Self::Coded { .. }) | (Self::Coded { .. }, Self::Full { .. }) => {
                let reason = "two ranks have moments of different precisions".to_owned();
                return Err(TrainerError::Message { reason });
            }
        }
        Ok(())
    }

    /// Splits the update of a tensor, or of a fragment that begins at `offset`, into chunks at fixed places. `values`
    /// and `gradients` are `[n]`.
    pub(crate) fn chunks<'a>(
        &'a mut self,
        offset: usize,
        values: &'a mut [f32],
        gradients: &'a [f32],
        factors: AdamwFactors,
    ) -> impl Iterator<Item = MomentChunk<'a>> {
        let moments: Vec<ChunkMoments<'a>> = match self {
            Self::Full { first, second } => first
                .chunks_mut(CHUNK)
                .zip(second.chunks_mut(CHUNK))
                .map(|(first, second)| ChunkMoments::Full(first, second))
                .collect(),
            Self::Coded { first, second } => first
                .chunks()
                .zip(second.chunks())
                .map(|(first, second)| ChunkMoments::Coded(first, second))
                .collect(),
        };
        let chunks = values.chunks_mut(CHUNK).zip(gradients.chunks(CHUNK)).zip(moments).enumerate();
        chunks.map(move |(i, ((values, gradients), moments))| MomentChunk {
            offset: offset + i * CHUNK,
            values,
            gradients,
            moments,
            factors,
        })
    }
}

impl Coded {
    fn cut(&self, within: &Range<usize>) -> Self {
        let Self { codes, scales } = self;
        Self { codes: codes[within.clone()].to_vec(), scales: scales[blocks(within)].to_vec() }
    }

    fn paste(&mut self, within: &Range<usize>, part: &Self) {
        self.codes[within.clone()].copy_from_slice(&part.codes);
        self.scales[blocks(within)].copy_from_slice(&part.scales);
    }

    fn chunks(&mut self) -> impl Iterator<Item = CodedMut<'_>> {
        let chunks = self.codes.chunks_mut(CHUNK).zip(self.scales.chunks_mut(CHUNK / BLOCK));
        chunks.map(|(codes, scales)| CodedMut { codes, scales })
    }
}

impl MomentChunk<'_> {
    /// Updates the values and moments of the chunk.
    pub(crate) fn update(self) {
        let Self { offset, values, gradients, moments, factors } = self;
        match moments {
            ChunkMoments::Full(first, second) => update_full(values, gradients, first, second, factors),
            ChunkMoments::Coded(first, second) => {
                update_coded(offset, values, gradients, first, second, factors);
            }
        }
    }
}

impl AdamwFactors {
    /// New value, first moment and second moment of one weight.
    #[inline(always)]
    fn step(self, value: f32, gradient: f32, first: f32, second: f32) -> UpdatedWeight {
        let g = gradient * self.gradient;
        let first = self.beta1 * first + (1.0 - self.beta1) * g;
        let second = self.beta2 * second + (1.0 - self.beta2) * g * g;
        let root = (second * self.second_scale).sqrt() + self.eps;
        UpdatedWeight { value: value * self.keep - self.step_size * first / root, first, second }
    }
}

model::vectorized! {
    fn update_full(
        values: &mut [f32],
        gradients: &[f32],
        first: &mut [f32],
        second: &mut [f32],
        factors: AdamwFactors,
    ) {
        for (((value, g), m), v) in values.iter_mut().zip(gradients).zip(first).zip(second) {
            UpdatedWeight { value: *value, first: *m, second: *v } = factors.step(*value, *g, *m, *v);
        }
    }
}

model::vectorized! {
    fn update_coded(
        offset: usize,
        values: &mut [f32],
        gradients: &[f32],
        first: CodedMut<'_>,
        second: CodedMut<'_>,
        factors: AdamwFactors,
    ) {
        let blocks = values.chunks_mut(BLOCK).zip(gradients.chunks(BLOCK));
        let firsts = first.codes.chunks_mut(BLOCK).zip(first.scales);
        let seconds = second.codes.chunks_mut(BLOCK).zip(second.scales);
        let (mut m, mut v) = ([0.0; BLOCK], [0.0; BLOCK]);
        for (i, (((values, gradients), (m_codes, m_scale)), (v_codes, v_scale))) in
            blocks.zip(firsts).zip(seconds).enumerate()
        {
            let n = values.len();
            let (m, v) = (&mut m[..n], &mut v[..n]);
            let codes = m_codes.iter().zip(v_codes.iter());
            let moments = m.iter_mut().zip(v.iter_mut());
            for (((value, g), (m, v)), (m_code, v_code)) in
                values.iter_mut().zip(gradients).zip(moments).zip(codes)
            {
                let (old_m, old_v) = (decode_signed(*m_code) * *m_scale, decode(u32::from(*v_code)) * *v_scale);
                UpdatedWeight { value: *value, first: *m, second: *v } =
                    factors.step(*value, *g, old_m, old_v);
            }
            let m_inverse;
            let v_inverse;
            (*m_scale, m_inverse) = scale(largest(m), SIGNED);
            (*v_scale, v_inverse) = scale(largest(v), UNSIGNED);
            let place = (offset + i * BLOCK) as u32;
            for (j, ((m_code, v_code), (m, v))) in
                m_codes.iter_mut().zip(v_codes).zip(m.iter().zip(v.iter())).enumerate()
            {
                let noise = noise(factors.seed ^ place.wrapping_add(j as u32));
                *m_code = encode_signed(*m * m_inverse, noise & 0xffff);
                *v_code = encode_above_zero(*v * v_inverse, noise >> 16);
            }
        }
    }
}

/// Block indices of values that begin at a block boundary.
fn blocks(within: &Range<usize>) -> Range<usize> {
    within.start / BLOCK..within.end.div_ceil(BLOCK)
}

/// Magnitude of a code.
#[inline(always)]
fn decode(code: u32) -> f32 {
    f32::from_bits(ONE + (code << SHIFT)) - 1.0
}

#[inline(always)]
fn decode_signed(code: u8) -> f32 {
    let code = u32::from(code);
    f32::from_bits(decode(code & SIGNED).to_bits() | (code & 128) << 24)
}

/// Stochastic rounding of `magnitude` to one of the neighbouring codes; `noise` has 16 bits.
#[inline(always)]
fn encode(magnitude: f32, noise: u32, largest: u32) -> u32 {
    let bits = (magnitude + 1.0).to_bits().wrapping_sub(ONE);
    (bits.wrapping_add(noise << (SHIFT - 16)) >> SHIFT).min(largest)
}

#[inline(always)]
fn encode_signed(x: f32, noise: u32) -> u8 {
    (encode(x.abs(), noise, SIGNED) | x.to_bits() >> 24 & 128) as u8
}

/// Code of a second moment; never 0 for a value above 0, because the first moment would be divided by `eps` alone.
#[inline(always)]
fn encode_above_zero(x: f32, noise: u32) -> u8 {
    encode(x, noise, UNSIGNED).max(u32::from(x > 0.0)) as u8
}

/// Scale of a block whose largest magnitude is `largest`, so that this has code `code`; and the inverse of the scale.
#[inline(always)]
fn scale(largest: f32, code: u32) -> (f32, f32) {
    if largest < SMALLEST {
        return (0.0, 0.0);
    }
    let top = decode(code);
    (largest / top, top / largest)
}

/// Largest magnitude of `values [n]`.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    // The bits of magnitudes have the order of their values, and an integer maximum does not depend on the order.
    f32::from_bits(values.iter().fold(0, |max, value| max.max(value.abs().to_bits())))
}

/// 32 random bits for a value: the finaliser `lowbias32` of Wellons, <https://nullprogram.com/blog/2018/07/31/>.
#[inline(always)]
pub(crate) fn noise(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTORS: AdamwFactors = AdamwFactors {
        gradient: 0.7,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        step_size: 0.03,
        second_scale: 1.5,
        keep: 0.999,
        seed: 77,
    };

    fn random(i: usize, seed: u32) -> f32 {
        let bits = noise(i as u32 ^ seed.wrapping_mul(0x9e37_79b9));
        // Several orders of magnitude, both signs, and zeros.
        if bits & 15 == 0 { 0.0 } else { ((bits >> 8) as f32 / 8_388_608.0 - 1.0).powi(5) * 3.0 }
    }

    fn codes() -> Vec<f32> {
        (0..256).map(|n| 2.0_f32.powi(n / 16) * (1.0 + (n % 16) as f32 / 16.0) - 1.0).collect()
    }

    #[test]
    fn codes_match_the_formula_and_round_trip() {
        let noises = [0, 1, 0x7fff, 0xffff];
        for (n, value) in (0..).zip(codes()) {
            assert_eq!(decode(n), value);
            for noise in noises {
                assert_eq!(encode(value, noise, UNSIGNED), n);
                if n <= SIGNED {
                    assert_eq!(decode_signed(encode_signed(value, noise)), value);
                    assert_eq!(decode_signed(encode_signed(-value, noise)), -value);
                }
            }
        }
        assert_eq!((decode(SIGNED), decode(UNSIGNED)), (247.0, 63487.0));
        assert_eq!(encode(64000.0, 0xffff, UNSIGNED), UNSIGNED);
        assert!(noises.iter().all(|noise| encode_above_zero(1e-30, *noise) > 0));
    }

    #[test]
    fn stochastic_rounding_is_unbiased_between_neighbouring_codes() {
        let codes = codes();
        for i in 0..500 {
            let x = random(i, 3).abs() * 80.0;
            let above = codes.iter().position(|code| *code >= x).unwrap();
            let (low, high) = (codes[above.saturating_sub(1)], codes[above]);
            // With a mantissa of 4 bits, neighbouring codes differ by a sixteenth.
            assert!(high - low <= (1.0 + x) / 16.0);
            let mut sum = 0.0;
            for noise in 0..=0xffff_u32 {
                let rounded = decode(encode(x, noise, UNSIGNED));
                assert!(rounded == low || rounded == high, "{x} became {rounded}");
                sum += f64::from(rounded);
            }
            let error = (sum / 65536.0 - f64::from(x)).abs();
            assert!(error <= f64::from(high - low) * 1e-4, "{x} is {} on average", sum / 65536.0);
        }
    }

    /// AdamW with 8-bit moments, value by value, with a table of codes.
    fn reference(
        values: &mut [f32],
        gradients: &[f32],
        first: &mut Coded,
        second: &mut Coded,
        f: AdamwFactors,
    ) {
        let codes = codes();
        let round = |x: f32, noise: u32| {
            let below = codes.iter().rposition(|code| *code <= x).unwrap();
            let Some(above) = codes.get(below + 1) else { return below as u8 };
            let part = ((1.0 + x) - (1.0 + codes[below])) / (above - codes[below]);
            // The noise has sixteen bits of the distance between codes; lower bits are truncated.
            (below + usize::from(part + noise as f32 / 65536.0 >= 1.0)) as u8
        };
        for block in 0..values.len().div_ceil(BLOCK) {
            let range = block * BLOCK..values.len().min((block + 1) * BLOCK);
            let (mut ms, mut vs) = (Vec::new(), Vec::new());
            for i in range.clone() {
                let sign = if first.codes[i] > 127 { -1.0 } else { 1.0 };
                let m = sign * codes[usize::from(first.codes[i] & 127)] * first.scales[block];
                let v = codes[usize::from(second.codes[i])] * second.scales[block];
                let g = gradients[i] * f.gradient;
                let m = f.beta1 * m + (1.0 - f.beta1) * g;
                let v = f.beta2 * v + (1.0 - f.beta2) * g * g;
                values[i] = values[i] * f.keep - f.step_size * m / ((v * f.second_scale).sqrt() + f.eps);
                ms.push(m);
                vs.push(v);
            }
            let m_largest = ms.iter().fold(0.0_f32, |max, m| max.max(m.abs()));
            let v_largest = vs.iter().fold(0.0_f32, |max, v| max.max(*v));
            (first.scales[block], second.scales[block]) = (m_largest / 247.0, v_largest / 63487.0);
            let inverse = |top: f32, largest: f32| if largest > 0.0 { top / largest } else { 0.0 };
            for ((i, m), v) in range.zip(ms).zip(vs) {
                let noise = noise(f.seed ^ i as u32);
                let sign = if m.is_sign_negative() { 128 } else { 0 };
                let m_code = round(m.abs() * inverse(247.0, m_largest), noise & 0xffff).min(127);
                let v_code = round(v * inverse(63487.0, v_largest), noise >> 16);
                first.codes[i] = sign | m_code;
                second.codes[i] = if v > 0.0 { v_code.max(1) } else { 0 };
            }
        }
    }

    fn of(moments: &mut Moments) -> (&mut Coded, &mut Coded) {
        match moments {
            Moments::Coded { first, second } => (first, second),
            Moments::Full { .. } => panic!("these are in 8 bits"),
        }
    }

    #[test]
    fn an_update_matches_the_reference() {
        let len = 2 * CHUNK + 3 * BLOCK + 57;
        let mut values: Vec<f32> = (0..len).map(|i| random(i, 1)).collect();
        let (mut moments, mut expected_moments) = (Moments::coded(len), Moments::coded(len));
        let mut expected = values.clone();
        for update in 0..4 {
            let mut gradients: Vec<f32> = (0..len).map(|i| random(i, 100 + update)).collect();
            gradients[BLOCK..2 * BLOCK].fill(0.0);
            let factors = AdamwFactors { seed: noise(update), ..FACTORS };
            // The order of chunks does not matter.
            let chunks: Vec<_> = moments.chunks(0, &mut values, &gradients, factors).collect();
            chunks.into_iter().rev().for_each(MomentChunk::update);
            let (first, second) = of(&mut expected_moments);
            reference(&mut expected, &gradients, first, second, factors);
            assert_eq!(values, expected, "update {update}");
            assert_eq!(moments, expected_moments, "update {update}");
        }
    }

    #[test]
    fn zero_and_extreme_gradients_give_finite_values() {
        for gradient in [0.0, 1e-38, 1e-20, 1e15] {
            let (mut values, mut moments) = (vec![1.0; 300], Moments::coded(300));
            for _ in 0..3 {
                moments.chunks(0, &mut values, &[gradient; 300], FACTORS).for_each(MomentChunk::update);
            }
            assert!(
                values.iter().all(|value| value.is_finite() && value.abs() <= 2.0),
                "{gradient}: {}",
                values[0]
            );
        }
    }
}
