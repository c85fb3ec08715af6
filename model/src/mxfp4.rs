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

/// The `BLOCK` values of a block: its scale, a power of two from -127 on (E8M0), then two values in each byte. The scale 255 means
/// that the block has no numbers.
#[inline(always)]
pub(crate) fn dequantize(block: &[u8; 1 + BLOCK_BYTES], out: &mut [f32; BLOCK]) {
    let [scale, codes @ ..] = block;
    let scale = power_of_two(*scale);
    for (pair, codes) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = [codes & 15, codes >> 4].map(|code| VALUES[usize::from(code)] * scale);
    }
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

    fn values(scale: u8, codes: [u8; BLOCK_BYTES]) -> [f32; BLOCK] {
        let mut block = [scale; 1 + BLOCK_BYTES];
        block[1..].copy_from_slice(&codes);
        let mut out = [0.0; BLOCK];
        dequantize(&block, &mut out);
        out
    }

    #[test]
    fn halves_follow_each_other_under_the_scale() {
        let mut codes = [0; BLOCK_BYTES];
        // 1.5 and -6.
        codes[3] = 0xf3;
        let out = values(129, codes);
        assert_eq!((out[6], out[7]), (6.0, -24.0));
        assert!(out.iter().enumerate().all(|(i, x)| [6, 7].contains(&i) || *x == 0.0));
        let scaled = |scale: u8| values(scale, [0x22; BLOCK_BYTES])[0];
        assert_eq!(scaled(0), 2.0_f32.powi(-127));
        assert_eq!(scaled(1), 2.0_f32.powi(-126));
        assert_eq!(scaled(254), 2.0_f32.powi(127));
        assert!(scaled(255).is_nan());
    }
}
