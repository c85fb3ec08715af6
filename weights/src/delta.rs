//! Delta encoding: the changes from one version to the next, lossless.
//!
//! The weights are split into blocks of [`BLOCK`], each encoded on its own:
//! ```text
//!   bytes that follow, u32;  bytes before compression, u32 (the same: not compressed);  then, perhaps as zstd,
//!   changed weights, u32;  bytes of places, u32;  places;  new words of the dtype
//! ```
//! A place is a gap: the number of unchanged weights since the last changed one, as a LEB128 varint. If a delta of a
//! block would not be smaller, the block has all of its words and no places (their byte count is [`DENSE`]). A word
//! is the f32, or its upper half if the lower one is zero in every weight (bf16).
//!
//! Invariant: applied to its base, a delta gives the version bit by bit; applied to anything else, it is refused. A
//! damaged delta takes at most the memory of a block.

use trajectory::PolicyVersion;

use crate::copier::share;
use crate::frame::{FrameHeader, FrameKind, HEADER};
use crate::{Dtype, Snapshot};

/// Weights of a block: large enough for a small overhead, small enough for balanced threads.
pub(crate) const BLOCK: usize = 1 << 18;
/// The byte count of places of a dense block.
const DENSE: u32 = u32::MAX;
/// Compression level of zstd: faster than most networks.
const LEVEL: i32 = 1;

/// An encoded delta.
#[derive(Debug)]
pub(crate) struct DeltaFrame {
    base: PolicyVersion,
    bytes: axum::body::Bytes,
}

/// Result of encoding a delta.
#[derive(Debug, Default)]
pub(crate) struct DeltaEncoding {
    /// `None` if it would not be smaller than all weights.
    pub(crate) frame: Option<DeltaFrame>,
    /// Share of the weights that changed.
    pub(crate) density: Option<f64>,
}

impl DeltaFrame {
    /// A delta as it was received: header and payload.
    pub(crate) fn received(base: PolicyVersion, bytes: Vec<u8>) -> Self {
        Self { base, bytes: bytes.into() }
    }

    /// The version that it applies to.
    pub(crate) fn base(&self) -> PolicyVersion {
        self.base
    }

    /// Header and payload.
    pub(crate) fn bytes(&self) -> &axum::body::Bytes {
        &self.bytes
    }
}

/// Bytes of a full frame of `values` weights.
pub(crate) fn full_bytes(values: usize, dtype: Dtype) -> u64 {
    (HEADER + values * dtype.bytes()) as u64
}

/// Maximum bytes of a payload of `values` weights; a longer one is damaged.
pub(crate) fn longest_payload(values: usize) -> u64 {
    (values * 4 + values.div_ceil(BLOCK) * 16) as u64
}

/// The delta from `base` to `new`, encoded by up to `threads` threads.
pub(crate) fn encode(
    base: &Snapshot,
    new: &Snapshot,
    dtype: Dtype,
    compress: bool,
    threads: usize,
) -> DeltaEncoding {
    if base.values.len() != new.values.len() || new.values.is_empty() {
        return DeltaEncoding::default();
    }
    let blocks: Vec<_> = base.values.chunks(BLOCK).zip(new.values.chunks(BLOCK)).collect();
    let blocks = share(threads, blocks, |(old, new)| {
        let (changed, bytes) = encode_block(old, new, dtype);
        (changed, store(&bytes, compress))
    });
    let (values, changed) =
        (new.values.len(), blocks.iter().map(|(changed, _)| *changed as u64).sum::<u64>());
    let density = Some(changed as f64 / values as f64);
    let payload: usize = blocks.iter().map(|(_, bytes)| bytes.len()).sum();
    if (HEADER + payload) as u64 >= full_bytes(values, dtype) {
        return DeltaEncoding { frame: None, density };
    }
    let mut bytes = Vec::with_capacity(HEADER + payload);
    bytes.resize(HEADER, 0);
    blocks.iter().for_each(|(_, block)| bytes.extend_from_slice(block));
    let checksum = *blake3::hash(&bytes[HEADER..]).as_bytes();
    let header = FrameHeader {
        kind: FrameKind::Delta { base: base.version, of: base.digest(), checksum },
        dtype,
        version: new.version,
        digest: new.digest(),
        values: values as u64,
        changed,
        payload: payload as u64,
    };
    bytes[..HEADER].copy_from_slice(&header.encode());
    DeltaEncoding { frame: Some(DeltaFrame { base: base.version, bytes: bytes.into() }), density }
}

/// Compares the payload of a delta with the checksum in its header.
pub(crate) fn check_payload(header: &FrameHeader, payload: &[u8]) -> Result<(), String> {
    let FrameKind::Delta { checksum, .. } = header.kind else { return Err("it is no delta".to_owned()) };
    if *blake3::hash(payload).as_bytes() == checksum {
        return Ok(());
    }
    Err("its payload does not have the checksum that the header names".to_owned())
}

/// Applies the payload of a delta to `[values]` weights of its base. The caller compares the digest afterwards; after
/// an error the weights are of no version.
pub(crate) fn apply(
    header: &FrameHeader,
    payload: &[u8],
    values: &mut [f32],
    threads: usize,
) -> Result<(), String> {
    check_payload(header, payload)?;
    let (mut rest, mut blocks) = (payload, Vec::new());
    for block in values.chunks_mut(BLOCK) {
        let (stored, raw) = (number(&mut rest)?, number(&mut rest)?);
        blocks.push((block, raw as usize, bytes(&mut rest, stored as usize)?));
    }
    if !rest.is_empty() {
        return Err(format!("there are {} bytes behind the last block", rest.len()));
    }
    share(threads, blocks, |(block, raw, stored)| {
        if raw == stored.len() {
            return apply_block(block, stored, header.dtype);
        }
        if raw > 8 + 4 * block.len() {
            return Err(format!("a block of {raw} bytes is longer than any can be"));
        }
        let opened = zstd::bulk::decompress(stored, raw).map_err(|error| format!("zstd: {error}"))?;
        apply_block(block, &opened, header.dtype)
    })
    .into_iter()
    .collect()
}

/// The number of changed weights, and the block before compression.
fn encode_block(old: &[f32], new: &[f32], dtype: Dtype) -> (usize, Vec<u8>) {
    let (mut places, mut words, mut next) = (Vec::new(), Vec::new(), 0);
    for (index, (old, new)) in old.iter().zip(new).enumerate() {
        if old.to_bits() != new.to_bits() {
            put_gap(&mut places, (index - next) as u32);
            put_word(&mut words, *new, dtype);
            next = index + 1;
        }
    }
    let changed = words.len() / dtype.bytes();
    let mut bytes = Vec::with_capacity(8 + places.len() + words.len());
    if places.len() + words.len() < new.len() * dtype.bytes() {
        bytes.extend_from_slice(&(changed as u32).to_le_bytes());
        bytes.extend_from_slice(&(places.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&places);
        bytes.extend_from_slice(&words);
    } else {
        bytes.extend_from_slice(&(new.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&DENSE.to_le_bytes());
        new.iter().for_each(|new| put_word(&mut bytes, *new, dtype));
    }
    (changed, bytes)
}

/// A block with its two lengths, compressed if that is smaller.
fn store(block: &[u8], compress: bool) -> Vec<u8> {
    let compressed = if compress { zstd::bulk::compress(block, LEVEL).ok() } else { None };
    let stored = compressed.as_deref().filter(|stored| stored.len() < block.len()).unwrap_or(block);
    let mut bytes = Vec::with_capacity(8 + stored.len());
    bytes.extend_from_slice(&(stored.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(block.len() as u32).to_le_bytes());
    bytes.extend_from_slice(stored);
    bytes
}

fn apply_block(values: &mut [f32], mut block: &[u8], dtype: Dtype) -> Result<(), String> {
    let (changed, place_bytes) = (number(&mut block)? as usize, number(&mut block)?);
    let dense = place_bytes == DENSE;
    let mut places = if dense { &[][..] } else { bytes(&mut block, place_bytes as usize)? };
    let words = changed.checked_mul(dtype.bytes()).filter(|bytes| *bytes == block.len());
    if words.is_none() || changed > values.len() || dense && changed != values.len() {
        let (found, len) = (block.len(), values.len());
        return Err(format!("{changed} changed words of a block of {len} weights have {found} bytes"));
    }
    let mut at = 0;
    for word in block.chunks_exact(dtype.bytes()) {
        at += if dense { 0 } else { gap(&mut places)? as usize };
        let value = values.get_mut(at).ok_or("a change lies outside its block")?;
        *value = value_of(word);
        at += 1;
    }
    if places.is_empty() { Ok(()) } else { Err("there are more places than words".to_owned()) }
}

pub(crate) fn put_word(bytes: &mut Vec<u8>, value: f32, dtype: Dtype) {
    match dtype {
        Dtype::F32 => bytes.extend_from_slice(&value.to_le_bytes()),
        Dtype::Bf16 => bytes.extend_from_slice(&value.to_le_bytes()[2..]),
    }
}

/// The weight of a word of 2 or 4 bytes.
pub(crate) fn value_of(word: &[u8]) -> f32 {
    match word {
        [a, b, c, d] => f32::from_le_bytes([*a, *b, *c, *d]),
        [c, d] => f32::from_le_bytes([0, 0, *c, *d]),
        _ => f32::NAN,
    }
}

fn put_gap(places: &mut Vec<u8>, mut gap: u32) {
    while gap >= 0x80 {
        places.push(gap as u8 | 0x80);
        gap >>= 7;
    }
    places.push(gap as u8);
}

/// Decodes the next gap of `places`.
fn gap(places: &mut &[u8]) -> Result<u32, String> {
    let mut gap = 0;
    for shift in (0..28).step_by(7) {
        let (byte, rest) = places.split_first().ok_or("there are fewer places than words")?;
        *places = rest;
        gap |= u32::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(gap);
        }
    }
    Err("a place has more than four bytes".to_owned())
}

fn number(bytes_left: &mut &[u8]) -> Result<u32, String> {
    let word = bytes(bytes_left, 4)?;
    Ok(word.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte)))
}

fn bytes<'a>(left: &mut &'a [u8], count: usize) -> Result<&'a [u8], String> {
    let (found, rest) =
        left.split_at_checked(count).ok_or_else(|| format!("it ends {} bytes early", count - left.len()))?;
    *left = rest;
    Ok(found)
}

#[cfg(test)]
mod tests;
