//! The BLAKE3 digest of device memory against the host.

use device::bf16;
use device::ops::digest::digest;

use crate::common::{devices, noise};

#[test]
fn the_digest_matches_the_host() {
    let most = (1 << 20) + 12;
    let values = noise(most / 4, 1);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for device in devices() {
        let uploaded = device.upload(&values).unwrap();
        for len in [0, 4, 1020, 1024, 1028, 2048, 5000, 63 << 10, 65 << 10, 100 << 10, most] {
            let found = digest(&device, uploaded.view(0..len / 4)).unwrap();
            assert_eq!(found, *blake3::hash(&bytes[..len]).as_bytes(), "{len} bytes");
        }
    }
}

/// Views at any offset that end within a word.
#[test]
fn unaligned_memory_has_the_same_digest() {
    let values: Vec<bf16> = noise(5001, 2).into_iter().map(bf16::from_f32).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for device in devices() {
        let narrow = device.upload(&values).unwrap();
        let single = device.upload(&bytes).unwrap();
        for start in 0..9 {
            let expected = |from: usize, to: usize| *blake3::hash(&bytes[from..to]).as_bytes();
            let end = 5001 - start % 3;
            let found = digest(&device, narrow.view(start..end)).unwrap();
            assert_eq!(found, expected(2 * start, 2 * end), "{start}");
            let found = digest(&device, single.view(start..9_999)).unwrap();
            assert_eq!(found, expected(start, 9_999), "{start}");
        }
    }
}
