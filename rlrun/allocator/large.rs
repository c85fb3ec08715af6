//! Large blocks of memory, which are reused instead of being given back to the system.
//!
//! Activations, gradients and weights have the same sizes at every step; a forward pass allocates other sizes than its backward. Memory that the system has just given is zeroed page by page when it is first touched, which took a fifth of the processor time of a
//! training step. Free memory is therefore divided for smaller blocks and joined for larger ones.
//!
//! Invariant: free ranges do not touch each other. Blocks in use and free memory together never take more than blocks in use once took
//! alone, [`SPARE`], and the ends of ranges that are no whole pages.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Bytes of a huge page, and of a page: the alignment of a block.
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// The largest page of the systems that rlrun runs on, beside huge ones: memory is given back in multiples of it.
const LARGEST_PAGE: usize = 64 << 10;
/// Fewest bytes that are mapped at once.
const REGION: usize = 32 << 20;

/// Bytes that are kept beyond what was once in use: free memory may be in ranges that are too short for the next block. At least
/// [`REGION`].
pub(crate) const SPARE: usize = REGION;

/// Blocks of memory.
#[derive(Debug)]
pub(super) struct LargeBlocks(Mutex<BlockState>);

#[derive(Debug)]
struct BlockState {
    /// Bytes of free ranges by address.
    free: BTreeMap<usize, usize>,
    /// The same as bytes and address.
    by_size: BTreeSet<(usize, usize)>,
    /// Bytes in use, bytes of `free`, and most bytes ever in use.
    used: usize,
    free_bytes: usize,
    most_used: usize,
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
        Self(Mutex::new(BlockState {
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            used: 0,
            free_bytes: 0,
            most_used: 0,
        }))
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
        state.add(address as usize, bytes);
    }

    /// Whether the block of one size is also that of another.
    pub(super) fn same_block(size: usize, other: usize) -> bool {
        other >= Self::MIN_BYTES && block_bytes(size) == block_bytes(other)
    }

    /// Gives all free memory back to the system.
    pub(super) fn release(&self) {
        self.state().shrink(0);
    }

    fn state(&self) -> MutexGuard<'_, BlockState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockState {
    fn take(&mut self, bytes: usize) -> TakenBlock {
        let taken = match self.by_size.range((bytes, 0)..).next().copied() {
            Some((found, address)) => {
                self.remove(address, found);
                self.add(address + bytes, found - bytes);
                TakenBlock { address: address as *mut u8, zeroed: false }
            }
            None => self.map(bytes),
        };
        if !taken.address.is_null() {
            self.used += bytes;
            self.most_used = self.most_used.max(self.used);
        }
        taken
    }

    /// A block of memory that the system gives; what it gives beyond is free.
    fn map(&mut self, bytes: usize) -> TakenBlock {
        let Some(least) = bytes.checked_next_multiple_of(HUGE) else {
            return TakenBlock { address: null_mut(), zeroed: true };
        };
        let mut mapped = least.max(REGION);
        self.shrink((self.most_used + SPARE).saturating_sub(self.used.saturating_add(mapped)));
        let mut address = map(mapped);
        if address.is_null() {
            self.shrink(0);
            (mapped, address) = (least, map(least));
        }
        if !address.is_null() {
            self.add(address as usize + bytes, mapped - bytes);
        }
        TakenBlock { address, zeroed: true }
    }

    /// Adds a free range, joined with those that touch it.
    fn add(&mut self, mut address: usize, mut bytes: usize) {
        if bytes == 0 {
            return;
        }
        if let Some((before, len)) = self.free.range(..address).next_back().map(|(at, len)| (*at, *len))
            && before + len == address
        {
            self.remove(before, len);
            (address, bytes) = (before, len + bytes);
        }
        if let Some(len) = self.free.get(&(address + bytes)).copied() {
            self.remove(address + bytes, len);
            bytes += len;
        }
        self.free.insert(address, bytes);
        self.by_size.insert((bytes, address));
        self.free_bytes += bytes;
    }

    fn remove(&mut self, address: usize, bytes: usize) {
        self.free.remove(&address);
        self.by_size.remove(&(bytes, address));
        self.free_bytes -= bytes;
    }

    /// Gives free memory back to the system, from the ends of the largest ranges, until at most `bytes` are free. Only whole pages are
    /// given back, and a huge page is not divided if the range has a whole one.
    fn shrink(&mut self, bytes: usize) {
        while let Some(over) = self.free_bytes.checked_sub(bytes).filter(|over| *over > 0)
            && let Some((len, address)) = self.by_size.last().copied()
        {
            let end = address + len;
            let from = (end - over.min(len)) / HUGE * HUGE;
            let from = from.max(address.next_multiple_of(LARGEST_PAGE));
            let to = end / LARGEST_PAGE * LARGEST_PAGE;
            if from >= to {
                break;
            }
            self.remove(address, len);
            self.add(address, from - address);
            self.add(to, end - to);
            #[expect(unsafe_code, reason = "free memory is not in use; the pages are whole and were mapped")]
            // After a failure they stay mapped, unused.
            let _ = unsafe { munmap(from as *mut _, to - from) };
        }
    }
}

/// Bytes of the block of a size: those of sizes within an eighth of each other are equal, so that free memory is divided into fewer lengths.
fn block_bytes(size: usize) -> usize {
    let step = (size.next_power_of_two() / 16).max(PAGE);
    size.checked_next_multiple_of(step).unwrap_or(usize::MAX)
}

/// Maps zeroed memory, in huge pages where the system has them: they are zeroed faster, and the processor finds their addresses
/// faster.
fn map(bytes: usize) -> *mut u8 {
    let Some(with_ends) = bytes.checked_add(HUGE) else { return null_mut() };
    #[expect(unsafe_code, reason = "a new private mapping is of no other use")]
    let mapped = unsafe {
        mmap_anonymous(null_mut(), with_ends, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    let Ok(start) = mapped.map(|address| address.cast::<u8>()) else { return null_mut() };
    let before = start.align_offset(HUGE);
    #[expect(
        unsafe_code,
        reason = "the ends of the new mapping are of no use; the advice changes the size of pages only"
    )]
    unsafe {
        let address = start.add(before);
        if before > 0 {
            let _ = munmap(start.cast(), before);
        }
        if before < HUGE {
            let _ = munmap(address.add(bytes).cast(), HUGE - before);
        }
        #[cfg(target_os = "linux")]
        let _ = rustix::mm::madvise(address.cast(), bytes, rustix::mm::Advice::LinuxHugepage);
        address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free_and_used(blocks: &LargeBlocks) -> (usize, usize) {
        let state = blocks.state();
        (state.free_bytes, state.used)
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
        assert_eq!(free_and_used(&blocks), (REGION - size, size));
        give(&blocks, again, size - 100);
        blocks.release();
        assert_eq!(free_and_used(&blocks), (0, 0));
    }

    /// Asserts that both forms of the free ranges agree, do not touch, and are of the sum that is counted.
    fn check_free(blocks: &LargeBlocks) {
        let state = blocks.state();
        let by_address: BTreeSet<(usize, usize)> = state.free.iter().map(|(at, len)| (*len, *at)).collect();
        assert_eq!(by_address, state.by_size);
        assert_eq!(state.free.values().sum::<usize>(), state.free_bytes);
        let ranges: Vec<(usize, usize)> = state.free.iter().map(|(at, len)| (*at, *len)).collect();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0), "{ranges:?}");
    }

    #[test]
    fn blocks_keep_their_bytes_while_others_are_divided_joined_and_given_back() {
        let blocks = LargeBlocks::new();
        let mut owned: Vec<(*mut u8, usize, u8)> = Vec::new();
        let (mut most, mut state) = (0, 1_u64);
        for round in 0..2_000_u64 {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            let random = (state >> 33) as usize;
            if owned.len() < 40 && (owned.is_empty() || random.is_multiple_of(2)) {
                let size = LargeBlocks::MIN_BYTES + (random >> 8) % (1 << (10 + random % 13));
                let value = (round % 251) as u8;
                let zeroed = random.is_multiple_of(3);
                let address = if zeroed { blocks.take_zeroed(size) } else { blocks.take(size) };
                assert!(!zeroed || bytes(address, size).iter().all(|byte| *byte == 0));
                write(address, size, value);
                owned.push((address, size, value));
            } else {
                let (address, size, value) = owned.swap_remove(random % owned.len());
                assert!(bytes(address, size).iter().all(|byte| *byte == value), "round {round}");
                give(&blocks, address, size);
            }
            if random.is_multiple_of(97) {
                blocks.release();
            }
            check_free(&blocks);
            let (free, used) = free_and_used(&blocks);
            most = most.max(used);
            assert!(free + used <= most + SPARE + 80 * LARGEST_PAGE, "{free} free, {used} used");
        }
        for (address, size, value) in owned {
            assert!(bytes(address, size).iter().all(|byte| *byte == value));
            give(&blocks, address, size);
        }
        blocks.release();
        assert_eq!(free_and_used(&blocks), (0, 0));
    }

    #[test]
    fn free_memory_is_divided_and_joined() {
        let blocks = LargeBlocks::new();
        let quarter = REGION / 4;
        let four = [0; 4].map(|_| blocks.take(quarter));
        assert_eq!(free_and_used(&blocks), (0, REGION));
        for at in [0, 2, 1, 3] {
            give(&blocks, four[at], quarter);
        }
        let whole = blocks.take(REGION);
        assert_eq!(whole, four.into_iter().min().unwrap(), "all free memory is one range again");
        assert_eq!(free_and_used(&blocks), (0, REGION));
        give(&blocks, whole, REGION);
        blocks.release();
        assert_eq!(free_and_used(&blocks), (0, 0));
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
