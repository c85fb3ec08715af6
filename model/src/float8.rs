//! FP8 weights with a scale for each square of 128 x 128 values, as DeepSeek-V3 and Qwen3 store them (DeepSeek-AI 2024, arXiv
//! 2412.19437; the format E4M3 of Micikevicius et al. 2022, arXiv 2209.05433).
//!
//! Invariant: a value is the product in f32 of what E4M3 stores and its scale. Files are not known here.

/// Values of a row, and rows, with one scale.
pub(crate) const SQUARE: usize = 128;

/// Bytes of a block: the scale as f32, and `SQUARE` values of a row.
pub(crate) const BLOCK_BYTES: usize = 4 + SQUARE;

/// The values of all bits.
const VALUES: [f32; 256] = {
    let (mut values, mut bits) = ([0.0; 256], 0);
    while bits < 256 {
        values[bits] = value(bits as u8);
        bits += 1;
    }
    values
};

/// The values of a block.
#[inline(always)]
pub(crate) fn dequantize(block: &[u8; BLOCK_BYTES], out: &mut [f32; SQUARE]) {
    let [a, b, c, d, bits @ ..] = block;
    let scale = f32::from_le_bytes([*a, *b, *c, *d]);
    out.iter_mut().zip(bits).for_each(|(out, bits)| *out = VALUES[usize::from(*bits)] * scale);
}

/// The values `out [columns]` of a row of `bits [columns]`, with its `scales`, f32, one for each `SQUARE` values or the rest of them.
pub(crate) fn dequantize_row(bits: &[u8], scales: &[u8], out: &mut [f32]) {
    let scales = scales.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    for ((out, bits), scale) in out.chunks_mut(SQUARE).zip(bits.chunks(SQUARE)).zip(scales) {
        out.iter_mut().zip(bits).for_each(|(out, bits)| *out = VALUES[usize::from(*bits)] * scale);
    }
}

/// The value of the bits E4M3: a sign, four bits of exponent, three of mantissa; without infinities.
const fn value(bits: u8) -> f32 {
    let magnitude = match (bits >> 3 & 15, bits & 7) {
        (15, 7) => f32::NAN,
        (0, mantissa) => mantissa as f32 / 512.0,
        (exponent, mantissa) => f32::from_bits((exponent as u32 + 120) << 23 | (mantissa as u32) << 20),
    };
    if bits & 128 == 0 { magnitude } else { -magnitude }
}

/// Number of scales of a row of `columns` values, or of a column of as many rows.
pub(crate) fn scales_of(columns: usize) -> usize {
    columns.div_ceil(SQUARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_the_values_of_the_format() {
        let expected = [
            (0x00, 0.0),
            (0x01, 2.0_f32.powi(-9)),
            (0x07, 7.0 * 2.0_f32.powi(-9)),
            (0x08, 2.0_f32.powi(-6)),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0xb8, -1.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ];
        for (bits, expected) in expected {
            assert_eq!(value(bits), expected, "{bits:#x}");
        }
        assert!(value(0x7f).is_nan() && value(0xff).is_nan());
    }
}
