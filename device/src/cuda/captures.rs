//! Excludes some calls while a thread captures a CUDA graph. Destroying a cuBLAS handle or loading a module
//! synchronizes the GPU, which invalidates the captures of all threads of the process.
//!
//! Invariant: a thread that captures holds the lock shared, from begin to end; a thread that makes such a call holds it
//! exclusively.

use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static RECORDING: RwLock<()> = RwLock::new(());

thread_local! {
    static OWN: RefCell<Option<RwLockReadGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// Begins a capture on this thread.
pub(super) fn begin() {
    let guard = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
    OWN.with_borrow_mut(|own| *own = Some(guard));
}

/// Ends the capture of this thread.
pub(super) fn end() {
    OWN.with_borrow_mut(|own| *own = None);
}

/// Excludes captures until the guard is dropped. Deadlocks if this thread captures.
pub(super) fn exclude() -> RwLockWriteGuard<'static, ()> {
    RECORDING.write().unwrap_or_else(PoisonError::into_inner)
}
