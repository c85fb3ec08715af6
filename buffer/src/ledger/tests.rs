//! The ledger under random schedules. No false alarms: every property holds for every seed.

mod contract;
mod pacing;
mod rewind;

use trajectory::TaskId;

use super::*;

/// SplitMix64: one seed makes one schedule.
struct TestRng(u64);

impl TestRng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }

    fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Heavy-tailed: mostly 1 to 4, up to 64.
    fn ticks(&mut self) -> u64 {
        64 / (1 + self.below(64))
    }
}

/// What a store would have: the changes that are durable.
#[derive(Clone, Debug, Default)]
struct DurableModel {
    rows: BTreeMap<GroupId, GroupRow>,
    leases: BTreeMap<LeaseId, LeaseRow>,
    keys: BTreeMap<GroupId, u128>,
    mark: Watermarks,
}

impl DurableModel {
    fn append(&mut self, row: GroupRow, key: Option<u128>) {
        self.keys.extend(key.map(|key| (row.id, key)));
        assert!(self.rows.insert(row.id, row).is_none(), "a group is stored twice");
    }

    fn write(&mut self, change: LedgerChange) {
        for row in change.rows {
            assert!(self.rows.insert(row.id, row).is_some(), "a row without a payload");
        }
        for (oldest, id) in change.forget {
            let row = self.rows.remove(&id).unwrap_or_else(|| panic!("{id} is forgotten twice"));
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
        self.mark = change.mark;
    }

    fn reopen(&self, config: BufferConfig, now: u64) -> Ledger {
        let kept = Recovered {
            rows: self.rows.values().cloned().collect(),
            leases: self.leases.iter().map(|(id, row)| (*id, row.clone())).collect(),
            keys: self.keys.iter().map(|(id, key)| (*id, *key)).collect(),
            mark: self.mark.clone(),
        };
        Ledger::restore(config, kept, now)
    }
}

fn row(id: GroupId, oldest: PolicyVersion) -> GroupRow {
    GroupRow {
        id,
        oldest,
        task: TaskId(id.0),
        tokens: 10,
        bytes: 1,
        reward: None,
        uses: 0,
        contents: Vec::new(),
    }
}

fn arrival(identity: ArrivalIdentity, version: PolicyVersion) -> Arrival<'static> {
    Arrival { identity, oldest: version, newest: version, bytes: 1, contents: &[] }
}
