//! The async half of a buffer, for a server: waits hold no thread.
//!
//! Invariant: each method behaves like the method of the same name in [`Producer`](crate::Producer) or
//! [`Consumer`](crate::Consumer), with the same deadlines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use trajectory::{GroupId, PolicyVersion};

use super::{Buffer, MAX_WAIT};
use crate::http::Reopen;
use crate::ledger::{ArrivalDecision, Ledger};
use crate::payload::{IncomingGroup, PreparedGroup};
use crate::store::{WRITE_WAIT, WriteCompletion};
use crate::{AdmitRequest, BufferError, Finalized, Lease, LeaseRequest, Submitted};

type CompletionFuture = oneshot::Receiver<Result<(), BufferError>>;

/// A group being appended: answered, waiting for the disk, or waiting for another call that writes the same group.
enum PendingAppend {
    Answered(Result<Submitted, BufferError>),
    Writing(GroupId, CompletionFuture),
    Elsewhere(GroupId, Box<PreparedGroup>),
}

impl Buffer {
    /// A function that opens the journal again after its storage failed, if the file at its path is still the same:
    /// no other file has what was acknowledged. `None` for a buffer that is not in a file.
    #[must_use]
    pub fn reopen(&self) -> Option<Reopen> {
        let (file, config) = (Arc::clone(self.file.as_ref()?), self.config);
        Some(Arc::new(move || {
            file.still_there()?;
            Self::open(file.path(), config)
        }))
    }

    /// The policy version of the trainer; unlike [`Consumer::stats`](crate::Consumer::stats) it counts nothing.
    pub(crate) fn policy_version(&self) -> Result<PolicyVersion, BufferError> {
        Ok(self.shared.ledger()?.policy_version())
    }

    pub(crate) async fn admit_async(
        &self,
        request: AdmitRequest,
        wait: Duration,
    ) -> Result<Vec<GroupId>, BufferError> {
        let deadline = Instant::now() + wait.min(MAX_WAIT);
        loop {
            let changed = self.shared.slots_freed.tasks.notified();
            let until = {
                let mut ledger = self.shared.ledger()?;
                let ids = self.try_admit(&mut ledger, request)?;
                if request.limit == 0 || !ids.is_empty() || Instant::now() >= deadline {
                    return Ok(ids);
                }
                self.shared.until(&ledger, deadline)
            };
            // On timeout and on the signal, the loop checks again.
            let _ = tokio::time::timeout_at(until.into(), changed).await;
        }
    }

    pub(crate) async fn lease_async(
        self: &Arc<Self>,
        request: &LeaseRequest,
        wait: Duration,
    ) -> Result<Lease, BufferError> {
        let started = Instant::now();
        let deadline = started + wait.min(MAX_WAIT);
        loop {
            let changed = self.shared.batch_changed.tasks.notified();
            let (done, completed) = completion();
            let last_call = Instant::now() >= deadline;
            let attempt = {
                let mut ledger = self.shared.ledger()?;
                match self.try_lease(&mut ledger, request, last_call, done)? {
                    Some(leased) => Ok(leased),
                    None if last_call => return Err(self.no_batch(&ledger, request, started.elapsed())),
                    None => Err(self.shared.until(&ledger, deadline)),
                }
            };
            match attempt {
                Ok(leased) => {
                    self.wait_for_async(completed).await?;
                    if self.store.is_cached(&leased.groups) {
                        return self.handed_out(request, leased);
                    }
                    let (buffer, request) = (Arc::clone(self), request.clone());
                    let read = tokio::task::spawn_blocking(move || buffer.handed_out(&request, leased));
                    return read.await.unwrap_or(Err(BufferError::Poisoned));
                }
                // On timeout and on the signal, the loop checks again.
                Err(until) => drop(tokio::time::timeout_at(until.into(), changed).await),
            }
        }
    }

    /// Stores several groups: they are queued at once and share a commit.
    pub(crate) async fn append_async(
        &self,
        incoming: Vec<IncomingGroup>,
    ) -> Vec<Result<Submitted, BufferError>> {
        let underway: Vec<PendingAppend> =
            incoming.into_iter().map(|incoming| self.start(incoming)).collect();
        let mut answers = Vec::with_capacity(underway.len());
        for group in underway {
            answers.push(match group {
                PendingAppend::Answered(answer) => answer,
                PendingAppend::Writing(group, completed) => self.written(group, completed).await,
                PendingAppend::Elsewhere(_, prepared) => self.after_others(*prepared).await,
            });
        }
        answers
    }

    /// Changes the ledger and waits until the change is durable.
    pub(crate) async fn settle_async<T>(
        &self,
        change: impl FnOnce(&mut Ledger, u64) -> Result<T, BufferError>,
    ) -> Result<T, BufferError> {
        let (done, completed) = completion();
        let result = {
            let mut ledger = self.shared.ledger()?;
            self.store.check_capacity()?;
            let result = change(&mut ledger, self.shared.now());
            self.commit(&mut ledger, done);
            result
        };
        self.shared.notify();
        self.wait_for_async(completed).await?;
        result
    }

    pub(crate) async fn extend_async(
        &self,
        lease: crate::LeaseId,
        hold: Duration,
    ) -> Result<(), BufferError> {
        let hold_ms = crate::ledger::millis(hold);
        self.settle_async(|ledger, now| ledger.extend(lease, hold_ms, now)).await
    }

    pub(crate) async fn ack_async(&self, lease: crate::LeaseId) -> Result<(), BufferError> {
        self.settle_async(|ledger, _| ledger.ack(lease)).await
    }

    pub(crate) async fn ack_through_async(
        &self,
        consumer: &str,
        through: PolicyVersion,
    ) -> Result<(), BufferError> {
        self.settle_async(|ledger, _| ledger.ack_through(consumer, through)).await
    }

    pub(crate) async fn release_async(&self, lease: crate::LeaseId) -> Result<(), BufferError> {
        self.settle_async(|ledger, _| ledger.release(lease)).await
    }

    pub(crate) async fn set_version_async(
        &self,
        version: PolicyVersion,
        rewind: bool,
    ) -> Result<(), BufferError> {
        self.settle_async(|ledger, _| ledger.set_version(version, rewind)).await
    }

    pub(crate) async fn evict_async(&self, group: GroupId) -> Result<bool, BufferError> {
        self.settle_async(|ledger, _| Ok(ledger.evict(group))).await
    }

    pub(crate) async fn evict_below_async(&self, version: PolicyVersion) -> Result<u64, BufferError> {
        self.settle_async(|ledger, _| Ok(ledger.evict_below(version))).await
    }

    pub(crate) async fn quarantine_async(&self, group: GroupId) -> Result<bool, BufferError> {
        self.settle_async(|ledger, _| Ok(ledger.quarantine(group))).await
    }

    fn start(&self, incoming: IncomingGroup) -> PendingAppend {
        match PreparedGroup::new(incoming, self.config.dedup) {
            Ok(prepared) => self.start_prepared(prepared),
            Err(error) => PendingAppend::Answered(Err(error)),
        }
    }

    fn start_prepared(&self, prepared: PreparedGroup) -> PendingAppend {
        match self.begin(&prepared) {
            Err(error) => PendingAppend::Answered(Err(error)),
            Ok(ArrivalDecision::Answer(group, answer)) => {
                PendingAppend::Answered(Ok(Submitted { answer, group }))
            }
            Ok(ArrivalDecision::Elsewhere(group)) => PendingAppend::Elsewhere(group, Box::new(prepared)),
            Ok(ArrivalDecision::Write { group, keep }) => {
                let (done, completed) = completion();
                self.write(prepared, group, &keep, done);
                PendingAppend::Writing(group, completed)
            }
        }
    }

    async fn written(&self, group: GroupId, completed: CompletionFuture) -> Result<Submitted, BufferError> {
        match self.wait_for_async(completed).await {
            Ok(()) => Ok(Submitted { answer: Finalized::Accepted, group: Some(group) }),
            Err(BufferError::QueueFull { .. }) => Ok(Submitted { answer: Finalized::Full, group: None }),
            Err(error) => Err(error),
        }
    }

    /// Waits for the other call that writes the same group, then starts again.
    async fn after_others(&self, mut prepared: PreparedGroup) -> Result<Submitted, BufferError> {
        let deadline = Instant::now() + 2 * WRITE_WAIT;
        loop {
            let changed = self.shared.batch_changed.tasks.notified();
            let group = match self.start_prepared(prepared) {
                PendingAppend::Answered(answer) => return answer,
                PendingAppend::Writing(group, completed) => return self.written(group, completed).await,
                PendingAppend::Elsewhere(group, again) => {
                    prepared = *again;
                    group
                }
            };
            if tokio::time::timeout_at(deadline.into(), changed).await.is_err() {
                return Err(BufferError::StillWriting { group, waited: 2 * WRITE_WAIT });
            }
        }
    }

    async fn wait_for_async(&self, completed: CompletionFuture) -> Result<(), BufferError> {
        match tokio::time::timeout(WRITE_WAIT, completed).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(self.store.unacknowledged(None)),
            Err(_) => Err(self.store.unacknowledged(Some(WRITE_WAIT))),
        }
    }
}

fn completion() -> (WriteCompletion, CompletionFuture) {
    let (sender, receiver) = oneshot::channel();
    // The receiver may have given up waiting.
    (Box::new(move |result| drop(sender.send(result))), receiver)
}
