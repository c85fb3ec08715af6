//! The whole contract against a model: random calls of any client, with a clock and crashes.
//!
//! The model tracks the acknowledgements that each caller received, not how the ledger decides. It fails when a group is
//! leased over the bound, or to two consumers at a time, or more often than allowed, or again after its last
//! acknowledgement; when a named step gets other groups than before; and when an accepted group is forgotten without a
//! reason.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::{Finalized, LeaseRequest, OnStale, Order};

/// Calls in one run of the suite.
const CALLS: u64 = 1_000_000;
/// Calls per world. The next world has another configuration.
const PER_WORLD: u64 = 10_000;
const CONSUMERS: u64 = 3;

/// A lease as its consumer sees it.
#[derive(Clone, Debug)]
struct ExpectedAnswer {
    consumer: String,
    step: PolicyVersion,
    named: bool,
    groups: Vec<GroupId>,
    until: Option<u64>,
}

/// What a group has been through.
#[derive(Clone, Debug)]
struct LeaseHistory {
    oldest: PolicyVersion,
    uses: u32,
    /// Removed on request, or in a lease when it went over the bound.
    evicted: bool,
}

/// How a lease ended, for its consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelLeaseEnd {
    Acked,
    Released,
    Lost,
}

struct ContractModel {
    dice: TestRng,
    config: BufferConfig,
    ledger: Ledger,
    disk: RecordModel,
    /// Unacknowledged changes: a crash may lose the last of them.
    unflushed: Vec<LedgerChange>,
    now: u64,
    histories: BTreeMap<GroupId, LeaseHistory>,
    expected: BTreeMap<LeaseId, ExpectedAnswer>,
    in_flight: BTreeMap<GroupId, PolicyVersion>,
    next_key: u128,
    /// Leases that are over, and whether they were acknowledged, released or lost.
    ended: Vec<(LeaseId, ModelLeaseEnd)>,
    /// The highest step for which anything may have been dropped.
    highest: PolicyVersion,
    handed_out: u64,
    acked: u64,
    lost: u64,
}

impl ContractModel {
    fn new(seed: u64) -> Self {
        let mut dice = TestRng(seed);
        let (batch_groups, max_staleness) = (1 + dice.below(4) as usize, dice.below(5));
        let order = match dice.below(6) {
            0 => Order::Recency,
            1 => Order::Uniform,
            2 => Order::Reward { temperature: 0.5 },
            _ => Order::Fifo,
        };
        let max_uses = if dice.once_in(3) { 1 + dice.below(3) as u32 } else { 1 };
        let mut config =
            BufferConfig { order, max_uses, seed, ..BufferConfig::new(batch_groups, max_staleness) };
        config.on_stale = if config.replays() || dice.once_in(3) { OnStale::Drop } else { OnStale::Wait };
        config.max_bytes = if dice.once_in(4) { 5 } else { 1 << 30 };
        let ledger = Ledger::restore(config.checked().unwrap(), Recovered::default(), 0);
        Self {
            dice,
            config,
            ledger,
            disk: RecordModel::default(),
            unflushed: Vec::new(),
            now: 0,
            histories: BTreeMap::new(),
            expected: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            next_key: 0,
            ended: Vec::new(),
            highest: PolicyVersion(0),
            handed_out: 0,
            acked: 0,
            lost: 0,
        }
    }

    fn random_call(&mut self) {
        self.now += self.dice.below(20);
        match self.dice.below(26) {
            0..=3 => self.admit(),
            4..=6 => self.finalize(),
            7..=9 => self.submit(),
            10 => self.claim_or_abort(),
            11..=15 => self.lease(),
            16 | 17 => self.ack(),
            18 => self.ack_through(),
            19 => self.release(),
            20 => self.extend(),
            21 => self.set_version(),
            24 => self.repeat_an_end(),
            25 if self.dice.once_in(8) => self.rewind(),
            22 if self.dice.once_in(4) => self.evict(),
            23 if self.dice.once_in(8) => self.crash(),
            _ => {
                self.ledger.expire(self.now);
                self.flush(false);
            }
        }
    }

    fn flush(&mut self, waits: bool) {
        self.unflushed.extend(self.ledger.take_change().0);
        self.highest = self.highest.max(self.ledger.step);
        if !waits {
            return;
        }
        for change in std::mem::take(&mut self.unflushed) {
            for (_, id) in &change.forget {
                let history = self.histories.get(id).unwrap_or_else(|| panic!("{id} was never accepted"));
                let over = history.oldest.staleness_at(self.highest) > self.config.max_staleness;
                let used_up = history.uses >= self.config.max_uses;
                assert!(
                    over || used_up || history.evicted,
                    "{id} is forgotten without a reason: {history:?}"
                );
            }
            self.disk.commit(change);
        }
    }

    fn admit(&mut self) {
        let served = PolicyVersion(self.dice.below(self.ledger.known().0 + 1));
        let hold = self.dice.once_in(2).then(|| std::time::Duration::from_millis(self.dice.below(200)));
        let request = AdmitRequest { served, limit: self.dice.below(4) as usize, hold, holder: None };
        let free = self.ledger.free(served);
        let ids = self.ledger.admit(request, self.now).unwrap();
        assert!(ids.len() <= free);
        for id in ids {
            if let Some(history) = self.histories.remove(&id) {
                let over = history.oldest.staleness_at(self.highest) > self.config.max_staleness;
                assert!(over && history.uses == 0, "{id} is admitted again: {history:?}");
            }
            self.in_flight.insert(id, served);
        }
    }

    fn claim_or_abort(&mut self) {
        let Some(id) = self.any_in_flight() else { return };
        if self.dice.once_in(2) {
            let served = self.ledger.known();
            if self.ledger.claim(id, served, self.now).is_ok() {
                self.in_flight.insert(id, served);
            }
        } else if self.ledger.abort(id, self.dice.once_in(2)).is_ok() {
            self.in_flight.remove(&id);
        }
    }

    fn finalize(&mut self) {
        let Some(id) = self.any_in_flight() else { return };
        let oldest = self.in_flight[&id];
        self.arrive(ArrivalIdentity::Admitted(id), oldest);
    }

    fn submit(&mut self) {
        let repeated = self.next_key > 0 && self.dice.once_in(5);
        let key = if repeated { u128::from(self.dice.below(self.next_key as u64)) } else { self.next_key };
        self.next_key = self.next_key.max(key + 1);
        let behind = self.dice.below(self.config.max_staleness + 2);
        self.arrive(ArrivalIdentity::Keyed(key), PolicyVersion(self.ledger.known().0.saturating_sub(behind)));
    }

    fn arrive(&mut self, identity: ArrivalIdentity, oldest: PolicyVersion) {
        let known = self.ledger.known();
        let begin = match self.ledger.begin(&arrival(identity, oldest), self.now) {
            // From a version that was undone since its admission.
            Err(BufferError::FutureVersion { .. }) if oldest > known => return,
            begin => begin.unwrap(),
        };
        match begin {
            ArrivalDecision::Write { group, .. } => {
                let works = !self.dice.once_in(20);
                let mut row = row(group, oldest);
                row.reward = Some(self.dice.below(5) as f64);
                if works {
                    let history = LeaseHistory { oldest, uses: 0, evicted: false };
                    assert!(self.histories.insert(group, history).is_none(), "{group} is accepted twice");
                    let key = match identity {
                        ArrivalIdentity::Keyed(key) => Some(key),
                        ArrivalIdentity::Admitted(_) => None,
                    };
                    self.disk.append(row.clone(), key);
                    self.in_flight.remove(&group);
                }
                self.ledger.end(group, works.then_some(row), self.now);
            }
            ArrivalDecision::Answer(group, Finalized::Stale) => {
                assert!(oldest.staleness_at(self.ledger.next_step()) > self.config.max_staleness);
                group.map(|group| self.in_flight.remove(&group));
            }
            ArrivalDecision::Answer(Some(group), Finalized::Duplicate) => {
                self.in_flight.remove(&group);
            }
            ArrivalDecision::Answer(_, Finalized::Full) => {}
            other => panic!("{other:?}"),
        }
    }

    fn lease(&mut self) {
        let consumer = format!("consumer {}", self.dice.below(CONSUMERS));
        let (current, known) = (self.ledger.step, self.ledger.known());
        let replayed =
            self.expected.values().filter(|expected| expected.named && expected.consumer == consumer);
        let replayed: Vec<PolicyVersion> = replayed.map(|expected| expected.step).collect();
        let step = match self.dice.below(4) {
            0 => None,
            1 if !replayed.is_empty() => Some(replayed[self.dice.below(replayed.len() as u64) as usize]),
            _ => Some(known),
        };
        let batch = self.config.batch_groups as u64;
        let request = LeaseRequest {
            consumer: consumer.clone(),
            step,
            groups: self.dice.once_in(2).then(|| 1 + self.dice.below(2 * batch) as usize),
            at_least: self.dice.once_in(2).then_some(1),
            tokens: self.dice.once_in(4).then(|| self.dice.below(60)),
            max_staleness: self.dice.once_in(4).then(|| self.dice.below(3)),
            hold: self.dice.once_in(2).then(|| std::time::Duration::from_millis(1 + self.dice.below(300))),
        };
        let leased = self.ledger.lease(&request, self.now, self.dice.once_in(2));
        self.flush(true);
        let Ok(Some(GrantedLease { id, step, groups, .. })) = leased else { return };
        // All groups of a lease that is given again can have been evicted.
        assert!(!groups.is_empty() || self.expected.contains_key(&id), "a lease of nothing");
        assert!(groups.is_sorted_by(|a, b| a < b));
        let until = request.hold.map(|hold| self.now + millis(hold));
        let named = request.step.is_some();
        if let Some(before) = self.expected.get(&id) {
            assert!(
                named && before.groups == groups,
                "another batch for {step}: {before:?}, then {groups:?}"
            );
        } else {
            assert!((current..=known).contains(&step), "a new lease for {step} at {current}");
            self.check_new(&groups, step);
        }
        self.check_alone(id, &groups);
        self.handed_out += groups.len() as u64;
        self.expected.insert(id, ExpectedAnswer { consumer, step, named, groups, until });
    }

    fn check_new(&self, groups: &[GroupId], step: PolicyVersion) {
        for id in groups {
            let history = &self.histories[id];
            let staleness = history.oldest.staleness_at(step);
            assert!(staleness <= self.config.max_staleness, "{id} is {staleness} versions old at {step}");
            assert!(
                history.uses < self.config.max_uses && !history.evicted,
                "{id} is done with: {history:?}"
            );
        }
    }

    /// At most `max_uses` live leases contain a group.
    fn check_alone(&self, lease: LeaseId, groups: &[GroupId]) {
        let live = self
            .expected
            .iter()
            .filter(|(id, expected)| **id != lease && expected.until.is_none_or(|until| until > self.now));
        let extended: Vec<&ExpectedAnswer> = live.map(|(_, expected)| expected).collect();
        for id in groups {
            let others = extended.iter().filter(|expected| expected.groups.contains(id)).count();
            let uses = self.histories[id].uses as usize + others + 1;
            assert!(uses <= self.config.max_uses as usize, "{id} is in the leases of {others} others");
        }
    }

    fn ack(&mut self) {
        let Some(id) = self.any_expected() else { return };
        let acked = self.ledger.ack(id);
        self.settle(acked.is_ok(), id);
        self.flush(true);
    }

    fn settle(&mut self, acked: bool, id: LeaseId) {
        let expected = self.expected.remove(&id).unwrap();
        self.ended.push((id, if acked { ModelLeaseEnd::Acked } else { ModelLeaseEnd::Lost }));
        if !acked {
            assert!(expected.until.is_some_and(|until| until <= self.now), "a lease is lost in its hold");
            self.lost += 1;
            return;
        }
        self.acked += 1;
        for id in &expected.groups {
            self.histories.get_mut(id).unwrap().uses += 1;
        }
    }

    fn ack_through(&mut self) {
        let consumer = format!("consumer {}", self.dice.below(CONSUMERS));
        let through = self.ledger.step;
        let of = |expected: &ExpectedAnswer| expected.consumer == consumer && expected.step < through;
        let done: Vec<LeaseId> =
            self.expected.iter().filter(|(_, expected)| of(expected)).map(|(id, _)| *id).collect();
        let answer = self.ledger.ack_through(&consumer, through).map_err(|error| error.to_string());
        for id in done {
            let acked = self.ledger.ack(id).is_ok();
            self.settle(acked, id);
        }
        self.flush(true);
        let again = self.ledger.ack_through(&consumer, through).map_err(|error| error.to_string());
        assert_eq!(answer, again, "another answer to the same acknowledgement");
        self.flush(true);
    }

    fn release(&mut self) {
        let Some(id) = self.any_expected() else { return };
        let released = self.ledger.release(id).is_ok();
        self.expected.remove(&id);
        self.ended.push((id, if released { ModelLeaseEnd::Released } else { ModelLeaseEnd::Lost }));
        self.flush(true);
    }

    /// What ended a lease succeeds again, and nothing else does.
    fn repeat_an_end(&mut self) {
        let n = self.dice.below(self.ended.len().max(1) as u64) as usize;
        let Some(&(id, end)) = self.ended.get(n) else { return };
        assert_eq!(self.ledger.ack(id).is_ok(), end == ModelLeaseEnd::Acked, "{id} was {end:?}");
        assert_eq!(self.ledger.release(id).is_ok(), end == ModelLeaseEnd::Released, "{id} was {end:?}");
        assert!(self.ledger.extend(id, 1, self.now).is_err(), "{id} was {end:?}");
    }

    /// The trainer goes back to an older version.
    fn rewind(&mut self) {
        let version = PolicyVersion(self.dice.below(self.ledger.known().0 + 1));
        self.ledger.set_version(version, true).unwrap();
        self.flush(true);
        assert_eq!((self.ledger.policy_version(), self.ledger.known()), (version, version));
    }

    fn extend(&mut self) {
        let Some(id) = self.any_expected() else { return };
        let hold = 1 + self.dice.below(300);
        let extended = self.ledger.extend(id, hold, self.now);
        self.flush(true);
        let expected = self.expected.get_mut(&id).unwrap();
        if extended.is_ok() {
            expected.until = Some(self.now + hold);
            let groups = expected.groups.clone();
            self.check_alone(id, &groups);
        } else {
            assert!(expected.until.is_some_and(|until| until <= self.now), "a lease is lost in its hold");
            self.expected.remove(&id);
            self.ended.push((id, ModelLeaseEnd::Lost));
        }
    }

    fn set_version(&mut self) {
        let ahead = self.dice.below(3).min(self.config.max_staleness + 1);
        self.ledger.set_version(PolicyVersion(self.ledger.known().0 + ahead), false).unwrap();
        self.flush(true);
    }

    fn evict(&mut self) {
        if self.dice.once_in(3) {
            let below = self.ledger.step;
            let bound = LeaseCandidate { version: below, group: GroupId(0) };
            for LeaseCandidate { version, group } in self.ledger.pool.range(..bound) {
                assert!(*version < below);
                self.histories.get_mut(group).unwrap().evicted = true;
            }
            self.ledger.evict_below(below);
            // Those in a lease were not.
            for (id, history) in &mut self.histories {
                history.evicted &= !self.ledger.is_stored(*id);
            }
        } else if let Some(id) =
            self.histories.keys().nth(self.dice.below(self.histories.len() as u64 + 1) as usize)
        {
            let id = *id;
            if self.ledger.evict(id) {
                self.histories.get_mut(&id).unwrap().evicted = true;
                self.expected.values_mut().for_each(|expected| expected.groups.retain(|group| *group != id));
            }
        }
        self.flush(true);
    }

    /// All acknowledged changes are durable, and any prefix of the others.
    fn crash(&mut self) {
        let written = self.dice.below(self.unflushed.len() as u64 + 1) as usize;
        self.unflushed.truncate(written);
        self.ledger.take_change();
        let flushed = self.ledger.step;
        self.flush(true);
        self.highest = self.highest.max(flushed);
        self.ledger = super::reopen(&self.disk, self.config, self.now);
        self.in_flight.clear();
        // Open leases get their full hold again.
        for (id, expected) in &mut self.expected {
            let open = self.ledger.leases.get(id).is_some_and(|record| record.row.state == LeaseState::Open);
            if let (Some(_), true) = (expected.until, open) {
                let hold = self.ledger.leases[id].row.hold_ms;
                expected.until = hold.map(|hold| self.now + hold);
            }
        }
        for (id, history) in &self.histories {
            let over = history.oldest.staleness_at(self.highest) > self.config.max_staleness;
            let done = history.uses >= self.config.max_uses || history.evicted || over;
            assert!(done || self.ledger.is_stored(*id), "{id} is lost: {history:?}");
        }
    }

    fn any_in_flight(&mut self) -> Option<GroupId> {
        let n = self.dice.below(self.in_flight.len().max(1) as u64) as usize;
        self.in_flight.keys().nth(n).copied()
    }

    fn any_expected(&mut self) -> Option<LeaseId> {
        let n = self.dice.below(self.expected.len().max(1) as u64) as usize;
        self.expected.keys().nth(n).copied()
    }

    fn check_counts(&self) {
        let stored: BTreeSet<GroupId> = self.ledger.stored.keys().copied().collect();
        assert_eq!(self.disk.rows.keys().copied().collect::<BTreeSet<_>>(), stored);
        let stats = self.ledger.stats();
        let bytes: u64 = self.ledger.stored.values().map(|stored| stored.row.bytes).sum();
        assert_eq!(stats.bytes, bytes, "bytes do not add up");
        assert!(stats.bytes <= self.config.max_bytes);
        for (step, leased) in &self.ledger.leased {
            let open = self.ledger.leases.values().filter(|record| record.row.state == LeaseState::Open);
            let of_step = open.filter(|record| record.row.step == *step);
            let groups: usize = of_step.map(|record| record.row.groups.len()).sum();
            assert_eq!(groups, *leased, "leased for {step}");
        }
        let live: usize = self.ledger.due.values().sum();
        assert_eq!(live, self.ledger.flights.len() + self.ledger.pool.len(), "deadlines do not add up");
        for (id, stored) in &self.ledger.stored {
            let open = self.ledger.leases.values().filter(|record| record.row.state == LeaseState::Open);
            let out = open.filter(|record| record.row.groups.contains(id)).count();
            assert_eq!(out, stored.out as usize, "{id} is in {out} leases");
        }
    }
}

#[test]
fn no_call_breaks_an_acknowledgement() {
    let (mut handed_out, mut acked, mut lost) = (0, 0, 0);
    for seed in 0..CALLS / PER_WORLD {
        let mut world = ContractModel::new(seed);
        for call in 0..PER_WORLD {
            world.random_call();
            if call % 500 == 0 {
                world.flush(true);
                world.check_counts();
            }
        }
        (handed_out, acked, lost) = (handed_out + world.handed_out, acked + world.acked, lost + world.lost);
    }
    // The schedules reach what they are to try.
    assert!(handed_out > 50_000 && acked > 20_000 && lost > 500, "{handed_out} {acked} {lost}");
}
