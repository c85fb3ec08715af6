//! The allocator that programs around rlrun should use.
//!
//! Invariant: a call is passed on to mimalloc, or to the large blocks, by size and alignment alone.

mod large;

use std::alloc::{GlobalAlloc, Layout};

use large::LargeBlocks;
pub(crate) use large::SPARE;
use mimalloc::MiMalloc;

/// Every operation of the decoder allocates its result: large blocks are reused, the others are those of mimalloc. What is
/// large begins at a cache line: products are a fifth slower on registers that straddle two.
#[derive(Debug)]
pub struct Allocator;

static LARGE_BLOCKS: LargeBlocks = LargeBlocks::new();

impl Allocator {
    const LARGE: usize = 1024;
    const LINE: usize = 64;

    fn aligned(layout: Layout) -> Layout {
        if layout.size() < Self::LARGE {
            return layout;
        }
        layout.align_to(Self::LINE).unwrap_or(layout)
    }

    /// Whether the memory is a large block.
    fn is_block(layout: Layout) -> bool {
        layout.size() >= LargeBlocks::MIN_BYTES && layout.align() <= LargeBlocks::MAX_ALIGN
    }
}

/// Gives back to the system what this thread has freed, and all large blocks. Where another allocator is in use it does nothing.
pub fn release() {
    #[expect(
        unsafe_code,
        reason = "the allocator's own call for it, which its crate only declares with another dependency"
    )]
    unsafe extern "C" {
        fn mi_collect(force: bool);
    }
    LARGE_BLOCKS.release();
    // SAFETY: mimalloc is linked, and collecting is allowed at any time on any thread.
    #[expect(unsafe_code, reason = "the allocator's own call for it")]
    unsafe {
        mi_collect(true);
    }
}

#[expect(unsafe_code, reason = "all calls are passed on; a stricter alignment satisfies every caller")]
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if Self::is_block(layout) {
            return LARGE_BLOCKS.take(layout.size());
        }
        unsafe { MiMalloc.alloc(Self::aligned(layout)) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if Self::is_block(layout) {
            return LARGE_BLOCKS.take_zeroed(layout.size());
        }
        unsafe { MiMalloc.alloc_zeroed(Self::aligned(layout)) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if Self::is_block(layout) {
            return unsafe { LARGE_BLOCKS.give(pointer, layout.size()) };
        }
        // Freeing needs neither size nor alignment.
        unsafe { MiMalloc.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Ok(new) = Layout::from_size_align(size, layout.align()) else { return std::ptr::null_mut() };
        if Self::is_block(layout) && LargeBlocks::same_block(layout.size(), size) {
            return pointer;
        }
        if Self::is_block(layout) || Self::is_block(new) {
            let moved = unsafe { self.alloc(new) };
            if !moved.is_null() {
                unsafe {
                    moved.copy_from_nonoverlapping(pointer, layout.size().min(size));
                    self.dealloc(pointer, layout);
                }
            }
            return moved;
        }
        let align = if size < Self::LARGE { layout.align() } else { layout.align().max(Self::LINE) };
        let Ok(aligned) = Layout::from_size_align(layout.size(), align) else { return std::ptr::null_mut() };
        unsafe { MiMalloc.realloc(pointer, aligned, size) }
    }
}
