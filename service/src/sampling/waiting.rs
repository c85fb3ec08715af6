//! A queue of users' requests between the threads of clients and the one thread that carries them out.
//!
//! Invariant: adding never waits. What is in a closed queue is dropped, and nothing is added to it any more.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::fair_queue::{FairBounds, FairQueue, QueueFull};
use crate::training::UserId;

/// A request whose client may be gone.
pub(super) trait Abandonable {
    /// Whether no client waits for it any more.
    fn is_abandoned(&self) -> bool;
}

/// Requests that wait for their turn.
#[derive(Debug)]
pub(super) struct WaitingRequests<T> {
    state: Mutex<WaitingState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct WaitingState<T> {
    queue: FairQueue<T>,
    /// Why nothing is carried out any more.
    closed: Option<String>,
    /// Whether the thread is to look up.
    woken: bool,
}

impl<T: Abandonable> WaitingRequests<T> {
    pub(super) fn new(bounds: FairBounds) -> Self {
        let state = WaitingState { queue: FairQueue::new(bounds), closed: None, woken: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds all of `new`, or none. They are dropped if the queue is closed.
    ///
    /// # Errors
    /// If not all of them may wait.
    pub(super) fn push_all(&self, user: UserId, new: Vec<T>) -> Result<(), QueueFull> {
        let mut state = self.lock();
        if state.closed.is_some() {
            return Ok(());
        }
        if state.queue.check(user, new.len()).is_err() {
            // Those of clients that are gone do not count.
            drop(state.queue.remove(|_, item| item.is_abandoned()));
        }
        state.queue.push_all(user, new)?;
        drop(state);
        self.wake();
        Ok(())
    }

    /// The next request whose client is there.
    pub(super) fn pop(&self) -> Option<T> {
        let mut state = self.lock();
        while let Some((_, item)) = state.queue.pop() {
            if !item.is_abandoned() {
                return Some(item);
            }
        }
        None
    }

    /// Waits up to `limit` until something is added or [`Self::wake`] is called.
    pub(super) fn wait(&self, limit: Duration) {
        let quiet =
            |state: &mut WaitingState<T>| !state.woken && state.queue.is_empty() && state.closed.is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), limit, quiet);
        waited.unwrap_or_else(PoisonError::into_inner).0.woken = false;
    }

    /// Ends the wait of the thread.
    pub(super) fn wake(&self) {
        self.lock().woken = true;
        self.changed.notify_all();
    }

    /// Drops what waits, and refuses what comes, because of `reason`. The first reason stays.
    pub(super) fn close(&self, reason: &str) {
        let mut state = self.lock();
        state.closed.get_or_insert_with(|| reason.to_owned());
        let dropped = state.queue.remove(|_, _| true);
        drop(state);
        drop(dropped);
        self.wake();
    }

    /// Why it is closed; `None` if it is open.
    pub(super) fn closed(&self) -> Option<String> {
        self.lock().closed.clone()
    }

    /// Requests that wait, and the number of their users.
    pub(super) fn waiting(&self) -> (usize, usize) {
        let state = self.lock();
        (state.queue.len(), state.queue.users())
    }

    fn lock(&self) -> MutexGuard<'_, WaitingState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
