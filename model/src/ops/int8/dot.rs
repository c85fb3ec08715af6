//! The integer product of quantised rows and quantised weights, compiled for each instruction set.
//!
//! Invariant: every instruction set computes the same exact `i32` sums. Products of an unsigned and a signed byte are
//! never added in 16 bits, which would saturate.

use super::super::dot::{DotOperands, LINE, PANEL_WIDTH, PanelLine, Results, StoreMode, Sums, panels};
use super::super::gemm::ProductOut;
#[cfg(target_arch = "x86_64")]
use super::amx;
use super::{Int8Linear, RowQuantization};

/// Rows of activations, quantised.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantizedRows<'a> {
    /// `[T, ceil(in / 4)]` groups of four neighbouring inputs; those beyond the last input meet weights of 0.
    pub(super) values: &'a [[u8; 4]],
    /// `[T]`
    pub(super) ranges: &'a [RowQuantization],
}

/// One product: all rows, and the columns of `layer` that begin with its panel `panel`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Int8Product<'a> {
    pub(super) layer: &'a Int8Linear,
    pub(super) rows: QuantizedRows<'a>,
    pub(super) panel: usize,
    pub(super) store: StoreMode,
}

impl Int8Product<'_> {
    /// Stores the result in `out [T, columns]`.
    pub(super) fn write(self, out: &mut ProductOut<'_>) {
        Arm::best(self.layer.steps()).product(self, out);
    }

    /// `N` lines by at most `MR` rows at a time.
    #[inline(always)]
    fn tiles<S: Totals, const N: usize, const MR: usize>(self, out: &mut ProductOut<'_>) {
        let steps = self.layer.steps();
        let panel_count = out.width().div_ceil(PANEL_WIDTH);
        let operands = DotOperands {
            lines: &self.layer.lines[self.panel * steps..][..panel_count * steps],
            first: self.panel * PANEL_WIDTH,
            inputs: self.rows.values,
            steps,
        };
        panels::<S, N, MR>(operands, &self, out, self.store);
    }
}

impl<S: Totals> Results<S> for Int8Product<'_> {
    #[inline(always)]
    fn results(&self, row: usize, column: usize, sums: S) -> [f32; LINE] {
        let columns = &self.layer.columns[column / PANEL_WIDTH];
        let range = self.rows.ranges[row];
        let mut results = [0.0; LINE];
        for (c, (result, product)) in results.iter_mut().zip(sums.totals()).enumerate() {
            let column = column % PANEL_WIDTH + c;
            *result = columns.result(column, product + S::OFFSET * columns.sum[column], range);
        }
        results
    }
}

/// Sums of the 16 outputs of a line, as numbers.
trait Totals: Sums<Inputs = [u8; 4], Weights = [i8; 4]> {
    /// What was subtracted from every input.
    const OFFSET: i32 = 0;

    fn totals(self) -> [i32; LINE];
}

/// An instruction set that the product is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// 16,384 products by one instruction, where inputs fill tiles.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// 64 products by one instruction.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// 32 products by one instruction.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// 16 products by one instruction, after widening.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 16 products by one instruction.
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    /// What the compiler makes of it.
    Portable,
}

impl Arm {
    /// Those of the architecture, the fastest first.
    #[cfg(target_arch = "x86_64")]
    const ALL: &[Self] = &[Self::Amx, Self::Avx512Vnni, Self::AvxVnni, Self::Avx2, Self::Portable];
    #[cfg(target_arch = "aarch64")]
    const ALL: &[Self] = &[Self::Dotprod, Self::Portable];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const ALL: &[Self] = &[Self::Portable];

    /// The fastest that this machine has, for layers of `steps` steps.
    fn best(steps: usize) -> Self {
        Self::ALL.iter().copied().find(|arm| arm.computes(steps)).unwrap_or(Self::Portable)
    }

    /// Whether this machine has its instructions, and they are for layers of `steps` steps.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_variables, reason = "AMX alone looks at the steps")
    )]
    fn computes(self, steps: usize) -> bool {
        #[cfg(target_arch = "aarch64")]
        use std::arch::is_aarch64_feature_detected as has;
        #[cfg(target_arch = "x86_64")]
        use std::arch::is_x86_feature_detected as has;
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => amx::is_here() && amx::fits(steps),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => has!("avx512f") && has!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => has!("avx2") && has!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has!("avx2"),
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => has!("dotprod"),
            Self::Portable => true,
        }
    }

    #[cfg_attr(
        any(target_arch = "x86_64", target_arch = "aarch64"),
        expect(unsafe_code, reason = "the first line has looked for the features of the callee")
    )]
    fn product(self, product: Int8Product<'_>, out: &mut ProductOut<'_>) {
        assert!(self.computes(product.layer.steps()), "{self:?} needs instructions that this machine lacks");
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => unsafe { amx::product(product, out) },
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => unsafe { x86::avx512_vnni(product, out) },
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => unsafe { x86::avx_vnni(product, out) },
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::avx2(product, out) },
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => unsafe { neon::dotprod(product, out) },
            Self::Portable => product.tiles::<[i32; LINE], 1, 2>(out),
        }
    }
}

impl Sums for [i32; LINE] {
    type Inputs = [u8; 4];
    type Weights = [i8; 4];

    #[inline(always)]
    fn zero() -> Self {
        [0; LINE]
    }

    #[inline(always)]
    fn add(mut self, inputs: [u8; 4], line: &PanelLine<[i8; 4]>) -> Self {
        for (sum, weights) in self.iter_mut().zip(line.0) {
            for (x, w) in inputs.into_iter().zip(weights) {
                *sum += i32::from(x) * i32::from(w);
            }
        }
        self
    }
}

impl Totals for [i32; LINE] {
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

    use super::{Int8Product, LINE, PanelLine, ProductOut, Sums, Totals};

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn avx512_vnni(product: Int8Product<'_>, out: &mut ProductOut<'_>) {
        product.tiles::<__m512i, 4, 6>(out);
    }

    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) fn avx_vnni(product: Int8Product<'_>, out: &mut ProductOut<'_>) {
        product.tiles::<[__m256i; 2], 1, 4>(out);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn avx2(product: Int8Product<'_>, out: &mut ProductOut<'_>) {
        product.tiles::<[__m256i; 4], 1, 2>(out);
    }

    impl Sums for __m512i {
        type Inputs = [u8; 4];
        type Weights = [i8; 4];

        #[inline(always)]
        fn zero() -> Self {
            unsafe { _mm512_setzero_si512() }
        }

        #[inline(always)]
        fn add(self, inputs: [u8; 4], line: &PanelLine<[i8; 4]>) -> Self {
            unsafe {
                let inputs = _mm512_set1_epi32(i32::from_ne_bytes(inputs));
                _mm512_dpbusd_epi32(self, inputs, _mm512_load_si512(line.0.as_ptr().cast()))
            }
        }
    }

    impl Totals for __m512i {
        #[inline(always)]
        fn totals(self) -> [i32; LINE] {
            unsafe { std::mem::transmute::<__m512i, [i32; LINE]>(self) }
        }
    }

    /// AVX-VNNI: eight outputs each.
    impl Sums for [__m256i; 2] {
        type Inputs = [u8; 4];
        type Weights = [i8; 4];

        #[inline(always)]
        fn zero() -> Self {
            [unsafe { _mm256_setzero_si256() }; 2]
        }

        #[inline(always)]
        fn add(self, inputs: [u8; 4], line: &PanelLine<[i8; 4]>) -> Self {
            std::array::from_fn(|half| unsafe {
                let inputs = _mm256_set1_epi32(i32::from_ne_bytes(inputs));
                let weights = _mm256_load_si256(line.0[8 * half..].as_ptr().cast());
                _mm256_dpbusd_avx_epi32(self[half], inputs, weights)
            })
        }
    }

    impl Totals for [__m256i; 2] {
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
        type Inputs = [u8; 4];
        type Weights = [i8; 4];

        #[inline(always)]
        fn zero() -> Self {
            [unsafe { _mm256_setzero_si256() }; 4]
        }

        #[inline(always)]
        fn add(self, inputs: [u8; 4], line: &PanelLine<[i8; 4]>) -> Self {
            std::array::from_fn(|quarter| unsafe {
                let inputs = _mm256_set1_epi64x(_mm_cvtsi128_si64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(
                    i32::from_ne_bytes(inputs),
                ))));
                let weights = _mm_load_si128(line.0[4 * quarter..].as_ptr().cast());
                let products = _mm256_madd_epi16(inputs, _mm256_cvtepi8_epi16(weights));
                _mm256_add_epi32(self[quarter], products)
            })
        }
    }

    impl Totals for [__m256i; 4] {
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

#[cfg(target_arch = "aarch64")]
#[expect(
    unsafe_code,
    reason = "used only inside functions whose target features were detected; a line is 64 bytes"
)]
mod neon {
    use std::arch::aarch64::*;
    use std::arch::asm;

    use super::{Int8Product, LINE, PanelLine, ProductOut, Sums, Totals};

    #[target_feature(enable = "dotprod")]
    pub(super) fn dotprod(product: Int8Product<'_>, out: &mut ProductOut<'_>) {
        product.tiles::<[int32x4_t; 4], 1, 6>(out);
    }

    /// Four outputs each. The instruction multiplies signed bytes, so 128 is subtracted from the inputs.
    impl Sums for [int32x4_t; 4] {
        type Inputs = [u8; 4];
        type Weights = [i8; 4];

        #[inline(always)]
        fn zero() -> Self {
            [unsafe { vdupq_n_s32(0) }; 4]
        }

        #[inline(always)]
        fn add(mut self, inputs: [u8; 4], line: &PanelLine<[i8; 4]>) -> Self {
            let inputs = unsafe { vdupq_n_u32(u32::from_ne_bytes(inputs) ^ 0x8080_8080) };
            for (sums, weights) in self.iter_mut().zip(line.0.as_chunks::<4>().0) {
                unsafe {
                    let weights = vld1q_s8(weights.as_ptr().cast());
                    // Its intrinsic is not stable yet. The assembler sees the features of the architecture alone.
                    asm!(
                        ".arch_extension dotprod",
                        "sdot {sums:v}.4s, {weights:v}.16b, {inputs:v}.16b",
                        sums = inout(vreg) *sums,
                        weights = in(vreg) weights,
                        inputs = in(vreg) inputs,
                        options(pure, nomem, nostack, preserves_flags),
                    );
                }
            }
            self
        }
    }

    impl Totals for [int32x4_t; 4] {
        const OFFSET: i32 = 128;

        #[inline(always)]
        fn totals(self) -> [i32; LINE] {
            let mut totals = [0; LINE];
            for (totals, sums) in totals.chunks_exact_mut(4).zip(self) {
                unsafe { vst1q_s32(totals.as_mut_ptr(), sums) };
            }
            totals
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn arms(steps: usize) -> Vec<Arm> {
        Arm::ALL.iter().copied().filter(|arm| arm.computes(steps)).collect()
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
        for arm in arms(steps) {
            let mut out = vec![f32::NAN; expected.len()];
            let mut product = Int8Product { layer: &layer, rows, panel: 0, store: StoreMode::Replace };
            arm.product(product, &mut ProductOut::new(&mut out, output));
            assert!(out == expected, "{arm:?}, {} x {input} x {output}", ranges.len());
            product.store = StoreMode::Add;
            arm.product(product, &mut ProductOut::new(&mut out, output));
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

    proptest! {
        /// Inputs that fill tiles, and rows that do not.
        #[test]
        fn every_arm_is_exact_in_tiles(
            rows in 1..100usize, tiles in 1..6usize, short in 0..4usize, output in 1..200usize, seed in 0..u64::MAX,
        ) {
            let input = 64 * tiles - short;
            let q: Vec<i8> = bytes(output * input, seed ^ 7).into_iter().map(|b| b as i8).collect();
            check(rows, input, output, &bytes(rows * input, seed), &q);
        }
    }

    /// Where sums of two products in 16 bits would saturate.
    #[test]
    fn extreme_factors_do_not_saturate() {
        for (input, q) in [(400, 127), (400, -127), (384, 127), (384, -127)] {
            check(7, input, 70, &vec![255; 7 * input], &vec![q; 70 * input]);
        }
    }
}
