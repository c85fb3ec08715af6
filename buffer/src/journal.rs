//! Groups in one redb file, for runs that survive kill -9.
//!
//! Invariant: after a crash at any moment the file holds exactly the changes whose commit was acknowledged, perhaps
//! followed by some that were on their way. Payloads are written once and never changed; leases and acknowledgements
//! touch only narrow rows. Admissions and claims are not written; the ledger can do without them.
//!
//! ```text
//! meta      format, mark, openings          what no row says
//! segments  number -> payloads in a row     immutable; gone when the last of its groups is forgotten
//! rows      (oldest version, id) -> what is known of a group, and where in which segment it is
//! leases    id -> consumer, step, groups
//! keys      id -> digest of the key that the group came with
//! ```
//!
//! One thread writes: it takes all that is queued into one transaction, then acknowledges, if the file is still at its path.
//! Each commit also writes what
//! redb needs to open the file after a crash without falling back to an older commit (quick repair), which costs a second
//! fsync. Opening compares the checksums of the whole file before it trusts any of it.

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
use crate::store::{AppendGroup, GroupRow, LedgerChange, OpenedStore, Store, WRITE_WAIT, WriteCompletion};

mod database;
mod file;
mod open;
mod tables;
mod writer;

use database::PanicSafeDatabase;
pub(crate) use file::OpenFile;
pub use open::JOURNAL_CACHE_BYTES;
use open::OpenedJournal;
use tables::SEGMENTS;
use writer::JournalWriter;

/// Writes that wait for the writer; groups beyond are refused.
const QUEUE: usize = 8192;
/// Of those, places that groups leave to changes, which cannot be refused.
const QUEUE_FOR_CHANGES: usize = 1024;
/// Bytes of groups, as they are in memory, that are also kept there until they are leased, so that the first lease need
/// not read.
const AT_HAND_BYTES: u64 = 256 << 20;

/// Where a payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PayloadLocation {
    segment: u64,
    offset: u32,
    length: u32,
    /// XXH64 of the payload.
    check: u64,
}

/// A row as it is written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct StoredRow {
    row: GroupRow,
    place: PayloadLocation,
}

type PayloadLocations = Mutex<HashMap<GroupId, PayloadLocation>>;

/// The store of a buffer that survives its process.
pub(crate) struct JournalStore {
    path: PathBuf,
    /// Written by the writer alone, who needs it exclusively only to give disk space back.
    database: Arc<RwLock<PanicSafeDatabase>>,
    places: Arc<PayloadLocations>,
    at_hand: Arc<Mutex<PayloadCache>>,
    /// `None` only while the store is being dropped.
    queue: Option<Sender<WriteRequest>>,
    writer: Option<JoinHandle<()>>,
    /// The writer's first failure.
    broken: Arc<Mutex<Option<WriterFailure>>>,
    /// `None` in a storage that is not a file.
    file: Option<Arc<OpenFile>>,
}

/// Why the writer has stopped.
#[derive(Clone, Debug)]
enum WriterFailure {
    /// It cannot write.
    Failed(String),
    /// It writes where nobody will look: what is found in place of the file.
    Moved(String),
}

/// What the writer is asked for.
enum WriteRequest {
    Append(AppendGroup),
    Change(LedgerChange, WriteCompletion),
}

/// Groups in memory, as many as fit.
#[derive(Debug, Default)]
struct PayloadCache {
    groups: HashMap<GroupId, (Arc<Group>, u64)>,
    bytes: u64,
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

    /// The same in another storage.
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
        let (at_hand, broken) = (Arc::default(), Arc::default());
        let (queue, requests) = bounded(QUEUE);
        let writer = JournalWriter::new(
            path,
            Arc::clone(&database),
            Arc::clone(&places),
            Arc::clone(&at_hand),
            Arc::clone(&broken),
            file.clone(),
            writer::CompactionState { peak: file_bytes, compact_above },
        );
        let writer = std::thread::Builder::new()
            .name("journal-writer".to_owned())
            .spawn(move || writer.run(&requests))
            .map_err(failed(path, "start the writer"))?;
        let journal = Self {
            path: path.to_owned(),
            database,
            places,
            at_hand,
            queue: Some(queue),
            writer: Some(writer),
            broken,
            file,
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
        // Changes are queued under the lock that the caller holds, and groups leave them room.
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
        let found: Vec<Option<Arc<Group>>> = {
            let mut at_hand = lock(&self.at_hand);
            ids.iter().map(|id| if last_read { at_hand.take(*id) } else { at_hand.get(*id) }).collect()
        };
        if found.iter().all(Option::is_some) {
            return Ok(found.into_iter().flatten().collect());
        }
        // redb panics when it meets some kinds of damage.
        catch_unwind(AssertUnwindSafe(|| self.read_missing(ids, found)))
            .unwrap_or_else(|panic| Err(failed(&self.path, "read a group")(open::panic_text(panic.as_ref()))))
    }

    fn sender(&self, id: GroupId) -> Option<String> {
        let place = lock(&self.places).get(&id).copied()?;
        // redb panics when it meets some kinds of damage.
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
        let at_hand = lock(&self.at_hand);
        ids.iter().all(|id| at_hand.groups.contains_key(id))
    }

    fn unacknowledged(&self, waited: Option<Duration>) -> BufferError {
        match waited {
            Some(waited) => BufferError::WriteTimeout { path: self.path.clone(), waited },
            None => self.stopped(),
        }
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
    /// Reads from the file what is not in `found`; each segment once if its groups are asked for in a row.
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
    /// The segment of a group is not there: somebody forgot the group meanwhile, or the file is damaged.
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
    /// The group in its segment, or how one sees that it is not what was written.
    fn decode(&self, id: GroupId, segment: &[u8]) -> Result<Group, String> {
        payload::decode(id, self.payload(segment)?)
    }

    /// Its bytes.
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

impl PayloadCache {
    fn put(&mut self, id: GroupId, group: Arc<Group>, bytes: u64) {
        if self.bytes + bytes <= AT_HAND_BYTES {
            self.bytes += bytes;
            self.groups.insert(id, (group, bytes));
        }
    }

    fn get(&self, id: GroupId) -> Option<Arc<Group>> {
        self.groups.get(&id).map(|(group, _)| Arc::clone(group))
    }

    fn take(&mut self, id: GroupId) -> Option<Arc<Group>> {
        let (group, bytes) = self.groups.remove(&id)?;
        self.bytes -= bytes;
        Some(group)
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
            // A panic of the writer was already reported to whoever waited for it.
            drop(writer.join());
        }
    }
}

/// What is shared is valid after every statement, so that a panic elsewhere does not spoil it.
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
