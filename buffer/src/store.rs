//! The storage seam: what the ledger needs of a store, memory, a file or a database.
//!
//! The `Ledger` decides and a [`Store`] keeps. The ledger is a state machine in memory, behind a lock, in
//! one process. A store knows neither slots nor staleness. It keeps two kinds of data: immutable payloads, and narrow
//! records (rows, leases, keys, watermarks). [`Recovered`] is all records: from it the ledger continues after a restart.
//!
//! # What a store guarantees
//! - *Order and atomicity.* Writes take effect in the order of the calls of [`Store::commit`], each as a whole. An
//!   [`AppendGroup`] that was called before a change may take effect after it, since no change concerns a group before
//!   its append was acknowledged.
//! - *Group commit.* Writes are queued, and a store commits as many of them together as it likes: one fsync, or one
//!   transaction, for all. [`Store::append`] and [`Store::commit`] never wait for the disk.
//! - *Asynchronous acknowledgement.* Each write has a one-shot [`WriteCompletion`]. The store calls it after the write is
//!   durable, or with the error. If it drops it instead, waiting callers ask [`Store::unacknowledged`] for the reason.
//! - *Failure.* After the first write that failed no later one is acknowledged, and [`Store::failure`] says why. Another
//!   opening recovers: every acknowledged write is there, and of the others any prefix.
//! - *Fencing.* If the data can be opened twice, then after the second opening no write of the first is acknowledged. The
//!   journal locks its file and compares the file at its path after every commit. A database compares an epoch, which each
//!   opening increments, in every transaction.
//! - *Back-pressure.* A store that has too many queued writes refuses groups with [`BufferError::QueueFull`], and always
//!   leaves capacity for changes, which cannot be refused once the ledger has made them.
//!
//! A lease is one [`LedgerChange`] with the lease's record. An acknowledgement is one with the groups to forget, and a
//! rewind is several, each of them consistent. Admissions and claims are not written: the watermarks of the next change
//! cover them, and after a crash the ledger admits those groups again.
//!
//! `buffer::conformance` tests all this; a store in another crate runs it in its own tests, with the feature
//! `conformance`.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use trajectory::{Group, GroupId};

use crate::BufferError;
use crate::journal::JournalStore;
pub use crate::ledger::{GroupRow, LeaseRow, LeaseState, LedgerChange, Recovered, Watermarks};
use crate::memory::MemoryStore;
pub use crate::payload::{decode as decode_payload, encode_group, sender as payload_sender};

/// Deadline of one write: afterwards the store counts as failed.
pub(crate) const WRITE_WAIT: Duration = Duration::from_secs(60);

/// One-shot completion of a write: called with `Ok` once the write is durable, or with the error. It never blocks. A store
/// that drops it uncalled has failed.
pub type WriteCompletion = Box<dyn FnOnce(Result<(), BufferError>) + Send>;

/// A commit of a store, seconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CommitTime {
    /// When it began.
    pub start: f64,
    /// When it was durable.
    pub end: f64,
}

/// A group to be stored.
pub struct AppendGroup {
    /// Its row.
    pub row: GroupRow,
    /// Digest of its idempotency key, if it has one; see [`Recovered::keys`].
    pub key: Option<u128>,
    /// The encoded group: what a durable store keeps, to be decoded by [`decode_payload`].
    pub payload: Vec<u8>,
    /// The same group decoded, for a cache.
    pub group: Arc<Group>,
    /// Its sender, which is part of the payload too.
    pub sender: Option<String>,
    /// Called when the group is durable.
    pub done: WriteCompletion,
}

/// A store that was opened, with the records that it recovered.
pub struct OpenedStore {
    /// The store.
    pub store: Box<dyn Store>,
    /// Its records.
    pub recovered: Recovered,
    /// How often this data has been opened, including this time; from 1. Ids of events ascend over openings.
    pub opening: u64,
}

/// An empty store in memory, which loses everything when it is dropped.
#[must_use]
pub fn open_memory() -> OpenedStore {
    MemoryStore::open()
}

/// The store in the journal at `path`, a new one if there is none. It is compacted when it is mostly empty and has once had
/// `compact_above` bytes.
///
/// # Errors
/// Those of [`Buffer::open`](crate::Buffer::open).
pub fn open_journal(path: impl AsRef<Path>, compact_above: u64) -> Result<OpenedStore, BufferError> {
    JournalStore::open(path.as_ref(), compact_above).map(|(opened, _)| opened)
}

impl fmt::Debug for AppendGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AppendGroup").field("row", &self.row).finish_non_exhaustive()
    }
}

impl fmt::Debug for OpenedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedStore").field("opening", &self.opening).finish_non_exhaustive()
    }
}

/// Payloads and records of groups. See the module for what it guarantees.
pub trait Store: Send + Sync {
    /// Queues a group; it replaces a stored group of the same id. Completes with [`BufferError::QueueFull`] if too many
    /// writes are queued.
    fn append(&self, append: AppendGroup);

    /// Checks that [`Store::commit`] would not wait. The buffer calls it under the lock of the ledger, before it changes
    /// the ledger.
    ///
    /// # Errors
    /// [`BufferError::QueueFull`].
    fn check_capacity(&self) -> Result<(), BufferError>;

    /// Queues a change. The buffer calls it under the lock of the ledger, so the order of calls is the ledger's order. It
    /// must not wait for a completion: completions take the same lock.
    fn commit(&self, change: LedgerChange, done: WriteCompletion);

    /// The stored groups `ids`, in this order. `last_read`: they are unlikely to be read again, and can leave a cache.
    ///
    /// # Errors
    /// [`BufferError::Gone`] for a group that is not stored; a store that cannot read, or reads damaged data.
    fn read(&self, ids: &[GroupId], last_read: bool) -> Result<Vec<Arc<Group>>, BufferError>;

    /// The sender of a stored group, if it is known and readable.
    fn sender(&self, id: GroupId) -> Option<String>;

    /// Whether [`Store::read`] of `ids` returns without waiting for a disk or a network. Otherwise a server reads on a
    /// thread for blocking work.
    fn is_cached(&self, ids: &[GroupId]) -> bool;

    /// Why a write was not acknowledged: its completion was dropped (`None`), or the deadline passed after `waited`.
    fn unacknowledged(&self, waited: Option<Duration>) -> BufferError;

    /// Why nothing can be written any more; `None` while the store works. A failed store has to be opened again.
    fn failure(&self) -> Option<BufferError>;

    /// The longest commits since the last call, at most 64, in order; none of a store that has no disk of its own.
    fn take_commits(&self) -> Vec<CommitTime> {
        Vec::new()
    }

    /// Whether another process can take the data over while this one has it open. Then only a durable write proves that it has
    /// not happened.
    fn can_be_taken_over(&self) -> bool {
        false
    }
}
