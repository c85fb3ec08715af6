//! Linear layers with int8 weights and activations (W8A8), for sampling only: a quarter of the memory traffic, several times
//! the arithmetic. Vector-wise quantization as in LLM.int8 (Dettmers et al. 2022, arXiv 2208.07339), without its outlier
//! decomposition.
//!
//! Weights are quantised once per policy version, symmetric, one scale per output channel: `w = scale q`, `q` in -127..=127.
//! Activations are quantised dynamically, one asymmetric range per token that always contains 0: `x = step (p - zero)`, `p` in 0..=255,
//! so that a zero stays exactly zero and no value is off by more than half a step. Then, with the sum over the inputs,
//!
//! ```text
//! y = step scale (sum(p q) - zero sum(q)) + bias
//! ```
//!
//! # Invariants
//! - The sums are exact integers and the rest is the same few roundings everywhere: all instruction sets give the same
//!   bits, and a row of the result depends on its own row of activations only.
//! - A row that holds a number that is not finite gives NaN in all its results, never a number that looks fine.
//!
//! There is no backward: training is f32. Only the four matrices of a layer are quantised. Embedding and head stay f32: an
//! error of the logits is an error of every log-probability, while the residual stream damps the error of a layer. Threads
//! share the outputs.

#[cfg(target_arch = "x86_64")]
mod amx;
mod dot;

use dot::{Int8Product, QuantizedRows};

use super::dot::{LINE, PANEL, PANEL_WIDTH, PanelLine, StoreMode};
use super::gemm::ProductOut;
use super::simd::{max, min, vectorized};
use super::{row_ranges, rows_each};
use crate::ThreadPool;

/// Rows of activations whose quantised form stays in the second-level cache while all weights pass by once.
const ROW_BLOCK: usize = 96;
/// Largest number of inputs whose sum fits an `i32`: each product is at most 255 * 127. A wider layer stays f32.
pub(crate) const MAX_INPUT: usize = i32::MAX as usize / (255 * 127);

/// Weights of a linear layer `[out, in]`, quantised and packed: `out * in` bytes and 12 more per output.
#[derive(Clone, Debug)]
pub(crate) struct Int8Linear {
    input: usize,
    output: usize,
    /// Panels of 64 outputs, each `[ceil(in / 4)][PANEL]` lines, the last one padded with zeros.
    lines: Vec<[PanelLine<[i8; 4]>; PANEL]>,
    /// Per panel.
    columns: Vec<PanelColumns>,
}

/// Scales and offsets that turn the integer products of a panel into results.
#[derive(Clone, Debug)]
struct PanelColumns {
    /// Value of one unit of the quantised weight.
    scale: [f32; PANEL_WIDTH],
    /// Sum of the quantised weights over the inputs.
    sum: [i32; PANEL_WIDTH],
    bias: [f32; PANEL_WIDTH],
}

/// How a row of activations was quantised: `x = step (p - zero)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RowQuantization {
    step: f32,
    zero: i32,
}

impl Int8Linear {
    /// Memory of the packed values, bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&self.lines[..]) + size_of_val(&self.columns[..])
    }

    /// Quantises and packs `weight [out, in]`.
    ///
    /// # Panics
    /// If there are no inputs, more than [`MAX_INPUT`], or another number of biases than of outputs.
    pub(crate) fn new(weight: &[f32], input: usize, bias: Option<&[f32]>) -> Self {
        assert!(
            (1..=MAX_INPUT).contains(&input),
            "a layer of {input} inputs; 1 to {MAX_INPUT} can be summed"
        );
        let output = weight.len() / input;
        assert_eq!(weight.len(), output * input, "weights are [out, {input}]");
        assert!(bias.is_none_or(|bias| bias.len() == output), "one bias per output");
        let (steps, panels) = (input.div_ceil(4), output.div_ceil(PANEL_WIDTH));
        let mut lines = vec![[PanelLine::<[i8; 4]>::default(); PANEL]; steps * panels];
        let mut columns = vec![PanelColumns::default(); panels];
        let mut quantized = vec![0_i8; input];
        for (index, row) in weight.chunks_exact(input).enumerate() {
            let (panel, column) = (index / (PANEL_WIDTH), index % (PANEL_WIDTH));
            let scale = quantize_weights(row, &mut quantized);
            let of = &mut columns[panel];
            of.scale[column] = scale;
            of.sum[column] = quantized.iter().map(|q| i32::from(*q)).sum();
            of.bias[column] = bias.map_or(0.0, |bias| bias[index]);
            let (line, lane) = (column / LINE, column % LINE);
            for (step, four) in lines[panel * steps..][..steps].iter_mut().zip(quantized.chunks(4)) {
                step[line].0[lane][..four.len()].copy_from_slice(four);
            }
        }
        Self { input, output, lines, columns }
    }

    /// Quantises the rows of `x [T, in]` to `values [T, steps]` and `ranges [T]`.
    fn quantize(&self, x: &[f32], values: &mut [[u8; 4]], ranges: &mut [RowQuantization], pool: &ThreadPool) {
        let each = rows_each(ranges.len(), x.len(), pool);
        let parts = x.chunks(each * self.input).zip(values.chunks_mut(each * self.steps()));
        let parts: Vec<_> = parts.zip(ranges.chunks_mut(each)).collect();
        pool.map(parts, |((x, values), ranges)| {
            let rows = x.chunks_exact(self.input).zip(values.chunks_exact_mut(self.steps()));
            for ((x, values), range) in rows.zip(ranges) {
                *range = quantize_row(x, &mut values.as_flattened_mut()[..self.input]);
            }
        });
    }

    /// Number of outputs.
    pub(crate) fn output(&self) -> usize {
        self.output
    }

    /// Steps of a row, of four inputs each.
    fn steps(&self) -> usize {
        self.input.div_ceil(4)
    }

    /// `out [T, out] = x [T, in] W^T + b`, or added to `out`.
    ///
    /// # Panics
    /// If the shapes do not fit each other.
    pub(crate) fn run(&self, x: &[f32], out: &mut [f32], store: StoreMode, pool: &ThreadPool) {
        assert_eq!(x.len() / self.input * self.output, out.len(), "the result is [T, {}]", self.output);
        assert_eq!(x.len() % self.input, 0, "activations are [T, {}]", self.input);
        let (rows, steps) = (x.len() / self.input, self.steps());
        let mut values = vec![[0_u8; 4]; rows.min(ROW_BLOCK) * steps];
        let mut ranges = vec![RowQuantization::default(); rows.min(ROW_BLOCK)];
        let blocks = x.chunks(ROW_BLOCK * self.input);
        for (x, out) in blocks.zip(out.chunks_mut((ROW_BLOCK * self.output).max(1))) {
            let rows = x.len() / self.input;
            let (values, ranges) = (&mut values[..rows * steps], &mut ranges[..rows]);
            self.quantize(x, values, ranges, pool);
            let rows = QuantizedRows { values, ranges };
            let columns = row_ranges(self.output, pool.threads(), PANEL_WIDTH);
            let outs = ProductOut::columns(out, self.output, &columns);
            pool.map(columns.into_iter().zip(outs).collect(), |(columns, mut out)| {
                let panel = columns.start / PANEL_WIDTH;
                Int8Product { layer: self, rows, panel, store }.write(&mut out);
            });
        }
    }
}

impl Default for PanelColumns {
    fn default() -> Self {
        Self { scale: [0.0; PANEL_WIDTH], sum: [0; PANEL_WIDTH], bias: [0.0; PANEL_WIDTH] }
    }
}

impl PanelColumns {
    /// The result of column `c` from its integer product with a row.
    #[inline(always)]
    fn result(&self, c: usize, product: i32, row: RowQuantization) -> f32 {
        let exact = product - row.zero * self.sum[c];
        exact as f32 * row.step * self.scale[c] + self.bias[c]
    }
}

vectorized! {
    /// Quantises one output's weights and returns the value of a unit, NaN if a weight is not finite.
    fn quantize_weights(weight: &[f32], out: &mut [i8]) -> f32 {
        /// Adding it rounds to an integer, negative ones too, whose low byte is that of the result.
        const ROUND: f32 = 12_582_912.0;
        let scale = f32::from_bits(largest_magnitude(weight)) / 127.0;
        if !scale.is_finite() {
            out.fill(0);
            return f32::NAN;
        }
        // Below this the reciprocal overflows; weights that small are nothing beside any other.
        let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
        for (q, w) in out.iter_mut().zip(weight) {
            *q = (w * inverse + ROUND).to_bits() as i8;
        }
        scale
    }
}

vectorized! {
    /// Quantises a row of activations.
    fn quantize_row(x: &[f32], out: &mut [u8]) -> RowQuantization {
        /// Adding it rounds to an integer, which is then the low byte: `round_ties_even` is a call on old machines.
        const ROUND: f32 = 8_388_608.0;
        let high = max(x).max(0.0);
        let low = min(x).min(0.0);
        let step = (high - low) / 255.0;
        if !step.is_finite() || !f32::from_bits(largest_magnitude(x)).is_finite() {
            out.fill(0);
            return RowQuantization { step: f32::NAN, zero: 0 };
        }
        if step < f32::MIN_POSITIVE {
            // All zero, or so small that the reciprocal overflows: nothing beside any other row.
            out.fill(0);
            return RowQuantization { step: 0.0, zero: 0 };
        }
        let inverse = 1.0 / step;
        let zero = (-low * inverse + ROUND) - ROUND;
        for (q, x) in out.iter_mut().zip(x) {
            let place = x.mul_add(inverse, zero);
            let place = if place < 0.0 { 0.0 } else { place };
            let place = if place > 255.0 { 255.0 } else { place };
            *q = (place + ROUND).to_bits() as u8;
        }
        RowQuantization { step, zero: zero as i32 }
    }
}

/// Bits of the largest absolute value. Values that are not finite have the largest bits.
#[inline(always)]
fn largest_magnitude(values: &[f32]) -> u32 {
    values.iter().fold(0, |largest, v| largest.max(v.to_bits() & !(1 << 31)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::check::{noise, row_is_independent};
    use super::*;

    fn apply(layer: &Int8Linear, x: &[f32]) -> Vec<f32> {
        let mut out = vec![7.0; x.len() / layer.input * layer.output()];
        layer.run(x, &mut out, StoreMode::Replace, &ThreadPool::single());
        out
    }

    proptest! {
        /// Each factor is off by at most half its unit, and the sum by what that makes of all products.
        #[test]
        fn the_error_is_that_of_rounding(
            m in 1..8usize, k in 1..300usize, n in 1..80usize, seed in 1..1000u32, scale in 0.01..100.0f32, shift in -1.0..1.0f32,
        ) {
            let x: Vec<f32> = noise(m * k, seed).iter().map(|x| scale * (x + shift)).collect();
            let (w, b) = (noise(n * k, seed + 1), noise(n, seed + 2));
            let layer = Int8Linear::new(&w, k, Some(&b));
            let out = apply(&layer, &x);
            for (x, out) in x.chunks_exact(k).zip(out.chunks_exact(n)) {
                let step = (max(x).max(0.0) - min(x).min(0.0)) / 255.0;
                for ((w, b), out) in w.chunks_exact(k).zip(&b).zip(out) {
                    let unit = w.iter().fold(0.0_f32, |a, w| a.max(w.abs())) / 127.0;
                    let exact: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let error = (f64::from(*out) - exact - f64::from(*b)).abs();
                    let bound: f32 = x.iter().zip(w).map(|(x, w)| (x.abs() + step / 2.0) * unit / 2.0 + w.abs() * step / 2.0).sum();
                    prop_assert!(error <= 1.001 * f64::from(bound) + 1e-6, "{error} > {bound}");
                }
            }
        }

        #[test]
        fn a_row_depends_neither_on_its_batch_nor_on_the_threads(m in 1..200usize, k in 1..70usize, n in 1..150usize, seed in 1..1000u32) {
            let (x, w, b) = (noise(m * k, seed), noise(n * k, seed + 1), noise(n, seed + 2));
            let layer = Int8Linear::new(&w, k, Some(&b));
            row_is_independent(&x, [m, n], seed as usize % m, |x, out, store, pool| layer.run(x, out, store, pool));
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let (k, n) = (37, 70);
        let (x, mut w, b) = (noise(2 * k, 1), noise(n * k, 2), noise(n, 3));
        w[5 * k..6 * k].fill(0.0);
        let layer = Int8Linear::new(&w, k, Some(&b));
        assert_eq!(apply(&layer, &vec![0.0; k]), b, "a row of zeros gives the bias");
        assert_eq!(apply(&layer, &vec![1e-42; k]), b, "and so does one that is as good as zero");
        assert!(apply(&layer, &x).chunks_exact(n).all(|row| row[5] == b[5]), "and so do weights of zero");
        // All that is left of the row is what the zeros add: nothing, though its range is not centred on them.
        let mut sparse = vec![0.0; k];
        (sparse[3], sparse[30]) = (-0.25, 1.0);
        for index in [3, 30] {
            w.chunks_exact_mut(k).for_each(|w| w[index] = 0.0);
        }
        assert_eq!(apply(&Int8Linear::new(&w, k, Some(&b)), &sparse), b);
    }

    #[test]
    fn non_finite_values_stay_non_finite() {
        let (k, n) = (20, 30);
        let (x, w) = (noise(3 * k, 1), noise(n * k, 2));
        let layer = Int8Linear::new(&w, k, None);
        let clean = apply(&layer, &x);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 16, k - 1] {
                let mut x = x.clone();
                x[k + at] = bad;
                let out = apply(&layer, &x);
                assert!(out[n..2 * n].iter().all(|y| y.is_nan()), "{bad} at {at}");
                assert_eq!((&out[..n], &out[2 * n..]), (&clean[..n], &clean[2 * n..]));
                let mut w = w.clone();
                w[4 * k + at] = bad;
                let out = apply(&Int8Linear::new(&w, k, None), &x[..k]);
                assert!(out.iter().enumerate().all(|(c, y)| y.is_nan() == (c == 4)), "{bad} at {at}");
            }
        }
        let mut wide = vec![0.0; k];
        (wide[0], wide[1]) = (f32::MAX, f32::MIN);
        assert!(apply(&layer, &wide).iter().all(|y| y.is_nan()), "a range beyond f32");
    }

    /// 256 different values of one sign keep 256 different codes.
    #[test]
    fn one_sided_activations_get_the_whole_range() {
        let x: Vec<f32> = (0..=255).map(|i| i as f32 / 8.0).collect();
        let unit: Vec<f32> = (0..256 * 256).map(|i| f32::from(u8::from(i / 256 == i % 256))).collect();
        let out = apply(&Int8Linear::new(&unit, 256, None), &x);
        for (y, x) in out.iter().zip(&x) {
            assert!((y - x).abs() <= 1e-5 * x, "{y} {x}");
        }
    }
}
