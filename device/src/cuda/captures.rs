//! What may not happen while a thread records: a handle of cuBLAS that goes, or a module that is loaded, waits for the whole
//! GPU, and that spoils what any other thread of the process records there.
//!
//! Invariant: a thread that records holds the lock with others, from begin to end; who does one of these things has it alone.

use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static RECORDING: RwLock<()> = RwLock::new(());

thread_local! {
    static OWN: RefCell<Option<RwLockReadGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// This thread records from now on.
pub(super) fn begin() {
    let guard = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
    OWN.with_borrow_mut(|own| *own = Some(guard));
}

/// It has recorded.
pub(super) fn end() {
    OWN.with_borrow_mut(|own| *own = None);
}

/// Nobody records until this is dropped. Not to be asked for by a thread that records.
pub(super) fn none() -> RwLockWriteGuard<'static, ()> {
    RECORDING.write().unwrap_or_else(PoisonError::into_inner)
}
