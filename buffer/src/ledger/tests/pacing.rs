//! One trainer, some samplers, heavy-tailed generation times: slots and earliest deadline first keep the bound without
//! throwing work away, whatever the schedule, and after crashes.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::{Finalized, LeaseRequest, OnStale};

const STEPS: u64 = 25;
const TRAINER: &str = "trainer";
/// How often a trainer goes back at most, so that it arrives.
const REWINDS: u32 = 20;

struct ModelGroup {
    id: GroupId,
    /// The version that its slot was given for.
    admitted: PolicyVersion,
    claimed: Option<PolicyVersion>,
    ticks: u64,
}

#[derive(Default)]
struct ModelSampler {
    served: PolicyVersion,
    groups: Vec<ModelGroup>,
}

/// Everything around the ledger, and what it must remember.
struct PacingModel {
    dice: TestRng,
    config: BufferConfig,
    ledger: Ledger,
    samplers: Vec<ModelSampler>,
    disk: RecordModel,
    trainer: PolicyVersion,
    checkpoint: PolicyVersion,
    /// Ticks until the leased step is done; `None` while it waits for its batch.
    training: Option<u64>,
    batches: BTreeMap<PolicyVersion, Vec<GroupId>>,
    evicted: u64,
    dropped: u64,
    /// Groups with a key that were over the bound when they came; they are not stored.
    refused: u64,
    next_key: u128,
    /// What was trained in steps whose groups are forgotten, before the trainer went back to them.
    undone: Vec<GroupId>,
    disturbances: Disturbances,
    rewound: u32,
    newest: u64,
}

/// What happens to a trainer beside training.
#[derive(Clone, Copy, Debug, Default)]
struct Disturbances {
    /// The buffer and all others start again.
    crashes: bool,
    /// It goes back to an older version and leases its steps again.
    rewinds: bool,
}

impl PacingModel {
    fn new(config: BufferConfig, seed: u64, disturbances: Disturbances) -> Self {
        let mut dice = TestRng(seed);
        let samplers = (0..=dice.below(3)).map(|_| ModelSampler::default()).collect();
        Self {
            dice,
            config,
            ledger: Ledger::restore(config, Recovered::default(), 0),
            samplers,
            disk: RecordModel::default(),
            trainer: PolicyVersion(0),
            checkpoint: PolicyVersion(0),
            training: None,
            batches: BTreeMap::new(),
            evicted: 0,
            dropped: 0,
            refused: 0,
            next_key: 0,
            undone: Vec::new(),
            disturbances,
            rewound: 0,
            newest: 0,
        }
    }

    fn keep(&mut self) {
        if let (Some(change), _) = self.ledger.take_change() {
            self.disk.commit(change);
        }
    }

    fn tick(&mut self) {
        for index in 0..self.samplers.len() {
            self.sample(index);
        }
        if self.dice.once_in(4) {
            self.submit();
        }
        self.train();
        if self.disturbances.crashes && self.dice.once_in(40) {
            self.crash();
        }
        if self.disturbances.rewinds && self.rewound < REWINDS && self.dice.once_in(40) {
            self.rewound += 1;
            self.rewind();
        }
        // Slots as of the newest version ever; after a crash, a released batch comes on top of what was admitted then.
        self.newest = self.newest.max(self.trainer.0);
        let versions = self.newest + self.config.max_staleness + 1 - self.ledger.next_step().0;
        let live = self.ledger.flights.len() + self.ledger.pool.len();
        assert!(live as u64 <= versions * self.config.batch_groups as u64, "too many groups");
    }

    fn sample(&mut self, index: usize) {
        let mut sampler = std::mem::take(&mut self.samplers[index]);
        if self.dice.once_in(3) {
            let behind = sampler.served.staleness_at(self.trainer);
            sampler.served.0 += self.dice.below(behind + 1);
        }
        let limit = self.dice.below(4) as usize;
        let request = AdmitRequest { served: sampler.served, limit, hold: None, holder: None };
        for id in self.ledger.admit(request, 0).unwrap() {
            let ticks = self.dice.ticks();
            sampler.groups.push(ModelGroup { id, admitted: sampler.served, claimed: None, ticks });
        }
        for mut group in std::mem::take(&mut sampler.groups) {
            match group.claimed {
                None if self.dice.once_in(2) => {
                    self.ledger.claim(group.id, sampler.served, 0).unwrap();
                    group.claimed = Some(sampler.served);
                }
                Some(oldest) if group.ticks == 0 => {
                    self.finalize(group.id, oldest);
                    continue;
                }
                _ if self.dice.once_in(50) => {
                    let retry = self.dice.once_in(2);
                    self.ledger.abort(group.id, retry).unwrap();
                    self.evicted += u64::from(!retry);
                    continue;
                }
                _ => group.ticks = group.ticks.saturating_sub(1),
            }
            sampler.groups.push(group);
        }
        self.samplers[index] = sampler;
    }

    fn finalize(&mut self, group: GroupId, oldest: PolicyVersion) {
        let arrival = arrival(ArrivalIdentity::Admitted(group), oldest);
        match self.ledger.begin(&arrival, 0).unwrap() {
            ArrivalDecision::Write { group: id, .. } => {
                assert_eq!(id, group);
                assert_eq!(self.ledger.begin(&arrival, 0).unwrap(), ArrivalDecision::Elsewhere(group));
                self.disk.append(row(group, oldest), None);
                self.ledger.end(group, Some(row(group, oldest)), 0);
            }
            answer => {
                assert_eq!(answer, ArrivalDecision::Answer(Some(group), Finalized::Stale));
                assert!(oldest.staleness_at(self.ledger.next_step()) > self.config.max_staleness);
                self.dropped += 1;
            }
        }
    }

    /// A group without admission, of any version that may still be trained.
    fn submit(&mut self) {
        let behind = self.dice.below(self.config.max_staleness + 2);
        let oldest = PolicyVersion(self.trainer.0.saturating_sub(behind));
        let key = self.next_key;
        self.next_key += 1;
        match self.ledger.begin(&arrival(ArrivalIdentity::Keyed(key), oldest), 0).unwrap() {
            ArrivalDecision::Write { group, .. } => {
                self.disk.append(row(group, oldest), Some(key));
                self.ledger.end(group, Some(row(group, oldest)), 0);
            }
            ArrivalDecision::Answer(None, Finalized::Stale) => self.refused += 1,
            ArrivalDecision::Answer(None, Finalized::Full) => {}
            other => panic!("{other:?}"),
        }
    }

    fn train(&mut self) {
        match self.training {
            None => self.lease(),
            Some(_) if self.dice.once_in(20) && self.ledger.step == self.trainer => {
                let lease = self.ledger.named[&(TRAINER.to_owned(), self.trainer)];
                self.ledger.release(lease).unwrap();
                self.keep();
                self.batches.remove(&self.trainer);
                self.training = None;
            }
            Some(0) => {
                self.training = None;
                self.trainer = self.trainer.next();
                if self.dice.once_in(3) {
                    self.checkpoint = self.trainer;
                    // A crash between checkpoint and acknowledgement.
                    if self.disturbances.crashes && self.dice.once_in(5) {
                        return self.crash();
                    }
                    self.acknowledge();
                }
            }
            Some(ticks) => self.training = Some(ticks - 1),
        }
    }

    fn acknowledge(&mut self) {
        self.ledger.ack_through(TRAINER, self.checkpoint).unwrap();
        self.keep();
    }

    fn lease(&mut self) {
        let before = self.ledger.dropped_stale;
        let leased = self.ledger.lease(&LeaseRequest::step(TRAINER, self.trainer), 0, true).unwrap();
        self.keep();
        self.dropped += self.ledger.dropped_stale - before;
        let Some(GrantedLease { groups: ids, .. }) = leased else {
            let nothing_in_flight = self.ledger.flights.is_empty();
            let enough = self.ledger.pool.len() >= self.config.batch_groups;
            assert!(!(nothing_in_flight && enough), "nothing to wait for, but no batch");
            return;
        };
        assert_eq!(ids.len(), self.config.batch_groups);
        assert!(ids.is_sorted_by(|a, b| a < b), "not in order");
        for id in &ids {
            let staleness = self.disk.rows[id].oldest.staleness_at(self.trainer);
            assert!(staleness <= self.config.max_staleness, "{id} is {staleness} versions old");
        }
        let before = self.batches.entry(self.trainer).or_insert_with(|| ids.clone());
        assert_eq!(*before, ids, "another batch for {} after a crash", self.trainer);
        self.training = Some(self.dice.below(6));
    }

    /// The trainer goes back to any version it had; what was acknowledged before its last checkpoint is not there again.
    fn rewind(&mut self) {
        let version = PolicyVersion(self.dice.below(self.trainer.0 + 1));
        self.ledger.set_version(version, true).unwrap();
        self.keep();
        for step in version.0..self.checkpoint.0 {
            self.undone.extend(self.batches.remove(&PolicyVersion(step)).unwrap());
        }
        (self.trainer, self.checkpoint, self.training) = (version, self.checkpoint.min(version), None);
        for sampler in &mut self.samplers {
            sampler.served = sampler.served.min(version);
            sampler.groups.retain(|group| group.claimed.unwrap_or(group.admitted) <= version);
        }
    }

    /// Everything but rows, mark and checkpoint is lost.
    fn crash(&mut self) {
        self.ledger = super::reopen(&self.disk, self.config, 0);
        self.trainer = self.checkpoint;
        self.training = None;
        self.samplers.iter_mut().for_each(|s| *s = ModelSampler { served: self.trainer, groups: Vec::new() });
        self.acknowledge();
    }

    fn check_conservation(&self) {
        let mut seen = BTreeSet::new();
        assert!(
            self.undone.iter().all(|id| seen.insert(*id)),
            "a group is trained after it was acknowledged"
        );
        assert!(self.batches.values().flatten().all(|id| seen.insert(*id)), "a group is in two batches");
        let batched = seen.len();
        let in_pool = self.ledger.pool.iter().map(|candidate| candidate.group);
        let live = self.ledger.flights.keys().copied().chain(in_pool);
        assert!(live.chain(self.ledger.again.iter().copied()).all(|id| seen.insert(id)));
        let admitted = seen.iter().filter(|id| id.0 < KEYED).count();
        let evicted = self.ledger.next_id - admitted as u64;
        if self.disturbances.crashes {
            assert!(evicted <= self.evicted, "{evicted} ids are nowhere, {} were evicted", self.evicted);
        } else {
            assert_eq!(evicted, self.evicted, "ids are lost");
        }
        let flying: usize = self.samplers.iter().map(|sampler| sampler.groups.len()).sum();
        let stats = self.ledger.stats();
        assert_eq!(stats.admitted + stats.claimed, flying);
        let dropped = self.dropped + self.refused;
        let lost_count = self.disturbances.crashes && stats.dropped_stale < dropped;
        assert!(stats.dropped_stale == dropped || lost_count);
        assert!(stats.leased <= batched);
    }
}

fn run(config: BufferConfig, seed: u64, disturbances: Disturbances) -> PacingModel {
    let mut world = PacingModel::new(config, seed, disturbances);
    let mut ticks = 0;
    while world.trainer.0 < STEPS {
        world.tick();
        ticks += 1;
        assert!(ticks < 60_000, "no progress: {}", world.ledger.stats());
    }
    world.check_conservation();
    world
}

prop_compose! {
    fn configs()(batch_groups in 1..=4usize, max_staleness in 0..=4u64, wait: bool) -> BufferConfig {
        let on_stale = if wait { OnStale::Wait } else { OnStale::Drop };
        BufferConfig { on_stale, ..BufferConfig::new(batch_groups, max_staleness) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_schedule_keeps_the_bound_and_loses_nothing(
        config in configs(), seed: u64, crashes: bool, rewinds: bool,
    ) {
        let world = run(config, seed, Disturbances { crashes, rewinds });
        if config.on_stale == OnStale::Wait {
            prop_assert_eq!(world.dropped, 0, "pacing threw work away");
        }
    }
}

#[test]
fn without_waiting_slow_groups_are_dropped() {
    let config = BufferConfig { on_stale: OnStale::Drop, ..BufferConfig::new(2, 1) };
    let dropped: u64 = (0..20).map(|seed| run(config, seed, Disturbances::default()).dropped).sum();
    assert!(dropped > 0, "the schedules are too tame to show that waiting matters");
}

fn admit(ledger: &mut Ledger, served: u64, limit: usize) -> Vec<GroupId> {
    ledger.admit(AdmitRequest { served: PolicyVersion(served), limit, hold: None, holder: None }, 0).unwrap()
}

fn finalize(ledger: &mut Ledger, id: u64, oldest: u64) -> ArrivalDecision {
    let (group, oldest) = (GroupId(id), PolicyVersion(oldest));
    let begin = ledger.begin(&arrival(ArrivalIdentity::Admitted(group), oldest), 0).unwrap();
    if matches!(begin, ArrivalDecision::Write { .. }) {
        ledger.end(group, Some(row(group, oldest)), 0);
    }
    begin
}

fn leased(ledger: &mut Ledger, step: u64) -> Option<Vec<u64>> {
    let leased = ledger.lease(&LeaseRequest::step(TRAINER, PolicyVersion(step)), 0, true).unwrap();
    leased.map(|leased| leased.groups.iter().map(|id| id.0).collect())
}

#[test]
fn a_batch_waits_for_the_group_whose_last_step_it_is() {
    let mut ledger = Ledger::restore(BufferConfig::new(1, 1), Recovered::default(), 0);
    admit(&mut ledger, 0, 2);
    finalize(&mut ledger, 1, 0);
    assert_eq!(leased(&mut ledger, 0), Some(vec![1]));
    admit(&mut ledger, 1, 1);
    finalize(&mut ledger, 2, 1);
    assert_eq!(leased(&mut ledger, 1), None, "group 0 must be trained by step 1");
    finalize(&mut ledger, 0, 0);
    assert_eq!(leased(&mut ledger, 1), Some(vec![0]));
}

#[test]
fn a_lease_does_not_wait_for_groups_over_the_bound() {
    let mut ledger = Ledger::restore(BufferConfig::new(1, 1), Recovered::default(), 0);
    admit(&mut ledger, 0, 2);
    ledger.set_version(PolicyVersion(9), true).unwrap();
    finalize(&mut ledger, 1, 9);
    // The trainer was at 9 at once: group 0, in flight since 0, is over the bound already.
    assert_eq!(leased(&mut ledger, 9), Some(vec![1]));
    assert_eq!(finalize(&mut ledger, 0, 0), ArrivalDecision::Answer(Some(GroupId(0)), Finalized::Stale));
    assert_eq!(leased(&mut ledger, 10), None);
    assert_eq!(ledger.stats().dropped_stale, 1);
    assert_eq!(admit(&mut ledger, 10, 1), [GroupId(0)]);
}

#[test]
fn groups_beyond_the_capacity_of_a_step_are_dropped() {
    let rows = [0, 1].map(|id| row(GroupId(id), PolicyVersion(0))).to_vec();
    let mut ledger = Ledger::restore(BufferConfig::new(1, 0), Recovered { rows, ..Recovered::default() }, 0);
    assert_eq!(leased(&mut ledger, 0), Some(vec![0]));
    assert_eq!(leased(&mut ledger, 1), None);
    assert_eq!(ledger.stats().dropped_stale, 1);
}

#[test]
fn groups_of_a_lost_sampler_are_admitted_again_first() {
    let mut ledger = Ledger::restore(BufferConfig::new(2, 1), Recovered::default(), 0);
    let of = |holder: u64, ledger: &mut Ledger| {
        let request = AdmitRequest { served: PolicyVersion(0), limit: 2, hold: None, holder: Some(holder) };
        ledger.admit(request, 0).unwrap()
    };
    let (gone, there) = (of(7, &mut ledger), of(8, &mut ledger));
    ledger.claim(gone[0], PolicyVersion(0), 0).unwrap();
    assert_eq!(ledger.abandon(9, 0), 0);
    // A group that is being written has arrived.
    assert!(matches!(finalize(&mut ledger, gone[0].0, 0), ArrivalDecision::Write { .. }));
    assert_eq!(ledger.abandon(7, 0), 1);
    assert_eq!(of(8, &mut ledger), [gone[1]]);
    ledger.claim(there[0], PolicyVersion(0), 0).unwrap();
    assert_eq!(ledger.abandon(7, 0), 0, "others have it now");
}
