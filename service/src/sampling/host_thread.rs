//! A thread of a host.
//!
//! Invariant: the wait for its end has a limit.

use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, bounded};
use rollout::RolloutError;

/// Longest wait for the thread of a host that is dropped.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A thread, and the sign that it has ended: the channel is closed.
#[derive(Debug)]
pub(super) struct HostThread {
    thread: Option<JoinHandle<()>>,
    ended: Receiver<()>,
}

impl HostThread {
    /// Starts the thread `name`.
    pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<Self, RolloutError> {
        let (alive, ended) = bounded(0);
        let builder = std::thread::Builder::new().name(name.replace('\0', " "));
        let thread = builder.spawn(move || {
            let _alive: Sender<()> = alive;
            work();
        });
        let thread = thread.map_err(|source| RolloutError::Sampler {
            engine: name.to_owned(),
            evidence: format!("has no thread: {source}"),
            remedy: "raise the limit of threads".to_owned(),
        })?;
        Ok(Self { thread: Some(thread), ended })
    }

    /// Waits for its end within a limit.
    pub(super) fn join(&mut self) {
        // Nothing is ever sent: the channel is closed, or the time is over.
        let is_over = self.ended.recv_timeout(STOP_LIMIT).is_err_and(|error| error.is_disconnected());
        if let Some(thread) = self.thread.take().filter(|_| is_over) {
            // A panic was reported when it happened, and its clients have a failure.
            drop(thread.join());
        }
    }
}
