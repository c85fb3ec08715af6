//! Leases: given, given again, held, over, acknowledged. Invariant: a group is in as many open leases as its `out` says,
//! and with those and its acknowledged uses never over `max_uses`.

use trajectory::{GroupId, PolicyVersion};

use super::{Held, KEYED, LeaseRow, LeaseState, Ledger, millis};
use crate::{BufferError, EventKind, LeaseId, LeaseRequest, OnStale};

/// Leases that were lost and of which that is remembered.
const LOST_KEPT: usize = 1 << 16;

/// A lease with the end of its hold.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) row: LeaseRow,
    pub(super) until: Option<u64>,
}

/// What is handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leased {
    pub(crate) id: LeaseId,
    pub(crate) step: PolicyVersion,
    /// Ordered by id.
    pub(crate) groups: Vec<GroupId>,
    pub(crate) dropped_stale: u64,
}

impl Ledger {
    /// Tries to hand out what `request` asks for, dropping what is over the bound. With `last_call`, also fewer groups than
    /// asked for.
    pub(crate) fn lease(
        &mut self,
        request: &LeaseRequest,
        now: u64,
        last_call: bool,
    ) -> Result<Option<Leased>, BufferError> {
        let length = request.consumer.len();
        if length == 0 || length > LeaseRequest::MAX_CONSUMER {
            return Err(BufferError::Consumer { length, limit: LeaseRequest::MAX_CONSUMER });
        }
        self.expire(now);
        if let Some(step) = request.step
            && let Some(&id) = self.named.get(&(request.consumer.clone(), step))
            && self.take_up(id).is_ok()
        {
            self.hold(id, request.hold.map(millis), now);
            let groups = self.leases[&id].row.groups.clone();
            return Ok(Some(Leased { id, step, groups, dropped_stale: self.tell_dropped() }));
        }
        let step = request.step.unwrap_or(self.step);
        if step < self.step {
            return Err(BufferError::StepPassed { step, next: self.next_step() });
        }
        if step > self.known() {
            return Err(BufferError::FutureVersion { version: step, known: self.known() });
        }
        if step > self.step {
            (self.step, self.taken) = (step, 0);
            self.change();
            self.tell(EventKind::Version, Vec::new(), None, Some(step));
        }
        self.drop_stale();
        let Some(groups) = self.choose(request, last_call) else { return Ok(None) };
        let id = self.hand_out(request, step, groups.clone());
        self.hold(id, request.hold.map(millis), now);
        Ok(Some(Leased { id, step, groups, dropped_stale: self.tell_dropped() }))
    }

    /// Whether as many groups are there as `request` asks for, so that its lease waits for slow ones.
    pub(crate) fn held_for_slow(&self, request: &LeaseRequest) -> bool {
        let wanted = self.most_groups(request).min(self.config.batch_groups);
        self.config.on_stale == OnStale::Wait && self.pool.len() >= wanted
    }

    pub(crate) fn extend(&mut self, lease: LeaseId, hold_ms: u64, now: u64) -> Result<(), BufferError> {
        self.take_up(lease)?;
        self.hold(lease, Some(hold_ms), now);
        Ok(())
    }

    /// A lease that is gone, not lost, was acknowledged before.
    pub(crate) fn ack(&mut self, lease: LeaseId) -> Result<(), BufferError> {
        if !self.leases.contains_key(&lease) && lease.0 < self.next_lease {
            return Ok(());
        }
        self.take_up(lease)?;
        let Some(record) = self.remove_lease(lease) else { return Ok(()) };
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
        self.tell(EventKind::Acked, record.row.groups, Some(lease), Some(record.row.step));
        Ok(())
    }

    /// Acknowledges what `consumer` leased for steps below `through`; those that were lost are named once.
    pub(crate) fn ack_through(&mut self, consumer: &str, through: PolicyVersion) -> Result<(), BufferError> {
        let of_consumer = |record: &Record| record.row.consumer == consumer && record.row.step < through;
        let done: Vec<LeaseId> =
            self.leases.iter().filter(|(_, record)| of_consumer(record)).map(|(id, _)| *id).collect();
        let mut lost = Ok(());
        for lease in done {
            if let Err(error) = self.ack(lease) {
                self.remove_lease(lease);
                lost = Err(error);
            }
        }
        if through > self.step {
            (self.step, self.taken) = (through, 0);
            self.change();
            self.tell(EventKind::Version, Vec::new(), None, Some(through));
        }
        lost
    }

    /// Takes a lease back as if it had not been given.
    pub(crate) fn release(&mut self, lease: LeaseId) -> Result<(), BufferError> {
        if !self.leases.contains_key(&lease) && lease.0 < self.next_lease {
            return Ok(());
        }
        self.take_up(lease)?;
        let Some(record) = self.remove_lease(lease) else { return Ok(()) };
        self.put_back(&record.row);
        self.tell(EventKind::Released, record.row.groups, Some(lease), Some(record.row.step));
        Ok(())
    }

    pub(super) fn restore_lease(&mut self, id: LeaseId, mut row: LeaseRow, now: u64) {
        row.groups.retain(|group| self.stored.contains_key(group));
        match row.state {
            LeaseState::Open => {
                for group in &row.groups {
                    if let Some(stored) = self.stored.get_mut(group) {
                        stored.out += 1;
                    }
                }
            }
            LeaseState::Expired => {
                self.expired.insert(id);
            }
            LeaseState::Lost => {}
        }
        if row.named && row.state != LeaseState::Lost {
            self.named.insert((row.consumer.clone(), row.step), id);
        }
        let (hold_ms, open) = (row.hold_ms, row.state == LeaseState::Open);
        self.leases.insert(id, Record { row, until: None });
        if open && hold_ms.is_some() {
            self.hold(id, hold_ms, now);
        }
    }

    /// The hold of a lease is over: its groups are free.
    pub(super) fn expire_lease(&mut self, lease: LeaseId) {
        self.let_go(lease);
        let Some(record) = self.leases.get_mut(&lease) else { return };
        record.row.state = LeaseState::Expired;
        let row = record.row.clone();
        self.expired.insert(lease);
        self.put_back(&row);
        self.tell(EventKind::Expired, row.groups.clone(), Some(lease), Some(row.step));
        self.change().leases.push((lease, Some(row)));
    }

    /// Somebody else has `group`, or nobody can have it: expired leases of it cannot be taken up again.
    pub(super) fn lose_leases_of(&mut self, group: GroupId) {
        let of_group = |lease: &&LeaseId| {
            self.leases.get(lease).is_some_and(|record| record.row.groups.binary_search(&group).is_ok())
        };
        let lost: Vec<LeaseId> = self.expired.iter().filter(of_group).copied().collect();
        for lease in lost {
            self.expired.remove(&lease);
            let Some(record) = self.leases.get_mut(&lease) else { continue };
            record.row.state = LeaseState::Lost;
            record.row.groups.clear();
            let row = record.row.clone();
            let name = (row.consumer.clone(), row.step);
            if self.named.get(&name) == Some(&lease) {
                self.named.remove(&name);
            }
            self.change().leases.push((lease, Some(row)));
        }
        let is_lost = |record: &&Record| record.row.state == LeaseState::Lost;
        if self.leases.len() > LOST_KEPT && self.leases.values().filter(is_lost).count() > LOST_KEPT {
            let oldest = self.leases.iter().find(|(_, record)| is_lost(record)).map(|(id, _)| *id);
            oldest.into_iter().for_each(|id| drop(self.remove_lease(id)));
        }
    }

    /// Takes a group out of all leases, to be forgotten.
    pub(super) fn leave_leases(&mut self, group: GroupId) {
        let mut changed = Vec::new();
        for (id, record) in &mut self.leases {
            if record.row.state == LeaseState::Open && record.row.groups.contains(&group) {
                record.row.groups.retain(|other| *other != group);
                changed.push((*id, Some(record.row.clone())));
            }
        }
        self.change().leases.extend(changed);
    }

    /// Drops what can be leased but is over the bound.
    fn drop_stale(&mut self) {
        let Some(oldest_usable) = self.step.0.checked_sub(self.config.max_staleness) else { return };
        let bound = (PolicyVersion(oldest_usable), GroupId(0));
        let stale: Vec<(PolicyVersion, GroupId)> = self.pool.range(..bound).copied().collect();
        let (mut dropped, mut evicted) = (Vec::new(), Vec::new());
        for (version, group) in stale {
            let stored = &self.stored[&group];
            let (used, leased) = (stored.row.uses + stored.out > 0, stored.out > 0);
            if leased {
                // Forgotten with its last lease, which an acknowledgement brings to `max_uses`.
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
            }
            dropped.push(group);
        }
        self.evicted += evicted.len() as u64;
        self.count_dropped(dropped.len() as u64);
        for (kind, groups) in [(EventKind::Dropped, dropped), (EventKind::Evicted, evicted)] {
            if !groups.is_empty() {
                self.tell(kind, groups, None, Some(self.step));
            }
        }
    }

    /// Leaves a group that is leased no use beyond its leases.
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
        groups.iter().for_each(|group| self.take(*group));
        let named = request.step.is_some();
        if named {
            self.named.insert((request.consumer.clone(), step), id);
        }
        self.tell(EventKind::Leased, groups.clone(), Some(id), Some(step));
        let (consumer, hold_ms) = (request.consumer.clone(), request.hold.map(millis));
        let row = LeaseRow { consumer, step, named, groups, hold_ms, state: LeaseState::Open };
        self.change().leases.push((id, Some(row.clone())));
        self.leases.insert(id, Record { row, until: None });
        id
    }

    /// One more lease has `group`.
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

    /// Its groups are leased once less.
    fn put_back(&mut self, row: &LeaseRow) {
        if row.step == self.step {
            self.taken = self.taken.saturating_sub(row.groups.len());
        }
        for &group in &row.groups {
            let Some(stored) = self.stored.get_mut(&group) else { continue };
            stored.out -= 1;
            self.enter_pool(group);
        }
    }

    /// Makes sure that a lease is open, taking it up again if its hold was over and nobody has its groups.
    fn take_up(&mut self, lease: LeaseId) -> Result<(), BufferError> {
        let Some(record) = self.leases.get(&lease) else {
            let next = LeaseId(self.next_lease);
            return Err(if lease < next {
                BufferError::LeaseLost { lease }
            } else {
                BufferError::UnknownLease { lease, next }
            });
        };
        match record.row.state {
            LeaseState::Open => Ok(()),
            LeaseState::Lost => Err(BufferError::LeaseLost { lease }),
            LeaseState::Expired => {
                self.expired.remove(&lease);
                let row = LeaseRow { state: LeaseState::Open, ..record.row.clone() };
                if row.step == self.step {
                    self.taken += row.groups.len();
                }
                row.groups.iter().for_each(|group| self.take(*group));
                self.change().leases.push((lease, Some(row.clone())));
                self.leases.insert(lease, Record { row, until: None });
                Ok(())
            }
        }
    }

    /// Holds an open lease for `hold_ms` from `now`.
    fn hold(&mut self, lease: LeaseId, hold_ms: Option<u64>, now: u64) {
        self.let_go(lease);
        let Some(record) = self.leases.get_mut(&lease) else { return };
        record.until = hold_ms.map(|hold| now.saturating_add(hold));
        if let Some(until) = record.until {
            self.holds.insert((until, Held::Lease(lease)));
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
            self.holds.remove(&(until, Held::Lease(lease)));
        }
    }

    fn remove_lease(&mut self, lease: LeaseId) -> Option<Record> {
        self.let_go(lease);
        self.expired.remove(&lease);
        let record = self.leases.remove(&lease)?;
        let name = (record.row.consumer.clone(), record.row.step);
        if self.named.get(&name) == Some(&lease) {
            self.named.remove(&name);
        }
        self.change().leases.push((lease, None));
        Some(record)
    }

    fn tell_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped_untold)
    }
}
