//! The loop of a simulation: events, admission, leases.
//!
//! Invariant: admission, order and staleness are the ledger's. After the events of one time every sampler that may start a group has
//! asked, the one with the fewest sequences first, and the trainer has asked for a lease if it waits.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use buffer::{
    AdmissionControl, AdmissionLimit, AdmitRequest, Finalized, LeaseId, LeaseRequest, SimulatedArrival,
    SimulatedLedger, StepObservation,
};
use trajectory::{GroupId, PolicyVersion};

use crate::engine::SimulatedEngine;
use crate::events::{EventQueue, Occasion};
use crate::fleet::{Fleet, SegmentEnd};
use crate::outcome::SimulationOutcome;
use crate::rewards::RewardQueue;
use crate::scenario::{ApplyRule, ResourceSharing, Scenario, SimulationError};

/// Most events of a simulation.
const MAX_EVENTS: u64 = 200_000_000;

/// What the trainer does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SimulatedTrainer {
    /// It waits for a lease.
    Waiting { since: f64 },
    /// Its lease is granted and not yet handed out; then it computes for so many seconds.
    Leasing { seconds: f64 },
    /// It waits until samplers have yielded the devices, and then computes for so many seconds.
    Switching { seconds: f64 },
    /// It computes for so many seconds more, counted from `from`.
    Computing { left_s: f64, from: f64 },
    /// It publishes.
    Publishing,
    /// It writes logs.
    Logging,
}

/// What is counted.
#[derive(Debug, Default)]
struct Tally {
    since: f64,
    steps: u64,
    wait_s: f64,
    tokens: f64,
    completions: f64,
    staleness: Vec<u64>,
    /// Samplers that got groups, a sum over steps.
    active_samplers: u64,
}

/// Plays `scenario` with the random numbers of `seed`.
///
/// # Errors
/// Inputs out of range, a run that stops, or too many events.
pub fn simulate(scenario: &Scenario, seed: u64) -> Result<SimulationOutcome, SimulationError> {
    scenario.check()?;
    let mut simulation = Simulation::new(scenario, seed)?;
    simulation.settle()?;
    while simulation.done < scenario.steps {
        let Some((now, what)) = simulation.events.take(f64::INFINITY) else {
            return Err(simulation.stopped());
        };
        simulation.now = now;
        simulation.handle(what)?;
        while let Some((_, what)) = simulation.events.take(now) {
            simulation.handle(what)?;
        }
        if simulation.done == scenario.steps {
            break;
        }
        simulation.settle()?;
        if simulation.events.taken() > MAX_EVENTS {
            let (events, step) = (simulation.events.taken(), simulation.done);
            return Err(SimulationError::TooLong { events, step, steps: scenario.steps });
        }
    }
    Ok(simulation.outcome())
}

/// A run in virtual time.
struct Simulation<'a> {
    scenario: &'a Scenario,
    now: f64,
    events: EventQueue,
    ledger: SimulatedLedger,
    fleet: Fleet<'a>,
    rewards: RewardQueue,
    /// Lengths of the completions of stored groups.
    stored: HashMap<GroupId, Vec<f64>>,
    trainer: SimulatedTrainer,
    trainer_epoch: u64,
    /// Factor of the trainer's times at the moment.
    trainer_slowdown: f64,
    /// The version that the trainer has.
    version: PolicyVersion,
    /// Leases of this step so far, and the open one.
    part: usize,
    lease: Option<LeaseId>,
    done: u64,
    /// By sampler the number that it has joined with; one that comes back has a new one.
    joined: Vec<u64>,
    /// Decides how far samplers run ahead, if that adapts.
    lead: Option<AdmissionControl>,
    /// Decides how many samplers get groups, if that adapts.
    samplers: Option<AdmissionControl>,
    /// When the step began, and how long the trainer has waited in it, seconds.
    step_began: f64,
    step_wait_s: f64,
    tally: Tally,
    /// Whether a lease that was not granted may be granted now.
    may_lease: bool,
    /// Samplers whose next event may have changed.
    touched: Vec<usize>,
    /// Samplers that may start a group.
    asking: Vec<usize>,
    all_ask: bool,
}

impl<'a> Simulation<'a> {
    fn new(scenario: &'a Scenario, seed: u64) -> Result<Self, SimulationError> {
        let mut events = EventQueue::default();
        for (index, absence) in scenario.samplers.absences.iter().enumerate() {
            events.add(absence.at_s, Occasion::Down { absence: index });
            let noticed = absence.noticed_after_s.min(absence.for_s);
            events.add(absence.at_s + noticed, Occasion::Noticed { absence: index });
            events.add(absence.at_s + absence.for_s, Occasion::Up { absence: index });
        }
        let control = |of, most| AdmissionControl::new(of, scenario.batch_groups, most);
        let mut ledger = SimulatedLedger::new(scenario.buffer())?;
        if scenario.samplers.count_adapts {
            ledger.limit_samplers(usize::MAX);
        }
        Ok(Self {
            scenario,
            now: 0.0,
            events,
            ledger,
            fleet: Fleet::new(scenario, seed),
            rewards: RewardQueue::new(scenario.rewards),
            stored: HashMap::new(),
            trainer: SimulatedTrainer::Waiting { since: 0.0 },
            trainer_epoch: 0,
            trainer_slowdown: 1.0,
            version: PolicyVersion(0),
            part: 0,
            lease: None,
            done: 0,
            joined: (0..scenario.samplers.count as u64).collect(),
            lead: scenario.lead_adapts.then(|| control(AdmissionLimit::Lead, scenario.max_staleness)),
            samplers: scenario
                .samplers
                .count_adapts
                .then(|| control(AdmissionLimit::Samplers, scenario.samplers.count as u64)),
            step_began: 0.0,
            step_wait_s: 0.0,
            may_lease: true,
            tally: Tally::default(),
            touched: Vec::new(),
            asking: Vec::new(),
            all_ask: true,
        })
    }

    fn now_ms(&self) -> u64 {
        (self.now * 1e3) as u64
    }

    fn handle(&mut self, what: Occasion) -> Result<(), SimulationError> {
        match what {
            Occasion::Engine { sampler, epoch } => {
                if self.fleet.engines[sampler].epoch == epoch {
                    self.collect(sampler);
                }
            }
            Occasion::Scored { sequence, life } => self.judged(sequence, life)?,
            Occasion::Answered { sequence, life } => {
                self.touched.extend(self.fleet.answered(sequence, life, self.now));
            }
            Occasion::Trainer { epoch } => {
                if self.trainer_epoch == epoch {
                    self.end_phase()?;
                }
            }
            Occasion::Weights { sampler, version } => {
                self.fleet.stage(sampler, version, self.now);
                self.touch(sampler);
            }
            Occasion::Down { absence } => {
                let sampler = self.scenario.samplers.absences[absence].sampler;
                self.fleet.lose(sampler, self.now);
                self.touch(sampler);
            }
            Occasion::Noticed { absence } => {
                let sampler = self.scenario.samplers.absences[absence].sampler;
                let now_ms = self.now_ms();
                self.ledger.abandon(self.joined[sampler], now_ms);
                (self.all_ask, self.may_lease) = (true, true);
            }
            Occasion::Up { absence } => {
                let sampler = self.scenario.samplers.absences[absence].sampler;
                self.joined[sampler] = 1 + self.joined.iter().max().copied().unwrap_or(0);
                let engine = &mut self.fleet.engines[sampler];
                engine.advance(self.now);
                (engine.away, engine.served) = (false, self.version);
                self.touch(sampler);
            }
        }
        Ok(())
    }

    fn touch(&mut self, sampler: usize) {
        self.touched.push(sampler);
        self.asking.push(sampler);
    }

    /// Takes what a sampler has finished.
    fn collect(&mut self, sampler: usize) {
        let mut ended = Vec::new();
        self.fleet.collect(sampler, self.now, &mut ended);
        for end in ended {
            match end {
                SegmentEnd::Acts { sequence, life, seconds } => {
                    self.events.add(self.now + seconds, Occasion::Answered { sequence, life });
                }
                SegmentEnd::Complete { sequence, life, seconds } => {
                    let at = self.rewards.end_of(seconds, self.now);
                    self.events.add(at, Occasion::Scored { sequence, life });
                }
            }
        }
        if self.fleet.engines[sampler].is_empty() {
            self.fleet.apply(sampler, self.now);
        }
        self.touch(sampler);
    }

    fn judged(&mut self, sequence: usize, life: u64) -> Result<(), SimulationError> {
        let Some(group) = self.fleet.judged(sequence, life) else { return Ok(()) };
        self.may_lease = true;
        let tokens = group.lengths.iter().sum::<f64>() as u64;
        let arrival =
            SimulatedArrival { group: group.id, oldest: group.oldest, newest: group.newest, tokens };
        match self.ledger.finalize(arrival, self.now_ms())? {
            Finalized::Accepted => {
                self.stored.insert(group.id, group.lengths);
            }
            // It is admitted again.
            _ => self.all_ask = true,
        }
        Ok(())
    }

    /// Admission and leases, until nothing changes any more, and the next event of every sampler that changed.
    fn settle(&mut self) -> Result<(), SimulationError> {
        if self.may_lease && matches!(self.trainer, SimulatedTrainer::Waiting { .. }) {
            self.may_lease = false;
            self.try_lease()?;
        }
        self.admit()?;
        self.share_cores();
        self.touched.sort_unstable();
        self.touched.dedup();
        for sampler in std::mem::take(&mut self.touched) {
            let engine = &mut self.fleet.engines[sampler];
            engine.epoch += 1;
            if let Some((at, _)) = engine.next() {
                self.events.add(at.max(self.now), Occasion::Engine { sampler, epoch: engine.epoch });
            }
        }
        Ok(())
    }

    /// Samplers start groups while the ledger grants slots.
    fn admit(&mut self) -> Result<(), SimulationError> {
        let asking = if std::mem::take(&mut self.all_ask) {
            self.asking.clear();
            (0..self.fleet.engines.len()).collect()
        } else {
            std::mem::take(&mut self.asking)
        };
        // Slots that stay free, for a bound of a fraction of a version.
        let spared =
            self.scenario.slots.map_or(0, |slots| self.scenario.buffer().slots().saturating_sub(slots));
        let mut heap: BinaryHeap<Reverse<(usize, usize)>> = asking
            .into_iter()
            .map(|sampler| Reverse((self.fleet.engines[sampler].load(), sampler)))
            .collect();
        while let Some(Reverse((_, sampler))) = heap.pop() {
            let served = self.fleet.engines[sampler].served;
            if !self.fleet.accepts(sampler) || self.ledger.free(served) <= spared {
                continue;
            }
            let request = AdmitRequest { served, limit: 1, hold: None, holder: Some(self.joined[sampler]) };
            for group in self.ledger.admit(request, self.now_ms())? {
                self.fleet.start_group(sampler, group, self.now);
                heap.push(Reverse((self.fleet.engines[sampler].load(), sampler)));
            }
            self.touched.push(sampler);
        }
        Ok(())
    }

    /// Leases the next part of the batch, if enough groups are stored.
    fn try_lease(&mut self) -> Result<(), SimulationError> {
        let groups = self.scenario.batch_groups / self.scenario.trainer.leases;
        if self.ledger.finalized() < groups {
            return Ok(());
        }
        let request = LeaseRequest {
            groups: Some(groups),
            ..LeaseRequest::step(format!("trainer {}", self.part), self.version)
        };
        let Some(lease) = self.ledger.lease(&request, self.now_ms())? else { return Ok(()) };
        let mut lengths = Vec::with_capacity(groups * self.scenario.group_size);
        for (group, oldest) in &lease.groups {
            let staleness = oldest.staleness_at(self.version);
            assert!(
                staleness <= self.scenario.max_staleness,
                "the ledger leased {group} with a staleness of {staleness}, above the bound of {}",
                self.scenario.max_staleness
            );
            let versions = usize::try_from(staleness).unwrap_or(usize::MAX);
            if self.tally.staleness.len() <= versions {
                self.tally.staleness.resize(versions + 1, 0);
            }
            self.tally.staleness[versions] += 1;
            lengths.extend(self.stored.remove(group).unwrap_or_default());
        }
        let lease_s = self.scenario.trainer.lease_s;
        if let SimulatedTrainer::Waiting { since } = self.trainer {
            self.tally.wait_s += self.now - since.max(self.tally.since) + lease_s;
            self.step_wait_s += self.now - since + lease_s;
        }
        self.tally.tokens += lengths.iter().sum::<f64>();
        self.tally.completions += lengths.len() as f64;
        let prompt = self.scenario.prompt_tokens;
        let answers = self.scenario.tools.map_or(0.0, |tools| tools.answer_tokens * (tools.turns - 1) as f64);
        lengths.iter_mut().for_each(|length| *length += prompt + answers);
        self.lease = Some(lease.id);
        let cost = &self.scenario.trainer;
        let last = self.part + 1 == cost.leases;
        let saves =
            last && cost.checkpoint_every > 0 && (self.done + 1).is_multiple_of(cost.checkpoint_every);
        let seconds = cost.seconds(&lengths) + if saves { cost.checkpoint_s } else { 0.0 };
        if lease_s > 0.0 {
            self.trainer = SimulatedTrainer::Leasing { seconds };
            self.trainer_event(lease_s);
        } else {
            self.begin(seconds);
        }
        Ok(())
    }

    /// The trainer has its batch, takes the devices if they are shared, and computes for `seconds` of its own.
    fn begin(&mut self, seconds: f64) {
        match self.scenario.sharing {
            ResourceSharing::Turns { switch_s } => {
                for sampler in 0..self.fleet.engines.len() {
                    self.fleet.engines[sampler].pause(true, self.now);
                    self.touched.push(sampler);
                }
                self.trainer = SimulatedTrainer::Switching { seconds };
                self.trainer_event(switch_s);
            }
            ResourceSharing::Separate | ResourceSharing::Cores { .. } => self.compute(seconds),
        }
    }

    /// The trainer begins to compute for `seconds` of its own.
    fn compute(&mut self, seconds: f64) {
        self.trainer = SimulatedTrainer::Computing { left_s: seconds, from: self.now };
        self.trainer_event(seconds * self.trainer_slowdown);
    }

    /// The phase of the trainer ends after `seconds`.
    fn trainer_event(&mut self, seconds: f64) {
        self.trainer_epoch += 1;
        self.events.add(self.now + seconds, Occasion::Trainer { epoch: self.trainer_epoch });
    }

    fn end_phase(&mut self) -> Result<(), SimulationError> {
        self.may_lease = true;
        match self.trainer {
            SimulatedTrainer::Waiting { .. } => {}
            SimulatedTrainer::Leasing { seconds } => self.begin(seconds),
            SimulatedTrainer::Switching { seconds } => self.compute(seconds),
            SimulatedTrainer::Computing { .. } => {
                if let Some(lease) = self.lease.take() {
                    self.ledger.ack(lease)?;
                }
                self.part += 1;
                if self.part < self.scenario.trainer.leases {
                    self.trainer = SimulatedTrainer::Waiting { since: self.now };
                    if matches!(self.scenario.sharing, ResourceSharing::Turns { .. }) {
                        self.resume_samplers();
                    }
                } else {
                    self.trainer = SimulatedTrainer::Publishing;
                    self.trainer_event(self.scenario.weights.publish_s);
                }
            }
            SimulatedTrainer::Publishing => self.end_step(),
            SimulatedTrainer::Logging => self.wait_for_batch(),
        }
        Ok(())
    }

    /// The version of the step is published.
    fn end_step(&mut self) {
        self.version = self.version.next();
        self.part = 0;
        self.done += 1;
        self.tally.steps += 1;
        let all = self.fleet.engines.len() as u64;
        self.tally.active_samplers += self.samplers.as_ref().map_or(all, AdmissionControl::amount);
        self.adapt();
        let logs_s = self.scenario.trainer.logs_s;
        if logs_s > 0.0 {
            self.trainer = SimulatedTrainer::Logging;
            self.trainer_event(logs_s);
        } else {
            self.wait_for_batch();
        }
        if !matches!(self.scenario.sharing, ResourceSharing::Turns { .. }) {
            let at = self.now + self.scenario.weights.push_s;
            for sampler in 0..self.fleet.engines.len() {
                self.events.add(at, Occasion::Weights { sampler, version: self.version });
            }
        }
        if self.done == self.scenario.warm_steps {
            self.tally = Tally { since: self.now, ..Tally::default() };
            self.fleet.engines.iter_mut().for_each(|engine| engine.count_from(self.now));
        }
    }

    /// The trainer waits for its next batch. With turns it has the devices until then.
    fn wait_for_batch(&mut self) {
        self.trainer = SimulatedTrainer::Waiting { since: self.now };
        self.step_began = self.now;
        if matches!(self.scenario.sharing, ResourceSharing::Turns { .. }) {
            for sampler in 0..self.fleet.engines.len() {
                self.fleet.stage(sampler, self.version, self.now);
            }
            self.resume_samplers();
        }
    }

    /// Gives groups to as many samplers, and lets them run ahead as far, as the steps so far say.
    fn adapt(&mut self) {
        let step = StepObservation {
            wait_s: std::mem::take(&mut self.step_wait_s),
            step_s: self.now - self.step_began,
            ready_groups: self.ledger.finalized(),
            free_slots: self.ledger.free(self.version),
        };
        if let Some(control) = &mut self.samplers {
            control.set_most(self.ledger.counted_samplers() as u64);
            let changed = control.observe(step).is_some();
            self.ledger.limit_samplers(control.limit().map_or(usize::MAX, |samplers| samplers as usize));
            self.all_ask = true;
            if changed {
                self.lead.iter_mut().for_each(|lead| lead.skip(step));
                return;
            }
        }
        if let Some(ahead) = self.lead.as_mut().and_then(|control| control.observe(step)) {
            self.ledger.run_ahead(ahead);
            self.all_ask = true;
            self.samplers.iter_mut().for_each(AdmissionControl::start_again);
        }
    }

    /// Samplers get the devices back, and prefill what is in flight again.
    fn resume_samplers(&mut self) {
        let ResourceSharing::Turns { switch_s } = self.scenario.sharing else { return };
        let prefill = self.scenario.samplers.prefill;
        for sampler in 0..self.fleet.engines.len() {
            let engine = &mut self.fleet.engines[sampler];
            engine.pause(false, self.now);
            let again = if engine.running() > 0 && self.scenario.weights.apply != ApplyRule::Recompute {
                prefill.fixed_s + prefill.per_token_s * engine.context()
            } else {
                0.0
            };
            engine.block(switch_s + again, self.now);
            self.touch(sampler);
        }
        self.all_ask = true;
    }

    /// Both sides take longer while the other one computes on the same cores.
    fn share_cores(&mut self) {
        let ResourceSharing::Cores { sampler, trainer } = self.scenario.sharing else { return };
        let trains = matches!(self.trainer, SimulatedTrainer::Computing { .. });
        let factor = if trains { sampler } else { 1.0 };
        let mut samples = false;
        for (index, engine) in self.fleet.engines.iter_mut().enumerate() {
            samples |= engine.running() > 0;
            if engine.slowdown() != factor {
                engine.slow_down(factor, self.now);
                self.touched.push(index);
            }
        }
        let factor = if samples { trainer } else { 1.0 };
        if factor != self.trainer_slowdown {
            if let SimulatedTrainer::Computing { left_s, from } = self.trainer {
                let left_s = (left_s - (self.now - from) / self.trainer_slowdown).max(0.0);
                self.trainer = SimulatedTrainer::Computing { left_s, from: self.now };
                self.trainer_event(left_s * factor);
            }
            self.trainer_slowdown = factor;
        }
    }

    fn stopped(&self) -> SimulationError {
        let running: usize = self.fleet.engines.iter().map(SimulatedEngine::running).sum();
        let waiting: usize = self.fleet.engines.iter().map(|engine| engine.waiting.len()).sum();
        let away = self.fleet.engines.iter().filter(|engine| engine.away).count();
        let waits = format!(
            "the trainer waits for a batch of {} groups, of which {} are stored; {running} sequences run, {waiting} wait, {away} of {} \
             samplers are away",
            self.scenario.batch_groups,
            self.ledger.finalized(),
            self.fleet.engines.len()
        );
        SimulationError::Stopped { at_s: self.now, step: self.done, waits }
    }

    fn outcome(&self) -> SimulationOutcome {
        let Tally { since, steps, wait_s, tokens, completions, staleness, active_samplers } = &self.tally;
        let lasted = (self.now - since).max(f64::MIN_POSITIVE);
        let idle: f64 = self.fleet.engines.iter().map(|engine| engine.idle_s(self.now)).sum();
        let steps = (*steps).max(1);
        SimulationOutcome {
            steps,
            step_s: lasted / steps as f64,
            tokens_per_s: tokens / lasted,
            sampler_idle: (idle / lasted / self.fleet.engines.len() as f64).min(1.0),
            active_samplers: *active_samplers as f64 / steps as f64,
            trainer_idle: (wait_s / lasted).min(1.0),
            wait_s: wait_s / steps as f64,
            staleness: staleness.clone(),
            dropped: self.ledger.dropped_stale(),
            mean_length: tokens / completions.max(1.0),
            events: self.events.taken(),
            time_s: self.now,
        }
    }
}
