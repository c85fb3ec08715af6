//! MXFP4, the number format of experts in the files of gpt-oss: 4-bit floats with a common scale for 32 of them (OCP Microscaling
//! Formats specification 1.0; Rouhani et al. 2023, arXiv 2310.10537).
//!
//! Invariant: a value is exact in f32. Files are not known here.

/// Values of a block.
pub(crate) const BLOCK: usize = 32;

/// Bytes of the values of a block: two values each, the first in the lower half.
pub(crate) const BLOCK_BYTES: usize = BLOCK / 2;

/// E2M1: a sign, two bits of exponent, one of mantissa.
const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The matrices `[experts, in, out]` whose transposes have these `blocks [experts, out, in / BLOCK, BLOCK_BYTES]` and `scales
/// [experts, out, in / BLOCK]`.
pub(crate) fn transposed([experts, inputs, outputs]: [usize; 3], blocks: &[u8], scales: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; experts * inputs * outputs];
    let rows = blocks.chunks_exact(inputs / 2).zip(scales.chunks_exact(inputs / BLOCK));
    for (row, (blocks, scales)) in rows.enumerate() {
        let (expert, output) = (row / outputs, row % outputs);
        let matrix = &mut out[expert * inputs * outputs..][..inputs * outputs];
        let column = matrix[output..].iter_mut().step_by(outputs);
        column.zip(dequantized(blocks, scales)).for_each(|(to, value)| *to = value);
    }
    out
}

/// Values `[BLOCK * scales]` of the blocks `[BLOCK_BYTES * scales]` with their `scales`, powers of two from -127 on (E8M0). The
/// scale 255 means that the block has no numbers.
fn dequantized<'a>(blocks: &'a [u8], scales: &'a [u8]) -> impl Iterator<Item = f32> + 'a {
    blocks.chunks_exact(BLOCK_BYTES).zip(scales).flat_map(|(block, scale)| {
        let scale = power_of_two(*scale);
        let halves = block.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        halves.map(move |code| VALUES[usize::from(code)] * scale)
    })
}

/// `2^(exponent - 127)`, or not a number for 255.
fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        // Below the smallest normal number.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_blocks_are_columns() {
        let mut blocks = vec![0_u8; 2 * 3 * BLOCK_BYTES];
        // Of the second expert, output 1: the inputs 4 and 5.
        blocks[(3 + 1) * BLOCK_BYTES + 2] = 0x52;
        let values = transposed([2, BLOCK, 3], &blocks, &[127; 6]);
        let at = |input: usize| values[(BLOCK + input) * 3 + 1];
        assert_eq!((at(4), at(5)), (1.0, 3.0));
        assert_eq!(values.iter().filter(|value| **value != 0.0).count(), 2);
    }

    #[test]
    fn halves_follow_each_other_and_blocks_have_their_scales() {
        let mut blocks = [0_u8; 2 * BLOCK_BYTES];
        // 1.5 and -6; then 0.5 in the other block.
        blocks[0] = 0xf3;
        blocks[BLOCK_BYTES] = 0x01;
        let values: Vec<f32> = dequantized(&blocks, &[127, 130]).collect();
        assert_eq!(values.len(), 2 * BLOCK);
        assert_eq!((values[0], values[1], values[BLOCK]), (1.5, -6.0, 4.0));
        assert!(values.iter().enumerate().all(|(i, x)| [0, 1, BLOCK].contains(&i) || *x == 0.0));
        let scaled = |scale: u8| dequantized(&[0x22; BLOCK_BYTES], &[scale]).next();
        assert_eq!(scaled(0), Some(2.0_f32.powi(-127)));
        assert_eq!(scaled(1), Some(2.0_f32.powi(-126)));
        assert_eq!(scaled(254), Some(2.0_f32.powi(127)));
        assert!(scaled(255).is_some_and(f32::is_nan));
    }
}
