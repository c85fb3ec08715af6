//! A wait for other members. Invariant: it is over at its deadline, and soon after there is a reason to give up.

use std::time::{Duration, Instant};

use super::Patience;

/// How often a member that waits asks whether to give up.
pub(super) const LOOK_UP: Duration = Duration::from_millis(10);

/// A wait that has begun.
pub(super) struct Waiting<'a> {
    patience: &'a Patience,
    pub(super) started: Instant,
    looked: Instant,
}

impl<'a> Waiting<'a> {
    pub(super) fn begin(patience: &'a Patience) -> Self {
        let started = Instant::now();
        Self { patience, started, looked: started }
    }

    /// Why it is over, if it is: the deadline has passed, which is `late`, or there is a reason to give up.
    pub(super) fn over(&mut self, late: impl FnOnce() -> String) -> Option<String> {
        if self.started.elapsed() >= self.patience.deadline {
            return Some(late());
        }
        let give_up = self.patience.give_up.as_ref().filter(|_| self.looked.elapsed() >= LOOK_UP)?;
        self.looked = Instant::now();
        give_up()
    }
}
