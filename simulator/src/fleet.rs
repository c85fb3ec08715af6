//! All samplers with their sequences and groups.
//!
//! Invariant: a sequence is running in one engine, waiting for one, acting (a tool works), being judged, or free; its life number
//! changes when it is freed, so that events of an earlier life are void.

use std::collections::{HashMap, HashSet};

use buffer::RunningControl;
use trajectory::{GroupId, PolicyVersion};

use crate::draws::DrawPurpose;
use crate::engine::{EngineOccasion, SimulatedEngine};
use crate::scenario::{ApplyRule, Scenario};

/// What happened to a sequence that left its engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SegmentEnd {
    /// A tool works for so many seconds.
    Acts { sequence: usize, life: u64, seconds: f64 },
    /// It is complete and is judged for so many seconds.
    Complete { sequence: usize, life: u64, seconds: f64 },
}

/// A group whose last trajectory was judged.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CompleteGroup {
    pub(crate) id: GroupId,
    pub(crate) oldest: PolicyVersion,
    pub(crate) newest: PolicyVersion,
    /// Tokens of each completion.
    pub(crate) lengths: Vec<f64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct SimulatedSequence {
    life: u64,
    group: GroupId,
    sampler: usize,
    /// Number of the sequence over the run, for draws.
    number: u64,
    /// Tokens behind the prompt so far.
    own: f64,
    /// Of these, tokens in the cache.
    in_cache: f64,
    /// Tokens left in this turn.
    left: f64,
    per_turn: f64,
    turns_left: usize,
    /// Clock of the engine when it began to run.
    started: f64,
    runs: bool,
}

#[derive(Clone, Debug)]
struct GroupProgress {
    sampler: usize,
    oldest: PolicyVersion,
    newest: PolicyVersion,
    to_sample: usize,
    to_judge: usize,
    lengths: Vec<f64>,
}

/// The samplers.
#[derive(Debug)]
pub(crate) struct Fleet<'a> {
    scenario: &'a Scenario,
    seed: u64,
    pub(crate) engines: Vec<SimulatedEngine>,
    sequences: Vec<SimulatedSequence>,
    free: Vec<usize>,
    groups: HashMap<GroupId, GroupProgress>,
}

impl<'a> Fleet<'a> {
    pub(crate) fn new(scenario: &'a Scenario, seed: u64) -> Self {
        let samplers = &scenario.samplers;
        let control = RunningControl::new(scenario.group_size, samplers.max_running);
        let engine = || {
            SimulatedEngine::new(samplers.decode.clone(), samplers.kv_tokens, samplers.max_running)
                .adapting(samplers.running_adapts.then(|| control.clone()))
        };
        Self {
            scenario,
            seed,
            engines: (0..samplers.count).map(|_| engine()).collect(),
            sequences: Vec::new(),
            free: Vec::new(),
            groups: HashMap::new(),
        }
    }

    /// Whether the sampler starts groups: it has capacity, and no version to drain for.
    pub(crate) fn accepts(&self, sampler: usize) -> bool {
        let engine = &self.engines[sampler];
        let drains = self.scenario.weights.apply == ApplyRule::Drain && engine.staged.is_some();
        !drains && engine.has_capacity(self.scenario.group_size, self.scenario.prompt_tokens)
    }

    /// The sampler starts a group.
    pub(crate) fn start_group(&mut self, sampler: usize, id: GroupId, now: f64) {
        let lengths = self.scenario.lengths.draw(self.seed, id.0, self.scenario.group_size);
        let prefill = self.scenario.samplers.prefill;
        let engine = &mut self.engines[sampler];
        let served = engine.served;
        engine.advance(now);
        engine.cache(self.scenario.prompt_tokens);
        engine.block(prefill.fixed_s + prefill.per_token_s * self.scenario.prompt_tokens, now);
        let turns = self.scenario.tools.map_or(1, |tools| tools.turns);
        for (index, length) in lengths.iter().enumerate() {
            let slot = self.free.pop().unwrap_or_else(|| {
                self.sequences.push(SimulatedSequence::default());
                self.sequences.len() - 1
            });
            let per_turn = length / turns as f64;
            self.sequences[slot] = SimulatedSequence {
                life: self.sequences[slot].life,
                group: id,
                sampler,
                number: id.0.wrapping_mul(1 << 20).wrapping_add(index as u64),
                own: 0.0,
                in_cache: 0.0,
                left: per_turn,
                per_turn,
                turns_left: turns,
                started: 0.0,
                runs: false,
            };
            self.run_or_wait(slot, now);
        }
        let members = lengths.len();
        let progress = GroupProgress {
            sampler,
            oldest: served,
            newest: served,
            to_sample: members,
            to_judge: members,
            lengths,
        };
        self.groups.insert(id, progress);
    }

    /// A sequence runs if the engine has capacity, and waits otherwise.
    fn run_or_wait(&mut self, slot: usize, now: f64) {
        let sequence = &mut self.sequences[slot];
        let engine = &mut self.engines[sequence.sampler];
        let missing = sequence.own - sequence.in_cache;
        if !engine.fits(missing) {
            engine.waiting.push_back(slot);
            return;
        }
        let prefill = self.scenario.samplers.prefill;
        if missing > 0.0 {
            engine.block(prefill.fixed_s + prefill.per_token_s * missing, now);
        }
        let attends = self.scenario.prompt_tokens + sequence.own;
        sequence.started = engine.start((slot, sequence.life), sequence.left, attends, missing);
        sequence.in_cache = sequence.own;
        sequence.runs = true;
    }

    /// Everything that the engine has finished by `now`, appended to `ended`.
    pub(crate) fn collect(&mut self, sampler: usize, now: f64, ended: &mut Vec<SegmentEnd>) {
        self.engines[sampler].advance(now);
        loop {
            match self.engines[sampler].due() {
                EngineOccasion::Nothing => break,
                EngineOccasion::Full => {
                    if !self.preempt(sampler) {
                        break;
                    }
                }
                EngineOccasion::End { sequence } => ended.push(self.end_turn(sequence)),
            }
        }
        let mut waiting = self.engines[sampler].waiting.len();
        while waiting > 0 {
            waiting -= 1;
            let Some(slot) = self.engines[sampler].waiting.pop_front() else { break };
            let missing = self.sequences[slot].own - self.sequences[slot].in_cache;
            if !self.engines[sampler].fits(missing) {
                self.engines[sampler].waiting.push_front(slot);
                break;
            }
            self.run_or_wait(slot, now);
        }
    }

    /// The cache is full: the youngest sequence leaves it and waits, as vLLM does. False if none runs.
    fn preempt(&mut self, sampler: usize) -> bool {
        let sequences = &self.sequences;
        let alive = |slot: usize, life: u64| sequences[slot].life == life && sequences[slot].runs;
        let Some(slot) = self.engines[sampler].youngest(alive) else { return false };
        let sequence = &mut self.sequences[slot];
        let engine = &mut self.engines[sampler];
        let sampled = (engine.clock() - sequence.started).clamp(0.0, sequence.left);
        sequence.own += sampled;
        sequence.left -= sampled;
        engine.preempt(slot, self.scenario.prompt_tokens + sequence.own, sequence.own);
        (sequence.in_cache, sequence.runs) = (0.0, false);
        engine.waiting.push_front(slot);
        true
    }

    fn end_turn(&mut self, slot: usize) -> SegmentEnd {
        let sequence = &mut self.sequences[slot];
        let engine = &mut self.engines[sequence.sampler];
        sequence.own += sequence.left;
        sequence.in_cache = sequence.own;
        (sequence.left, sequence.runs) = (0.0, false);
        let attends = self.scenario.prompt_tokens + sequence.own;
        let (life, number) = (sequence.life, sequence.number);
        if let (Some(tools), true) = (self.scenario.tools, sequence.turns_left > 1) {
            sequence.turns_left -= 1;
            engine.end(attends, 0.0);
            engine.acting += 1;
            let draw = number.wrapping_mul(64).wrapping_add(sequence.turns_left as u64);
            let seconds = tools.time.draw(self.seed, DrawPurpose::Tools, draw);
            return SegmentEnd::Acts { sequence: slot, life, seconds };
        }
        engine.end(attends, sequence.own);
        sequence.in_cache = 0.0;
        if let Some(group) = self.groups.get_mut(&sequence.group) {
            group.to_sample -= 1;
            group.newest = group.newest.max(engine.served);
            if group.to_sample == 0 {
                engine.uncache(self.scenario.prompt_tokens);
            }
        }
        let seconds = self.scenario.rewards.time.draw(self.seed, DrawPurpose::Rewards, number);
        SegmentEnd::Complete { sequence: slot, life, seconds }
    }

    /// A tool answered; the sampler, unless the sequence is gone.
    pub(crate) fn answered(&mut self, slot: usize, life: u64, now: f64) -> Option<usize> {
        if self.sequences[slot].life != life {
            return None;
        }
        let sequence = &mut self.sequences[slot];
        let (sampler, engine) = (sequence.sampler, &mut self.engines[sequence.sampler]);
        engine.advance(now);
        engine.acting -= 1;
        sequence.own += self.scenario.tools.map_or(0.0, |tools| tools.answer_tokens);
        sequence.left = sequence.per_turn;
        self.run_or_wait(slot, now);
        Some(sampler)
    }

    /// A trajectory was judged; its group, if it was the last one.
    pub(crate) fn judged(&mut self, slot: usize, life: u64) -> Option<CompleteGroup> {
        if self.sequences[slot].life != life {
            return None;
        }
        self.sequences[slot].life += 1;
        self.free.push(slot);
        let id = self.sequences[slot].group;
        let group = self.groups.get_mut(&id)?;
        group.to_judge -= 1;
        if group.to_judge > 0 {
            return None;
        }
        let GroupProgress { oldest, newest, lengths, .. } = self.groups.remove(&id)?;
        Some(CompleteGroup { id, oldest, newest, lengths })
    }

    /// A version is there for the sampler: it is applied now, or once the sampler is empty.
    pub(crate) fn stage(&mut self, sampler: usize, version: PolicyVersion, now: f64) {
        let engine = &mut self.engines[sampler];
        if engine.away || version <= engine.served {
            return;
        }
        engine.staged = engine.staged.max(Some(version));
        self.apply(sampler, now);
    }

    /// Applies a staged version if the rule allows it; whether it did.
    pub(crate) fn apply(&mut self, sampler: usize, now: f64) -> bool {
        let (weights, prefill) = (self.scenario.weights, self.scenario.samplers.prefill);
        let engine = &mut self.engines[sampler];
        let Some(version) = engine.staged else { return false };
        if weights.apply == ApplyRule::Drain && !engine.is_empty() {
            return false;
        }
        engine.advance(now);
        engine.staged = None;
        engine.served = version;
        let again = if weights.apply == ApplyRule::Recompute && engine.running() > 0 {
            prefill.fixed_s + prefill.per_token_s * engine.context()
        } else {
            0.0
        };
        engine.block(weights.stall_s + again, now);
        true
    }

    /// The sampler goes away with all that it had.
    pub(crate) fn lose(&mut self, sampler: usize, now: f64) {
        self.engines[sampler].clear(now);
        self.engines[sampler].away = true;
        self.groups.retain(|_, group| group.sampler != sampler);
        let free: HashSet<usize> = self.free.iter().copied().collect();
        for slot in (0..self.sequences.len()).filter(|slot| !free.contains(slot)) {
            if self.sequences[slot].sampler == sampler {
                self.sequences[slot].life += 1;
                self.free.push(slot);
            }
        }
    }
}
