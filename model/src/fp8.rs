//! FP8, the number format of matrices in the files of DeepSeek-V3: 8-bit floats E4M3 (Micikevicius et al. 2022, arXiv 2209.05433)
//! with a common scale for 128 x 128 of them (DeepSeek-AI 2024, arXiv 2412.19437).
//!
//! Invariant: a value is exact in f32 before it is scaled. Files are not known here.

/// Rows and columns of a block.
pub(crate) const BLOCK: usize = 128;

/// What the name of the scales adds to that of the matrix.
pub(crate) const SCALES: &str = "_scale_inv";

/// The shape of the scales of a matrix of this shape.
pub(crate) fn scale_shape(matrix: [usize; 2]) -> [usize; 2] {
    matrix.map(|size| size.div_ceil(BLOCK))
}

/// Writes the numbers of `bytes [n]` to `values [n]`.
pub(crate) fn widen(bytes: &[u8], values: &mut [f32]) {
    bytes.iter().zip(values).for_each(|(byte, value)| *value = number(*byte));
}

/// Multiplies every block of the matrix `values [rows, columns]` by its scale of `scales`, of [`scale_shape`].
pub(crate) fn scale(values: &mut [f32], columns: usize, scales: &[f32]) {
    let rows = values.chunks_exact_mut(columns);
    let scales = scales.chunks_exact(columns.div_ceil(BLOCK));
    for (row, scales) in rows.zip(scales.flat_map(|scales| [scales; BLOCK])) {
        for (block, scale) in row.chunks_mut(BLOCK).zip(scales) {
            block.iter_mut().for_each(|value| *value *= scale);
        }
    }
}

/// A sign, four bits of exponent, three of mantissa; all ones are not a number, and there is no infinity.
fn number(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2.0_f32.powi(-9),
        _ => (8.0 + mantissa) * 2.0_f32.powi(exponent - 10),
    };
    if byte >> 7 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_e4m3() {
        let all: Vec<f32> = (0..=255).map(number).collect();
        for (byte, expected) in [
            (0x00, 0.0),
            (0x01, 2.0_f32.powi(-9)),
            (0x07, 7.0 * 2.0_f32.powi(-9)),
            (0x08, 2.0_f32.powi(-6)),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0xc0, -2.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(all[byte].to_bits(), f32::to_bits(expected), "{byte:#x}");
        }
        assert!(all[0x7f].is_nan() && all[0xff].is_nan());
        assert!(all[..0x7f].windows(2).all(|pair| pair[0] < pair[1]), "they ascend");
    }

    #[test]
    fn blocks_have_their_scales_and_the_last_ones_are_smaller() {
        let (rows, columns) = (BLOCK + 2, 2 * BLOCK + 1);
        assert_eq!(scale_shape([rows, columns]), [2, 3]);
        let mut values = vec![1.0; rows * columns];
        scale(&mut values, columns, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let at = |row: usize, column: usize| values[row * columns + column];
        assert_eq!(
            [at(0, 0), at(BLOCK - 1, BLOCK - 1), at(0, BLOCK), at(5, 2 * BLOCK)],
            [1.0, 1.0, 2.0, 3.0]
        );
        assert_eq!([at(BLOCK, 0), at(BLOCK + 1, BLOCK), at(BLOCK, 2 * BLOCK)], [4.0, 5.0, 6.0]);
    }
}
