//! Linear layers with bf16 weights and activations and sums in f32, for sampling only: half of the memory traffic, and twice
//! the arithmetic where the machine has AVX-512 BF16 (Kalamkar et al. 2019, arXiv 1905.12322).
//!
//! Weights are rounded once per policy version, activations in every product, both to nearest even. A sum takes two inputs
//! per step, the odd one first, each by a fused multiply-add:
//!
//! ```text
//! sum = flush(w[2 i + 1] x[2 i + 1] + sum)
//! sum = flush(w[2 i] x[2 i] + sum)
//! ```
//!
//! `flush` replaces a subnormal by a zero of its sign; subnormal weights and activations are zeros. This is what the
//! instruction `vdpbf16ps` computes.
//!
//! # Invariants
//! - All instruction sets give the same bits, and a row of the result depends on its own row of activations only.
//! - A number that is not finite stays one.
//!
//! There is no backward: training is f32. Threads share the outputs.

use super::dot::{DotOperands, LINE, PANEL, PANEL_WIDTH, PanelLine, Results, StoreMode, Sums, panels};
use super::gemm::ProductOut;
use super::row_ranges;
use super::simd::vectorized;
use crate::ThreadPool;

/// Rows of activations whose rounded form stays in the second-level cache while all weights pass by once.
const ROW_BLOCK: usize = 96;

/// Two neighbouring values, as bits of bf16.
type Pair = [u16; 2];

/// Weights of a linear layer `[out, in]`, rounded and packed: two bytes each.
#[derive(Clone, Debug)]
pub(crate) struct Bf16Linear {
    input: usize,
    output: usize,
    /// Panels of 64 outputs, each `[ceil(in / 2)][PANEL]` lines, the last one padded with zeros.
    lines: Vec<[PanelLine<Pair>; PANEL]>,
    /// `[panels * 64]`, zeros without biases.
    bias: Vec<f32>,
}

impl Bf16Linear {
    /// Memory of the packed values, bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&self.lines[..]) + size_of_val(&self.bias[..])
    }

    /// Rounds and packs `weight [out, in]`.
    ///
    /// # Panics
    /// If there are no inputs, or another number of biases than of outputs.
    pub(crate) fn new(weight: &[f32], input: usize, bias: Option<&[f32]>) -> Self {
        assert!(input > 0, "a layer has inputs");
        let output = weight.len() / input;
        assert_eq!(weight.len(), output * input, "weights are [out, {input}]");
        assert!(bias.is_none_or(|bias| bias.len() == output), "one bias per output");
        let (steps, panels) = (input.div_ceil(2), output.div_ceil(PANEL_WIDTH));
        let mut lines = vec![[PanelLine::<Pair>::default(); PANEL]; steps * panels];
        let mut rounded = vec![0; input];
        for (index, row) in weight.chunks_exact(input).enumerate() {
            round(row, &mut rounded);
            let (panel, column) = (index / PANEL_WIDTH, index % PANEL_WIDTH);
            for (step, pair) in lines[panel * steps..][..steps].iter_mut().zip(rounded.chunks(2)) {
                step[column / LINE].0[column % LINE][..pair.len()].copy_from_slice(pair);
            }
        }
        let mut padded = bias.map_or(Vec::new(), <[f32]>::to_vec);
        padded.resize(panels * PANEL_WIDTH, 0.0);
        Self { input, output, lines, bias: padded }
    }

    /// Number of outputs.
    pub(crate) fn output(&self) -> usize {
        self.output
    }

    /// `out [T, out] = x [T, in] W^T + b`, or added to `out`.
    ///
    /// # Panics
    /// If the shapes do not fit each other.
    pub(crate) fn run(&self, x: &[f32], out: &mut [f32], store: StoreMode, pool: &ThreadPool) {
        assert_eq!(x.len() / self.input * self.output, out.len(), "the result is [T, {}]", self.output);
        assert_eq!(x.len() % self.input, 0, "activations are [T, {}]", self.input);
        let (rows, steps) = (x.len() / self.input, self.input.div_ceil(2));
        let mut values = vec![[0_u16; 2]; rows.min(ROW_BLOCK) * steps];
        let blocks = x.chunks(ROW_BLOCK * self.input);
        for (x, out) in blocks.zip(out.chunks_mut((ROW_BLOCK * self.output).max(1))) {
            let values = &mut values[..x.len() / self.input * steps];
            for (x, values) in x.chunks_exact(self.input).zip(values.chunks_exact_mut(steps)) {
                round(x, &mut values.as_flattened_mut()[..self.input]);
            }
            let columns = row_ranges(self.output, pool.threads(), PANEL_WIDTH);
            let outs = ProductOut::columns(out, self.output, &columns);
            let inputs = &*values;
            pool.map(columns.into_iter().zip(outs).collect(), |(columns, mut out)| {
                let panels = columns.start / PANEL_WIDTH..columns.end.div_ceil(PANEL_WIDTH);
                let lines = &self.lines[panels.start * steps..panels.end * steps];
                let operands = DotOperands { lines, first: columns.start, inputs, steps };
                Bf16Arm::best().product(Bf16Product { operands, bias: &self.bias, store }, &mut out);
            });
        }
    }
}

vectorized! {
    /// Rounds to bf16, to nearest even; subnormal values to zero.
    fn round(values: &[f32], out: &mut [u16]) {
        for (out, value) in out.iter_mut().zip(values) {
            let bits = value.to_bits();
            let nearest = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
            // Adding could carry out of the mantissa of a number that is none.
            let nearest = if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { nearest };
            *out = if nearest & 0x7f80 == 0 { nearest & 0x8000 } else { nearest };
        }
    }
}

/// One product: all rows, and some panels.
#[derive(Clone, Copy, Debug)]
struct Bf16Product<'a> {
    operands: DotOperands<'a, Pair, Pair>,
    bias: &'a [f32],
    store: StoreMode,
}

impl Bf16Product<'_> {
    #[inline(always)]
    fn tiles<S: Sums<Inputs = Pair, Weights = Pair> + Into<Lanes>, const N: usize, const MR: usize>(
        self,
        out: &mut ProductOut<'_>,
    ) {
        panels::<S, N, MR>(self.operands, &self, out, self.store);
    }
}

impl<S: Into<Lanes>> Results<S> for Bf16Product<'_> {
    #[inline(always)]
    fn results(&self, _: usize, column: usize, sums: S) -> [f32; LINE] {
        let Lanes(mut results) = sums.into();
        for (result, bias) in results.iter_mut().zip(&self.bias[column..column + LINE]) {
            *result += bias;
        }
        results
    }
}

/// An instruction set that the product is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bf16Arm {
    /// 32 products by one instruction.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// The same arithmetic in f32, on AVX-512.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// On AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler makes of it.
    Portable,
}

impl Bf16Arm {
    /// The fastest that this machine has.
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let vector = [Self::Avx512Bf16, Self::Avx512, Self::Avx2];
            vector.into_iter().find(|arm| arm.is_here()).unwrap_or(Self::Portable)
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::Portable
    }

    /// Whether this machine has its instructions.
    #[cfg(target_arch = "x86_64")]
    fn is_here(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        match self {
            Self::Avx512Bf16 => has!("avx512f") && has!("avx512bf16"),
            Self::Avx512 => has!("avx512f"),
            Self::Avx2 => has!("avx2") && has!("fma"),
            Self::Portable => true,
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn product(self, product: Bf16Product<'_>, out: &mut ProductOut<'_>) {
        use std::arch::x86_64::__m512;

        #[target_feature(enable = "avx512f,avx512bf16")]
        fn avx512_bf16(product: Bf16Product<'_>, out: &mut ProductOut<'_>) {
            product.tiles::<__m512, 4, 6>(out);
        }
        #[target_feature(enable = "avx512f")]
        fn avx512(product: Bf16Product<'_>, out: &mut ProductOut<'_>) {
            product.tiles::<Lanes, 2, 4>(out);
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(product: Bf16Product<'_>, out: &mut ProductOut<'_>) {
            product.tiles::<Lanes, 1, 4>(out);
        }
        assert!(self.is_here(), "{self:?} needs instructions that this machine lacks");
        #[expect(unsafe_code, reason = "the line above has looked for the features of the callee")]
        unsafe {
            match self {
                Self::Avx512Bf16 => avx512_bf16(product, out),
                Self::Avx512 => avx512(product, out),
                Self::Avx2 => avx2(product, out),
                Self::Portable => product.tiles::<Lanes, 1, 2>(out),
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn product(self, product: Bf16Product<'_>, out: &mut ProductOut<'_>) {
        product.tiles::<Lanes, 1, 2>(out);
    }
}

/// The sums of a line in f32 arithmetic.
#[derive(Clone, Copy)]
struct Lanes([f32; LINE]);

impl Sums for Lanes {
    type Inputs = Pair;
    type Weights = Pair;

    #[inline(always)]
    fn zero() -> Self {
        Self([0.0; LINE])
    }

    #[inline(always)]
    fn add(mut self, [even, odd]: Pair, line: &PanelLine<Pair>) -> Self {
        let (even, odd) = (widened(even), widened(odd));
        for (sum, weights) in self.0.iter_mut().zip(line.0) {
            *sum = flush(widened(weights[1]).mul_add(odd, *sum));
            *sum = flush(widened(weights[0]).mul_add(even, *sum));
        }
        self
    }
}

#[inline(always)]
fn widened(value: u16) -> f32 {
    f32::from_bits(u32::from(value) << 16)
}

/// A subnormal value becomes a zero of its sign.
#[inline(always)]
fn flush(value: f32) -> f32 {
    let zero = f32::from_bits(value.to_bits() & 0x8000_0000);
    if value.abs() < f32::MIN_POSITIVE { zero } else { value }
}

#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "used only inside functions whose target features were detected; a line is 64 aligned bytes"
)]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LINE, Lanes, Pair, PanelLine, Sums};

    impl Sums for __m512 {
        type Inputs = Pair;
        type Weights = Pair;

        #[inline(always)]
        fn zero() -> Self {
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        fn add(self, inputs: Pair, line: &PanelLine<Pair>) -> Self {
            unsafe {
                let inputs = i32::from(inputs[0]) | i32::from(inputs[1]) << 16;
                let weights = _mm512_load_si512(line.0.as_ptr().cast());
                let (inputs, weights) = (_mm512_set1_epi32(inputs), weights);
                _mm512_dpbf16_ps(
                    self,
                    std::mem::transmute::<__m512i, __m512bh>(inputs),
                    std::mem::transmute::<__m512i, __m512bh>(weights),
                )
            }
        }
    }

    impl From<__m512> for Lanes {
        #[inline(always)]
        fn from(sums: __m512) -> Self {
            Self(unsafe { std::mem::transmute::<__m512, [f32; LINE]>(sums) })
        }
    }
}

#[cfg(test)]
mod tests;
