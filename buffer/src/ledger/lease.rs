//! Leases: granting, repeating, extending, expiring, acknowledging, releasing. Invariant: a group is in exactly `out`
//! open leases, and these and its acknowledged uses never exceed `max_uses`. A lease ends in one way. Later calls
//! with its id are fenced: the call that ended it succeeds again, every other call is an error.

use trajectory::{GroupId, PolicyVersion};

use super::select::LeaseCandidate;
use super::{HoldTarget, KEYED, LeaseRow, LeaseState, Ledger, millis};
use crate::{BufferError, EventKind, LeaseId, LeaseRequest, OnStale};

/// Number of lost or released leases whose end is remembered.
pub(super) const ENDED_KEPT: usize = 1 << 16;

/// How a lease that is neither open nor expired ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeaseEnd {
    Acknowledged,
    Released,
    Lost,
    /// The id was never issued.
    Never,
}

/// A lease with the time of its expiry.
#[derive(Clone, Debug)]
pub(super) struct LeaseRecord {
    pub(super) row: LeaseRow,
    pub(super) until: Option<u64>,
}

/// A lease that was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrantedLease {
    pub(crate) id: LeaseId,
    pub(crate) step: PolicyVersion,
    /// Sorted by id.
    pub(crate) groups: Vec<GroupId>,
    pub(crate) dropped_stale: u64,
}

impl Ledger {
    /// Tries to grant `request`, and drops stale groups. With `last_call` it may grant fewer groups than requested.
    pub(crate) fn lease(
        &mut self,
        request: &LeaseRequest,
        now: u64,
        last_call: bool,
    ) -> Result<Option<GrantedLease>, BufferError> {
        let length = request.consumer.len();
        if length == 0 || length > LeaseRequest::MAX_CONSUMER {
            return Err(BufferError::Consumer { length, limit: LeaseRequest::MAX_CONSUMER });
        }
        self.expire(now);
        if let Some(step) = request.step
            && let Some(&id) = self.named.get(&(request.consumer.clone(), step))
            && self.take_up(id).is_ok()
        {
            self.advance_to(step);
            self.hold(id, request.hold.map(millis), now);
            let groups = self.leases[&id].row.groups.clone();
            return Ok(Some(GrantedLease { id, step, groups, dropped_stale: self.emit_dropped() }));
        }
        let step = request.step.unwrap_or(self.step);
        if step < self.step {
            return Err(BufferError::StepPassed { step, next: self.next_step() });
        }
        if step > self.known() {
            return Err(BufferError::FutureVersion { version: step, known: self.known() });
        }
        if step > self.step {
            self.begin_step(step);
        }
        self.drop_stale();
        let Some(groups) = self.choose(request, last_call) else { return Ok(None) };
        let id = self.hand_out(request, step, groups.clone());
        self.hold(id, request.hold.map(millis), now);
        Ok(Some(GrantedLease { id, step, groups, dropped_stale: self.emit_dropped() }))
    }

    /// Whether enough groups are finalized for `request`, so that its lease only waits for slow groups.
    pub(crate) fn held_for_slow(&self, request: &LeaseRequest) -> bool {
        let wanted = self.most_groups(request).min(self.config.batch_groups);
        self.config.on_stale == OnStale::Wait && self.pool.len() >= wanted
    }

    pub(crate) fn extend(&mut self, lease: LeaseId, hold_ms: u64, now: u64) -> Result<(), BufferError> {
        self.take_up(lease)?;
        self.hold(lease, Some(hold_ms), now);
        Ok(())
    }

    /// Idempotent for an acknowledged lease.
    pub(crate) fn ack(&mut self, lease: LeaseId) -> Result<(), BufferError> {
        if self.end_of(lease) == Some(LeaseEnd::Acknowledged) {
            return Ok(());
        }
        self.take_up(lease)?;
        let Some(record) = self.remove_lease(lease) else { return Ok(()) };
        self.change().leases.push((lease, None));
        self.count_ended(record.row.step, record.row.groups.len());
        for &group in &record.row.groups {
            let Some(stored) = self.stored.get_mut(&group) else { continue };
            stored.out -= 1;
            stored.row.uses += 1;
            let (row, used_up) =
                (stored.row.clone(), stored.row.uses >= self.config.max_uses && stored.out == 0);
            if used_up {
                self.forget(group);
            } else {
                self.change().rows.push(row);
            }
        }
        self.emit(EventKind::Acked, record.row.groups, Some(lease), Some(record.row.step));
        Ok(())
    }

    /// Acknowledges the leases of `consumer` for steps below `through`. The error names the lowest lost one of them;
    /// every repetition with the same `through` reports it, a later `through` does not.
    pub(crate) fn ack_through(&mut self, consumer: &str, through: PolicyVersion) -> Result<(), BufferError> {
        self.not_from_the_future(through)?;
        let of_consumer = |record: &LeaseRecord| record.row.consumer == consumer && record.row.step < through;
        let done: Vec<LeaseId> =
            self.leases.iter().filter(|(_, record)| of_consumer(record)).map(|(id, _)| *id).collect();
        for lease in done {
            // Resuming one lease can lose another, which is reported below.
            let _ = self.ack(lease);
        }
        if through > self.step {
            self.begin_step(through);
        }
        self.name_lost(consumer, through)
    }

    /// The lowest lease that `consumer` lost for a step below `through` and that no earlier `through` reported.
    fn name_lost(&mut self, consumer: &str, through: PolicyVersion) -> Result<(), BufferError> {
        let (mut lost, mut changed) = (Ok(()), Vec::new());
        for (&lease, row) in &mut self.ended {
            let concerned = row.state == LeaseState::Lost && row.step < through && row.consumer == consumer;
            if !concerned || row.named_through.is_some_and(|named| named < through) {
                continue;
            }
            if lost.is_ok() {
                lost = Err(BufferError::LeaseLost { lease });
            }
            if row.named_through.is_none() {
                row.named_through = Some(through);
                changed.push((lease, Some(row.clone())));
            }
        }
        if !changed.is_empty() {
            self.change().leases.extend(changed);
        }
        lost
    }

    /// Returns the groups of a lease as if it had not been granted. Idempotent for a released lease.
    pub(crate) fn release(&mut self, lease: LeaseId) -> Result<(), BufferError> {
        if self.end_of(lease) == Some(LeaseEnd::Released) {
            return Ok(());
        }
        self.take_up(lease)?;
        let Some(LeaseRecord { row, .. }) = self.remove_lease(lease) else { return Ok(()) };
        self.put_back(&row);
        self.emit(EventKind::Released, row.groups.clone(), Some(lease), Some(row.step));
        self.remember_end(lease, LeaseRow { state: LeaseState::Released, ..row });
        Ok(())
    }

    pub(super) fn restore_lease(&mut self, id: LeaseId, mut row: LeaseRow, now: u64) {
        row.groups.retain(|group| self.stored.contains_key(group));
        match row.state {
            LeaseState::Lost | LeaseState::Released => {
                self.ended.insert(id, row);
                return;
            }
            LeaseState::Open => {
                self.count_leased(row.step, row.groups.len());
                for group in &row.groups {
                    if let Some(stored) = self.stored.get_mut(group) {
                        stored.out += 1;
                    }
                }
            }
            LeaseState::Expired => {
                self.expired.insert(id);
            }
        }
        if row.named {
            self.named.insert((row.consumer.clone(), row.step), id);
        }
        let (hold_ms, open) = (row.hold_ms, row.state == LeaseState::Open);
        self.leases.insert(id, LeaseRecord { row, until: None });
        if open && hold_ms.is_some() {
            self.hold(id, hold_ms, now);
        }
    }

    /// The hold of a lease expired: its groups can be leased again.
    pub(super) fn expire_lease(&mut self, lease: LeaseId) {
        self.let_go(lease);
        let Some(record) = self.leases.get_mut(&lease) else { return };
        record.row.state = LeaseState::Expired;
        let row = record.row.clone();
        self.expired.insert(lease);
        self.put_back(&row);
        self.emit(EventKind::Expired, row.groups.clone(), Some(lease), Some(row.step));
        self.change().leases.push((lease, Some(row)));
    }

    /// `group` was leased again or removed: expired leases that contain it are lost.
    pub(super) fn lose_leases_of(&mut self, group: GroupId) {
        let of_group = |lease: &&LeaseId| {
            self.leases.get(lease).is_some_and(|record| record.row.groups.binary_search(&group).is_ok())
        };
        let lost: Vec<LeaseId> = self.expired.iter().filter(of_group).copied().collect();
        for lease in lost {
            let Some(LeaseRecord { row, .. }) = self.remove_lease(lease) else { continue };
            self.remember_end(lease, LeaseRow { state: LeaseState::Lost, ..row });
        }
    }

    /// Records how a lease ended, and drops the oldest record if there are too many.
    fn remember_end(&mut self, lease: LeaseId, row: LeaseRow) {
        let row = LeaseRow { groups: Vec::new(), hold_ms: None, ..row };
        self.change().leases.push((lease, Some(row.clone())));
        self.ended.insert(lease, row);
        if self.ended.len() > ENDED_KEPT
            && let Some((oldest, _)) = self.ended.pop_first()
        {
            self.forgotten_leases = self.forgotten_leases.max(oldest.0 + 1);
            self.change().leases.push((oldest, None));
        }
    }

    /// How a lease ended; `None` if it is open or expired. A lease without a record counts as lost.
    fn end_of(&self, lease: LeaseId) -> Option<LeaseEnd> {
        match self.ended.get(&lease).map(|row| row.state) {
            _ if self.leases.contains_key(&lease) => None,
            _ if lease.0 >= self.next_lease => Some(LeaseEnd::Never),
            Some(LeaseState::Released) => Some(LeaseEnd::Released),
            Some(_) => Some(LeaseEnd::Lost),
            None if lease.0 < self.forgotten_leases => Some(LeaseEnd::Lost),
            None => Some(LeaseEnd::Acknowledged),
        }
    }

    /// Removes a group from all leases, before it is removed itself.
    pub(super) fn leave_leases(&mut self, group: GroupId) {
        let mut changed = Vec::new();
        for (id, record) in &mut self.leases {
            if record.row.state == LeaseState::Open && record.row.groups.contains(&group) {
                record.row.groups.retain(|other| *other != group);
                changed.push((*id, Some(record.row.clone())));
            }
        }
        for (_, row) in &changed {
            row.iter().for_each(|row| self.count_ended(row.step, 1));
        }
        self.change().leases.extend(changed);
    }

    /// Drops stale groups from the pool.
    fn drop_stale(&mut self) {
        let Some(oldest_usable) = self.step.0.checked_sub(self.config.max_staleness) else { return };
        let bound = LeaseCandidate { version: PolicyVersion(oldest_usable), group: GroupId(0) };
        let stale: Vec<LeaseCandidate> = self.pool.range(..bound).copied().collect();
        let (mut dropped, mut evicted) = (Vec::new(), Vec::new());
        for LeaseCandidate { version, group } in stale {
            let stored = &self.stored[&group];
            let (used, leased) = (stored.row.uses + stored.out > 0, stored.out > 0);
            if leased {
                // Removed with its last lease: the acknowledgement brings it to `max_uses`.
                self.leave_pool(version, group);
                self.retire(group);
            } else {
                self.forget(group);
            }
            if used {
                evicted.push(group);
                continue;
            }
            if group.0 < KEYED {
                self.again.insert(group);
            } else {
                // A repeated submission is then not a duplicate: it is accepted if it is fresh enough, and stale
                // otherwise.
                self.keys.remove(group);
                self.change().keys.push(group);
            }
            dropped.push(group);
        }
        self.evicted += evicted.len() as u64;
        self.count_dropped(dropped.len() as u64);
        for (kind, groups) in [(EventKind::Dropped, dropped), (EventKind::Evicted, evicted)] {
            if !groups.is_empty() {
                self.emit(kind, groups, None, Some(self.step));
            }
        }
    }

    /// Leaves a leased group no use beyond its open leases.
    fn retire(&mut self, group: GroupId) {
        let max_uses = self.config.max_uses;
        let Some(stored) = self.stored.get_mut(&group) else { return };
        stored.row.uses = max_uses.saturating_sub(stored.out);
        let row = stored.row.clone();
        self.change().rows.push(row);
    }

    fn hand_out(&mut self, request: &LeaseRequest, step: PolicyVersion, groups: Vec<GroupId>) -> LeaseId {
        let id = LeaseId(self.next_lease);
        self.next_lease += 1;
        self.taken += groups.len();
        self.count_leased(step, groups.len());
        self.known = self.known.max(step.next());
        groups.iter().for_each(|group| self.take(*group));
        let named = request.step.is_some();
        if named {
            self.named.insert((request.consumer.clone(), step), id);
        }
        self.emit(EventKind::Leased, groups.clone(), Some(id), Some(step));
        let (consumer, hold_ms) = (request.consumer.clone(), request.hold.map(millis));
        let row =
            LeaseRow { consumer, step, named, groups, hold_ms, state: LeaseState::Open, named_through: None };
        self.change().leases.push((id, Some(row.clone())));
        self.leases.insert(id, LeaseRecord { row, until: None });
        id
    }

    /// One more lease contains `group`.
    fn take(&mut self, group: GroupId) {
        let Some(stored) = self.stored.get_mut(&group) else { return };
        stored.out += 1;
        let (version, left) = (stored.row.oldest, stored.row.uses + stored.out < self.config.max_uses);
        if !left {
            self.leave_pool(version, group);
        }
        if !self.expired.is_empty() {
            self.lose_leases_of(group);
        }
    }

    /// One open lease less contains these groups.
    pub(super) fn put_back(&mut self, row: &LeaseRow) {
        if row.step == self.step {
            self.taken = self.taken.saturating_sub(row.groups.len());
        }
        self.count_ended(row.step, row.groups.len());
        for &group in &row.groups {
            let Some(stored) = self.stored.get_mut(&group) else { continue };
            stored.out -= 1;
            self.enter_pool(group);
        }
    }

    /// Checks that a lease is open. Resumes an expired one whose groups were not leased again.
    fn take_up(&mut self, lease: LeaseId) -> Result<(), BufferError> {
        if let Some(end) = self.end_of(lease) {
            return Err(match end {
                LeaseEnd::Acknowledged => BufferError::LeaseOver { lease, how: "acknowledged" },
                LeaseEnd::Released => BufferError::LeaseOver { lease, how: "released" },
                LeaseEnd::Lost => BufferError::LeaseLost { lease },
                LeaseEnd::Never => BufferError::UnknownLease { lease, next: LeaseId(self.next_lease) },
            });
        }
        let record = &self.leases[&lease];
        match record.row.state {
            LeaseState::Expired => {
                self.expired.remove(&lease);
                let row = LeaseRow { state: LeaseState::Open, ..record.row.clone() };
                if row.step == self.step {
                    self.taken += row.groups.len();
                }
                self.count_leased(row.step, row.groups.len());
                row.groups.iter().for_each(|group| self.take(*group));
                self.change().leases.push((lease, Some(row.clone())));
                self.leases.insert(lease, LeaseRecord { row, until: None });
                Ok(())
            }
            LeaseState::Open | LeaseState::Lost | LeaseState::Released => Ok(()),
        }
    }

    /// Sets the expiry of an open lease to `hold_ms` from `now`.
    fn hold(&mut self, lease: LeaseId, hold_ms: Option<u64>, now: u64) {
        self.let_go(lease);
        let Some(record) = self.leases.get_mut(&lease) else { return };
        record.until = hold_ms.map(|hold| now.saturating_add(hold));
        if let Some(until) = record.until {
            self.holds.insert((until, HoldTarget::Lease(lease)));
        }
        if record.row.hold_ms != hold_ms {
            record.row.hold_ms = hold_ms;
            let row = record.row.clone();
            self.change().leases.push((lease, Some(row)));
        }
    }

    fn let_go(&mut self, lease: LeaseId) {
        if let Some(record) = self.leases.get_mut(&lease)
            && let Some(until) = record.until.take()
        {
            self.holds.remove(&(until, HoldTarget::Lease(lease)));
        }
    }

    /// Removes an open or expired lease from the ledger; the caller adds the change.
    pub(super) fn remove_lease(&mut self, lease: LeaseId) -> Option<LeaseRecord> {
        self.let_go(lease);
        self.expired.remove(&lease);
        let record = self.leases.remove(&lease)?;
        let name = (record.row.consumer.clone(), record.row.step);
        if self.named.get(&name) == Some(&lease) {
            self.named.remove(&name);
        }
        Some(record)
    }

    fn emit_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped_untold)
    }
}
