//! Groups in PostgreSQL: a [`Store`] that survives the loss of a machine, with standbys.
//!
//! Invariant: a write is acknowledged after the commit of its transaction, and every transaction has locked the row of the
//! epoch of this opening (`FOR SHARE`). Another opening increments the epoch first, so afterwards no transaction of this one
//! commits. The ledger is that of every store; the database decides nothing.
//!
//! ```text
//! store      format, owner, epoch         one row; the epoch fences
//! watermarks the watermarks
//! groups     id -> row, and the block and number of its payload      narrow
//! leases     id -> LeaseRow
//! keys       id -> digest of the idempotency key
//! payload_N  number -> payload, of groups whose oldest version is in block N      immutable; dropped with its last group
//! ```
//!
//! One thread has all sessions: two that write in turns (`writer`), one that has the lock of the schema (`keeper`), one that
//! reads (`reader`). The order of writes, and why two sessions keep it, is in `writer`. A lost connection is made again and
//! what was not acknowledged is repeated, with the same epoch, until [`PostgresConfig::outage`] is over.

mod batch;
mod check;
mod keeper;
mod queue;
mod reader;
mod schema;
mod session;
mod settings;
mod tls;
mod writer;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use trajectory::{Group, GroupId, PolicyVersion};

use self::batch::WriteBatch;
pub use self::check::{DatabaseCheck, check_postgres};
use self::queue::{QueuedWrite, WriteQueue};
use self::reader::PayloadReader;
use self::session::DatabaseFailure;
use self::settings::{DatabaseAddress, check_schema_name};
use crate::BufferError;
use crate::http::StorageNotice;
use crate::payload;
use crate::payload_cache::{CachedGroup, PayloadCache};
use crate::store::{AppendGroup, LedgerChange, OpenedStore, Recovered, Store, WriteCompletion};

/// How long the database may be away, by default: shorter than the deadline of a write, longer than a failover.
pub const DEFAULT_OUTAGE: Duration = Duration::from_secs(50);
/// Versions whose groups share a table of payloads.
const BLOCK_VERSIONS: u64 = 64;
/// Largest payload, bytes: a value of PostgreSQL has at most 1 GiB.
const MAX_PAYLOAD_BYTES: u64 = 512 << 20;
/// Longest wait for a thread that ends, beside the deadlines of its own requests, and for one that opens.
const THREAD_WAIT: Duration = Duration::from_secs(600);

/// Where a store is, and who owns it.
#[derive(Clone)]
pub struct PostgresConfig {
    /// Such as `postgres://user@host:5432/database`; several hosts are tried in order for one that accepts writes.
    pub url: String,
    /// The schema of this store, see [`schema_name`](crate::database::schema_name).
    pub schema: String,
    /// Identifies whose groups these are; a schema of another owner is refused.
    pub owner: String,
    /// Whether a missing schema is made.
    pub create: bool,
    /// The variables of libpq (`PGUSER`, `PGPASSWORD` and the others) and `HOME`; what the URL says comes first.
    pub variables: BTreeMap<String, String>,
    /// How long the database may be away before the store has failed.
    pub outage: Duration,
    /// How long to wait for another process that has the schema open.
    pub wait: Duration,
    /// Receives what is worth knowing but no error, such as a setting that slows the database down.
    pub notice: Option<StorageNotice>,
}

/// Opens the store of `config`; makes its schema if it may.
///
/// # Errors
/// [`BufferError::StoreSetup`] for a URL, credentials, a server, a setting or a schema that cannot be used;
/// [`BufferError::StoreInUse`] while another process has the schema open; [`BufferError::Store`] for a database that does not
/// answer.
pub fn open_postgres(config: PostgresConfig) -> Result<OpenedStore, BufferError> {
    PostgresStore::open(config)
}

/// Where a payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StoredPayload {
    /// The table.
    block: u64,
    /// The key in the table.
    number: i64,
    /// XXH64 of the payload.
    digest: u64,
    bytes: u64,
}

/// PostgreSQL as a [`Store`].
struct PostgresStore {
    shared: Arc<StoreShared>,
    reader: PayloadReader,
    /// `None` only during drop.
    thread: Option<JoinHandle<()>>,
}

/// State of an opening that its thread and its callers share.
struct StoreShared {
    config: PostgresConfig,
    address: DatabaseAddress,
    /// The number of this opening: the epoch that every transaction compares.
    epoch: u64,
    queue: WriteQueue,
    payloads: Mutex<PayloadIndex>,
    cache: Mutex<PayloadCache>,
    /// The first failure.
    broken: Mutex<Option<StoreFailure>>,
}

/// Where all stored payloads are.
#[derive(Debug, Default)]
struct PayloadIndex {
    places: HashMap<GroupId, StoredPayload>,
    /// Number of stored groups of each table of payloads.
    blocks: BTreeMap<u64, usize>,
}

/// Why an opening has ended.
#[derive(Clone, Debug)]
enum StoreFailure {
    Deposed { now: u64 },
    Failed { action: &'static str, cause: String },
}

/// What the thread hands over once the store is open.
struct OpenedDatabase {
    shared: Arc<StoreShared>,
    recovered: Recovered,
    runtime: tokio::runtime::Handle,
}

impl PostgresStore {
    fn open(config: PostgresConfig) -> Result<OpenedStore, BufferError> {
        let address = DatabaseAddress::new(&config)?;
        check_schema_name(&config.schema).map_err(|reason| address.setup(reason))?;
        let name = address.name.clone();
        let failed =
            |action, cause: String| BufferError::Store { store: name.clone(), action, source: cause.into() };
        let (opened, result) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("postgres-store".to_owned())
            .spawn(move || run(config, address, &opened))
            .map_err(|error| failed("start its thread", error.to_string()))?;
        let opened = match result.recv_timeout(THREAD_WAIT) {
            Ok(opened) => opened?,
            Err(RecvTimeoutError::Timeout) => {
                return Err(failed("open", "its thread did not answer".to_owned()));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failed("open", "its thread panicked".to_owned()));
            }
        };
        let OpenedDatabase { shared, recovered, runtime } = opened;
        let opening = shared.epoch;
        let reader = PayloadReader::new(Arc::clone(&shared), runtime);
        let store = Self { shared, reader, thread: Some(thread) };
        Ok(OpenedStore { store: Box::new(store), recovered, opening })
    }
}

/// The thread of a store: opens it, and writes until it is dropped or has failed.
fn run(
    config: PostgresConfig,
    address: DatabaseAddress,
    opened: &SyncSender<Result<OpenedDatabase, BufferError>>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let source = Box::new(error);
            let error = BufferError::Store { store: address.name, action: "start its thread", source };
            // The other side waits for this.
            return drop(opened.send(Err(error)));
        }
    };
    let handle = runtime.handle().clone();
    runtime.block_on(async {
        let (schema, recovered) = match schema::open(config, address).await {
            Ok(open) => open,
            Err(error) => return drop(opened.send(Err(error))),
        };
        let schema::OpenSchema { shared, lock, writers, blocks } = schema;
        let made = OpenedDatabase { shared: Arc::clone(&shared), recovered, runtime: handle };
        if opened.send(Ok(made)).is_err() {
            return;
        }
        let keeper = keeper::LockKeeper::new(Arc::clone(&shared), lock);
        writer::DatabaseWriter::new(shared, writers, blocks).run(keeper).await;
    });
}

impl Store for PostgresStore {
    fn append(&self, append: AppendGroup) {
        if let Some(error) = self.failure() {
            return (append.done)(Err(error));
        }
        let bytes = append.payload.len() as u64;
        if bytes > MAX_PAYLOAD_BYTES {
            return (append.done)(Err(BufferError::GroupTooLarge { bytes, limit: MAX_PAYLOAD_BYTES }));
        }
        if let Err((append, waiting)) = self.shared.queue.push_group(Box::new(append)) {
            (append.done)(Err(BufferError::QueueFull { waiting }));
        }
    }

    fn check_capacity(&self) -> Result<(), BufferError> {
        self.shared.queue.check_capacity()
    }

    fn commit(&self, change: LedgerChange, done: WriteCompletion) {
        match self.failure() {
            Some(error) => done(Err(error)),
            // After a failure between these lines the queue drops it, and its completion with it.
            None => self.shared.queue.push_change(change, done),
        }
    }

    fn read(&self, ids: &[GroupId], last_read: bool) -> Result<Vec<Arc<Group>>, BufferError> {
        let found = lock(&self.shared.cache).find(ids, last_read);
        let missing: Vec<GroupId> =
            ids.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|(id, _)| *id).collect();
        if missing.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        let mut read = self.reader.payloads(&missing)?;
        let decode = |(id, found): (&GroupId, Option<Arc<Group>>)| match found {
            Some(group) => Ok(group),
            None => {
                let payload = read.remove(id).ok_or(BufferError::Gone { group: *id })?;
                let group = payload::decode(*id, &payload);
                group.map(Arc::new).map_err(|reason| self.shared.damaged(*id, &reason))
            }
        };
        ids.iter().zip(found).map(decode).collect()
    }

    fn sender(&self, id: GroupId) -> Option<String> {
        payload::sender(self.reader.payloads(&[id]).ok()?.get(&id)?)
    }

    fn is_cached(&self, ids: &[GroupId]) -> bool {
        lock(&self.shared.cache).has(ids)
    }

    fn unacknowledged(&self, waited: Option<Duration>) -> BufferError {
        match waited {
            Some(waited) => {
                let cause = format!("no write was acknowledged within {} s", waited.as_secs());
                self.shared.error("write", cause)
            }
            None => self.shared.stopped(),
        }
    }

    fn failure(&self) -> Option<BufferError> {
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        (ended || lock(&self.shared.broken).is_some()).then(|| self.shared.stopped())
    }

    fn can_be_taken_over(&self) -> bool {
        true
    }
}

impl Drop for PostgresStore {
    fn drop(&mut self) {
        self.shared.queue.close();
        if let Some(thread) = self.thread.take() {
            // The waiting callers already got the panic of the thread.
            drop(thread.join());
        }
    }
}

impl StoreShared {
    /// Ends this opening, for the first reason that there is: nothing is acknowledged any more.
    fn fail(&self, action: &'static str, failure: DatabaseFailure) {
        let failure = match failure {
            DatabaseFailure::Deposed { now } => StoreFailure::Deposed { now },
            DatabaseFailure::Transient(cause) | DatabaseFailure::Permanent(cause) => {
                StoreFailure::Failed { action, cause }
            }
        };
        lock(&self.broken).get_or_insert(failure);
        self.queue.abandon();
    }

    fn is_broken(&self) -> bool {
        lock(&self.broken).is_some()
    }

    /// After a commit: the writes of `batch` take effect here, and are acknowledged.
    fn acknowledge(&self, batch: WriteBatch) {
        let (groups, forgotten, done) = batch.into_parts();
        {
            let mut payloads = lock(&self.payloads);
            let mut cache = lock(&self.cache);
            for id in forgotten {
                payloads.remove(id);
                drop(cache.take(id));
            }
            for (place, group) in groups {
                payloads.insert(group.id, place);
                // A group that replaces one of the same id replaces it here too.
                drop(cache.take(group.id));
                cache.put(group);
            }
        }
        done.into_iter().for_each(|done| done(Ok(())));
    }

    fn error(&self, action: &'static str, cause: String) -> BufferError {
        BufferError::Store { store: self.address.name.clone(), action, source: cause.into() }
    }

    fn damaged(&self, id: GroupId, reason: &str) -> BufferError {
        self.error("read a group", format!("{id} is damaged ({reason}); evict it to continue without it"))
    }

    fn stopped(&self) -> BufferError {
        let store = self.address.name.clone();
        match lock(&self.broken).clone() {
            Some(StoreFailure::Deposed { now }) => BufferError::Deposed { store, opening: self.epoch, now },
            Some(StoreFailure::Failed { action, cause }) => self.error(action, cause),
            None => self.error("write", "its thread has ended".to_owned()),
        }
    }
}

impl PayloadIndex {
    fn insert(&mut self, id: GroupId, place: StoredPayload) {
        self.remove(id);
        self.places.insert(id, place);
        *self.blocks.entry(place.block).or_default() += 1;
    }

    fn remove(&mut self, id: GroupId) {
        let Some(place) = self.places.remove(&id) else { return };
        if let Some(groups) = self.blocks.get_mut(&place.block) {
            *groups -= 1;
        }
    }

    /// Tables of payloads below the newest without a group.
    fn empty_blocks(&self, known: &BTreeSet<u64>) -> Vec<u64> {
        let Some(newest) = known.last() else { return Vec::new() };
        let is_empty = |block: &&u64| self.blocks.get(block).is_none_or(|groups| *groups == 0);
        known.range(..newest).filter(is_empty).copied().collect()
    }
}

impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Neither the URL nor the variables, which may have a password.
        f.debug_struct("PostgresConfig")
            .field("schema", &self.schema)
            .field("owner", &self.owner)
            .field("outage", &self.outage)
            .finish_non_exhaustive()
    }
}

/// The table of payloads for groups whose oldest version is `version`.
fn block_of(version: PolicyVersion) -> u64 {
    version.0 / BLOCK_VERSIONS
}

/// XXH64 of a payload.
fn digest(payload: &[u8]) -> u64 {
    twox_hash::XxHash64::oneshot(0, payload)
}

/// The shared state is valid after every statement, so poisoning is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
