//! Going on from an older checkpoint than the one that the buffer last heard of.
//!
//! What a checkpoint contains is acknowledged and forgotten. A trainer that goes on from an older one cannot have those
//! groups again: other tasks take their place. What is left was sampled partly by versions that the trainer is about to
//! make anew, and which will be other policies: their numbers say nothing about how old such a group is.
//!
//! Invariant: after a rewind to `version` no group is leased, none holds a token of a later version, and every id below
//! the next one that was neither acknowledged nor stored is in line.

use std::collections::BTreeSet;

use trajectory::{GroupId, PolicyVersion};

use super::{KEYED, LeaseState, Ledger};
use crate::LeaseId;

/// What a rewind found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rewound {
    /// Groups that the steps to be done again were trained on, and that are gone.
    pub gone: u64,
    /// Groups of later versions that are sampled again.
    pub again: u64,
    /// Groups of later versions that came with a key, whose sender alone can sample them again.
    pub dropped: u64,
}

impl Ledger {
    /// Groups of steps from `version` on that `consumer` has acknowledged, so that they cannot be had again.
    pub(crate) fn gone_since(&self, consumer: &str, version: PolicyVersion) -> u64 {
        let steps = self.step.0.saturating_sub(version.0);
        let rows = self.leases.values().map(|record| &record.row);
        let kept: BTreeSet<PolicyVersion> = rows
            .filter(|row| row.consumer == consumer && row.state != LeaseState::Lost)
            .map(|row| row.step)
            .filter(|step| (version..self.step).contains(step))
            .collect();
        (steps - kept.len() as u64).saturating_mul(self.config.batch_groups as u64)
    }

    /// All stored groups, leased or not.
    pub(crate) fn stored_groups(&self) -> Vec<GroupId> {
        self.stored.keys().copied().collect()
    }

    /// Forgets `group`, wherever it is leased; true if it is first in line again.
    pub(crate) fn sample_again(&mut self, group: GroupId) -> bool {
        self.leave_leases(group);
        self.forget(group);
        let again = group.0 < KEYED;
        if again {
            self.again.insert(group);
        }
        again
    }

    /// Ends all leases and goes back to `version`.
    pub(crate) fn rewind(&mut self, version: PolicyVersion) {
        let leases: Vec<LeaseId> = self.leases.keys().copied().collect();
        for lease in leases {
            if let Some(record) = self.remove_lease(lease)
                && record.row.state == LeaseState::Open
            {
                self.put_back(&record.row);
            }
        }
        self.begin_step(version);
        self.known = version;
    }
}
