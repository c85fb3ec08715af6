//! The writer thread: group commit of all queued writes, then their acknowledgements.
//!
//! Invariant: a write is acknowledged only after its commit is on disk, in a file that is still at its path; after a
//! failure nothing is acknowledged. Payloads of one commit share segments, so a group costs neither a page nor an
//! insertion of its own.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crossbeam::channel::Receiver;
use redb::Table;
use serde::Serialize;
use trajectory::{GroupId, PolicyVersion};

use super::commits::CommitLog;
use super::database::PanicSafeDatabase;
use super::open::panic_text;
use super::tables::{KEYS, LEASES, META, ROWS, SEGMENTS};
use super::{
    OpenFile, PayloadLocation, PayloadLocations, StoredRow, WriteRequest, WriterFailure, check, lock, stopped,
};
use crate::BufferError;
use crate::ledger::{GroupRow, LedgerChange};
use crate::payload_cache::{CachedGroup, PayloadCache};
use crate::store::{AppendGroup, WriteCompletion};

/// Bytes of payloads in a segment: with redb's overhead they fill 16 pages. A larger payload has its own segment.
const SEGMENT_BYTES: usize = (64 << 10) - 256;
/// Maximum bytes of payloads in a transaction.
const TRANSACTION_BYTES: usize = 64 << 20;
/// Maximum number of writes in a transaction.
const TRANSACTION_REQUESTS: usize = 4096;
/// Rows of one version whose ids are at most this far apart are removed in one sweep.
const SWEEP_GAP: u64 = 8;
/// The file is compacted when less than one part in this many of its peak size is used.
const COMPACT_RATIO: u64 = 4;

/// When to compact.
#[derive(Clone, Copy, Debug)]
pub(super) struct CompactionState {
    /// Peak bytes since the last compaction.
    pub(super) peak: u64,
    /// Peaks below this number of bytes are not compacted.
    pub(super) compact_above: u64,
}

pub(super) struct JournalWriter {
    path: PathBuf,
    database: Arc<RwLock<PanicSafeDatabase>>,
    places: Arc<PayloadLocations>,
    cache: Arc<Mutex<PayloadCache>>,
    broken: Arc<Mutex<Option<WriterFailure>>>,
    file: Option<Arc<OpenFile>>,
    space: CompactionState,
    /// Remaining groups and bytes of each segment.
    segments: HashMap<u64, (usize, u64)>,
    next_segment: u64,
    bytes: u64,
    commits: Arc<CommitLog>,
}

/// Completions and cache entries of a transaction, for after its commit.
#[derive(Default)]
struct PendingCompletions {
    done: Vec<WriteCompletion>,
    cache: Vec<CachedGroup>,
}

/// A row to append, with its payload.
struct RowAppend {
    row: GroupRow,
    key: Option<u128>,
    payload: Vec<u8>,
}

struct JournalTables<'t> {
    meta: Table<'t, &'static str, &'static [u8]>,
    segments: Table<'t, u64, &'static [u8]>,
    rows: Table<'t, (u64, u64), &'static [u8]>,
    leases: Table<'t, u64, &'static [u8]>,
    keys: Table<'t, u64, u128>,
}

impl JournalWriter {
    pub(super) fn new(
        path: &Path,
        database: Arc<RwLock<PanicSafeDatabase>>,
        places: Arc<PayloadLocations>,
        cache: Arc<Mutex<PayloadCache>>,
        broken: Arc<Mutex<Option<WriterFailure>>>,
        file: Option<Arc<OpenFile>>,
        space: CompactionState,
    ) -> Self {
        let mut segments: HashMap<u64, (usize, u64)> = HashMap::new();
        for place in lock(&places).values() {
            let segment = segments.entry(place.segment).or_default();
            *segment = (segment.0 + 1, segment.1 + u64::from(place.length));
        }
        let next_segment = segments.keys().max().map_or(0, |last| last + 1);
        let bytes = segments.values().map(|(_, bytes)| bytes).sum();
        let space = CompactionState { peak: space.peak.max(bytes), ..space };
        Self {
            path: path.to_owned(),
            database,
            places,
            cache,
            broken,
            file,
            space,
            segments,
            next_segment,
            bytes,
            commits: Arc::default(),
        }
    }

    /// Where the times of its commits can be taken.
    pub(super) fn commits(&self) -> Arc<CommitLog> {
        Arc::clone(&self.commits)
    }

    pub(super) fn run(mut self, requests: &Receiver<WriteRequest>) {
        if let Err((cause, pending)) = self.write_until_closed(requests) {
            *lock(&self.broken) = Some(cause);
            pending.done.into_iter().for_each(|done| done(Err(stopped(&self.path, &self.broken))));
            // Drains the queue until all senders are dropped, so no caller waits for the stopped writer.
            while let Ok(request) = requests.recv() {
                request.done(Err(stopped(&self.path, &self.broken)));
            }
        }
    }

    /// Writes until all senders are dropped. After a failure: the cause, and the writes that were not committed.
    fn write_until_closed(
        &mut self,
        requests: &Receiver<WriteRequest>,
    ) -> Result<(), (WriterFailure, PendingCompletions)> {
        while let Ok(first) = requests.recv() {
            let mut pending = PendingCompletions::default();
            let commits = Arc::clone(&self.commits);
            let timed = || commits.time(|| self.write_together(first, requests, &mut pending));
            if let Err(cause) = unpanicked(timed) {
                return Err((WriterFailure::Failed(cause), pending));
            }
            if let Some(found) = self.file.as_ref().and_then(|file| file.moved()) {
                return Err((WriterFailure::Moved(found), pending));
            }
            {
                let mut cache = lock(&self.cache);
                pending.cache.into_iter().for_each(|group| cache.put(group));
            }
            pending.done.into_iter().for_each(|done| done(Ok(())));
            if requests.is_empty() {
                unpanicked(|| self.give_space_back())
                    .map_err(|cause| (WriterFailure::Failed(cause), PendingCompletions::default()))?;
            }
        }
        Ok(())
    }

    /// One transaction with all queued writes.
    fn write_together(
        &mut self,
        first: WriteRequest,
        requests: &Receiver<WriteRequest>,
        pending: &mut PendingCompletions,
    ) -> Result<(), redb::Error> {
        let database = Arc::clone(&self.database);
        let database = database.read().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = 0;
        let (mut appends, mut changes, mut mark) = (Vec::new(), Vec::new(), None);
        let mut next = Some(first);
        while let Some(request) = next {
            match request {
                WriteRequest::Append(AppendGroup { row, key, payload, group, done, .. }) => {
                    bytes += payload.len();
                    pending.done.push(done);
                    let weight = crate::payload::weight(&group);
                    pending.cache.push(CachedGroup { id: row.id, group, bytes: weight });
                    appends.push(RowAppend { row, key, payload });
                }
                WriteRequest::Change(change, done) => {
                    pending.done.push(done);
                    mark = Some(change.watermarks.clone());
                    changes.push(change);
                }
            }
            let below_limits = bytes < TRANSACTION_BYTES && pending.done.len() < TRANSACTION_REQUESTS;
            next = if below_limits { requests.try_recv().ok() } else { None };
        }
        let mut transaction = database.begin_write()?;
        transaction.set_quick_repair(true);
        {
            let mut tables = JournalTables {
                meta: transaction.open_table(META)?,
                segments: transaction.open_table(SEGMENTS)?,
                rows: transaction.open_table(ROWS)?,
                leases: transaction.open_table(LEASES)?,
                keys: transaction.open_table(KEYS)?,
            };
            // A change concerns a group only after its append was acknowledged, so no change concerns the appends
            // here. But a change may remove a dropped group whose id is appended again here, so changes come first.
            for change in &changes {
                self.apply(&mut tables, change)?;
            }
            self.append(&mut tables, appends)?;
            if let Some(mark) = mark {
                tables.meta.insert("mark", encoded(&mark)?.as_slice())?;
            }
        }
        fail::fail_point!("journal-commit", |errno: Option<String>| {
            let number = errno.and_then(|number| number.parse().ok()).unwrap_or_default();
            Err(std::io::Error::from_raw_os_error(number).into())
        });
        transaction.commit()?;
        Ok(())
    }

    fn append(&mut self, tables: &mut JournalTables<'_>, appends: Vec<RowAppend>) -> Result<(), redb::Error> {
        let mut segment: Vec<u8> = Vec::new();
        let mut in_segment = 0;
        for RowAppend { row, key, payload } in appends {
            if in_segment > 0 && segment.len() + payload.len() > SEGMENT_BYTES {
                self.close_segment(tables, &mut segment, &mut in_segment)?;
            }
            let too_long = |_| std::io::Error::other("a group of 4 GiB or more cannot be kept");
            let place = PayloadLocation {
                segment: self.next_segment,
                offset: u32::try_from(segment.len()).map_err(too_long)?,
                length: u32::try_from(payload.len()).map_err(too_long)?,
                check: check(&payload),
            };
            if segment.is_empty() && payload.len() > SEGMENT_BYTES {
                segment = payload;
            } else {
                segment.extend_from_slice(&payload);
            }
            in_segment += 1;
            let id = row.id;
            lock(&self.places).insert(id, place);
            if let Some(key) = key {
                tables.keys.insert(id.0, key)?;
            }
            put_row(tables, row, place)?;
        }
        if in_segment > 0 {
            self.close_segment(tables, &mut segment, &mut in_segment)?;
        }
        Ok(())
    }

    fn close_segment(
        &mut self,
        tables: &mut JournalTables<'_>,
        segment: &mut Vec<u8>,
        groups: &mut usize,
    ) -> Result<(), redb::Error> {
        tables.segments.insert(self.next_segment, segment.as_slice())?;
        self.segments.insert(self.next_segment, (*groups, segment.len() as u64));
        self.bytes += segment.len() as u64;
        self.space.peak = self.space.peak.max(self.bytes);
        self.next_segment += 1;
        segment.clear();
        *groups = 0;
        Ok(())
    }

    fn apply(&mut self, tables: &mut JournalTables<'_>, change: &LedgerChange) -> Result<(), redb::Error> {
        for row in &change.rows {
            // A row that a later change of this transaction removes is still stored here.
            if let Some(place) = self.place(row.id) {
                put_row(tables, row.clone(), place)?;
            }
        }
        remove_rows(tables, &change.forget)?;
        for (_, id) in &change.forget {
            drop(lock(&self.cache).take(*id));
            let Some(place) = lock(&self.places).remove(id) else { continue };
            let Some((left, bytes)) = self.segments.get_mut(&place.segment) else { continue };
            *left -= 1;
            if *left == 0 {
                self.bytes -= *bytes;
                self.segments.remove(&place.segment);
                tables.segments.remove(place.segment)?;
            }
        }
        for (id, lease) in &change.leases {
            match lease {
                Some(lease) => drop(tables.leases.insert(id.0, encoded(lease)?.as_slice())?),
                None => drop(tables.leases.remove(id.0)?),
            }
        }
        for group in &change.keys {
            tables.keys.remove(group.0)?;
        }
        if let Some(below) = change.keys_below {
            tables.keys.retain_in(..below.0, |_, _| false)?;
        }
        Ok(())
    }

    fn place(&self, id: GroupId) -> Option<PayloadLocation> {
        lock(&self.places).get(&id).copied()
    }

    /// Compacts the file if most of it is unused. Readers and writers wait meanwhile, about as long as copying the
    /// rest takes.
    fn give_space_back(&mut self) -> Result<(), BufferError> {
        let CompactionState { peak, compact_above } = self.space;
        if peak < compact_above || self.bytes >= peak / COMPACT_RATIO {
            return Ok(());
        }
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        database.compact().map_err(super::failed(&self.path, "give disk space back"))?;
        self.space.peak = self.bytes;
        Ok(())
    }
}

/// Runs `work`; the error or the panic as text. redb panics on some kinds of damage.
fn unpanicked<E: std::fmt::Display>(work: impl FnOnce() -> Result<(), E>) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(panic) => Err(panic_text(panic.as_ref())),
    }
}

/// Removes rows, adjacent ones in one sweep.
fn remove_rows(tables: &mut JournalTables<'_>, rows: &[(PolicyVersion, GroupId)]) -> Result<(), redb::Error> {
    let mut keys: Vec<(u64, u64)> = rows.iter().map(|(oldest, id)| (oldest.0, id.0)).collect();
    keys.sort_unstable();
    for together in keys.chunk_by(|a, b| a.0 == b.0 && b.1 - a.1 <= SWEEP_GAP) {
        let (first, last) = (together[0], together[together.len() - 1]);
        tables.rows.retain_in(first..=last, |key, _| together.binary_search(&key).is_err())?;
    }
    Ok(())
}

fn put_row(tables: &mut JournalTables<'_>, row: GroupRow, place: PayloadLocation) -> Result<(), redb::Error> {
    let key = (row.oldest.0, row.id.0);
    // Without field names: every group has a row, and several share a page.
    let row = rmp_serde::to_vec(&StoredRow { row, place }).map_err(std::io::Error::other)?;
    tables.rows.insert(key, row.as_slice())?;
    Ok(())
}

fn encoded(value: &impl Serialize) -> Result<Vec<u8>, std::io::Error> {
    rmp_serde::to_vec_named(value).map_err(std::io::Error::other)
}
