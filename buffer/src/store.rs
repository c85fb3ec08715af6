//! What keeps the groups while the ledger decides about them. Invariant: changes take effect in the order in which they
//! were submitted, each as a whole. A store knows neither slots nor staleness.

use std::sync::Arc;

use crossbeam::channel::Receiver;
use trajectory::{Group, GroupId, PolicyVersion};

use crate::BufferError;
use crate::ledger::Change;

/// Payloads and rows of groups.
pub(crate) trait Store: Send + Sync {
    /// Keeps a group under its id, in the place of an earlier one; returns when it is durable.
    fn append(&self, group: Arc<Group>, oldest: PolicyVersion) -> Result<(), BufferError>;

    /// Queues a change; called under the lock of the ledger, so that the order is the ledger's.
    fn submit(&self, change: Change) -> Result<Commit, BufferError>;

    /// Waits until the change is durable.
    fn wait(&self, commit: &Commit) -> Result<(), BufferError>;

    /// The payloads of leased groups, in the order of `ids`.
    fn read(&self, ids: &[GroupId]) -> Result<Vec<Arc<Group>>, BufferError>;
}

/// A change on its way to the store.
#[derive(Debug)]
pub(crate) enum Commit {
    /// It is there.
    Done,
    /// It is there when this says so; a hang-up means that the writer has stopped.
    Queued(Receiver<()>),
}
