//! Test devices and test values.

use device::device::DeviceLocation;
use device::{Device, bf16};

/// The first GPU, or the emulator; none if the program was built without it.
pub(crate) fn devices() -> Vec<Device> {
    match DeviceLocation::of_tests() {
        DeviceLocation::Emulated if cfg!(not(feature = "emulator")) => Vec::new(),
        location => vec![Device::open(location).expect("a device that is there opens")],
    }
}

/// `len` pseudo-random numbers between -1 and 1.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// The nearest bf16 values, as f32.
pub(crate) fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect()
}

/// Checks that every value is within `relative` of the expected one, or of the root mean square of all.
pub(crate) fn assert_close(found: &[f32], expected: &[f64], relative: f64) {
    assert_eq!(found.len(), expected.len());
    let scale = (expected.iter().map(|e| e * e).sum::<f64>() / expected.len().max(1) as f64).sqrt();
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        assert!(off <= relative * expected.abs().max(scale), "value {i}: {found} in place of {expected}");
    }
}
