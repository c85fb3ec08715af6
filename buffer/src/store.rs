//! What keeps the groups while the ledger decides about them. Invariant: changes take effect in the order in which they
//! were submitted, each as a whole. A store knows neither slots nor staleness.

use std::sync::Arc;
use std::time::Duration;

use trajectory::{Group, GroupId};

use crate::BufferError;
use crate::ledger::{GroupRow, LedgerChange};

/// The longest that one write may take before the disk counts as dead.
pub(crate) const WRITE_WAIT: Duration = Duration::from_secs(60);

/// Told once, when a write is durable or has failed; dropped untold if the writer broke down. Never blocks.
pub(crate) type WriteCompletion = Box<dyn FnOnce(Result<(), BufferError>) + Send>;

/// A group to be kept.
pub(crate) struct AppendGroup {
    pub(crate) row: GroupRow,
    /// Digest of the key that it came with.
    pub(crate) key: Option<u128>,
    /// The group as [`crate::payload`] encodes it.
    pub(crate) payload: Vec<u8>,
    pub(crate) group: Arc<Group>,
    /// Who sent it; it is part of the payload too.
    pub(crate) sender: Option<String>,
    pub(crate) done: WriteCompletion,
}

/// Payloads and rows of groups.
pub(crate) trait Store: Send + Sync {
    /// Queues a group, in the place of an earlier one with its id. [`BufferError::QueueFull`] if too many wait.
    fn append(&self, append: AppendGroup);

    /// Whether [`Store::submit`] would not have to wait; asked under the lock of the ledger before it is changed.
    ///
    /// # Errors
    /// [`BufferError::QueueFull`].
    fn ready(&self) -> Result<(), BufferError>;

    /// Queues a change; called under the lock of the ledger, so that the order is the ledger's. To wait here would keep
    /// the lock from the writer, which needs it to say what it has done.
    fn submit(&self, change: LedgerChange, done: WriteCompletion);

    /// The payloads of stored groups, in the order of `ids`; `last` of the groups that will not be asked for again
    /// in the ordinary course of things.
    fn read(&self, ids: &[GroupId], last: bool) -> Result<Vec<Arc<Group>>, BufferError>;

    /// Who sent a stored group, if that is known and can be read.
    fn sender(&self, id: GroupId) -> Option<String>;

    /// Whether a read of `ids` needs no disk.
    fn at_hand(&self, ids: &[GroupId]) -> bool;

    /// Why a write was not answered: the writer broke down, or, after `waited`, the disk is dead.
    fn unanswered(&self, waited: Option<Duration>) -> BufferError;

    /// Why nothing can be written any more, if that is so.
    fn failure(&self) -> Option<BufferError>;
}
