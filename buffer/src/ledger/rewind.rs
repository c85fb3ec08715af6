//! Rewind: the trainer resumes from an older checkpoint than the last one that it acknowledged.
//!
//! Groups in acknowledged checkpoints were removed, so a rewound trainer cannot get them again: other tasks take
//! their place. The stored groups were sampled partly by versions that the trainer will produce again, as other
//! policies. The version numbers in such groups say nothing about their age.
//!
//! Invariant: after a rewind to `version` no group is leased, no group has a token of a later version, and every id
//! below `next_id` that was neither acknowledged nor stored is queued for re-admission.

use std::collections::BTreeSet;

use trajectory::{GroupId, PolicyVersion};

use super::{KEYED, LeaseState, Ledger};
use crate::LeaseId;

/// Result of a rewind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rewound {
    /// Groups of the repeated steps that were acknowledged and removed.
    pub gone: u64,
    /// Groups of later versions that are generated again.
    pub again: u64,
    /// Groups of later versions with idempotency keys: only their sender can generate them again.
    pub dropped: u64,
}

impl Ledger {
    /// Number of groups of steps from `version` on that `consumer` acknowledged, which are removed.
    pub(crate) fn lost_since(&self, consumer: &str, version: PolicyVersion) -> u64 {
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

    /// Removes `group` from the store and from its leases; true if it is queued for re-admission.
    pub(crate) fn sample_again(&mut self, group: GroupId) -> bool {
        self.leave_leases(group);
        self.forget(group);
        let again = group.0 < KEYED;
        if again {
            self.again.insert(group);
        }
        again
    }

    /// Ends all leases and sets the version back to `version`.
    pub(crate) fn rewind(&mut self, version: PolicyVersion) {
        let leases: Vec<LeaseId> = self.leases.keys().copied().collect();
        for lease in leases {
            let Some(record) = self.remove_lease(lease) else { continue };
            self.change().leases.push((lease, None));
            if record.row.state == LeaseState::Open {
                self.put_back(&record.row);
            }
        }
        self.begin_step(version);
        self.known = version;
    }
}
