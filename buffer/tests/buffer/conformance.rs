//! The conformance suite over every store: the built-in ones, a served buffer, and a store of this file, as another crate
//! would write one. Stores that are broken on purpose fail it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use buffer::conformance::{StoreUnderTest, check_contract, check_store};
use buffer::store::{
    AppendGroup, GroupRow, LeaseRow, LedgerChange, OpenedStore, Recovered, Store, Watermarks,
    WriteCompletion, decode_payload, open_journal, open_memory, payload_sender,
};
use buffer::{BufferError, LeaseId};
use trajectory::{Group, GroupId};

use crate::served::TestServer;

/// A store in memory that starts empty each time.
struct Memory;

impl StoreUnderTest for Memory {
    fn open(&self) -> Result<OpenedStore, BufferError> {
        Ok(open_memory())
    }

    fn is_durable(&self) -> bool {
        false
    }
}

struct Journal(tempfile::TempDir);

impl StoreUnderTest for Journal {
    fn open(&self) -> Result<OpenedStore, BufferError> {
        open_journal(self.0.path().join("buffer.redb"), u64::MAX)
    }
}

#[test]
fn the_memory_store_conforms() {
    check_store(|_| Memory);
}

#[test]
fn the_journal_store_conforms() {
    check_store(|_| Journal(tempfile::tempdir().unwrap()));
}

#[test]
fn a_served_buffer_conforms() {
    check_contract(|config, check| {
        let directory = tempfile::tempdir().unwrap();
        check(&TestServer::journal(&directory, config).client());
    });
}

/// What is wrong with a store on purpose.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Leases are not written.
    LosesLeases,
    /// Removed groups can still be read.
    KeepsRemovedGroups,
    /// Writes of an earlier opening are acknowledged.
    NoFencing,
}

/// Tables of a database that outlives its connections.
#[derive(Default)]
struct Tables {
    /// Incremented by every opening: the fencing token of the writer.
    epoch: u64,
    groups: BTreeMap<GroupId, (GroupRow, Vec<u8>)>,
    leases: BTreeMap<LeaseId, LeaseRow>,
    keys: BTreeMap<GroupId, u128>,
    watermarks: Watermarks,
}

/// A database; [`StoreUnderTest::open`] connects to it.
struct Database {
    tables: Arc<Mutex<Tables>>,
    flaw: Flaw,
}

/// A connection of one epoch.
struct Connection {
    tables: Arc<Mutex<Tables>>,
    epoch: u64,
    flaw: Flaw,
}

impl StoreUnderTest for Database {
    fn open(&self) -> Result<OpenedStore, BufferError> {
        let mut tables = self.tables.lock().unwrap();
        tables.epoch += 1;
        let recovered = Recovered {
            rows: tables.groups.values().map(|(row, _)| row.clone()).collect(),
            leases: tables.leases.clone().into_iter().collect(),
            keys: tables.keys.clone().into_iter().collect(),
            watermarks: tables.watermarks.clone(),
        };
        let store = Connection { tables: Arc::clone(&self.tables), epoch: tables.epoch, flaw: self.flaw };
        Ok(OpenedStore { store: Box::new(store), recovered, opening: tables.epoch })
    }
}

impl Connection {
    /// Runs a transaction, unless a later opening has deposed this one.
    fn transaction(&self, done: WriteCompletion, write: impl FnOnce(&mut Tables)) {
        let mut tables = self.tables.lock().unwrap();
        if self.is_deposed(&tables) {
            drop(tables);
            return done(Err(deposed()));
        }
        write(&mut tables);
        drop(tables);
        done(Ok(()));
    }

    fn is_deposed(&self, tables: &MutexGuard<'_, Tables>) -> bool {
        tables.epoch != self.epoch && self.flaw != Flaw::NoFencing
    }
}

fn deposed() -> BufferError {
    let source = "another server has taken over".into();
    BufferError::Store { store: "test database".to_owned(), action: "write", source }
}

impl Store for Connection {
    fn append(&self, append: AppendGroup) {
        let AppendGroup { row, key, payload, done, .. } = append;
        self.transaction(done, |tables| {
            tables.keys.extend(key.map(|key| (row.id, key)));
            tables.groups.insert(row.id, (row, payload));
        });
    }

    fn check_capacity(&self) -> Result<(), BufferError> {
        Ok(())
    }

    fn commit(&self, change: LedgerChange, done: WriteCompletion) {
        let flaw = self.flaw;
        self.transaction(done, |tables| {
            for row in change.rows {
                if let Some((stored, _)) = tables.groups.get_mut(&row.id) {
                    *stored = row;
                }
            }
            if flaw != Flaw::KeepsRemovedGroups {
                tables.groups.retain(|id, (row, _)| !change.forget.contains(&(row.oldest, *id)));
            }
            if flaw != Flaw::LosesLeases {
                for (id, lease) in change.leases {
                    match lease {
                        Some(lease) => drop(tables.leases.insert(id, lease)),
                        None => drop(tables.leases.remove(&id)),
                    }
                }
            }
            for id in &change.keys {
                tables.keys.remove(id);
            }
            tables.keys.retain(|id, _| change.keys_below.is_none_or(|below| *id >= below));
            tables.watermarks = change.watermarks;
        });
    }

    fn read(&self, ids: &[GroupId], _last_read: bool) -> Result<Vec<Arc<Group>>, BufferError> {
        let tables = self.tables.lock().unwrap();
        let read = |id: &GroupId| {
            let (_, payload) = tables.groups.get(id).ok_or(BufferError::Gone { group: *id })?;
            Ok(Arc::new(decode_payload(*id, payload).unwrap()))
        };
        ids.iter().map(read).collect()
    }

    fn sender(&self, id: GroupId) -> Option<String> {
        payload_sender(&self.tables.lock().unwrap().groups.get(&id)?.1)
    }

    fn is_cached(&self, _ids: &[GroupId]) -> bool {
        false
    }

    fn unacknowledged(&self, _waited: Option<Duration>) -> BufferError {
        deposed()
    }

    fn failure(&self) -> Option<BufferError> {
        self.is_deposed(&self.tables.lock().unwrap()).then(deposed)
    }
}

fn database(flaw: Flaw) -> Database {
    Database { tables: Arc::default(), flaw }
}

#[test]
fn a_store_of_another_crate_conforms() {
    check_store(|_| database(Flaw::None));
}

#[test]
fn broken_stores_fail_the_suite() {
    for (flaw, case) in [
        (Flaw::LosesLeases, "random_writes_are_recovered_exactly"),
        (Flaw::KeepsRemovedGroups, "a_removed_group_is_gone"),
        (Flaw::NoFencing, "a_second_opening_fences_the_first"),
    ] {
        let failed = catch_unwind(AssertUnwindSafe(|| check_store(|_| database(flaw)))).unwrap_err();
        let report = failed.downcast_ref::<String>().unwrap();
        assert!(report.contains(case), "{report}");
    }
}
