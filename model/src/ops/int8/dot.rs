//! The integer product of quantised rows and quantised weights, compiled for each instruction set.
//!
//! Invariant: every instruction set computes the same exact `i32` sums. Products of an unsigned and a signed byte are
//! never added in 16 bits, which would saturate.

use super::{Int8Linear, RowQuantization, StoreMode};

/// Outputs of a line.
pub(super) const LINE: usize = 16;
/// Lines of a panel: with six rows their sums fill 24 of the 32 AVX-512 registers.
pub(super) const PANEL: usize = 4;

/// Weights of 16 outputs for four neighbouring inputs: one AVX-512 register.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(super) struct PanelLine(pub(super) [[i8; 4]; LINE]);

/// Rows of activations, quantised.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantizedRows<'a> {
    /// `[T, ceil(in / 4)]` groups of four neighbouring inputs; those beyond the last input meet weights of 0.
    pub(super) values: &'a [[u8; 4]],
    /// `[T]`
    pub(super) ranges: &'a [RowQuantization],
}

/// Stores the product of `rows` and the weights of `layer` in `out [T, out]`.
pub(super) fn product(layer: &Int8Linear, rows: QuantizedRows<'_>, out: &mut [f32], store: StoreMode) {
    Arm::best().product(layer, rows, out, store);
}

/// An instruction set that the product is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// 64 products by one instruction.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// 32 products by one instruction.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// 16 products by one instruction, after widening.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler makes of it.
    Portable,
}

impl Arm {
    /// The fastest that this machine has.
    #[cfg(target_arch = "x86_64")]
    fn best() -> Self {
        let vector = [Self::Avx512Vnni, Self::AvxVnni, Self::Avx2];
        vector.into_iter().find(|arm| arm.is_here()).unwrap_or(Self::Portable)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn best() -> Self {
        Self::Portable
    }

    /// Whether this machine has its instructions.
    #[cfg(target_arch = "x86_64")]
    fn is_here(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        match self {
            Self::Avx512Vnni => has!("avx512f") && has!("avx512vnni"),
            Self::AvxVnni => has!("avx2") && has!("avxvnni"),
            Self::Avx2 => has!("avx2"),
            Self::Portable => true,
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn product(self, layer: &Int8Linear, rows: QuantizedRows<'_>, out: &mut [f32], store: StoreMode) {
        use std::arch::x86_64::{__m256i, __m512i};

        #[target_feature(enable = "avx512f,avx512vnni")]
        fn avx512_vnni(layer: &Int8Linear, rows: QuantizedRows<'_>, out: &mut [f32], store: StoreMode) {
            panels::<__m512i, 4, 6>(layer, rows, out, store);
        }
        #[target_feature(enable = "avx2,avxvnni")]
        fn avx_vnni(layer: &Int8Linear, rows: QuantizedRows<'_>, out: &mut [f32], store: StoreMode) {
            panels::<[__m256i; 2], 1, 4>(layer, rows, out, store);
        }
        #[target_feature(enable = "avx2")]
        fn avx2(layer: &Int8Linear, rows: QuantizedRows<'_>, out: &mut [f32], store: StoreMode) {
            panels::<[__m256i; 4], 1, 2>(layer, rows, out, store);
        }
        assert!(self.is_here(), "{self:?} needs instructions that this machine lacks");
        #[expect(unsafe_code, reason = "the line above has looked for the features of the callee")]
        unsafe {
            match self {
                Self::Avx512Vnni => avx512_vnni(layer, rows, out, store),
                Self::AvxVnni => avx_vnni(layer, rows, out, store),
                Self::Avx2 => avx2(layer, rows, out, store),
                Self::Portable => panels::<[i32; LINE], 1, 2>(layer, rows, out, store),
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn product(self, layer: &Int8Linear, rows: QuantizedRows<'_>, out: &mut [f32], store: StoreMode) {
        panels::<[i32; LINE], 1, 2>(layer, rows, out, store);
    }
}

/// All panels, each with all rows: `N` lines by at most `MR` rows at a time, within the number of registers for sums.
#[inline(always)]
fn panels<S: Sums, const N: usize, const MR: usize>(
    layer: &Int8Linear,
    rows: QuantizedRows<'_>,
    out: &mut [f32],
    store: StoreMode,
) {
    const { assert!(PANEL.is_multiple_of(N) && MR <= 6) };
    let steps = layer.input.div_ceil(4);
    let count = rows.ranges.len().div_ceil(MR);
    // Tiles of equal height: one of few rows would wait for the sums of the instruction before.
    let tiles = || (0..count).map(|t| t * rows.ranges.len() / count..(t + 1) * rows.ranges.len() / count);
    let mut inputs = vec![[0; 4]; rows.values.len()];
    for tile in tiles() {
        for (row, values) in rows.values[tile.start * steps..tile.end * steps].chunks_exact(steps).enumerate()
        {
            let slots = inputs[tile.start * steps + row..].iter_mut().step_by(tile.len());
            slots.zip(values).for_each(|(slot, four)| *slot = *four);
        }
    }
    for (panel, lines) in layer.lines.chunks_exact(steps).enumerate() {
        for first in (0..PANEL).step_by(N) {
            for (t, tile) in tiles().enumerate() {
                // Each tile fetches its share of the next panel: neighbouring lines come in pairs.
                let ahead = if count < PANEL { t * PANEL / count } else { t % PANEL };
                let inputs = &inputs[tile.start * steps..tile.end * steps];
                let place = TilePlacement { panel, line: first, row: tile.start, store };
                match tile.len() {
                    1 => finish(layer, rows, sums::<S, N, 1>(lines, first, inputs, ahead), place, out),
                    2 => finish(layer, rows, sums::<S, N, 2>(lines, first, inputs, ahead), place, out),
                    3 => finish(layer, rows, sums::<S, N, 3>(lines, first, inputs, ahead), place, out),
                    4 => finish(layer, rows, sums::<S, N, 4>(lines, first, inputs, ahead), place, out),
                    5 => finish(layer, rows, sums::<S, N, 5>(lines, first, inputs, ahead), place, out),
                    _ => finish(layer, rows, sums::<S, N, 6>(lines, first, inputs, ahead), place, out),
                }
            }
        }
    }
}

/// Position of a tile in the result.
#[derive(Clone, Copy)]
struct TilePlacement {
    panel: usize,
    line: usize,
    row: usize,
    store: StoreMode,
}

/// Sums over all inputs of `N` lines of a panel, from `first` on, with `R` rows, whose `inputs` are interleaved. On the
/// way it fetches the line `ahead` of every step of the next panel.
#[inline(always)]
fn sums<S: Sums, const N: usize, const R: usize>(
    lines: &[[PanelLine; PANEL]],
    first: usize,
    inputs: &[[u8; 4]],
    ahead: usize,
) -> [[S; N]; R] {
    let beyond = lines.len() * PANEL;
    let mut sums = [[S::zero(); N]; R];
    for (lines, inputs) in lines.iter().zip(inputs.as_chunks::<R>().0) {
        prefetch(&lines[ahead], beyond);
        for n in 0..N {
            for r in 0..R {
                sums[r][n] = sums[r][n].add(inputs[r], &lines[first + n]);
            }
        }
    }
    sums
}

/// Asks for the line that lies `beyond` lines after `line`: while one panel is multiplied, the next one comes in from
/// memory. There need not be one: an address is all that is used.
#[inline(always)]
fn prefetch(line: &PanelLine, beyond: usize) {
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "every x86-64 has it, and it reads nothing that the program could see")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(line).wrapping_add(beyond).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, beyond);
}

/// Puts the sums of a tile into `out [T, out]` as numbers.
#[inline(always)]
fn finish<S: Sums, const N: usize, const R: usize>(
    layer: &Int8Linear,
    rows: QuantizedRows<'_>,
    sums: [[S; N]; R],
    place: TilePlacement,
    out: &mut [f32],
) {
    let columns = &layer.columns[place.panel];
    for (r, sums) in sums.into_iter().enumerate() {
        let range = rows.ranges[place.row + r];
        for (n, sums) in sums.into_iter().enumerate() {
            let column = (place.line + n) * LINE;
            let first = place.panel * PANEL * LINE + column;
            let width = LINE.min(layer.output.saturating_sub(first));
            let mut result = [0.0; LINE];
            for (c, (result, product)) in result.iter_mut().zip(sums.totals()).enumerate() {
                *result = columns.result(column + c, product, range);
            }
            let at = (place.row + r) * layer.output + first;
            let out = &mut out[at.min((place.row + r + 1) * layer.output)..][..width];
            match (place.store, out.as_mut_array::<LINE>()) {
                (StoreMode::Replace, Some(out)) => *out = result,
                (StoreMode::Add, Some(out)) => out.iter_mut().zip(result).for_each(|(out, y)| *out += y),
                (StoreMode::Replace, None) => out.copy_from_slice(&result[..width]),
                (StoreMode::Add, None) => out.iter_mut().zip(result).for_each(|(out, y)| *out += y),
            }
        }
    }
}

/// Sums of the 16 outputs of a line.
trait Sums: Copy {
    fn zero() -> Self;

    /// With the products of four inputs and the weights of `line`.
    fn add(self, inputs: [u8; 4], line: &PanelLine) -> Self;

    fn totals(self) -> [i32; LINE];
}

impl Sums for [i32; LINE] {
    #[inline(always)]
    fn zero() -> Self {
        [0; LINE]
    }

    #[inline(always)]
    fn add(mut self, inputs: [u8; 4], line: &PanelLine) -> Self {
        for (sum, weights) in self.iter_mut().zip(line.0) {
            for (x, w) in inputs.into_iter().zip(weights) {
                *sum += i32::from(x) * i32::from(w);
            }
        }
        self
    }

    #[inline(always)]
    fn totals(self) -> [i32; LINE] {
        self
    }
}

#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "used only inside functions whose target features were detected; a line is 64 aligned bytes"
)]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LINE, PanelLine, Sums};

    impl Sums for __m512i {
        #[inline(always)]
        fn zero() -> Self {
            unsafe { _mm512_setzero_si512() }
        }

        #[inline(always)]
        fn add(self, inputs: [u8; 4], line: &PanelLine) -> Self {
            unsafe {
                let inputs = _mm512_set1_epi32(i32::from_ne_bytes(inputs));
                _mm512_dpbusd_epi32(self, inputs, _mm512_load_si512(line.0.as_ptr().cast()))
            }
        }

        #[inline(always)]
        fn totals(self) -> [i32; LINE] {
            let mut totals = [0; LINE];
            unsafe { _mm512_storeu_si512(totals.as_mut_ptr().cast(), self) };
            totals
        }
    }

    /// AVX-VNNI: eight outputs each.
    impl Sums for [__m256i; 2] {
        #[inline(always)]
        fn zero() -> Self {
            [unsafe { _mm256_setzero_si256() }; 2]
        }

        #[inline(always)]
        fn add(self, inputs: [u8; 4], line: &PanelLine) -> Self {
            std::array::from_fn(|half| unsafe {
                let inputs = _mm256_set1_epi32(i32::from_ne_bytes(inputs));
                let weights = _mm256_load_si256(line.0[8 * half..].as_ptr().cast());
                _mm256_dpbusd_avx_epi32(self[half], inputs, weights)
            })
        }

        #[inline(always)]
        fn totals(self) -> [i32; LINE] {
            let mut totals = [0; LINE];
            for (totals, sums) in totals.chunks_exact_mut(8).zip(self) {
                unsafe { _mm256_storeu_si256(totals.as_mut_ptr().cast(), sums) };
            }
            totals
        }
    }

    /// AVX2: four outputs each, as two sums over two of the four inputs.
    impl Sums for [__m256i; 4] {
        #[inline(always)]
        fn zero() -> Self {
            [unsafe { _mm256_setzero_si256() }; 4]
        }

        #[inline(always)]
        fn add(self, inputs: [u8; 4], line: &PanelLine) -> Self {
            std::array::from_fn(|quarter| unsafe {
                let inputs = _mm256_set1_epi64x(_mm_cvtsi128_si64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(
                    i32::from_ne_bytes(inputs),
                ))));
                let weights = _mm_load_si128(line.0[4 * quarter..].as_ptr().cast());
                let products = _mm256_madd_epi16(inputs, _mm256_cvtepi8_epi16(weights));
                _mm256_add_epi32(self[quarter], products)
            })
        }

        #[inline(always)]
        fn totals(self) -> [i32; LINE] {
            let mut totals = [0; LINE];
            for (totals, sums) in totals.chunks_exact_mut(4).zip(self) {
                let mut pairs = [0; 8];
                unsafe { _mm256_storeu_si256(pairs.as_mut_ptr().cast(), sums) };
                for (total, pair) in totals.iter_mut().zip(pairs.chunks_exact(2)) {
                    *total = pair[0] + pair[1];
                }
            }
            totals
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[cfg(target_arch = "x86_64")]
    fn arms() -> Vec<Arm> {
        let all = [Arm::Avx512Vnni, Arm::AvxVnni, Arm::Avx2, Arm::Portable];
        all.into_iter().filter(|arm| arm.is_here()).collect()
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn arms() -> Vec<Arm> {
        vec![Arm::Portable]
    }

    /// Bytes without a pattern.
    fn bytes(n: usize, seed: u64) -> Vec<u8> {
        (0..n as u64)
            .map(|i| ((i + 1).wrapping_mul(seed.wrapping_mul(2) + 0x9e37_79b9_7f4a_7c15) >> 37) as u8)
            .collect()
    }

    /// Every arm against a loop in i64. Up to 500 inputs every sum is exact in f32 too.
    fn check(rows: usize, input: usize, output: usize, x: &[u8], q: &[i8]) {
        // A weight of 127 makes the unit of every output 1.
        let mut weight: Vec<f32> = q.iter().map(|q| f32::from((*q).max(-127))).collect();
        weight.chunks_exact_mut(input).for_each(|w| w[0] = 127.0);
        let layer = Int8Linear::new(&weight, input, None);
        let steps = input.div_ceil(4);
        // What lies behind the last input must not matter.
        let mut values = vec![[255; 4]; rows * steps];
        for (values, x) in values.chunks_exact_mut(steps).zip(x.chunks_exact(input)) {
            values.as_flattened_mut()[..input].copy_from_slice(x);
        }
        let ranges: Vec<_> =
            (0..rows).map(|r| RowQuantization { step: 1.0, zero: (r * 53 % 256) as i32 }).collect();
        let rows = QuantizedRows { values: &values, ranges: &ranges };
        let expected: Vec<f32> = x
            .chunks_exact(input)
            .zip(&ranges)
            .flat_map(|(x, range)| {
                weight.chunks_exact(input).map(move |w| {
                    let product = |(x, w): (&u8, &f32)| (i64::from(*x) - i64::from(range.zero)) * *w as i64;
                    x.iter().zip(w).map(product).sum::<i64>() as f32
                })
            })
            .collect();
        for arm in arms() {
            let mut out = vec![f32::NAN; expected.len()];
            arm.product(&layer, rows, &mut out, StoreMode::Replace);
            assert!(out == expected, "{arm:?}, {} x {input} x {output}", ranges.len());
            arm.product(&layer, rows, &mut out, StoreMode::Add);
            assert!(out.iter().zip(&expected).all(|(y, e)| *y == 2.0 * e), "{arm:?} adds");
        }
    }

    proptest! {
        #[test]
        fn every_arm_is_exact(rows in 1..40usize, input in 1..500usize, output in 1..150usize, seed in 0..u64::MAX) {
            let q: Vec<i8> = bytes(output * input, seed ^ 7).into_iter().map(|b| b as i8).collect();
            check(rows, input, output, &bytes(rows * input, seed), &q);
        }
    }

    /// Where sums of two products in 16 bits would saturate.
    #[test]
    fn extreme_factors_do_not_saturate() {
        for q in [127, -127] {
            check(7, 400, 70, &[255; 7 * 400], &vec![q; 70 * 400]);
        }
    }
}
