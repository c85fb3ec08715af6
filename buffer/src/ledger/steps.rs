//! The current step, and the capacity of the steps from it on. Invariant: `leased` counts the groups in open leases
//! by step, and `taken` is at least its count for the current step.

use trajectory::{GroupId, PolicyVersion};

use super::{InFlightStage, KEYED, Ledger};
use crate::{BufferError, EventKind};

/// The highest version that a trainer can have; below 2^53, so every JSON reader keeps it exact.
const MAX_VERSION: PolicyVersion = PolicyVersion((1 << 53) - 1);

impl Ledger {
    /// The newest version that can exist.
    pub(crate) fn known(&self) -> PolicyVersion {
        self.known
    }

    /// The policy version of the trainer.
    pub(crate) fn policy_version(&self) -> PolicyVersion {
        self.step
    }

    /// The first step that still takes groups, if every step takes a full batch.
    pub(super) fn next_step(&self) -> PolicyVersion {
        let batch = self.config.batch_groups;
        if self.taken < batch {
            return self.step;
        }
        let mut next = self.step.next();
        for (step, leased) in self.leased.range(next..) {
            if *step != next || *leased < batch {
                break;
            }
            next = next.next();
        }
        next
    }

    /// Number of groups that the steps from the current one to `last` can still take, if each takes a full batch.
    pub(super) fn capacity_through(&self, last: PolicyVersion) -> usize {
        let Some(later) = last.0.checked_sub(self.step.0) else { return 0 };
        let batch = self.config.batch_groups;
        let steps = usize::try_from(later).unwrap_or(usize::MAX).saturating_add(1);
        let after = self.step.next();
        let leased: usize = if after <= last {
            self.leased.range(after..=last).map(|(_, leased)| (*leased).min(batch)).sum()
        } else {
            0
        };
        steps.saturating_mul(batch).saturating_sub(leased).saturating_sub(self.taken.min(batch))
    }

    /// Number of free slots for a sampler that serves `served`: limited by what the steps that may train such
    /// groups can take.
    pub(crate) fn free(&self, served: PolicyVersion) -> usize {
        if self.bytes >= self.config.max_bytes {
            return 0;
        }
        let mut slots = self.config.slots();
        if !self.config.replays() {
            slots = slots.min(self.capacity_through(self.last_step_of(served)));
        }
        slots.saturating_sub(self.reserved_slots()).saturating_sub(self.flights.len() + self.pool.len())
    }

    /// Admits groups as a bound on staleness of `versions` would. Leases keep the bound of the configuration, which is at least as
    /// large, so what the bound promises holds, and a batch can always be assembled.
    pub(crate) fn run_ahead(&mut self, versions: u64) {
        self.ahead = versions.min(self.config.max_staleness);
    }

    /// Slots that admission leaves free.
    fn reserved_slots(&self) -> usize {
        let versions = usize::try_from(self.config.max_staleness - self.ahead).unwrap_or(usize::MAX);
        versions.saturating_mul(self.config.batch_groups)
    }

    /// The last step that may train a group of `version` (its deadline).
    pub(super) fn last_step_of(&self, version: PolicyVersion) -> PolicyVersion {
        PolicyVersion(version.0.saturating_add(self.config.max_staleness))
    }

    /// Sets the trainer's version; with `rewind` it starts from a checkpoint of that version.
    pub(crate) fn set_version(&mut self, version: PolicyVersion, rewind: bool) -> Result<(), BufferError> {
        let known = self.known;
        if version > MAX_VERSION || !rewind && version > self.furthest() {
            return Err(BufferError::VersionJump { version, known });
        }
        if rewind {
            self.undo_after(version);
            self.begin_step(version);
        } else if version < known && version != self.step {
            return Err(BufferError::VersionBehind { version, known });
        } else if version != self.step {
            self.begin_step(version);
        }
        Ok(())
    }

    /// The highest version that does not make every group in the buffer stale.
    fn furthest(&self) -> PolicyVersion {
        let empty = self.flights.is_empty() && self.pool.is_empty() && self.leases.is_empty();
        if empty { MAX_VERSION } else { self.last_step_of(self.known.next()) }
    }

    /// Versions after `version` were undone: revokes groups in flight that count from one of them.
    fn undo_after(&mut self, version: PolicyVersion) {
        self.known = self.known.min(version);
        let undone = self
            .flights
            .iter()
            .filter(|(_, flight)| flight.version > version && flight.stage != InFlightStage::Writing);
        let undone: Vec<GroupId> = undone.map(|(group, _)| *group).collect();
        for group in undone {
            self.land(group);
            self.again.insert(group);
        }
    }

    /// Begins `step`. Groups already leased for it are counted, because their leases are repeated.
    pub(super) fn begin_step(&mut self, step: PolicyVersion) {
        self.taken = self.leased.get(&step).copied().unwrap_or(0);
        self.step = step;
        self.known = self.known.max(step);
        self.change();
        self.emit(EventKind::Version, Vec::new(), None, Some(step));
    }

    /// The lease of `step` is repeated: a trainer that rewound has reached it again.
    pub(super) fn advance_to(&mut self, step: PolicyVersion) {
        if step > self.known {
            return;
        }
        if step > self.step {
            self.begin_step(step);
        }
        if self.known < step.next() {
            self.known = step.next();
            self.change();
        }
    }

    /// Adds `count` groups in open leases for `step`.
    pub(super) fn count_leased(&mut self, step: PolicyVersion, count: usize) {
        if count > 0 {
            *self.leased.entry(step).or_default() += count;
        }
    }

    /// Removes `count` groups in open leases for `step`.
    pub(super) fn count_ended(&mut self, step: PolicyVersion, count: usize) {
        if let Some(leased) = self.leased.get_mut(&step) {
            *leased = leased.saturating_sub(count);
            if *leased == 0 {
                self.leased.remove(&step);
            }
        }
    }

    pub(super) fn not_from_the_future(&self, version: PolicyVersion) -> Result<(), BufferError> {
        let known = self.known;
        if version > known { Err(BufferError::FutureVersion { version, known }) } else { Ok(()) }
    }

    /// Revokes the slot of a group that is older than the slot assumed: the group then needs a free slot like one
    /// without admission.
    pub(super) fn give_up_slot_if_older(&mut self, group: GroupId, oldest: PolicyVersion) {
        if self.flights.get(&group).is_some_and(|flight| oldest < flight.version) {
            self.land(group);
            if group.0 < KEYED {
                self.again.insert(group);
            }
        }
    }
}
