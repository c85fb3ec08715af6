//! A promise to a thread that it is told once. Invariant: the thread sleeps until then; channels made for many messages
//! spin first, which takes the cores from the writer that is waited for.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::BufferError;
use crate::store::Done;

/// Where it is told.
pub(super) struct Receipt(Arc<Slot>);

#[derive(Default)]
struct Slot {
    state: Mutex<State>,
    told: Condvar,
}

#[derive(Default)]
enum State {
    #[default]
    Open,
    Told(Result<(), BufferError>),
    /// Whoever promised is gone.
    Broken,
}

/// Tells, or says that nobody will.
struct Promise(Option<Arc<Slot>>);

/// A promise, and where it is kept.
pub(super) fn receipt() -> (Done, Receipt) {
    let slot = Arc::new(Slot::default());
    let mut promise = Promise(Some(Arc::clone(&slot)));
    (Box::new(move |result| promise.keep(State::Told(result))), Receipt(slot))
}

impl Receipt {
    /// What was told within `limit`; otherwise how long that was, or `None` if nobody will tell any more.
    pub(super) fn wait(&self, limit: Duration) -> Result<Result<(), BufferError>, Option<Duration>> {
        let deadline = Instant::now() + limit;
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match std::mem::take(&mut *state) {
                State::Told(result) => return Ok(result),
                State::Broken => return Err(None),
                State::Open => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Some(limit));
            }
            state = self.0.told.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Promise {
    fn keep(&mut self, state: State) {
        if let Some(slot) = self.0.take() {
            *slot.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
            slot.told.notify_one();
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.keep(State::Broken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_told_or_hears_that_nobody_will() {
        let (done, receipt) = receipt();
        done(Ok(()));
        assert!(matches!(receipt.wait(Duration::ZERO), Ok(Ok(()))));
        let (done, receipt) = super::receipt();
        assert!(matches!(receipt.wait(Duration::ZERO), Err(Some(Duration::ZERO))));
        drop(done);
        assert!(matches!(receipt.wait(Duration::from_secs(30)), Err(None)));
    }
}
