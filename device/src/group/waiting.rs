//! A wait for other members. Invariant: it ends at the deadline, and soon after there is a reason to abort.

use std::time::{Duration, Instant};

use super::GroupTimeout;

/// How often a wait polls for a reason to abort.
pub(super) const POLL: Duration = Duration::from_millis(10);

/// A wait in progress.
pub(super) struct GroupWait<'a> {
    timeout: &'a GroupTimeout,
    pub(super) started: Instant,
    polled: Instant,
}

impl<'a> GroupWait<'a> {
    pub(super) fn begin(timeout: &'a GroupTimeout) -> Self {
        let started = Instant::now();
        Self { timeout, started, polled: started }
    }

    /// The reason to end the wait, if any: `late` after the deadline, or a reason to abort.
    pub(super) fn over(&mut self, late: impl FnOnce() -> String) -> Option<String> {
        if self.started.elapsed() >= self.timeout.deadline {
            return Some(late());
        }
        let give_up = self.timeout.give_up.as_ref().filter(|_| self.polled.elapsed() >= POLL)?;
        self.polled = Instant::now();
        give_up()
    }
}
