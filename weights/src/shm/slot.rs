//! A slot: one file with one version. A page of header, then the weights as f32 of this machine.
//!
//! ```text
//!   words of 64 bits: magic, layout, sequence, version, weights, bytes of a word, digest known, digest (4 words)
//! ```
//! Invariant (a seqlock): the sequence is odd while the weights are written and increases with every change, so a
//! reader that compares it before and after knows whether the header is consistent.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use trajectory::PolicyVersion;

use crate::{Digest, Dtype, WeightsError};

/// Bytes before the weights: one page, for alignment.
const HEADER: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"RLRUNSHM");
const LAYOUT: u64 = 1;
/// Word indices of the header.
const SEQUENCE: usize = 2;
const VERSION: usize = 3;
const WEIGHTS: usize = 4;
const WORD: usize = 5;
const DIGEST_KNOWN: usize = 6;
const DIGEST: usize = 7;
const WORDS: usize = 11;

/// A mapped slot.
#[derive(Debug)]
pub(super) struct ShmSlot {
    map: MmapRaw,
    /// Capacity, weights.
    len: usize,
}

/// Header of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotHeader {
    pub(super) sequence: u64,
    pub(super) version: PolicyVersion,
    pub(super) dtype: Dtype,
    pub(super) digest: Option<Digest>,
}

impl SlotHeader {
    pub(super) fn complete(&self) -> bool {
        self.sequence.is_multiple_of(2)
    }
}

impl ShmSlot {
    /// Makes a file for `len` weights.
    pub(super) fn create(path: &Path, len: usize) -> Result<(Self, File), WeightsError> {
        let failed = |what, error: io::Error| failed(path, what, &error);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|error| failed("make a file; name another directory", error))?;
        let bytes = (HEADER + len * size_of::<f32>()) as u64;
        // The file is allocated: a sparse file would kill the process when memory runs out.
        let allocated = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes);
        if let Err(error) = allocated {
            // If this fails, the next publisher removes it.
            let _ = std::fs::remove_file(path);
            let what = "allocate the weights; make it larger, or use the transport http";
            return Err(failed(what, error.into()));
        }
        let map = MmapOptions::new().map_raw(&file).map_err(|error| failed("map a file", error))?;
        let slot = Self { map, len };
        for (word, value) in [(0, MAGIC), (1, LAYOUT), (SEQUENCE, 1), (WEIGHTS, len as u64)] {
            slot.word(word).store(value, Ordering::Relaxed);
        }
        Ok((slot, file))
    }

    /// Maps the file of a publisher, read-only or to write a shard.
    pub(super) fn open(path: &Path, write: bool) -> Result<(Self, File), WeightsError> {
        let failed = |what, error: io::Error| failed(path, what, &error);
        let file = OpenOptions::new().read(true).write(write).open(path);
        let file = file.map_err(|error| failed("open a file of the publisher", error))?;
        let bytes = file.metadata().map_err(|error| failed("ask for the length", error))?.len();
        let odd = |what| failed(what, io::Error::new(io::ErrorKind::InvalidData, format!("{bytes} bytes")));
        let weights = bytes.checked_sub(HEADER as u64).filter(|bytes| bytes.is_multiple_of(4));
        let Some(len) = weights.map(|bytes| (bytes / 4) as usize) else {
            return Err(odd("read a file that is not as this version of rlrun writes it"));
        };
        let options = MmapOptions::new();
        let map = if write { options.map_raw(&file) } else { options.map_raw_read_only(&file) };
        let slot = Self { map: map.map_err(|error| failed("map a file", error))?, len };
        let word = |index: usize| slot.word(index).load(Ordering::Relaxed);
        if (word(0), word(1), word(WEIGHTS)) != (MAGIC, LAYOUT, len as u64) {
            return Err(odd("read a file that is not as this version of rlrun writes it"));
        }
        Ok((slot, file))
    }

    /// Capacity, weights.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn described(&self) -> Option<SlotHeader> {
        let word = |index: usize| self.word(index).load(Ordering::Relaxed);
        let sequence = word(SEQUENCE);
        fence(Ordering::Acquire);
        let dtype = Dtype::ALL.into_iter().find(|dtype| dtype.bytes() as u64 == word(WORD))?;
        let mut digest = [0; 32];
        for (index, bytes) in digest.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word(DIGEST + index).to_le_bytes());
        }
        let digest = (word(DIGEST_KNOWN) == 1).then_some(Digest::from_bytes(digest));
        let described = SlotHeader { sequence, version: PolicyVersion(word(VERSION)), dtype, digest };
        fence(Ordering::Acquire);
        (word(SEQUENCE) == sequence).then_some(described)
    }

    /// Marks the slot as being written with `version`.
    pub(super) fn write(&self, version: PolicyVersion, dtype: Dtype) {
        let odd = (self.word(SEQUENCE).load(Ordering::Relaxed) + 1) | 1;
        self.word(SEQUENCE).store(odd, Ordering::Relaxed);
        fence(Ordering::Release);
        self.word(DIGEST_KNOWN).store(0, Ordering::Relaxed);
        self.word(VERSION).store(version.0, Ordering::Relaxed);
        self.word(WORD).store(dtype.bytes() as u64, Ordering::Relaxed);
    }

    /// Marks the slot as complete.
    pub(super) fn complete(&self) {
        let odd = self.word(SEQUENCE).load(Ordering::Relaxed);
        self.word(SEQUENCE).store(odd + 1, Ordering::Release);
    }

    pub(super) fn digested(&self, digest: Digest) {
        for (index, bytes) in digest.as_bytes().chunks_exact(8).enumerate() {
            let word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
            self.word(DIGEST + index).store(word, Ordering::Relaxed);
        }
        self.word(DIGEST_KNOWN).store(1, Ordering::Release);
    }

    /// The `[len]` weights.
    ///
    /// # Safety
    /// No thread or process writes them during the lifetime of the slice.
    #[expect(unsafe_code, reason = "memory that other processes see has no other way in")]
    pub(super) unsafe fn values(&self) -> &[f32] {
        // SAFETY: the map has a page of header and `len` weights behind it, every bit pattern is an f32, and the
        // caller guarantees that no writer changes them.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(HEADER).cast(), self.len) }
    }

    /// The weights of a range, to be written.
    ///
    /// # Safety
    /// The map is writable, and no other thread or process accesses the range during the lifetime of the slice.
    ///
    /// # Panics
    /// If the range is outside the slot.
    #[expect(unsafe_code, reason = "memory that other processes see has no other way in")]
    #[expect(
        clippy::mut_from_ref,
        reason = "several processes write parts of one slot; the caller vouches for it"
    )]
    pub(super) unsafe fn range_mut(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} weights", self.len);
        // SAFETY: the range was checked against the capacity, every bit pattern is an f32, and the caller guarantees
        // exclusive access to the range.
        unsafe {
            let first = self.map.as_mut_ptr().add(HEADER).cast::<f32>().add(range.start);
            std::slice::from_raw_parts_mut(first, range.len())
        }
    }

    #[expect(unsafe_code, reason = "words that other processes change are atomics")]
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS, "the header has {WORDS} words");
        // SAFETY: the map begins on a page and is longer than the header, so the word is inside and aligned. All
        // processes access the header through atomics, and those that map it read-only only load.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().cast::<u64>().add(index).cast_mut()) }
    }
}

/// The error of a system call.
pub(crate) fn failed(path: &Path, what: &'static str, error: &io::Error) -> WeightsError {
    WeightsError::Shm { path: path.display().to_string(), what, reason: error.to_string() }
}
