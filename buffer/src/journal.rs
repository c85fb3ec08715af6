//! Groups in one redb file, for runs that survive kill -9.
//!
//! Invariant: after a crash at any moment the file holds exactly the changes whose commit was acknowledged, perhaps
//! followed by some that were on their way. One thread writes: it takes all that is queued into one transaction and one
//! fsync, then acknowledges. Admissions, claims and evictions are not written; the ledger can do without them.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition};
use trajectory::{Group, GroupId, PolicyVersion};

use crate::buffer::WRITE_WAIT;
use crate::ledger::{Change, Mark, Row};
use crate::store::{Commit, Store};
use crate::{Buffer, BufferConfig, BufferError};

/// A buffer that survives its process.
pub type Journal = Buffer<JournalStore>;

/// `format` to a little-endian u64, `mark` to a [`Mark`] in MessagePack.
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
/// Id to oldest version and, if leased, step.
const ROWS: TableDefinition<'_, u64, (u64, Option<u64>)> = TableDefinition::new("rows");
/// Id to the group in MessagePack with named fields, so that a later program can add some.
const PAYLOADS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("payloads");

/// Raised whenever an older program could misread what a newer one wrote.
const FORMAT: u64 = 1;
/// Requests that wait for the writer before a caller has to; more than one transaction should hold.
const QUEUE: usize = 1024;
/// Payloads that one transaction holds, in bytes, before it commits.
const TRANSACTION_BYTES: usize = 64 << 20;
/// Pages that redb keeps in memory, in bytes: payloads are read at most once, after a crash.
const CACHE_BYTES: usize = 64 << 20;

/// The store of [`Journal`].
pub struct JournalStore {
    path: PathBuf,
    database: Arc<Database>,
    /// `None` only while the store is being dropped.
    queue: Option<Sender<Request>>,
    writer: Option<JoinHandle<()>>,
    /// The writer's first failure.
    failure: Arc<Mutex<Option<String>>>,
    /// Groups that are finalized and not leased, so that the first lease need not read; as many as slots.
    fresh: Mutex<HashMap<GroupId, Arc<Group>>>,
}

struct Request {
    write: Write,
    /// Told once, after the fsync.
    done: Sender<()>,
}

enum Write {
    Append { row: Row, payload: Vec<u8> },
    Change(Change),
}

impl Journal {
    /// Opens the journal at `path`, or makes an empty one. Its directory must exist.
    ///
    /// # Errors
    /// A configuration without slots; a file that is locked by another process, not a journal, of a newer format, or
    /// not readable.
    pub fn open(path: impl AsRef<Path>, config: BufferConfig) -> Result<Self, BufferError> {
        let config = config.checked()?;
        let path = path.as_ref();
        let database = open_database(path)?;
        let (rows, mark) = load(path, &database)?;
        let database = Arc::new(database);
        let failure = Arc::new(Mutex::new(None));
        let (queue, requests) = bounded(QUEUE);
        let writer = {
            let (database, failure) = (Arc::clone(&database), Arc::clone(&failure));
            std::thread::Builder::new()
                .name("journal-writer".to_owned())
                .spawn(move || write_until_closed(&database, &requests, &failure))
                .map_err(failed(path, "start the writer"))?
        };
        let store = JournalStore {
            path: path.to_owned(),
            database,
            queue: Some(queue),
            writer: Some(writer),
            failure,
            fresh: Mutex::default(),
        };
        Ok(Self::over(store, config, &rows, mark))
    }
}

impl Store for JournalStore {
    fn append(&self, group: Arc<Group>, oldest: PolicyVersion) -> Result<(), BufferError> {
        let id = group.id;
        let payload = rmp_serde::to_vec_named(&*group).map_err(failed(&self.path, "encode a group"))?;
        let commit = self.send(Write::Append { row: Row { id, oldest, step: None }, payload })?;
        self.wait(&commit)?;
        self.fresh()?.insert(id, group);
        Ok(())
    }

    fn submit(&self, change: Change) -> Result<Commit, BufferError> {
        let mut fresh = self.fresh()?;
        change.forget.iter().for_each(|id| drop(fresh.remove(id)));
        drop(fresh);
        self.send(Write::Change(change))
    }

    fn wait(&self, commit: &Commit) -> Result<(), BufferError> {
        let Commit::Queued(done) = commit else { return Ok(()) };
        done.recv_timeout(WRITE_WAIT).map_err(|error| match error {
            RecvTimeoutError::Timeout => self.timeout(),
            RecvTimeoutError::Disconnected => self.stopped(),
        })
    }

    fn read(&self, ids: &[GroupId]) -> Result<Vec<Arc<Group>>, BufferError> {
        let taken: Vec<Option<Arc<Group>>> = {
            let mut fresh = self.fresh()?;
            ids.iter().map(|id| fresh.remove(id)).collect()
        };
        let path = &self.path;
        let transaction = self.database.begin_read().map_err(failed(path, "read"))?;
        let payloads = transaction.open_table(PAYLOADS).map_err(failed(path, "read"))?;
        let from_disk = |id: GroupId| {
            let payload = payloads.get(id.0).map_err(failed(path, "read a group"))?;
            let payload = payload.ok_or_else(|| failed(path, "read a group")(format!("{id} is missing")))?;
            let group = rmp_serde::from_slice(payload.value()).map_err(failed(path, "decode a group"))?;
            Ok(Arc::new(group))
        };
        ids.iter().zip(taken).map(|(id, group)| group.map_or_else(|| from_disk(*id), Ok)).collect()
    }
}

impl JournalStore {
    fn send(&self, write: Write) -> Result<Commit, BufferError> {
        let (done, receipt) = bounded(1);
        let queue = self.queue.as_ref().ok_or_else(|| self.stopped())?;
        queue.send_timeout(Request { write, done }, WRITE_WAIT).map_err(|error| match error {
            SendTimeoutError::Timeout(_) => self.timeout(),
            SendTimeoutError::Disconnected(_) => self.stopped(),
        })?;
        Ok(Commit::Queued(receipt))
    }

    fn timeout(&self) -> BufferError {
        BufferError::WriteTimeout { path: self.path.clone(), waited: WRITE_WAIT }
    }

    fn stopped(&self) -> BufferError {
        let failure = self.failure.lock().ok().and_then(|failure| failure.clone());
        let cause = failure.unwrap_or_else(|| "it panicked".to_owned());
        BufferError::WriterStopped { path: self.path.clone(), cause }
    }

    fn fresh(&self) -> Result<MutexGuard<'_, HashMap<GroupId, Arc<Group>>>, BufferError> {
        self.fresh.lock().map_err(|_| BufferError::Poisoned)
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

impl fmt::Debug for JournalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournalStore").field("path", &self.path).finish_non_exhaustive()
    }
}

fn failed<E>(path: &Path, action: &'static str) -> impl Fn(E) -> BufferError
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let path = path.to_owned();
    move |error| BufferError::Journal { path: path.clone(), action, source: error.into() }
}

fn open_database(path: &Path) -> Result<Database, BufferError> {
    let not_ours = |found| BufferError::NotAJournal { path: path.to_owned(), found };
    let create = |at: &Path| redb::Builder::new().set_cache_size(CACHE_BYTES).create(at);
    let opened = if path.exists() {
        create(path)
    } else {
        // A process that is killed while it makes a journal leaves half of one: under another name, not in the way.
        let fresh = path.with_extension("new");
        if fresh.exists() {
            std::fs::remove_file(&fresh).map_err(failed(path, "remove what a killed process left of"))?;
        }
        let made = create(&fresh);
        if made.is_ok() {
            std::fs::rename(&fresh, path).map_err(failed(path, "make"))?;
        }
        made
    };
    opened.map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => BufferError::Locked { path: path.to_owned() },
        DatabaseError::Storage(StorageError::Corrupted(what)) => not_ours(what),
        DatabaseError::Storage(StorageError::Io(error))
            if error.kind() == std::io::ErrorKind::InvalidData =>
        {
            not_ours(error.to_string())
        }
        error => failed(path, "open")(error),
    })
}

/// Checks whose file this is and reads all but the payloads.
fn load(path: &Path, database: &Database) -> Result<(Vec<Row>, Mark), BufferError> {
    let stored = read_or_make_tables(database).map_err(failed(path, "read"))?;
    match stored.format {
        Some(found) if found > FORMAT => {
            Err(BufferError::NewerFormat { path: path.to_owned(), found, known: FORMAT })
        }
        Some(_) => {
            let decoded = stored.mark.map(|mark| rmp_serde::from_slice(&mark)).transpose();
            let mark: Option<Mark> = decoded.map_err(failed(path, "decode the mark"))?;
            Ok((stored.rows, mark.unwrap_or_default()))
        }
        None => {
            let found = "a redb file without a journal format".to_owned();
            Err(BufferError::NotAJournal { path: path.to_owned(), found })
        }
    }
}

struct Stored {
    format: Option<u64>,
    mark: Option<Vec<u8>>,
    rows: Vec<Row>,
}

/// Writes only to a file without tables; that of somebody else stays as it is.
fn read_or_make_tables(database: &Database) -> Result<Stored, redb::Error> {
    let transaction = database.begin_write()?;
    let is_new = transaction.list_tables()?.next().is_none();
    let stored = {
        let mut meta = transaction.open_table(META)?;
        if is_new {
            meta.insert("format", FORMAT.to_le_bytes().as_slice())?;
        }
        let format = meta.get("format")?.and_then(|bytes| bytes.value().try_into().ok());
        let mark = meta.get("mark")?.map(|bytes| bytes.value().to_vec());
        transaction.open_table(PAYLOADS)?;
        let mut rows = Vec::new();
        for entry in transaction.open_table(ROWS)?.iter()? {
            let (id, row) = entry?;
            let (oldest, step) = row.value();
            let (oldest, step) = (PolicyVersion(oldest), step.map(PolicyVersion));
            rows.push(Row { id: GroupId(id.value()), oldest, step });
        }
        Stored { format: format.map(u64::from_le_bytes), mark, rows }
    };
    if is_new {
        transaction.commit()?;
    }
    Ok(stored)
}

fn write_until_closed(database: &Database, requests: &Receiver<Request>, failure: &Mutex<Option<String>>) {
    while let Ok(first) = requests.recv() {
        if let Err(error) = write_together(database, first, requests) {
            if let Ok(mut failure) = failure.lock() {
                *failure = Some(error.to_string());
            }
            return;
        }
    }
}

/// One transaction with all that is queued, then the acknowledgements.
fn write_together(
    database: &Database,
    first: Request,
    requests: &Receiver<Request>,
) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    let mut receipts = Vec::new();
    {
        let mut tables =
            (transaction.open_table(META)?, transaction.open_table(ROWS)?, transaction.open_table(PAYLOADS)?);
        let mut bytes = 0;
        let mut next = Some(first);
        while let Some(Request { write, done }) = next {
            bytes += apply(&mut tables, write)?;
            receipts.push(done);
            next = if bytes < TRANSACTION_BYTES { requests.try_recv().ok() } else { None };
        }
    }
    transaction.commit()?;
    for done in receipts {
        // Whoever gave up waiting does not want to hear it.
        let _ = done.send(());
    }
    Ok(())
}

type Tables<'t> = (
    redb::Table<'t, &'static str, &'static [u8]>,
    redb::Table<'t, u64, (u64, Option<u64>)>,
    redb::Table<'t, u64, &'static [u8]>,
);

/// The number of payload bytes written.
fn apply((meta, rows, payloads): &mut Tables<'_>, write: Write) -> Result<usize, redb::Error> {
    let value = |row: &Row| (row.oldest.0, row.step.map(|step| step.0));
    match write {
        Write::Append { row, payload } => {
            rows.insert(row.id.0, value(&row))?;
            payloads.insert(row.id.0, payload.as_slice())?;
            Ok(payload.len())
        }
        Write::Change(change) => {
            for row in &change.rows {
                rows.insert(row.id.0, value(row))?;
            }
            for id in &change.forget {
                rows.remove(id.0)?;
                payloads.remove(id.0)?;
            }
            let mark = rmp_serde::to_vec_named(&change.mark).map_err(std::io::Error::other)?;
            meta.insert("mark", mark.as_slice())?;
            Ok(0)
        }
    }
}
