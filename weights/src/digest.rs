//! BLAKE3 by several threads. Invariant: the result is that of one thread, byte for byte.
//!
//! BLAKE3 is a binary tree over chunks of 1024 bytes whose left subtrees are full. Threads digest subtrees, whose
//! chaining values are merged in the order of the tree.

use std::ops::Range;

use blake3::Hasher;
use blake3::hazmat::{self, ChainingValue, HasherExt, Mode};

use crate::copier::share;

/// Maximum subtree of one task, bytes: large enough for a small overhead, small enough for balanced threads.
const TASK: u64 = 4 << 20;
/// Bytes of a weight.
const WORD: u64 = 4;

/// BLAKE3 over `[parameters]` values as little-endian f32, by up to `threads` threads.
pub(crate) fn tree(values: &[f32], threads: usize) -> [u8; 32] {
    tree_of(values.len(), threads, |range, hasher| feed(hasher, &values[range]))
}

/// The same over `len` values, of which `add` adds a range to a hasher.
pub(crate) fn tree_of(
    len: usize,
    threads: usize,
    add: impl Fn(Range<usize>, &mut Hasher) + Sync,
) -> [u8; 32] {
    let bytes = len as u64 * WORD;
    if bytes <= TASK || threads <= 1 {
        let mut hasher = Hasher::new();
        add(0..len, &mut hasher);
        return *hasher.finalize().as_bytes();
    }
    let mut tasks = Vec::new();
    split(0, bytes, &mut tasks);
    let digested = share(threads, tasks, |(start, len)| {
        let mut hasher = Hasher::new();
        hasher.set_input_offset(start);
        add((start / WORD) as usize..((start + len) / WORD) as usize, &mut hasher);
        hasher.finalize_non_root()
    });
    let mut digested = digested.into_iter();
    let left_len = hazmat::left_subtree_len(bytes);
    let left = merged(left_len, &mut digested);
    let right = merged(bytes - left_len, &mut digested);
    *hazmat::merge_subtrees_root(&left, &right, Mode::Hash).as_bytes()
}

/// The subtrees of `len` bytes from `start`, in order: start and length of each, bytes.
fn split(start: u64, len: u64, tasks: &mut Vec<(u64, u64)>) {
    if len <= TASK {
        tasks.push((start, len));
        return;
    }
    let left = hazmat::left_subtree_len(len);
    split(start, left, tasks);
    split(start + left, len - left, tasks);
}

/// The chaining value of a subtree of `len` bytes, from those of its tasks in order.
fn merged(len: u64, digested: &mut impl Iterator<Item = ChainingValue>) -> ChainingValue {
    if len <= TASK {
        return digested.next().expect("the input was split in the same way");
    }
    let left_len = hazmat::left_subtree_len(len);
    let left = merged(left_len, digested);
    let right = merged(len - left_len, digested);
    hazmat::merge_subtrees_non_root(&left, &right, Mode::Hash)
}

/// Adds values to a hasher.
pub(crate) fn feed(hasher: &mut Hasher, values: &[f32]) {
    if cfg!(target_endian = "little") {
        hasher.update(bytemuck::cast_slice(values));
        return;
    }
    for value in values {
        hasher.update(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_threads_digest_as_one() {
        let task = (TASK / WORD) as usize;
        for len in [0, 1, 255, 257, task, task + 1, 2 * task, 3 * task - 7, 5 * task + 300] {
            let values: Vec<f32> = (0..len).map(|index| index as f32 * 0.37).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            for threads in [1, 2, 5] {
                assert_eq!(tree(&values, threads), *blake3::hash(&bytes).as_bytes(), "{len} by {threads}");
            }
        }
    }
}
