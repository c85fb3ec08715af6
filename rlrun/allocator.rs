//! The allocator that programs around rlrun should use.
//!
//! Invariant: all calls are passed on to mimalloc; only alignment changes.

use std::alloc::{GlobalAlloc, Layout};

use mimalloc::MiMalloc;

/// Every operation of the decoder allocates its result; glibc would map and zero large ones each time. What is large
/// begins at a cache line: products are a fifth slower on registers that straddle two.
#[derive(Debug)]
pub struct Allocator;

impl Allocator {
    const LARGE: usize = 1024;
    const LINE: usize = 64;

    fn aligned(layout: Layout) -> Layout {
        if layout.size() < Self::LARGE {
            return layout;
        }
        layout.align_to(Self::LINE).unwrap_or(layout)
    }
}

/// Gives back to the system what this thread has freed. Where another allocator is in use it does nothing.
pub fn release() {
    #[expect(
        unsafe_code,
        reason = "the allocator's own call for it, which its crate only declares with another dependency"
    )]
    unsafe extern "C" {
        fn mi_collect(force: bool);
    }
    // SAFETY: mimalloc is linked, and collecting is allowed at any time on any thread.
    #[expect(unsafe_code, reason = "the allocator's own call for it")]
    unsafe {
        mi_collect(true);
    }
}

#[expect(unsafe_code, reason = "all calls are passed on; a stricter alignment satisfies every caller")]
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        unsafe { MiMalloc.alloc(Self::aligned(layout)) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        unsafe { MiMalloc.alloc_zeroed(Self::aligned(layout)) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // Freeing needs neither size nor alignment.
        unsafe { MiMalloc.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let align = if size < Self::LARGE { layout.align() } else { layout.align().max(Self::LINE) };
        let Ok(aligned) = Layout::from_size_align(layout.size(), align) else { return std::ptr::null_mut() };
        unsafe { MiMalloc.realloc(pointer, aligned, size) }
    }
}
