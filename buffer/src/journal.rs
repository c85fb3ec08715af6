//! The write-ahead journal: groups in one redb file that survives kill -9.
//!
//! Invariant: after a crash at any moment the file has exactly the acknowledged writes, perhaps followed by some that
//! were not acknowledged. Payloads are immutable; leases and acknowledgements change only narrow rows. Admissions and
//! claims are not written.
//!
//! ```text
//! meta      format, watermarks, openings
//! segments  number -> payloads of one commit   immutable; removed with the last of its groups
//! rows      (oldest version, id) -> GroupRow, and the location of the payload in its segment
//! leases    id -> LeaseRow
//! keys      id -> digest of the idempotency key
//! ```
//!
//! One writer thread does group commit: it takes all queued writes into one transaction, and acknowledges them if the
//! file is still at its path. Each commit also writes the metadata that lets redb open the file after a crash without
//! falling back to an older commit (quick repair), which costs a second fsync. Opening verifies the checksums of the
//! whole file first.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Sender, TrySendError, bounded};
use redb::{ReadableDatabase, StorageBackend};
use serde::{Deserialize, Serialize};
use trajectory::{Group, GroupId};

use crate::BufferError;
use crate::payload;
use crate::payload_cache::PayloadCache;
use crate::store::{
    AppendGroup, CommitTime, GroupRow, LedgerChange, OpenedStore, Store, WRITE_WAIT, WriteCompletion,
};

mod commits;
mod database;
mod file;
mod open;
mod tables;
mod writer;

use commits::CommitLog;
use database::PanicSafeDatabase;
pub(crate) use file::OpenFile;
pub use open::JOURNAL_CACHE_BYTES;
use open::OpenedJournal;
use tables::SEGMENTS;
use writer::JournalWriter;

/// Capacity of the queue of writes; groups beyond it are refused (back-pressure).
const QUEUE: usize = 8192;
/// Part of the queue that groups leave to changes, which cannot be refused.
const QUEUE_FOR_CHANGES: usize = 1024;

/// Location of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PayloadLocation {
    segment: u64,
    offset: u32,
    length: u32,
    /// XXH64 of the payload.
    check: u64,
}

/// A row with the location of its payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct StoredRow {
    row: GroupRow,
    place: PayloadLocation,
}

type PayloadLocations = Mutex<HashMap<GroupId, PayloadLocation>>;

/// The journal as a [`Store`].
pub(crate) struct JournalStore {
    path: PathBuf,
    /// Written by the writer thread alone, which locks it exclusively only for compaction.
    database: Arc<RwLock<PanicSafeDatabase>>,
    places: Arc<PayloadLocations>,
    cache: Arc<Mutex<PayloadCache>>,
    /// `None` only during drop.
    queue: Option<Sender<WriteRequest>>,
    writer: Option<JoinHandle<()>>,
    /// The first failure of the writer.
    broken: Arc<Mutex<Option<WriterFailure>>>,
    /// `None` in a storage that is not a file.
    file: Option<Arc<OpenFile>>,
    commits: Arc<CommitLog>,
}

/// Why the writer has stopped.
#[derive(Clone, Debug)]
enum WriterFailure {
    /// A write failed.
    Failed(String),
    /// The file was moved: what is at its path now.
    Moved(String),
}

/// A queued write.
enum WriteRequest {
    Append(AppendGroup),
    Change(LedgerChange, WriteCompletion),
}

impl JournalStore {
    /// Opens the journal at `path`, or makes a new one; the file is for [`Buffer::reopen`](crate::Buffer::reopen).
    ///
    /// # Errors
    /// Those of [`Buffer::open`](crate::Buffer::open).
    pub(crate) fn open(
        path: &Path,
        compact_above: u64,
    ) -> Result<(OpenedStore, Option<Arc<OpenFile>>), BufferError> {
        let opened = open::file(path)?;
        let file = opened.file.clone();
        Ok((Self::start(path, opened, compact_above)?, file))
    }

    /// A journal in another storage.
    ///
    /// # Errors
    /// Those of [`Buffer::open`](crate::Buffer::open).
    pub(crate) fn open_on(
        backend: impl StorageBackend,
        compact_above: u64,
    ) -> Result<OpenedStore, BufferError> {
        let path = Path::new("(in a storage that is not a file)");
        Self::start(path, open::backend(path, backend)?, compact_above)
    }

    fn start(path: &Path, opened: OpenedJournal, compact_above: u64) -> Result<OpenedStore, BufferError> {
        let OpenedJournal { database, recovered, places, opening, file_bytes, file } = opened;
        let database = Arc::new(RwLock::new(database));
        let places = Arc::new(Mutex::new(places));
        let (cache, broken) = (Arc::default(), Arc::default());
        let (queue, requests) = bounded(QUEUE);
        let writer = JournalWriter::new(
            path,
            Arc::clone(&database),
            Arc::clone(&places),
            Arc::clone(&cache),
            Arc::clone(&broken),
            file.clone(),
            writer::CompactionState { peak: file_bytes, compact_above },
        );
        let commits = writer.commits();
        let writer = std::thread::Builder::new()
            .name("journal-writer".to_owned())
            .spawn(move || writer.run(&requests))
            .map_err(failed(path, "start the writer"))?;
        let journal = Self {
            path: path.to_owned(),
            database,
            places,
            cache,
            queue: Some(queue),
            writer: Some(writer),
            broken,
            file,
            commits,
        };
        Ok(OpenedStore { store: Box::new(journal), recovered, opening })
    }

    fn stopped(&self) -> BufferError {
        stopped(&self.path, &self.broken)
    }
}

impl Store for JournalStore {
    fn append(&self, append: AppendGroup) {
        let Some(queue) = self.queue.as_ref() else { return (append.done)(Err(self.stopped())) };
        let waiting = queue.len();
        if waiting >= QUEUE - QUEUE_FOR_CHANGES {
            return (append.done)(Err(BufferError::QueueFull { waiting }));
        }
        match queue.try_send(WriteRequest::Append(append)) {
            Ok(()) => {}
            Err(TrySendError::Full(request)) => request.done(Err(BufferError::QueueFull { waiting })),
            Err(TrySendError::Disconnected(request)) => request.done(Err(self.stopped())),
        }
    }

    fn check_capacity(&self) -> Result<(), BufferError> {
        // Changes are queued under the lock of the ledger, and groups leave them capacity.
        let waiting = self.queue.as_ref().map_or(0, Sender::len);
        if waiting + QUEUE_FOR_CHANGES / 2 > QUEUE { Err(BufferError::QueueFull { waiting }) } else { Ok(()) }
    }

    fn commit(&self, change: LedgerChange, done: WriteCompletion) {
        let Some(queue) = self.queue.as_ref() else { return done(Err(self.stopped())) };
        if let Err(error) = queue.send_timeout(WriteRequest::Change(change, done), WRITE_WAIT) {
            let timeout = error.is_timeout();
            let error_to_tell = if timeout { self.unacknowledged(Some(WRITE_WAIT)) } else { self.stopped() };
            error.into_inner().done(Err(error_to_tell));
        }
    }

    fn read(&self, ids: &[GroupId], last_read: bool) -> Result<Vec<Arc<Group>>, BufferError> {
        let found = lock(&self.cache).find(ids, last_read);
        if found.iter().all(Option::is_some) {
            return Ok(found.into_iter().flatten().collect());
        }
        // redb panics on some kinds of damage.
        catch_unwind(AssertUnwindSafe(|| self.read_missing(ids, found)))
            .unwrap_or_else(|panic| Err(failed(&self.path, "read a group")(open::panic_text(panic.as_ref()))))
    }

    fn sender(&self, id: GroupId) -> Option<String> {
        let place = lock(&self.places).get(&id).copied()?;
        // redb panics on some kinds of damage.
        let read = catch_unwind(AssertUnwindSafe(|| {
            let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
            let transaction = database.begin_read().ok()?;
            let segments = transaction.open_table(SEGMENTS).ok()?;
            let segment = segments.get(place.segment).ok()??;
            payload::sender(place.payload(segment.value()).ok()?)
        }));
        read.ok()?
    }

    fn is_cached(&self, ids: &[GroupId]) -> bool {
        lock(&self.cache).has(ids)
    }

    fn unacknowledged(&self, waited: Option<Duration>) -> BufferError {
        match waited {
            Some(waited) => BufferError::WriteTimeout { path: self.path.clone(), waited },
            None => self.stopped(),
        }
    }

    fn take_commits(&self) -> Vec<CommitTime> {
        self.commits.take()
    }

    fn failure(&self) -> Option<BufferError> {
        if let Some(found) = self.file.as_ref().and_then(|file| file.moved()) {
            lock(&self.broken).get_or_insert(WriterFailure::Moved(found));
        }
        let ended = self.writer.as_ref().is_none_or(JoinHandle::is_finished);
        (ended || lock(&self.broken).is_some()).then(|| self.stopped())
    }
}

impl JournalStore {
    /// Reads the groups that are not in `found`; consecutive groups of a segment read it once.
    fn read_missing(
        &self,
        ids: &[GroupId],
        found: Vec<Option<Arc<Group>>>,
    ) -> Result<Vec<Arc<Group>>, BufferError> {
        let path = &self.path;
        let places: Vec<Option<PayloadLocation>> = {
            let places = lock(&self.places);
            ids.iter().map(|id| places.get(id).copied()).collect()
        };
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let transaction = database.begin_read().map_err(failed(path, "read"))?;
        let segments = transaction.open_table(SEGMENTS).map_err(failed(path, "read"))?;
        let mut current = None;
        let mut groups = Vec::with_capacity(ids.len());
        for ((&id, place), found) in ids.iter().zip(places).zip(found) {
            if let Some(group) = found {
                groups.push(group);
                continue;
            }
            let place = place.ok_or(BufferError::Gone { group: id })?;
            if current.as_ref().is_none_or(|(number, _)| *number != place.segment) {
                let segment = segments.get(place.segment).map_err(failed(path, "read a group"))?;
                current = Some((place.segment, segment.ok_or_else(|| self.without_segment(id))?));
            }
            let segment = current.as_ref().map_or(&[][..], |(_, segment)| segment.value());
            let group = place.decode(id, segment);
            groups.push(Arc::new(group.map_err(|reason| BufferError::Damaged {
                path: path.clone(),
                group: id,
                reason,
            })?));
        }
        Ok(groups)
    }
}

impl JournalStore {
    /// A segment is missing: the group was removed meanwhile, or the file is damaged.
    fn without_segment(&self, group: GroupId) -> BufferError {
        if lock(&self.places).contains_key(&group) {
            let reason = "its segment is missing".to_owned();
            BufferError::Damaged { path: self.path.clone(), group, reason }
        } else {
            BufferError::Gone { group }
        }
    }
}

impl PayloadLocation {
    /// Decodes the group from its segment; or why its bytes differ from what was written.
    fn decode(&self, id: GroupId, segment: &[u8]) -> Result<Group, String> {
        payload::decode(id, self.payload(segment)?)
    }

    /// The bytes of the payload.
    fn payload<'s>(&self, segment: &'s [u8]) -> Result<&'s [u8], String> {
        let (start, length) = (self.offset as usize, self.length as usize);
        let bytes = segment.get(start..start.saturating_add(length)).ok_or_else(|| {
            format!("its segment has {} bytes, it ends at {}", segment.len(), start + length)
        })?;
        if check(bytes) != self.check {
            return Err("its checksum is wrong".to_owned());
        }
        Ok(bytes)
    }
}

impl WriteRequest {
    fn done(self, result: Result<(), BufferError>) {
        match self {
            Self::Append(AppendGroup { done, .. }) | Self::Change(_, done) => done(result),
        }
    }
}

impl Drop for JournalStore {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take() {
            // The waiting callers already got the panic of the writer.
            drop(writer.join());
        }
    }
}

/// The shared state is valid after every statement, so poisoning is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check(payload: &[u8]) -> u64 {
    twox_hash::XxHash64::oneshot(0, payload)
}

fn stopped(path: &Path, broken: &Mutex<Option<WriterFailure>>) -> BufferError {
    let path = path.to_owned();
    match lock(broken).clone() {
        Some(WriterFailure::Moved(found)) => BufferError::JournalMoved { path, found },
        Some(WriterFailure::Failed(cause)) => BufferError::WriterStopped { path, cause },
        None => BufferError::WriterStopped { path, cause: "it panicked".to_owned() },
    }
}

fn failed<E>(path: &Path, action: &'static str) -> impl Fn(E) -> BufferError
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let path = path.to_owned();
    move |error| BufferError::Journal { path: path.clone(), action, source: error.into() }
}
