//! A one-shot completion for a thread. Invariant: the waiting thread sleeps. Channels for many messages spin first,
//! which takes CPU time from the writer that it waits for.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::BufferError;
use crate::store::WriteCompletion;

/// The waiting side.
pub(super) struct CompletionReceiver(Arc<CompletionCell>);

#[derive(Default)]
struct CompletionCell {
    state: Mutex<CompletionState>,
    completed: Condvar,
}

#[derive(Default)]
enum CompletionState {
    #[default]
    Pending,
    Completed(Result<(), BufferError>),
    /// The sender was dropped.
    Abandoned,
}

/// The sending side; dropping it abandons the completion.
struct CompletionSender(Option<Arc<CompletionCell>>);

/// A completion and its receiver.
pub(super) fn completion() -> (WriteCompletion, CompletionReceiver) {
    let slot = Arc::new(CompletionCell::default());
    let mut sender = CompletionSender(Some(Arc::clone(&slot)));
    (Box::new(move |result| sender.complete(CompletionState::Completed(result))), CompletionReceiver(slot))
}

impl CompletionReceiver {
    /// The result, within `limit`. Otherwise the time waited, or `None` if the completion was abandoned.
    pub(super) fn wait(&self, limit: Duration) -> Result<Result<(), BufferError>, Option<Duration>> {
        let deadline = Instant::now() + limit;
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match std::mem::take(&mut *state) {
                CompletionState::Completed(result) => return Ok(result),
                CompletionState::Abandoned => return Err(None),
                CompletionState::Pending => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Some(limit));
            }
            state = self.0.completed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl CompletionSender {
    fn complete(&mut self, state: CompletionState) {
        if let Some(slot) = self.0.take() {
            *slot.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
            slot.completed.notify_one();
        }
    }
}

impl Drop for CompletionSender {
    fn drop(&mut self) {
        self.complete(CompletionState::Abandoned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_gets_the_result_a_timeout_or_abandonment() {
        let (done, completed) = completion();
        done(Ok(()));
        assert!(matches!(completed.wait(Duration::ZERO), Ok(Ok(()))));
        let (done, completed) = super::completion();
        assert!(matches!(completed.wait(Duration::ZERO), Err(Some(Duration::ZERO))));
        drop(done);
        assert!(matches!(completed.wait(Duration::from_secs(30)), Err(None)));
    }
}
