//! BLAKE3 digest of device memory. Invariant: it equals that of the same little-endian bytes on the host.
//!
//! BLAKE3 is a binary tree over chunks of 1024 bytes whose left subtrees are full. Merging neighbours level by level
//! gives that tree if an unpaired last value moves up unchanged. The device merges down to a few values; the host
//! merges these and computes the root, which has a different finalisation.

use blake3::hazmat::{ChainingValue, Mode, merge_subtrees_non_root, merge_subtrees_root};

use super::size;
use crate::device::Device;
use crate::element::Element;
use crate::error::Result;
use crate::memory::View;

/// Bytes of a chunk (leaf).
const CHUNK: usize = blake3::CHUNK_LEN;
/// Chunks whose values are in memory at a time, a power of two: a full subtree of 1 GiB.
const PIECE: usize = 1 << 20;
/// Values that one thread merges: three levels.
const MERGED: usize = 8;
/// Largest number of values per piece that the host merges.
const FINISHED: usize = 64;
/// 32-bit words of a chaining value.
const WORDS: usize = 8;
/// Threads per block.
const THREADS: usize = 128;

/// BLAKE3 digest of the bytes of `of [n]`. Waits.
///
/// # Errors
/// If a launch fails, or device memory is full.
pub fn digest<T: Element>(device: &Device, of: View<'_, T>) -> Result<[u8; 32]> {
    digest_by(device, of, PIECE)
}

/// The digest with pieces of `piece_chunks` chunks.
fn digest_by<T: Element>(device: &Device, of: View<'_, T>, piece_chunks: usize) -> Result<[u8; 32]> {
    let per_chunk = CHUNK / size_of::<T>();
    if of.len() <= per_chunk {
        let values = device.download(of)?;
        return Ok(*blake3::hash(bytemuck::cast_slice(&values)).as_bytes());
    }
    let per_piece = per_chunk * piece_chunks;
    let pieces = of.len().div_ceil(per_piece);
    let chunks = of.len().div_ceil(per_chunk).min(piece_chunks);
    let mut values = device.uninit::<u32>(chunks * WORDS)?;
    let mut merged = device.uninit::<u32>(chunks.div_ceil(MERGED) * WORDS)?;
    let mut left = device.uninit::<u32>(pieces * FINISHED * WORDS)?;
    let mut counts = Vec::with_capacity(pieces);
    for piece in 0..pieces {
        let part = of.slice(piece * per_piece..of.len().min((piece + 1) * per_piece));
        let (mut from, mut to) = (&mut values, &mut merged);
        let mut count = part.len().div_ceil(per_chunk);
        let bytes = (part.len() * size_of::<T>()) as i64;
        let counter = (piece * piece_chunks) as u64;
        let arguments = [part.into(), bytes.into(), counter.into(), from.all_mut().into()];
        device.launch("digest_chunks", [count.div_ceil(THREADS), 1, 1], THREADS, 0, &arguments)?;
        while count > FINISHED {
            let arguments = [from.all().into(), size(count).into(), to.all_mut().into()];
            count = count.div_ceil(MERGED);
            device.launch("digest_parents", [count.div_ceil(THREADS), 1, 1], THREADS, 0, &arguments)?;
            (from, to) = (to, from);
        }
        let first = piece * FINISHED * WORDS;
        device.copy(from.view(0..count * WORDS), left.view_mut(first..first + count * WORDS))?;
        counts.push(count);
    }
    Ok(finish(&device.download(left.all())?, &counts))
}

/// Merges `words [pieces, FINISHED, WORDS]` on the host; piece `i` has `counts[i]` values.
fn finish(words: &[u32], counts: &[usize]) -> [u8; 32] {
    let of_piece = |(words, count): (&[u32], &usize)| -> Vec<ChainingValue> {
        words.chunks_exact(WORDS).take(*count).map(chaining_value).collect()
    };
    let mut pieces: Vec<_> = words.chunks_exact(FINISHED * WORDS).zip(counts).map(of_piece).collect();
    let top = if pieces.len() == 1 {
        pieces.swap_remove(0)
    } else {
        pieces.into_iter().map(|values| merge_down_to(values, 1)[0]).collect()
    };
    let top = merge_down_to(top, 2);
    *merge_subtrees_root(&top[0], &top[1], Mode::Hash).as_bytes()
}

/// Merges neighbours level by level until at most `wanted` values are left.
fn merge_down_to(mut values: Vec<ChainingValue>, wanted: usize) -> Vec<ChainingValue> {
    let merge = |pair: &[ChainingValue]| match pair {
        [left, right] => merge_subtrees_non_root(left, right, Mode::Hash),
        alone => alone[0],
    };
    while values.len() > wanted {
        values = values.chunks(2).map(merge).collect();
    }
    values
}

fn chaining_value(words: &[u32]) -> ChainingValue {
    let mut value = ChainingValue::default();
    for (bytes, word) in value.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    value
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use super::*;
    use crate::device::DeviceLocation;

    #[test]
    fn pieces_have_the_digest_of_the_whole() {
        let device = Device::open(DeviceLocation::Emulated).unwrap();
        let bytes: Vec<u8> = (0..200 * CHUNK + 17).map(|i| (i * i % 251) as u8).collect();
        for len in [1025, 4096, 4097, 8192, 20 * CHUNK - 1, 96 * CHUNK, 129 * CHUNK, bytes.len()] {
            let uploaded = device.upload(&bytes[..len]).unwrap();
            for piece_chunks in [1, 4, 128] {
                let found = digest_by(&device, uploaded.all(), piece_chunks).unwrap();
                assert_eq!(found, *blake3::hash(&bytes[..len]).as_bytes(), "{len} by {piece_chunks}");
            }
        }
    }
}
