//! Properties of deltas: they lose nothing, and nothing that is damaged is taken for one.

use proptest::prelude::*;

use super::*;
use crate::Digest;

/// Numbers that look random, the same for a seed.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) ^ (state << 11)
    }
}

fn snapshot(version: u64, values: &[f32], dtype: Dtype) -> Snapshot {
    Snapshot::rounded(PolicyVersion(version), values, dtype)
}

fn parts(frame: &DeltaFrame) -> (FrameHeader, &[u8]) {
    let (header, payload) = frame.bytes().split_first_chunk::<HEADER>().unwrap();
    (FrameHeader::decode(header).unwrap(), payload)
}

/// Changes about one of `every` weights, to anything an f32 can be.
fn change(values: &mut [f32], every: u64, next: &mut impl FnMut() -> u64) {
    for value in values {
        if next().is_multiple_of(every) {
            *value = f32::from_bits(next() as u32);
        }
    }
}

#[test]
fn twenty_deltas_in_a_row_give_every_version_bit_by_bit() {
    for dtype in Dtype::ALL {
        for compress in [false, true] {
            let (mut next, len) = (random(7), 2 * BLOCK + 777);
            let mut values: Vec<f32> = (0..len).map(|_| next() as f32 / 1e9 - 1.0).collect();
            let mut newest = snapshot(0, &values, dtype);
            let mut current = newest.values.to_vec();
            for version in 1..=20 {
                change(&mut values, [10, 100, 10_000, u64::MAX][version as usize % 4], &mut next);
                let new = snapshot(version, &values, dtype);
                let encoded = encode(&newest, &new, dtype, compress, 2);
                let frame = encoded.frame.expect("few weights changed");
                let (header, payload) = parts(&frame);
                assert_eq!((header.version, header.digest), (new.version, new.digest()));
                let differ = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits();
                let changed = newest.values.iter().zip(new.values.iter()).filter(differ).count();
                assert_eq!(encoded.density, Some(changed as f64 / len as f64));
                apply(&header, payload, &mut current, 2).unwrap();
                assert_eq!(Digest::of(&current), new.digest(), "{version} {dtype} {compress}");
                newest = new;
            }
        }
    }
}

#[test]
fn a_delta_that_would_be_no_gain_is_not_made() {
    let mut next = random(3);
    let old: Vec<f32> = (0..5000).map(|_| f32::from_bits(next() as u32)).collect();
    for dtype in Dtype::ALL {
        let (old, mut all) = (snapshot(1, &old, dtype), old.clone());
        all.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits() ^ 0x0001_0000));
        let encoded = encode(&old, &snapshot(2, &all, dtype), dtype, false, 1);
        assert!(encoded.frame.is_none());
        assert_eq!(encoded.density, Some(1.0));
        let other_length = encode(&old, &snapshot(2, &all[1..], dtype), dtype, false, 1);
        assert!(other_length.frame.is_none() && other_length.density.is_none());
    }
}

#[test]
fn a_small_change_gives_a_small_delta() {
    let old = vec![1.0; 4 * BLOCK];
    let mut new = old.clone();
    new[3 * BLOCK + 5] = 2.0;
    let frame = encode(&snapshot(1, &old, Dtype::F32), &snapshot(2, &new, Dtype::F32), Dtype::F32, true, 1);
    assert!(frame.frame.unwrap().bytes().len() < HEADER + 100);
}

proptest! {
    #[test]
    fn any_other_byte_is_refused(at in any::<prop::sample::Index>(), bit in 0..8u32, compress: bool, bf16: bool) {
        let dtype = Dtype::ALL[usize::from(bf16)];
        let mut next = random(11);
        let mut values: Vec<f32> = (0..3000).map(|_| next() as f32).collect();
        let old = snapshot(1, &values, dtype);
        change(&mut values, 9, &mut next);
        let new = snapshot(2, &values, dtype);
        let frame = encode(&old, &new, dtype, compress, 1).frame.unwrap();
        let mut bytes = frame.bytes().to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let (header, payload) = bytes.split_first_chunk::<HEADER>().unwrap();
        let mut current = old.values.to_vec();
        let applied = FrameHeader::decode(header).and_then(|header| apply(&header, payload, &mut current, 1));
        prop_assert!(applied.is_err());
        prop_assert_eq!(Digest::of(&current), old.digest(), "nothing was applied");
    }

    #[test]
    fn a_payload_of_any_bytes_does_no_harm(payload in prop::collection::vec(any::<u8>(), 0..200), len in 0..50usize) {
        let checksum = *blake3::hash(&payload).as_bytes();
        let of = Digest::of(&[]);
        let kind = FrameKind::Delta { base: PolicyVersion(1), of, checksum };
        let header = FrameHeader {
            kind,
            dtype: Dtype::F32,
            version: PolicyVersion(2),
            digest: of,
            values: len as u64,
            changed: 0,
            payload: payload.len() as u64,
        };
        // Whether it is refused or means something is the digest's business; here it only has to come back.
        let _ = apply(&header, &payload, &mut vec![0.0; len], 1);
    }
}
