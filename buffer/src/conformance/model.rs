//! The records of a store as plain maps, to compare a store or a ledger with. Invariant: it holds what a store must recover
//! after the same writes.

use std::collections::BTreeMap;

use trajectory::GroupId;

use crate::LeaseId;
use crate::store::{GroupRow, LeaseRow, LedgerChange, Recovered, Watermarks};

/// All records that are durable.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecordModel {
    pub(crate) rows: BTreeMap<GroupId, GroupRow>,
    pub(crate) leases: BTreeMap<LeaseId, LeaseRow>,
    pub(crate) keys: BTreeMap<GroupId, u128>,
    pub(crate) watermarks: Watermarks,
}

impl RecordModel {
    pub(crate) fn append(&mut self, row: GroupRow, key: Option<u128>) {
        self.keys.extend(key.map(|key| (row.id, key)));
        assert!(self.rows.insert(row.id, row).is_none(), "a group is stored twice");
    }

    pub(crate) fn commit(&mut self, change: LedgerChange) {
        for row in change.rows {
            assert!(self.rows.insert(row.id, row).is_some(), "a row without a payload");
        }
        for (oldest, id) in change.forget {
            let row = self.rows.remove(&id).unwrap_or_else(|| panic!("{id} is removed twice"));
            assert_eq!(row.oldest, oldest);
        }
        for (id, lease) in change.leases {
            match lease {
                Some(lease) => drop(self.leases.insert(id, lease)),
                None => drop(self.leases.remove(&id)),
            }
        }
        for id in change.keys {
            self.keys.remove(&id);
        }
        if let Some(below) = change.keys_below {
            self.keys = self.keys.split_off(&below);
        }
        self.watermarks = change.watermarks;
    }

    /// What a store recovers, sorted by id.
    pub(crate) fn recovered(&self) -> Recovered {
        Recovered {
            rows: self.rows.values().cloned().collect(),
            leases: self.leases.iter().map(|(id, row)| (*id, row.clone())).collect(),
            keys: self.keys.iter().map(|(id, key)| (*id, *key)).collect(),
            watermarks: self.watermarks.clone(),
        }
    }
}
