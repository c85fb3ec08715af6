//! Opening a journal: identification, verification, and recovery of all records.
//!
//! Invariant: a file that is not a journal is not changed. Any bytes give a journal or an error, never a panic.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageBackend, StorageError};
use serde::de::DeserializeOwned;
use trajectory::GroupId;

use super::database::PanicSafeDatabase;
use super::file::OpenFile;
use super::tables::{FORMAT, KEYS, LEASES, META, OLDEST_FORMAT, ROWS, SEGMENTS};
use super::{PayloadLocation, StoredRow, failed};
use crate::ledger::Recovered;
use crate::{BufferError, LeaseId};

/// Size of redb's page cache, bytes: payloads are read rarely.
pub const JOURNAL_CACHE_BYTES: u64 = 64 << 20;

/// An open journal with its records.
pub(super) struct OpenedJournal {
    pub(super) database: PanicSafeDatabase,
    pub(super) recovered: Recovered,
    pub(super) places: HashMap<GroupId, PayloadLocation>,
    /// Number of openings, including this one.
    pub(super) opening: u64,
    /// Bytes of the file; 0 if it is not a file.
    pub(super) file_bytes: u64,
    /// The file, if it is one.
    pub(super) file: Option<Arc<OpenFile>>,
}

/// Opens the journal in a file, or makes a new one.
pub(super) fn file(path: &Path) -> Result<OpenedJournal, BufferError> {
    let create = |at: &Path| {
        unpanicked(path, || redb::Builder::new().set_cache_size(JOURNAL_CACHE_BYTES as usize).create(at))
    };
    let database = if path.exists() {
        create(path)?
    } else {
        // A process that is killed while it makes a journal leaves an incomplete file, so a new journal is made under
        // another name. A power cut may leave a journal in use under that name.
        let fresh = path.with_extension("new");
        if fresh.exists() && !is_journal(&fresh)? {
            std::fs::remove_file(&fresh).map_err(|error| unwritable(path, error))?;
        }
        let made = create(&fresh)?;
        let renamed = std::fs::rename(&fresh, path).and_then(|()| sync_parent(path));
        renamed.map_err(|error| unwritable(path, error))?;
        made
    };
    let file_bytes = std::fs::metadata(path).map_err(failed(path, "measure"))?.len();
    let file = OpenFile::of(path).map_err(|error| unwritable(path, error))?;
    Ok(OpenedJournal {
        file_bytes,
        file: Some(Arc::new(file)),
        ..load(path, PanicSafeDatabase::new(database))?
    })
}

/// Whether a file can be opened and has the format of a journal.
///
/// # Errors
/// [`BufferError::Locked`] while another process makes it.
fn is_journal(file: &Path) -> Result<bool, BufferError> {
    let open = || redb::Builder::new().set_cache_size(JOURNAL_CACHE_BYTES as usize).open(file);
    let database = match unpanicked(file, open) {
        Ok(database) => PanicSafeDatabase::new(database),
        Err(locked @ BufferError::Locked { .. }) => return Err(locked),
        Err(_) => return Ok(false),
    };
    let has_format = || -> Result<bool, redb::Error> {
        Ok(database.begin_read()?.open_table(META)?.get("format")?.is_some())
    };
    Ok(catch_unwind(AssertUnwindSafe(has_format)).is_ok_and(|found| found.unwrap_or(false)))
}

/// Makes a rename to `path` survive a power cut.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    std::fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Opens the journal in another storage.
pub(super) fn backend(path: &Path, backend: impl StorageBackend) -> Result<OpenedJournal, BufferError> {
    let backend = AssertUnwindSafe(backend);
    let create = || {
        let AssertUnwindSafe(backend) = { backend };
        redb::Builder::new().set_cache_size(JOURNAL_CACHE_BYTES as usize).create_with_backend(backend)
    };
    load(path, PanicSafeDatabase::new(unpanicked(path, create)?))
}

/// redb verifies what it reads, but not everything: some damage makes it panic.
fn unpanicked<T>(path: &Path, open: impl FnOnce() -> Result<T, DatabaseError>) -> Result<T, BufferError> {
    match catch_unwind(AssertUnwindSafe(open)) {
        Ok(opened) => opened.map_err(|error| open_error(path, error)),
        Err(panic) => Err(not_ours(path, panic_text(panic.as_ref()))),
    }
}

fn open_error(path: &Path, error: DatabaseError) -> BufferError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => BufferError::Locked { path: path.to_owned() },
        DatabaseError::Storage(StorageError::Corrupted(what)) => not_ours(path, what),
        DatabaseError::Storage(StorageError::Io(error)) => match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => not_ours(path, error.to_string()),
            _ => unwritable(path, error),
        },
        error => failed(path, "open")(error),
    }
}

fn unwritable(path: &Path, error: io::Error) -> BufferError {
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::NotFound => {
            BufferError::NotWritable { path: path.to_owned(), source: error }
        }
        _ => failed(path, "open")(error),
    }
}

fn not_ours(path: &Path, found: String) -> BufferError {
    BufferError::NotAJournal { path: path.to_owned(), found }
}

pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("damaged: {}", text.unwrap_or("of an unknown kind"))
}

/// Verifies the file, counts the opening, and reads all records.
///
/// The checksums of all pages are compared first, before any write: redb trusts what it reads, and a damaged free
/// list makes it panic during a commit and again while unwinding, which would abort the process.
fn load(path: &Path, mut database: PanicSafeDatabase) -> Result<OpenedJournal, BufferError> {
    // redb has repaired an unclean shutdown at this point.
    unpanicked(path, || database.check_integrity())?;
    let stored = catch_unwind(AssertUnwindSafe(|| read_tables(&database)))
        .map_err(|panic| not_ours(path, panic_text(panic.as_ref())))?
        .map_err(|error| read_error(path, error))?;
    match stored.format {
        None => return Err(not_ours(path, "a redb file without a journal format".to_owned())),
        Some(found) if found > FORMAT => {
            return Err(BufferError::NewerFormat { path: path.to_owned(), found, known: FORMAT });
        }
        Some(found) if found < OLDEST_FORMAT => {
            return Err(BufferError::OlderFormat { path: path.to_owned(), found, known: OLDEST_FORMAT });
        }
        Some(_) => {}
    }
    let mut recovered = Recovered { keys: stored.keys, ..Recovered::default() };
    if let Some(mark) = stored.mark {
        recovered.watermarks = decoded(path, "the mark", &mark)?;
    }
    for (id, lease) in stored.leases {
        recovered.leases.push((LeaseId(id), decoded(path, "a lease", &lease)?));
    }
    let mut places = HashMap::with_capacity(stored.rows.len());
    for row in stored.rows {
        let StoredRow { row, place } = decoded(path, "a row", &row)?;
        places.insert(row.id, place);
        recovered.rows.push(row);
    }
    Ok(OpenedJournal { database, recovered, places, opening: stored.opening, file_bytes: 0, file: None })
}

fn read_error(path: &Path, error: redb::Error) -> BufferError {
    match error {
        redb::Error::Corrupted(what) => not_ours(path, what),
        error => failed(path, "read")(error),
    }
}

fn decoded<T: DeserializeOwned>(path: &Path, what: &str, bytes: &[u8]) -> Result<T, BufferError> {
    rmp_serde::from_slice(bytes).map_err(|error| not_ours(path, format!("{what} is damaged: {error}")))
}

#[derive(Default)]
struct JournalContents {
    format: Option<u64>,
    mark: Option<Vec<u8>>,
    rows: Vec<Vec<u8>>,
    leases: Vec<(u64, Vec<u8>)>,
    keys: Vec<(GroupId, u128)>,
    opening: u64,
}

/// Reads all tables. Writes only to an empty file or a journal.
fn read_tables(database: &Database) -> Result<JournalContents, redb::Error> {
    let mut transaction = database.begin_write()?;
    transaction.set_quick_repair(true);
    let is_new = transaction.list_tables()?.next().is_none();
    let mut stored = JournalContents::default();
    {
        let mut meta = transaction.open_table(META)?;
        if is_new {
            meta.insert("format", FORMAT.to_le_bytes().as_slice())?;
        }
        let number = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_le_bytes);
        stored.format = meta.get("format")?.and_then(|bytes| number(bytes.value()));
        match stored.format {
            Some(FORMAT) => {}
            // Later writes use the current format, which the earlier program must not misread.
            Some(OLDEST_FORMAT..FORMAT) => drop(meta.insert("format", FORMAT.to_le_bytes().as_slice())?),
            _ => return Ok(stored),
        }
        stored.mark = meta.get("mark")?.map(|bytes| bytes.value().to_vec());
        stored.opening = meta.get("openings")?.and_then(|bytes| number(bytes.value())).unwrap_or(0) + 1;
        meta.insert("openings", stored.opening.to_le_bytes().as_slice())?;
        transaction.open_table(SEGMENTS)?;
        for entry in transaction.open_table(ROWS)?.iter()? {
            stored.rows.push(entry?.1.value().to_vec());
        }
        for entry in transaction.open_table(LEASES)?.iter()? {
            let (id, lease) = entry?;
            stored.leases.push((id.value(), lease.value().to_vec()));
        }
        for entry in transaction.open_table(KEYS)?.iter()? {
            let (id, key) = entry?;
            stored.keys.push((GroupId(id.value()), key.value()));
        }
    }
    transaction.commit()?;
    Ok(stored)
}
