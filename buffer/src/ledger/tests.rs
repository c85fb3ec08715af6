//! The ledger under random schedules. No false alarms: every property holds for every seed.

mod contract;
mod pacing;
mod rewind;

use trajectory::TaskId;

use super::*;
use crate::conformance::RecordModel;

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

/// A ledger restored from what a store would recover.
fn reopen(model: &RecordModel, config: BufferConfig, now: u64) -> Ledger {
    Ledger::restore(config, model.recovered(), now)
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
