//! Large blocks of memory, which are reused instead of being given back to the system.
//!
//! Activations, gradients and weights have the same sizes at every step. A block that the system has just given is zeroed page
//! by page when it is first touched, which took a fifth of the processor time of a training step.
//!
//! Invariant: blocks in use and blocks kept for reuse together never take more memory than blocks in use once took alone, and
//! [`SPARE`].

use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Bytes of a huge page, and of a page: the alignment of a block.
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// Bytes that are kept beyond what was once in use, so that the backward pass, whose sizes are others, does not give back what the
/// next forward pass takes.
pub(crate) const SPARE: usize = 64 << 20;

/// Blocks of memory by size.
#[derive(Debug)]
pub(super) struct LargeBlocks(Mutex<BlockState>);

#[derive(Debug)]
struct BlockState {
    /// Kept for reuse, the one freed last at the end.
    kept: Vec<FreeBlock>,
    /// Bytes in use, bytes of `kept`, and most bytes ever in use.
    used: usize,
    kept_bytes: usize,
    most_used: usize,
}

#[derive(Debug)]
struct FreeBlock {
    address: usize,
    bytes: usize,
}

/// A block, and whether all its bytes are zero.
struct TakenBlock {
    address: *mut u8,
    zeroed: bool,
}

impl LargeBlocks {
    /// Smallest size and largest alignment of a block. mimalloc gives smaller blocks back too, after 10 ms; they are few.
    pub(super) const MIN_BYTES: usize = 1 << 17;
    pub(super) const MAX_ALIGN: usize = PAGE;

    pub(super) const fn new() -> Self {
        Self(Mutex::new(BlockState { kept: Vec::new(), used: 0, kept_bytes: 0, most_used: 0 }))
    }

    /// A block of at least so many bytes with any content; null if there is no memory.
    pub(super) fn take(&self, size: usize) -> *mut u8 {
        self.state().take(block_bytes(size)).address
    }

    /// The same with bytes of zero.
    pub(super) fn take_zeroed(&self, size: usize) -> *mut u8 {
        let TakenBlock { address, zeroed } = self.state().take(block_bytes(size));
        if !zeroed && !address.is_null() {
            #[expect(unsafe_code, reason = "the block is at least as long")]
            unsafe {
                address.write_bytes(0, size);
            }
        }
        address
    }

    /// Frees a block.
    ///
    /// # Safety
    /// It was taken with this size, and is not in use.
    #[expect(unsafe_code, reason = "memory that others might use is freed")]
    pub(super) unsafe fn give(&self, address: *mut u8, size: usize) {
        let bytes = block_bytes(size);
        let mut state = self.state();
        state.used -= bytes;
        state.kept_bytes += bytes;
        state.kept.push(FreeBlock { address: address as usize, bytes });
    }

    /// Whether the block of one size is also that of another.
    pub(super) fn same_block(size: usize, other: usize) -> bool {
        other >= Self::MIN_BYTES && block_bytes(size) == block_bytes(other)
    }

    /// Gives all blocks kept for reuse back to the system.
    pub(super) fn release(&self) {
        self.state().shrink(0);
    }

    fn state(&self) -> MutexGuard<'_, BlockState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockState {
    fn take(&mut self, bytes: usize) -> TakenBlock {
        let found = self.kept.iter().rposition(|block| block.bytes == bytes);
        let taken = if let Some(at) = found {
            self.kept_bytes -= bytes;
            TakenBlock { address: self.kept.remove(at).address as *mut u8, zeroed: false }
        } else {
            self.shrink((self.most_used + SPARE).saturating_sub(self.used + bytes));
            TakenBlock { address: map(bytes), zeroed: true }
        };
        if !taken.address.is_null() {
            self.used += bytes;
            self.most_used = self.most_used.max(self.used);
        }
        taken
    }

    /// Gives blocks back to the system, those that were freed first, until at most `bytes` are kept.
    fn shrink(&mut self, bytes: usize) {
        let mut kept_bytes = self.kept_bytes;
        let excess = |block: &&FreeBlock| {
            let over = kept_bytes > bytes;
            kept_bytes -= if over { block.bytes } else { 0 };
            over
        };
        let count = self.kept.iter().take_while(excess).count();
        self.kept_bytes -= self.kept[..count].iter().map(|block| block.bytes).sum::<usize>();
        for FreeBlock { address, bytes } in self.kept.drain(..count) {
            #[expect(unsafe_code, reason = "a free block is not in use; the range is one that was mapped")]
            // After a failure the block stays mapped, unused.
            let _ = unsafe { munmap(address as *mut _, bytes) };
        }
    }
}

/// Bytes of the block of a size: sizes within an eighth of each other share blocks. What is beyond the size is not touched and
/// takes no memory.
fn block_bytes(size: usize) -> usize {
    let step = (size.next_power_of_two() / 16).max(PAGE);
    size.checked_next_multiple_of(step).unwrap_or(usize::MAX)
}

/// Maps zeroed memory, in huge pages where the system has them: they are zeroed faster, and the processor finds their addresses
/// faster.
fn map(bytes: usize) -> *mut u8 {
    #[expect(unsafe_code, reason = "a new private mapping is of no other use")]
    let mapped =
        unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
    let Ok(address) = mapped.map(|address| address.cast::<u8>()) else { return null_mut() };
    if bytes >= HUGE {
        #[expect(unsafe_code, reason = "the advice changes the size of pages only; it may be refused")]
        let _ = unsafe { madvise(address.cast(), bytes, Advice::LinuxHugepage) };
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept_and_used(blocks: &LargeBlocks) -> (usize, usize) {
        let state = blocks.state();
        (state.kept_bytes, state.used)
    }

    #[expect(unsafe_code, reason = "the tests use their own blocks within their sizes")]
    fn write(address: *mut u8, size: usize, value: u8) {
        unsafe { address.write_bytes(value, size) };
    }

    #[expect(unsafe_code, reason = "the tests use their own blocks within their sizes")]
    fn bytes<'a>(address: *mut u8, size: usize) -> &'a [u8] {
        unsafe { std::slice::from_raw_parts(address, size) }
    }

    #[expect(unsafe_code, reason = "the tests free what they took")]
    fn give(blocks: &LargeBlocks, address: *mut u8, size: usize) {
        unsafe { blocks.give(address, size) };
    }

    #[test]
    fn a_block_is_reused_and_zeroed_when_asked() {
        let blocks = LargeBlocks::new();
        let size = 3 << 20;
        let first = blocks.take(size);
        assert_eq!(first as usize % LargeBlocks::MAX_ALIGN, 0);
        write(first, size, 7);
        give(&blocks, first, size);
        let again = blocks.take_zeroed(size - 100);
        assert_eq!(again, first);
        assert!(bytes(again, size - 100).iter().all(|byte| *byte == 0));
        assert_eq!(kept_and_used(&blocks), (0, size));
        give(&blocks, again, size - 100);
        blocks.release();
        assert_eq!(kept_and_used(&blocks), (0, 0));
    }

    #[test]
    fn memory_exceeds_what_was_used_at_once_by_the_spare_at_most() {
        let blocks = LargeBlocks::new();
        let mib = 1 << 20;
        let mut owned = Vec::new();
        let mut most = 0;
        for round in 0..200_usize {
            let size = mib + round * 7919 % 40 * mib / 3;
            owned.push((blocks.take(size), size));
            most = most.max(kept_and_used(&blocks).1);
            if owned.len() > 3 {
                let (address, size) = owned.remove(round % 3);
                give(&blocks, address, size);
            }
            let (kept, used) = kept_and_used(&blocks);
            assert!(kept + used <= most + SPARE, "{kept} kept, {used} used");
        }
        owned.into_iter().for_each(|(address, size)| give(&blocks, address, size));
        blocks.release();
    }

    #[test]
    fn sizes_of_one_block_are_close() {
        for size in [1 << 20, (1 << 20) + 1, 100_000_000, 3 << 30] {
            let bytes = block_bytes(size);
            assert!(bytes >= size && bytes <= size + size / 8 + PAGE, "{bytes} for {size}");
            assert!(LargeBlocks::same_block(size, bytes) && !LargeBlocks::same_block(size, bytes + 1));
        }
        assert!(LargeBlocks::new().take(usize::MAX / 2).is_null());
    }
}
