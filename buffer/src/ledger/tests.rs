//! The ledger under a random schedule: slow groups, lagging samplers, crashes. No false alarms: every property holds
//! for every seed.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const STEPS: u64 = 25;

/// SplitMix64: one seed makes one schedule.
struct Dice(u64);

impl Dice {
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

struct InFlight {
    id: GroupId,
    claimed: Option<PolicyVersion>,
    ticks: u64,
}

#[derive(Default)]
struct Sampler {
    served: PolicyVersion,
    groups: Vec<InFlight>,
}

/// Everything around the ledger, and what it must remember.
struct World {
    dice: Dice,
    config: BufferConfig,
    ledger: Ledger,
    samplers: Vec<Sampler>,
    rows: BTreeMap<GroupId, Row>,
    mark: Mark,
    trainer: PolicyVersion,
    checkpoint: PolicyVersion,
    /// Ticks until the leased step is done; `None` while it waits for its batch.
    training: Option<u64>,
    batches: BTreeMap<PolicyVersion, Vec<GroupId>>,
    evicted: u64,
    dropped: u64,
    crashes: bool,
    newest: u64,
}

impl World {
    fn new(config: BufferConfig, seed: u64, crashes: bool) -> Self {
        let mut dice = Dice(seed);
        let samplers = (0..=dice.below(3)).map(|_| Sampler::default()).collect();
        Self {
            dice,
            config,
            ledger: Ledger::restore(config, &[], Mark::default()),
            samplers,
            rows: BTreeMap::new(),
            mark: Mark::default(),
            trainer: PolicyVersion(0),
            checkpoint: PolicyVersion(0),
            training: None,
            batches: BTreeMap::new(),
            evicted: 0,
            dropped: 0,
            crashes,
            newest: 0,
        }
    }

    fn keep(&mut self, change: Change) {
        for row in change.rows {
            assert!(self.rows.insert(row.id, row).is_some(), "{} has a row without a payload", row.id);
        }
        for id in change.forget {
            assert!(self.rows.remove(&id).is_some(), "{id} is forgotten twice");
        }
        self.mark = change.mark;
    }

    fn tick(&mut self) {
        for index in 0..self.samplers.len() {
            self.sample(index);
        }
        self.train();
        if self.crashes && self.dice.once_in(40) {
            self.crash();
        }
        // Slots as of the newest version ever; after a crash, a released batch comes on top of what was admitted then.
        self.newest = self.newest.max(self.trainer.0);
        let versions = self.newest + self.config.max_staleness + 1 - self.ledger.next_step.0;
        assert!(
            self.ledger.live.len() as u64 <= versions * self.config.batch_groups as u64,
            "too many groups"
        );
    }

    fn sample(&mut self, index: usize) {
        let mut sampler = std::mem::take(&mut self.samplers[index]);
        if self.dice.once_in(3) {
            let behind = sampler.served.staleness_at(self.trainer);
            sampler.served.0 += self.dice.below(behind + 1);
        }
        let limit = self.dice.below(4) as usize;
        for id in self.ledger.admit(sampler.served, limit) {
            let ticks = self.dice.ticks();
            sampler.groups.push(InFlight { id, claimed: None, ticks });
        }
        for mut group in std::mem::take(&mut sampler.groups) {
            match group.claimed {
                None if self.dice.once_in(2) => {
                    self.ledger.claim(group.id, sampler.served).unwrap();
                    group.claimed = Some(sampler.served);
                }
                Some(oldest) if group.ticks == 0 => {
                    assert_eq!(self.ledger.begin_finalize(group.id, oldest), Begin::Write);
                    assert_eq!(self.ledger.begin_finalize(group.id, oldest), Begin::Elsewhere);
                    self.rows.insert(group.id, Row { id: group.id, oldest, step: None });
                    self.ledger.end_finalize(group.id, true);
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

    fn train(&mut self) {
        match self.training {
            None => self.lease(),
            Some(_) if self.dice.once_in(20) && self.ledger.next_step == self.trainer.next() => {
                let change = self.ledger.release(self.trainer).unwrap();
                self.keep(change);
                self.batches.remove(&self.trainer);
                self.training = None;
            }
            Some(0) => {
                self.training = None;
                self.trainer = self.trainer.next();
                if self.dice.once_in(3) {
                    self.checkpoint = self.trainer;
                    // A crash between checkpoint and acknowledgement.
                    if self.crashes && self.dice.once_in(5) {
                        return self.crash();
                    }
                    self.acknowledge();
                }
            }
            Some(ticks) => self.training = Some(ticks - 1),
        }
    }

    fn acknowledge(&mut self) {
        if let Some(change) = self.ledger.ack(self.checkpoint) {
            self.keep(change);
        }
    }

    fn lease(&mut self) {
        let attempt = self.ledger.lease(self.trainer).unwrap();
        if let Some(change) = attempt.change {
            self.dropped += change.forget.len() as u64;
            self.keep(change);
        }
        let finalized = self.ledger.live.values().filter(|l| l.stage == Stage::Finalized).count();
        let Some(ids) = attempt.groups else {
            let all = finalized == self.ledger.live.len();
            assert!(!(all && finalized >= self.config.batch_groups), "nothing to wait for, but no batch");
            return;
        };
        assert_eq!(ids.len(), self.config.batch_groups);
        assert!(ids.is_sorted_by(|a, b| a < b), "not in order");
        for id in &ids {
            let staleness = self.rows[id].oldest.staleness_at(self.trainer);
            assert!(staleness <= self.config.max_staleness, "{id} is {staleness} versions old");
        }
        let before = self.batches.entry(self.trainer).or_insert_with(|| ids.clone());
        assert_eq!(*before, ids, "another batch for {} after a crash", self.trainer);
        self.training = Some(self.dice.below(6));
    }

    /// Everything but rows, mark and checkpoint is lost.
    fn crash(&mut self) {
        let rows: Vec<Row> = self.rows.values().copied().collect();
        self.ledger = Ledger::restore(self.config, &rows, self.mark.clone());
        self.trainer = self.checkpoint;
        self.training = None;
        self.samplers.iter_mut().for_each(|s| *s = Sampler { served: self.trainer, groups: Vec::new() });
        self.acknowledge();
    }

    fn check_conservation(&self) {
        let mut seen = BTreeSet::new();
        assert!(self.batches.values().flatten().all(|id| seen.insert(*id)), "a group is in two batches");
        let batched = seen.len();
        assert!(self.ledger.live.keys().chain(&self.ledger.again).all(|id| seen.insert(*id)));
        let evicted = self.ledger.next_id - seen.len() as u64;
        if self.crashes {
            assert!(evicted <= self.evicted, "{evicted} ids are nowhere, {} were evicted", self.evicted);
        } else {
            assert_eq!(evicted, self.evicted, "ids are lost");
        }
        let flying: usize = self.samplers.iter().map(|sampler| sampler.groups.len()).sum();
        let stats = self.ledger.stats();
        assert_eq!(stats.admitted + stats.claimed, flying);
        assert!(stats.dropped_stale == self.dropped || self.crashes && stats.dropped_stale < self.dropped);
        assert!(stats.leased <= batched);
    }
}

fn run(config: BufferConfig, seed: u64, crashes: bool) -> World {
    let mut world = World::new(config, seed, crashes);
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
        BufferConfig { batch_groups, max_staleness, on_stale }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_schedule_keeps_the_bound_and_loses_nothing(config in configs(), seed: u64, crashes: bool) {
        let world = run(config, seed, crashes);
        if config.on_stale == OnStale::Wait {
            prop_assert_eq!(world.dropped, 0, "pacing threw work away");
        }
    }
}

#[test]
fn without_waiting_slow_groups_are_dropped() {
    let config = BufferConfig { batch_groups: 2, max_staleness: 1, on_stale: OnStale::Drop };
    let dropped: u64 = (0..20).map(|seed| run(config, seed, false).dropped).sum();
    assert!(dropped > 0, "the schedules are too tame to show that waiting matters");
}

fn finalize(ledger: &mut Ledger, id: u64, oldest: u64) {
    assert_eq!(ledger.begin_finalize(GroupId(id), PolicyVersion(oldest)), Begin::Write);
    ledger.end_finalize(GroupId(id), true);
}

fn leased(ledger: &mut Ledger, step: u64) -> Option<Vec<u64>> {
    let attempt = ledger.lease(PolicyVersion(step)).unwrap();
    attempt.groups.map(|ids| ids.iter().map(|id| id.0).collect())
}

#[test]
fn a_batch_waits_for_the_group_whose_last_step_it_is() {
    let config = BufferConfig { batch_groups: 1, max_staleness: 1, on_stale: OnStale::Wait };
    let mut ledger = Ledger::restore(config, &[], Mark::default());
    ledger.admit(PolicyVersion(0), 2);
    finalize(&mut ledger, 1, 0);
    assert_eq!(leased(&mut ledger, 0), Some(vec![1]));
    ledger.admit(PolicyVersion(1), 1);
    finalize(&mut ledger, 2, 1);
    assert_eq!(leased(&mut ledger, 1), None, "group 0 must be trained by step 1");
    finalize(&mut ledger, 0, 0);
    assert_eq!(leased(&mut ledger, 1), Some(vec![0]));
}

#[test]
fn what_no_waiting_saves_is_not_waited_for() {
    let config = BufferConfig { batch_groups: 1, max_staleness: 1, on_stale: OnStale::Wait };
    let mut ledger = Ledger::restore(config, &[], Mark::default());
    ledger.admit(PolicyVersion(0), 2);
    finalize(&mut ledger, 1, 9);
    // The trainer skips to 9: group 0, in flight since 0, is over the bound already.
    assert_eq!(leased(&mut ledger, 9), Some(vec![1]));
    finalize(&mut ledger, 0, 0);
    assert_eq!(leased(&mut ledger, 10), None);
    assert_eq!(ledger.stats().dropped_stale, 1);
    assert_eq!(ledger.admit(PolicyVersion(10), 1), [GroupId(0)]);
}

#[test]
fn more_due_than_a_step_can_take_still_leaves() {
    let config = BufferConfig { batch_groups: 1, max_staleness: 0, on_stale: OnStale::Wait };
    let row = |id| Row { id: GroupId(id), oldest: PolicyVersion(0), step: None };
    let mut ledger = Ledger::restore(config, &[row(0), row(1)], Mark::default());
    assert_eq!(leased(&mut ledger, 0), Some(vec![0]));
    assert_eq!(leased(&mut ledger, 1), None);
    assert_eq!(ledger.stats().dropped_stale, 1);
}
