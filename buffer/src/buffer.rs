//! The buffer in this process: the ledger behind a lock, a store behind the ledger.
//!
//! Invariant: changes reach the store in the order in which the ledger made them, and no caller hears of a group or
//! a batch before the store has it. No call waits without a deadline. What may happen when is the ledger's business.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use trajectory::{Group, GroupId, PolicyVersion};

use crate::ledger::{Begin, Ledger, Mark, Row};
use crate::store::Store;
use crate::{BufferConfig, BufferError, Consumer, Finalized, Lease, Producer, Stats};

/// The longest that any call waits, whatever it was told.
const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest that one write may take before the disk counts as dead.
pub(crate) const WRITE_WAIT: Duration = Duration::from_secs(60);

/// A buffer over some store: [`Memory`](crate::Memory) or [`Journal`](crate::Journal).
pub struct Buffer<S> {
    ledger: Mutex<Ledger>,
    changed: Condvar,
    store: S,
}

#[expect(private_bounds, reason = "the stores are ours to choose; callers see two aliases of this type")]
impl<S: Store> Buffer<S> {
    pub(crate) fn over(store: S, config: BufferConfig, rows: &[Row], mark: Mark) -> Self {
        Self { ledger: Mutex::new(Ledger::restore(config, rows, mark)), changed: Condvar::new(), store }
    }

    fn ledger(&self) -> Result<MutexGuard<'_, Ledger>, BufferError> {
        self.ledger.lock().map_err(|_| BufferError::Poisoned)
    }

    /// Waits until something changed or the deadline is over.
    fn wait<'a>(
        &self,
        ledger: MutexGuard<'a, Ledger>,
        deadline: Instant,
    ) -> Result<MutexGuard<'a, Ledger>, BufferError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let (ledger, _) = self.changed.wait_timeout(ledger, left).map_err(|_| BufferError::Poisoned)?;
        Ok(ledger)
    }
}

impl<S: Store> Producer for Buffer<S> {
    fn admit(
        &self,
        served: PolicyVersion,
        limit: usize,
        wait: Duration,
    ) -> Result<Vec<GroupId>, BufferError> {
        let deadline = Instant::now() + wait.min(MAX_WAIT);
        let mut ledger = self.ledger()?;
        loop {
            let ids = ledger.admit(served, limit);
            if limit == 0 || !ids.is_empty() || Instant::now() >= deadline {
                return Ok(ids);
            }
            ledger = self.wait(ledger, deadline)?;
        }
    }

    fn claim(&self, group: GroupId, served: PolicyVersion) -> Result<(), BufferError> {
        self.ledger()?.claim(group, served)?;
        self.changed.notify_all();
        Ok(())
    }

    fn finalize(&self, group: Group) -> Result<Finalized, BufferError> {
        let id = group.id;
        let oldest = group.oldest_version().ok_or(BufferError::EmptyGroup { group: id })?;
        let deadline = Instant::now() + 2 * WRITE_WAIT;
        let mut ledger = self.ledger()?;
        loop {
            match ledger.begin_finalize(id, oldest) {
                Begin::Write => break,
                Begin::Answer(answer) => return Ok(answer),
                Begin::Elsewhere if Instant::now() >= deadline => {
                    return Err(BufferError::StillWriting { group: id, waited: 2 * WRITE_WAIT });
                }
                Begin::Elsewhere => ledger = self.wait(ledger, deadline)?,
            }
        }
        drop(ledger);
        let written = self.store.append(Arc::new(group), oldest);
        self.ledger()?.end_finalize(id, written.is_ok());
        self.changed.notify_all();
        written.map(|()| Finalized::Accepted)
    }

    fn abort(&self, group: GroupId, retry: bool) -> Result<(), BufferError> {
        self.ledger()?.abort(group, retry)?;
        self.changed.notify_all();
        Ok(())
    }
}

impl<S: Store> Consumer for Buffer<S> {
    fn lease(&self, step: PolicyVersion, wait: Duration) -> Result<Lease, BufferError> {
        let started = Instant::now();
        let deadline = started + wait.min(MAX_WAIT);
        let mut dropped_stale = 0;
        let mut ledger = self.ledger()?;
        let (ids, commit) = loop {
            let attempt = ledger.lease(step)?;
            let mut commit = None;
            if let Some(change) = attempt.change {
                dropped_stale += change.forget.len() as u64;
                commit = Some(self.store.submit(change)?);
                self.changed.notify_all();
            }
            if let Some(ids) = attempt.groups {
                break (ids, commit);
            }
            if Instant::now() >= deadline {
                let (waited, held_for_slow) = (started.elapsed(), ledger.held_for_slow());
                let stats = Box::new(ledger.stats());
                return Err(BufferError::LeaseTimeout { step, waited, held_for_slow, stats });
            }
            ledger = self.wait(ledger, deadline)?;
        };
        drop(ledger);
        if let Some(commit) = commit {
            self.store.wait(&commit)?;
        }
        Ok(Lease { step, groups: self.store.read(&ids)?, dropped_stale })
    }

    fn ack(&self, through: PolicyVersion) -> Result<(), BufferError> {
        let mut ledger = self.ledger()?;
        let Some(change) = ledger.ack(through) else { return Ok(()) };
        let commit = self.store.submit(change)?;
        drop(ledger);
        self.store.wait(&commit)
    }

    fn release(&self, step: PolicyVersion) -> Result<(), BufferError> {
        let mut ledger = self.ledger()?;
        let commit = self.store.submit(ledger.release(step)?)?;
        drop(ledger);
        self.changed.notify_all();
        self.store.wait(&commit)
    }

    fn stats(&self) -> Result<Stats, BufferError> {
        Ok(self.ledger()?.stats())
    }
}

impl<S> fmt::Debug for Buffer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("ledger", &self.ledger).finish_non_exhaustive()
    }
}
