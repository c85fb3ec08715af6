//! The policy of the buffer as a state machine: ids, slots, order, staleness, leases. It has no I/O, no lock and no
//! clock: callers pass the time.
//!
//! Invariant. Let `v` be the step that leases are for, `B = batch_groups`, `eta = max_staleness`, and `L(s)` the
//! number of groups leased for step `s`, at most `B`. A group is live if it is admitted, claimed or finalized, and
//! not leased. Its deadline is the last step that may train it: its oldest version + `eta`. For every `d >= v`, at
//! most `R(d) = sum over s = v..d of (B - L(s))` live groups have a deadline of `d` or less. `L(s)` counts the open
//! leases of a step after `v` (there are some after a rewind), and for `v` also what was acknowledged since the step
//! began.
//!
//! Why slots and earliest deadline first keep the staleness bound in [`OnStale::Wait`](crate::OnStale::Wait), for
//! steps that train `B` groups:
//! - *Admission.* A sampler that serves `a` gets groups with the deadline `d = a + eta`, and only while at most
//!   `R(d)` groups are live, whatever their deadlines. This keeps the invariant at `d` and later; earlier deadlines
//!   are not concerned. A group without a slot is admitted by the same rule when it arrives, and so is a group that
//!   is older than its slot assumed. All other claims and arrivals move a deadline later.
//! - *Lease.* The lease of step `v` takes the `B` earliest deadlines of the finalized groups. It is granted only if
//!   afterwards at most `R(d)` groups have a deadline of `d` or less, with its own groups in `L(v)`. No other `B`
//!   finalized groups satisfy more deadlines. If all live groups are finalized, the condition holds: either all
//!   groups taken are due by `d`, and both sides decrease by the same number, or no group due by `d` remains. A
//!   smaller lease leaves the rest of the step's `B` to other leases.
//! - *Next step.* It begins when `L(v) = B`, so no `R(d)` changes: the term that drops out is 0.
//! - *Bound.* With `d = v` the condition says that a group is leased at the latest for the step of its deadline. So
//!   no group exceeds the bound; the lease waits for the slow group instead.
//! - *No deadlock.* While the lease of step `v` waits, `L(v) < B`. So a sampler that serves `v` finds a free slot,
//!   unless `R(v + eta) >= B - L(v)` groups, or all slots, are live; those finish, and then the lease is granted.
//!
//! *Rewind.* A trainer that rewinds from `w` to an older step `v` requests its old steps again. Steps whose leases
//! are open get the same groups, which are not live; acknowledged steps get other groups. So `L(s)` is what is open
//! for `s`, and `R(d)` is what these steps still need. For `d >= w` every `R(d)` increases or stays. For `d < w` no
//! live group has such a deadline: step `d` ended with `R(d) = 0`, and groups in flight from undone versions are
//! revoked. A repeated lease changes neither side; its step begins with `L` as it was counted before. A lease
//! released for step `s >= v` adds capacity to every `d >= s`, and live groups only for `d` at or after their
//! deadlines, which are at or after `s`.
//!
//! *Crash.* A crash only removes live groups, which keeps the invariant. Two things outside break it: steps that
//! train more or less than `B` groups, and a released lease of a step before `v`. They cost groups, never the bound
//! or progress: groups over the bound are dropped, groups in flight over the bound are not waited for, and if more
//! groups are due than steps can take, a full batch of due groups is leased.
//!
//! *Replay* (another order, or several uses) checks the bound at the lease too, and limits admission by the live
//! groups alone. A group that exceeds the bound is generated again if it was never used, and evicted otherwise.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use trajectory::{GroupId, PolicyVersion};

use crate::{AdmitRequest, BufferConfig, BufferError, EventKind, LeaseId, Stats};

pub(crate) use arrival::{Arrival, ArrivalDecision, ArrivalIdentity};
pub use change::{GroupRow, LeaseRow, LeaseState, LedgerChange, Watermarks};
use dedup::{ContentIndex, KeyIndex};
pub(crate) use lease::GrantedLease;
pub use rewind::Rewound;
use select::LeaseCandidate;

mod arrival;
mod change;
mod dedup;
mod lease;
mod listing;
mod quarantine;
mod rewind;
mod samplers;
mod select;
mod steps;

/// First id of groups with idempotency keys; below 2^53, so every JSON reader keeps ids exact.
pub const KEYED: u64 = 1 << 52;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InFlightStage {
    Admitted,
    Claimed,
    Writing,
}

#[derive(Clone, Debug)]
struct InFlightGroup {
    stage: InFlightStage,
    /// The version that counts as the oldest: served at admission, then at the claim, then the oldest in the group.
    version: PolicyVersion,
    hold: GroupHold,
    until: Option<u64>,
    /// Size and digests while the group is written.
    bytes: u64,
    contents: Vec<u128>,
}

/// The process that generates a group, when the group got its slot, and the time after which it is revoked without a heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct GroupHold {
    ms: Option<u64>,
    holder: Option<u64>,
    /// Milliseconds.
    since: u64,
}

#[derive(Clone, Debug)]
struct StoredGroup {
    row: GroupRow,
    /// Number of open leases that contain it.
    out: u32,
    /// When it got its slot, milliseconds.
    since: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum HoldTarget {
    Group(GroupId),
    Lease(LeaseId),
}

/// An event, before it has an id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LedgerEvent {
    pub(crate) kind: EventKind,
    pub(crate) groups: Vec<GroupId>,
    pub(crate) lease: Option<LeaseId>,
    pub(crate) version: Option<PolicyVersion>,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    config: BufferConfig,
    /// Versions that admission may run ahead of the step, at most the bound on staleness.
    ahead: u64,
    /// `None` if all samplers get slots.
    samplers: Option<samplers::CountedSamplers>,
    next_id: u64,
    next_keyed: u64,
    /// Queue for re-admission: ids to be admitted before new ones.
    again: BTreeSet<GroupId>,
    flights: BTreeMap<GroupId, InFlightGroup>,
    stored: BTreeMap<GroupId, StoredGroup>,
    /// Groups that can be leased, by oldest version: stored, with a use left.
    pool: BTreeSet<LeaseCandidate>,
    /// Number of live groups (in flight or in the pool) by the version that they count from.
    due: BTreeMap<PolicyVersion, usize>,
    /// Open or expired.
    leases: BTreeMap<LeaseId, lease::LeaseRecord>,
    /// Leases that ended without an acknowledgement; at most [`lease::ENDED_KEPT`].
    ended: BTreeMap<LeaseId, LeaseRow>,
    /// Lease ids below have no record of their end, unless they are in `leases`.
    forgotten_leases: u64,
    named: HashMap<(String, PolicyVersion), LeaseId>,
    /// Expired leases whose groups were not leased again.
    expired: BTreeSet<LeaseId>,
    next_lease: u64,
    step: PolicyVersion,
    /// Number of groups leased for `step`.
    taken: usize,
    /// Groups in open leases, by the step of the lease.
    leased: BTreeMap<PolicyVersion, usize>,
    /// The newest version that can exist: `step`, or the next one after groups were leased for it, even if they were
    /// released since.
    known: PolicyVersion,
    holds: BTreeSet<(u64, HoldTarget)>,
    keys: KeyIndex,
    contents: ContentIndex,
    bytes: u64,
    dropped_stale: u64,
    /// Of those, the number that no lease has reported.
    dropped_untold: u64,
    evicted: u64,
    expiries: u64,
    quarantined: u64,
    /// The change since the last [`Ledger::take_change`].
    change: Option<LedgerChange>,
    occurrences: Vec<LedgerEvent>,
}

impl Ledger {
    /// Restores a ledger from the records of a store. Groups that were in flight are queued for re-admission; open
    /// leases get their full hold from `now`.
    pub(crate) fn restore(config: BufferConfig, recovered: Recovered, now: u64) -> Self {
        let Recovered { rows, leases, keys, watermarks: mark } = recovered;
        let admitted = |row: &&GroupRow| row.id.0 < KEYED;
        let next_id =
            rows.iter().filter(admitted).map(|row| row.id.0 + 1).max().unwrap_or(0).max(mark.next_id);
        let keyed = rows.iter().map(|row| row.id).chain(keys.iter().map(|(id, _)| *id));
        let next_keyed = keyed.map(|id| id.0 + 1).max().unwrap_or(0).max(mark.next_keyed).max(KEYED);
        let mut ledger = Self {
            config,
            ahead: config.max_staleness,
            samplers: None,
            next_id,
            next_keyed,
            again: mark.pending().chain((mark.next_id..next_id).map(GroupId)).collect(),
            flights: BTreeMap::new(),
            stored: BTreeMap::new(),
            pool: BTreeSet::new(),
            due: BTreeMap::new(),
            leases: BTreeMap::new(),
            ended: BTreeMap::new(),
            forgotten_leases: mark.forgotten_leases,
            named: HashMap::new(),
            expired: BTreeSet::new(),
            next_lease: leases.iter().map(|(id, _)| id.0 + 1).max().unwrap_or(0).max(mark.next_lease),
            step: mark.step,
            taken: mark.taken,
            leased: BTreeMap::new(),
            known: mark.known,
            holds: BTreeSet::new(),
            keys: KeyIndex::default(),
            contents: ContentIndex::default(),
            bytes: 0,
            dropped_stale: 0,
            dropped_untold: 0,
            evicted: 0,
            expiries: 0,
            quarantined: 0,
            change: None,
            occurrences: Vec::new(),
        };
        keys.into_iter().for_each(|(group, key)| ledger.keys.insert(key, group));
        for row in rows {
            ledger.again.remove(&row.id);
            ledger.bytes += row.bytes;
            ledger.contents.add(&row.contents);
            ledger.stored.insert(row.id, StoredGroup { row, out: 0, since: now });
        }
        leases.into_iter().for_each(|(id, row)| ledger.restore_lease(id, row, now));
        // Earlier programs did not count the open leases of a step that the trainer had rewound to.
        ledger.taken = ledger.taken.max(ledger.leased.get(&ledger.step).copied().unwrap_or(0));
        let ids: Vec<GroupId> = ledger.stored.keys().copied().collect();
        ids.into_iter().for_each(|id| ledger.enter_pool(id));
        ledger
    }

    /// The time of the next expiry, if any hold can expire.
    pub(crate) fn next_expiry(&self) -> Option<u64> {
        self.holds.first().map(|(until, _)| *until)
    }

    /// Admission: takes up to `limit` free slots, ids queued for re-admission first, lowest first. None for a sampler that gets none.
    pub(crate) fn admit(&mut self, request: AdmitRequest, now: u64) -> Result<Vec<GroupId>, BufferError> {
        self.not_from_the_future(request.served)?;
        if !self.may_hold(request.holder, now) {
            return Ok(Vec::new());
        }
        let count = request.limit.min(self.free(request.served));
        let mut ids = Vec::with_capacity(count);
        for _ in 0..count {
            let id = self.again.pop_first().unwrap_or_else(|| {
                self.next_id += 1;
                GroupId(self.next_id - 1)
            });
            let hold = GroupHold { ms: request.hold.map(millis), holder: request.holder, since: now };
            self.take_off(id, InFlightStage::Admitted, request.served, hold, now);
            ids.push(id);
        }
        Ok(ids)
    }

    pub(crate) fn claim(
        &mut self,
        group: GroupId,
        served: PolicyVersion,
        now: u64,
    ) -> Result<(), BufferError> {
        self.not_from_the_future(served)?;
        match self.flights.get(&group).map(|flight| (flight.stage, flight.version, flight.hold)) {
            Some((stage @ (InFlightStage::Admitted | InFlightStage::Claimed), version, hold)) => {
                // A claim from an older version than the admission's is checked when the group arrives.
                let version = if stage == InFlightStage::Admitted { version.max(served) } else { version };
                self.land(group);
                self.take_off(group, InFlightStage::Claimed, version, hold, now);
                Ok(())
            }
            _ => Err(BufferError::WrongState { group, is: self.state(group), needs: BufferError::NEEDS[0] }),
        }
    }

    pub(crate) fn abort(&mut self, group: GroupId, retry: bool) -> Result<(), BufferError> {
        match self.flights.get(&group) {
            Some(InFlightGroup { stage: InFlightStage::Admitted | InFlightStage::Claimed, .. }) => {}
            _ => {
                let is = self.state(group);
                return Err(BufferError::WrongState { group, is, needs: BufferError::NEEDS[1] });
            }
        }
        self.land(group);
        if retry {
            self.again.insert(group);
        } else {
            self.evicted += 1;
            self.emit(EventKind::Evicted, vec![group], None, None);
        }
        Ok(())
    }

    /// Revokes all groups in flight of `holder`, which is lost, and queues them for re-admission; their number. Groups being written
    /// stay.
    pub(crate) fn abandon(&mut self, holder: u64, now: u64) -> usize {
        self.lose_sampler(holder, now);
        let theirs = |flight: &InFlightGroup| {
            flight.hold.holder == Some(holder) && flight.stage != InFlightStage::Writing
        };
        let groups = self.flights.iter().filter(|(_, flight)| theirs(flight)).map(|(group, _)| *group);
        let groups: Vec<GroupId> = groups.collect();
        for group in &groups {
            self.land(*group);
            self.again.insert(*group);
        }
        groups.len()
    }

    /// Expires every hold that ended by `now`.
    pub(crate) fn expire(&mut self, now: u64) -> bool {
        let mut any = false;
        while let Some(&(until, target)) = self.holds.first()
            && until <= now
        {
            any = true;
            self.expiries += 1;
            match target {
                HoldTarget::Group(group) => {
                    // A sampler that does not say that it still generates a group may be one that never ends it.
                    let holder = self.land(group).and_then(|flight| flight.hold.holder);
                    holder.into_iter().for_each(|holder| self.lose_sampler(holder, now));
                    self.again.insert(group);
                    self.emit(EventKind::Expired, vec![group], None, None);
                }
                HoldTarget::Lease(lease) => self.expire_lease(lease),
            }
        }
        any
    }

    /// Evicts a group in any state; false if it is unknown.
    pub(crate) fn evict(&mut self, group: GroupId) -> bool {
        let flying = self.flights.get(&group).is_some_and(|flight| flight.stage != InFlightStage::Writing);
        if flying {
            self.land(group);
        } else if self.stored.contains_key(&group) {
            self.leave_leases(group);
            self.forget(group);
        } else if !self.again.remove(&group) {
            return false;
        }
        self.change();
        self.evicted += 1;
        self.emit(EventKind::Evicted, vec![group], None, None);
        true
    }

    /// Evicts groups that can be leased and are older than `version`; their number.
    pub(crate) fn evict_below(&mut self, version: PolicyVersion) -> u64 {
        let bound = LeaseCandidate { version, group: GroupId(0) };
        let old: Vec<GroupId> = self.pool.range(..bound).map(|candidate| candidate.group).collect();
        let idle = |id: &GroupId| self.stored.get(id).is_some_and(|stored| stored.out == 0);
        let old: Vec<GroupId> = old.into_iter().filter(idle).collect();
        old.iter().for_each(|id| self.forget(*id));
        self.evicted += old.len() as u64;
        let count = old.len() as u64;
        if count > 0 {
            self.emit(EventKind::Evicted, old, None, None);
        }
        count
    }

    /// The change to commit since the last call, and its events.
    pub(crate) fn take_change(&mut self) -> (Option<LedgerChange>, Vec<LedgerEvent>) {
        let change =
            self.change.take().map(|change| LedgerChange { watermarks: self.watermarks(), ..change });
        (change, std::mem::take(&mut self.occurrences))
    }

    /// Makes the next change write at least the watermarks.
    pub(crate) fn write_watermarks(&mut self) {
        self.change();
    }

    /// The events since the last call, if there is no change to commit first.
    pub(crate) fn take_occurrences(&mut self) -> Vec<LedgerEvent> {
        if self.change.is_some() { Vec::new() } else { std::mem::take(&mut self.occurrences) }
    }

    /// Forgets the change and the events since the last call, where nothing is stored.
    pub(crate) fn discard_change(&mut self) {
        self.change = None;
        self.occurrences.clear();
    }

    /// Number of groups that can be leased.
    pub(crate) fn finalized(&self) -> usize {
        self.pool.len()
    }

    /// Groups dropped as stale since the start.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped_stale
    }

    /// The oldest version in a stored group.
    pub(crate) fn oldest_of(&self, group: GroupId) -> Option<PolicyVersion> {
        self.stored.get(&group).map(|stored| stored.row.oldest)
    }

    pub(crate) fn is_in_flight(&self, group: GroupId) -> bool {
        self.flights.contains_key(&group)
    }

    pub(crate) fn stats(&self) -> Stats {
        let admitted = self.flights.values().filter(|flight| flight.stage == InFlightStage::Admitted).count();
        let mut in_flight: Vec<_> = self.flights.iter().map(|(id, flight)| (*id, flight.version)).collect();
        in_flight.sort_unstable_by_key(|&(id, version)| (version, id));
        in_flight.truncate(Stats::NAMED_IN_FLIGHT);
        let open = || self.leases.values().filter(|record| record.row.state == LeaseState::Open);
        let next_step = self.next_step();
        Stats {
            policy_version: self.step,
            admitted,
            claimed: self.flights.len() - admitted,
            finalized: self.pool.len(),
            leased: open().map(|record| record.row.groups.len()).sum(),
            leases: open().count(),
            again: self.again.len(),
            dropped_stale: self.dropped_stale,
            evicted: self.evicted,
            expired: self.expiries,
            quarantined: self.quarantined,
            oldest_age: self.due.first_key_value().map_or(0, |(version, _)| version.staleness_at(next_step)),
            oldest_in_flight: in_flight,
            batch_groups: self.config.batch_groups,
            max_staleness: self.config.max_staleness,
            slots: self.config.slots(),
            slots_free: self.free(next_step),
            bytes: self.bytes,
            max_bytes: self.config.max_bytes,
            next_id: GroupId(self.next_id),
            next_step,
        }
    }

    fn take_off(
        &mut self,
        group: GroupId,
        stage: InFlightStage,
        version: PolicyVersion,
        hold: GroupHold,
        now: u64,
    ) {
        let until = hold.ms.filter(|_| stage != InFlightStage::Writing).map(|hold| now.saturating_add(hold));
        if let Some(until) = until {
            self.holds.insert((until, HoldTarget::Group(group)));
        }
        *self.due.entry(version).or_default() += 1;
        let flight = InFlightGroup { stage, version, hold, until, bytes: 0, contents: Vec::new() };
        self.flights.insert(group, flight);
    }

    fn land(&mut self, group: GroupId) -> Option<InFlightGroup> {
        let flight = self.flights.remove(&group)?;
        self.due_less(flight.version);
        if let Some(until) = flight.until {
            self.holds.remove(&(until, HoldTarget::Group(group)));
        }
        Some(flight)
    }

    /// Adds a stored group to the pool if it has a use left.
    fn enter_pool(&mut self, group: GroupId) {
        let Some(stored) = self.stored.get(&group) else { return };
        let version = stored.row.oldest;
        if stored.row.uses + stored.out < self.config.max_uses
            && self.pool.insert(LeaseCandidate { version, group })
        {
            *self.due.entry(version).or_default() += 1;
        }
    }

    fn leave_pool(&mut self, version: PolicyVersion, group: GroupId) {
        if self.pool.remove(&LeaseCandidate { version, group }) {
            self.due_less(version);
        }
    }

    fn due_less(&mut self, version: PolicyVersion) {
        if let Some(count) = self.due.get_mut(&version) {
            *count -= 1;
            if *count == 0 {
                self.due.remove(&version);
            }
        }
    }

    /// Removes a stored group.
    fn forget(&mut self, group: GroupId) {
        let Some(StoredGroup { row, .. }) = self.stored.remove(&group) else { return };
        self.leave_pool(row.oldest, group);
        self.bytes -= row.bytes;
        self.contents.remove(&row.contents);
        self.change().forget.push((row.oldest, group));
        self.lose_leases_of(group);
    }

    fn count_dropped(&mut self, count: u64) {
        self.dropped_stale += count;
        self.dropped_untold += count;
    }

    fn change(&mut self) -> &mut LedgerChange {
        self.change.get_or_insert_default()
    }

    fn emit(
        &mut self,
        kind: EventKind,
        groups: Vec<GroupId>,
        lease: Option<LeaseId>,
        version: Option<PolicyVersion>,
    ) {
        self.occurrences.push(LedgerEvent { kind, groups, lease, version });
    }

    fn watermarks(&self) -> Watermarks {
        // The groups in flight and those queued are disjoint, and each list is ascending.
        let admitted = self.flights.keys().copied().filter(|id| id.0 < KEYED);
        let mut pending: Vec<GroupId> = admitted.chain(self.again.iter().copied()).collect();
        pending.sort_unstable();
        Watermarks {
            next_id: self.next_id,
            next_keyed: self.next_keyed,
            pending: Watermarks::ranges(pending.into_iter()),
            next_lease: self.next_lease,
            step: self.step,
            taken: self.taken,
            known: self.known,
            forgotten_leases: self.forgotten_leases,
        }
    }

    fn state(&self, group: GroupId) -> &'static str {
        let [admitted, claimed, writing, finalized, again, not_yet, past] = BufferError::STATES;
        match self.flights.get(&group).map(|flight| flight.stage) {
            Some(InFlightStage::Admitted) => admitted,
            Some(InFlightStage::Claimed) => claimed,
            Some(InFlightStage::Writing) => writing,
            None if self.stored.get(&group).is_some_and(|stored| stored.out == 0) => finalized,
            None if self.again.contains(&group) => again,
            None if group.0 >= self.next_id && group.0 < KEYED => not_yet,
            None => past,
        }
    }
}

/// All records of a store, as they were when it was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recovered {
    /// Rows of all stored groups, in any order.
    pub rows: Vec<GroupRow>,
    /// Leases, in any order.
    pub leases: Vec<(LeaseId, LeaseRow)>,
    /// Digests of idempotency keys, in any order. A key can outlive its group.
    pub keys: Vec<(GroupId, u128)>,
    /// The watermarks of the last change; the default if there was none.
    pub watermarks: Watermarks,
}

/// Whole milliseconds, saturating.
pub(crate) fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
