//! Matrices in quantised blocks, those of GGUF files and of [`crate::float8`] and [`crate::mxfp4`], as QLoRA keeps a frozen base
//! (Dettmers et al. 2023, arXiv 2305.14314).
//!
//! ```text
//! Q8_0   32 values   d f16 | 32 x i8                                    d q
//! Q4_0   32 values   d f16 | 16 bytes of nibbles                        d (q - 8)
//! Q4_1   32 values   d f16, m f16 | 16 bytes of nibbles                 d q + m
//! Q4_K  256 values   d f16, m f16 | 8 x (scale, min) of 6 bits | nibbles    (d scale) q - (m min)
//! Q6_K  256 values   low nibbles | high 2 bits | 16 x scale i8 | d f16      (d scale) (q - 32)
//! FP8   128 values   d f32 | 128 x E4M3                                 d q
//! MXFP4  32 values   d E8M0 | 16 bytes of E2M1                          d q
//! ```
//!
//! Invariant: a product dequantises some rows at a time, and every element of its result is the chain of multiply-adds of a
//! product with the dequantised matrix: it has the same bits.

use std::ops::Range;
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use device::ops::blocks::BlockFormat;
use half::{bf16, f16};

use super::gemm::NR;
use super::simd::vectorized;
use super::unwritten;
use crate::{float8, mxfp4};

/// Values that are dequantised at a time: 512 KiB, half of a small second-level cache.
const AT_A_TIME: usize = 1 << 17;

/// The formats of GGUF files that are computed with, for messages.
pub(crate) const GGUF_FORMATS: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K";

/// The format of a tensor of a GGUF file; `None` if it is not computed with.
pub(crate) fn gguf_format(dtype: GgmlDType) -> Option<BlockFormat> {
    match dtype {
        GgmlDType::F32 => Some(BlockFormat::F32),
        GgmlDType::F16 => Some(BlockFormat::F16),
        GgmlDType::BF16 => Some(BlockFormat::Bf16),
        GgmlDType::Q8_0 => Some(BlockFormat::Q8Zero),
        GgmlDType::Q4_0 => Some(BlockFormat::Q4Zero),
        GgmlDType::Q4_1 => Some(BlockFormat::Q4One),
        GgmlDType::Q4K => Some(BlockFormat::Q4K),
        GgmlDType::Q6K => Some(BlockFormat::Q6K),
        _ => None,
    }
}

/// A matrix whose rows are whole blocks.
#[derive(Debug)]
pub(crate) struct BlockMatrix {
    pub(crate) format: BlockFormat,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) bytes: Vec<u8>,
}

impl BlockMatrix {
    /// The matrix `[rows, columns]` of these bytes; `None` if they are not its blocks.
    pub(crate) fn new(format: BlockFormat, [rows, columns]: [usize; 2], bytes: Vec<u8>) -> Option<Self> {
        let (values, block) = format.block();
        let whole = columns.is_multiple_of(values) && bytes.len() == rows * columns / values * block;
        whole.then_some(Self { format, rows, columns, bytes })
    }

    /// Writes some rows to `out [rows, columns]`.
    pub(crate) fn dequantize(&self, rows: Range<usize>, out: &mut [f32]) {
        let (values, block) = self.format.block();
        let row = self.columns / values * block;
        dequantize(self.format, &self.bytes[rows.start * row..rows.end * row], out);
    }
}

impl BlockMatrix {
    /// Number of values that are not finite.
    pub(crate) fn non_finite(&self) -> usize {
        let mut row = vec![0.0; self.columns];
        let of = |at: usize| {
            self.dequantize(at..at + 1, &mut row);
            row.iter().filter(|value| !value.is_finite()).count()
        };
        (0..self.rows).map(of).sum()
    }
}

/// Matrices one below the other.
#[derive(Clone, Debug)]
pub(crate) struct BlockRows(Vec<Arc<BlockMatrix>>);

impl BlockRows {
    pub(crate) fn new(parts: Vec<Arc<BlockMatrix>>) -> Self {
        Self(parts)
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|part| part.rows).sum()
    }

    /// Ranges of rows that are dequantised at a time, ascending.
    pub(crate) fn chunks(&self) -> Vec<Range<usize>> {
        let columns = self.0.first().map_or(1, |part| part.columns).max(1);
        let each = (AT_A_TIME / columns).max(1).next_multiple_of(NR);
        let rows = self.len();
        (0..rows).step_by(each).map(|start| start..(start + each).min(rows)).collect()
    }

    /// `[rows, columns]` some rows.
    pub(crate) fn dequantized(&self, rows: &Range<usize>) -> Vec<f32> {
        let columns = self.0.first().map_or(0, |part| part.columns);
        let mut out = unwritten(rows.len() * columns);
        let (mut rest, mut start) = (&mut out[..], 0);
        for part in &self.0 {
            let end = start + part.rows;
            let own = rows.start.clamp(start, end) - start..rows.end.clamp(start, end) - start;
            let (values, after) = rest.split_at_mut(own.len() * columns);
            part.dequantize(own, values);
            (rest, start) = (after, end);
        }
        out
    }
}

vectorized! {
    /// Writes whole blocks to `out [n]`.
    fn dequantize(format: BlockFormat, bytes: &[u8], out: &mut [f32]) {
        match format {
            BlockFormat::F32 => {
                let values = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                out.iter_mut().zip(values).for_each(|(out, value)| *out = value);
            }
            BlockFormat::F16 => {
                let values = bytes.as_chunks().0.iter().map(|bytes| half(*bytes));
                out.iter_mut().zip(values).for_each(|(out, value)| *out = value);
            }
            BlockFormat::Bf16 => {
                let values = bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32());
                out.iter_mut().zip(values).for_each(|(out, value)| *out = value);
            }
            BlockFormat::Q8Zero => each(bytes, out, q8_zero),
            BlockFormat::Q4Zero => each(bytes, out, q4_zero),
            BlockFormat::Q4One => each(bytes, out, q4_one),
            BlockFormat::Q4K => each(bytes, out, q4_k),
            BlockFormat::Q6K => each(bytes, out, q6_k),
            BlockFormat::Float8 => each(bytes, out, float8::dequantize),
            BlockFormat::Mxfp4 => each(bytes, out, mxfp4::dequantize),
        }
    }
}

/// Writes each block of `B` bytes to its `V` values of `out [n]`.
#[inline(always)]
fn each<const B: usize, const V: usize>(
    bytes: &[u8],
    out: &mut [f32],
    write: impl Fn(&[u8; B], &mut [f32; V]),
) {
    let blocks = bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0);
    blocks.for_each(|(block, out)| write(block, out));
}

#[inline(always)]
fn half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

#[inline(always)]
fn q8_zero(block: &[u8; 34], out: &mut [f32; 32]) {
    let [low, high, quants @ ..] = block;
    let scale = half([*low, *high]);
    out.iter_mut().zip(quants).for_each(|(out, q)| *out = f32::from(q.cast_signed()) * scale);
}

#[inline(always)]
fn q4_zero(block: &[u8; 18], out: &mut [f32; 32]) {
    let [low, high, quants @ ..] = block;
    let scale = half([*low, *high]);
    nibbles(quants, out, |q| (f32::from(q) - 8.0) * scale);
}

#[inline(always)]
fn q4_one(block: &[u8; 20], out: &mut [f32; 32]) {
    let [low, high, min_low, min_high, quants @ ..] = block;
    let (scale, min) = (half([*low, *high]), half([*min_low, *min_high]));
    nibbles(quants, out, |q| f32::from(q) * scale + min);
}

#[inline(always)]
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let [low, high, min_low, min_high, rest @ ..] = block;
    let (scale, min) = (half([*low, *high]), half([*min_low, *min_high]));
    let (packed, quants) = rest.split_at(12);
    // 6 bits each: the first four of each kind in whole bytes, whose upper 2 bits belong to the last four.
    let of = |at: usize| match at {
        0..4 => (packed[at] & 63, packed[at + 4] & 63),
        _ => (packed[at + 4] & 15 | packed[at - 4] >> 6 << 4, packed[at + 4] >> 4 | packed[at] >> 6 << 4),
    };
    for (pair, (quants, out)) in quants.chunks_exact(32).zip(out.chunks_exact_mut(64)).enumerate() {
        let scaled = |at: usize| {
            let (of_scale, of_min) = of(at);
            (scale * f32::from(of_scale), min * f32::from(of_min))
        };
        let ((d1, m1), (d2, m2)) = (scaled(2 * pair), scaled(2 * pair + 1));
        let (first, second) = out.split_at_mut(32);
        for ((first, second), q) in first.iter_mut().zip(second).zip(quants) {
            *first = d1 * f32::from(q & 15) - m1;
            *second = d2 * f32::from(q >> 4) - m2;
        }
    }
}

#[inline(always)]
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, scale) = rest.split_at(16);
    let scale = half([scale[0], scale[1]]);
    let halves = low.chunks_exact(64).zip(high.chunks_exact(32)).zip(scales.chunks_exact(8));
    for (((low, high), scales), out) in halves.zip(out.chunks_exact_mut(128)) {
        for at in 0..32 {
            let bits = [high[at], high[at] >> 2, high[at] >> 4, high[at] >> 6].map(|bits| (bits & 3) << 4);
            let quants = [low[at] & 15, low[at + 32] & 15, low[at] >> 4, low[at + 32] >> 4];
            for (quarter, (q, bits)) in quants.into_iter().zip(bits).enumerate() {
                let of_scale = scales[at / 16 + 2 * quarter].cast_signed();
                out[at + 32 * quarter] = scale * f32::from(of_scale) * (f32::from(q | bits) - 32.0);
            }
        }
    }
}

/// The low nibbles of `quants` make the first half of `out`, the high ones the second.
#[inline(always)]
fn nibbles(quants: &[u8; 16], out: &mut [f32; 32], value: impl Fn(u8) -> f32) {
    let (first, second) = out.split_at_mut(16);
    for ((first, second), q) in first.iter_mut().zip(second).zip(quants) {
        *first = value(q & 15);
        *second = value(q >> 4);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::{QStorage, QTensor};
    use candle_core::{Device, Tensor};

    use super::super::check::noise;
    use super::*;

    const FORMATS: [GgmlDType; 8] = [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q8_0,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q4K,
        GgmlDType::Q6K,
    ];

    fn quantized(values: &[f32], columns: usize, dtype: GgmlDType) -> (Vec<u8>, Vec<f32>) {
        let tensor = Tensor::from_slice(values, (values.len() / columns, columns), &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, dtype).unwrap();
        let bytes = tensor.data().unwrap().to_vec();
        let storage = QStorage::from_data((&bytes[..]).into(), &Device::Cpu, dtype).unwrap();
        let expected = QTensor::new(storage, values.len()).unwrap().dequantize(&Device::Cpu).unwrap();
        (bytes, expected.to_vec1().unwrap())
    }

    /// candle-core reads the same blocks.
    #[test]
    fn values_are_those_of_candle() {
        for dtype in FORMATS {
            let (bytes, expected) = quantized(&noise(6 * 512, 7), 512, dtype);
            let matrix =
                Arc::new(BlockMatrix::new(gguf_format(dtype).unwrap(), [6, 512], bytes.clone()).unwrap());
            let mut out = vec![0.0; expected.len()];
            matrix.dequantize(0..6, &mut out);
            assert_eq!(out, expected, "{dtype:?}");
            // Rows that begin in one matrix and end in another.
            let rows = BlockRows::new(vec![Arc::clone(&matrix), matrix]);
            let across = [&expected[4 * 512..], &expected[..3 * 512]].concat();
            assert_eq!(rows.dequantized(&(4..9)), across, "{dtype:?}");
            assert_eq!((rows.len(), rows.chunks().first()), (12, Some(&(0..12))));
            assert!(BlockMatrix::new(gguf_format(dtype).unwrap(), [5, 512], bytes).is_none());
        }
        assert_eq!(gguf_format(GgmlDType::Q5_0), None);
    }
}
