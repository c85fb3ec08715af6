//! The loop of a sampler: new weights, admission, one step, completions to be scored.
//!
//! Invariant: between two steps the order is always the same: weights first, then admission with the version that is
//! served now, then the step. A group therefore never starts under an older version than its slot was granted for.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use buffer::{AdmitRequest, BufferError, Producer};
use model::{CoreReservation, DeviceTurn, Sampling};
use trajectory::{GroupId, PolicyVersion};

use crate::RolloutError;
use crate::applier::{Applier, Ready};
use crate::curation::{Curation, CurationCounts, Decision};
use crate::engine::{Engine, EngineCounts, Request};
use crate::prompts::PromptSet;
use crate::scoring::{Ended, Scorer, give_back};

/// How long an idle sampler waits for weights before it asks for a slot again.
const LOOK_UP: Duration = Duration::from_millis(5);

/// How long a sampler in another process stands in line for a slot before it looks for weights again.
const IN_LINE: Duration = Duration::from_millis(20);

/// How long rewards that are still running may take when a run ends; nobody waits for what they judge.
const GRACE: Duration = Duration::from_secs(5);

/// Most places of the stream passed over before the sampler looks for weights and for a stop again.
const PASSED_OVER: usize = 256;

/// What happens to sequences in flight when new weights are applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnUpdate {
    /// They go on with the keys and values that they have (PipelineRL).
    #[default]
    Keep,
    /// Their keys and values are computed anew under the new weights (AReaL).
    Recompute,
    /// They finish first, under the old weights; nothing new starts meanwhile.
    Drain,
}

/// What a worker samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerConfig {
    /// Completions per task that are sampled; curation may ask for fewer.
    pub group_size: usize,
    /// Whether a group has one more completion, decoded greedily to be compared with.
    pub greedy_baseline: bool,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Longest completion, tokens.
    pub max_completion_length: usize,
    /// What happens to sequences in flight when new weights are applied.
    pub on_update: OnUpdate,
    /// Longest wait for anybody.
    pub wait: Duration,
    /// The number by which the buffer knows what this worker has in flight, if it may have to be taken from it.
    pub holder: Option<u64>,
}

/// What a worker does just now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Doing {
    /// It has not begun.
    #[default]
    Starting,
    /// A decoding step.
    Decoding,
    /// It asks the buffer for slots, or tells it what it began.
    Admitting,
    /// It has nothing to decode: no slot is free until the trainer advances, or newer weights arrive.
    Waiting,
    /// It hands completions over to be scored.
    HandingOver,
    /// It swaps weights.
    Applying,
    /// It has been told to stop, and waits for rewards that are still running.
    Stopping,
}

impl std::fmt::Display for Doing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Starting => "is starting",
            Self::Decoding => "is decoding",
            Self::Admitting => "asks the buffer for slots",
            Self::Waiting => "waits for a slot or for newer weights: the trainer has to advance",
            Self::HandingOver => "waits for rewards: too many completions are being scored",
            Self::Applying => "swaps weights",
            Self::Stopping => "waits for rewards that are still running, to stop",
        })
    }
}

/// What a worker has done since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Progress {
    /// What it does just now.
    pub doing: Doing,
    /// Work of the engine.
    pub engine: EngineCounts,
    /// Time in steps of the engine, seconds.
    pub busy_s: f64,
    /// Time with nothing to do: no slot, or waiting for weights, seconds.
    pub idle_s: f64,
    /// Time that decoding stood still for new weights, seconds.
    pub stall_s: f64,
    /// The version that is served.
    pub served: PolicyVersion,
    /// Groups started.
    pub groups: u64,
    /// What curation did; all zero without it.
    pub curation: CurationCounts,
    /// Bytes that it gave up the last time that the trainer had the device; 0 if they do not take turns.
    pub freed_bytes: u64,
    /// Time in which it gave up its memory for the trainer, or made weights ready and computed again what was in flight,
    /// seconds.
    pub switch_s: f64,
}

impl Progress {
    /// Adds what another worker did. What is served is the older of both.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        self.busy_s += other.busy_s;
        self.idle_s += other.idle_s;
        self.stall_s += other.stall_s;
        // Other processes say so of themselves.
        self.groups = self.groups.saturating_add(other.groups);
        self.served = self.served.min(other.served);
        self.engine += other.engine;
        self.curation += other.curation;
        self
    }
}

/// One sampler.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    engine: Engine,
    prompts: Arc<PromptSet>,
    applier: Applier,
    scorer: Scorer,
    /// A version that waits for the sequences in flight to finish.
    pending: Option<Ready>,
    started: HashMap<GroupId, Started>,
    curation: Option<Curation>,
    /// Its place at a device that it shares with the trainer.
    turn: Option<DeviceTurn>,
    /// Since when it has had nothing to do, or was given the device.
    waiting_since: Instant,
    progress: Progress,
    shared: Arc<Mutex<Progress>>,
}

/// A group in flight.
#[derive(Clone, Copy, Debug)]
struct Started {
    /// Completions, the baseline included.
    sequences: usize,
    /// Completions that have not ended.
    left: usize,
}

impl Worker {
    /// A worker that serves what `engine` serves until `applier` brings something newer.
    #[must_use]
    pub fn new(
        config: WorkerConfig,
        engine: Engine,
        prompts: Arc<PromptSet>,
        applier: Applier,
        scorer: Scorer,
    ) -> Self {
        let progress = Progress { served: engine.version(), ..Progress::default() };
        let shared = Arc::new(Mutex::new(progress));
        Self {
            config,
            engine,
            prompts,
            applier,
            scorer,
            pending: None,
            started: HashMap::new(),
            curation: None,
            turn: None,
            waiting_since: Instant::now(),
            progress,
            shared,
        }
    }

    /// The same, asking `curation` which tasks to draw. Its scorer asks the same one.
    #[must_use]
    pub fn curated(self, curation: Option<Curation>) -> Self {
        Self { curation, ..self }
    }

    /// The same, standing still without weights whenever the trainer has the device. Its engine is parked until its first
    /// turn, in which the published version is applied.
    #[must_use]
    pub fn taking_turns(mut self, turn: Option<DeviceTurn>) -> Self {
        if turn.is_some() {
            self.engine.park();
        }
        Self { turn, ..self }
    }

    /// Where its progress can be read while it runs.
    #[must_use]
    pub fn progress(&self) -> Arc<Mutex<Progress>> {
        Arc::clone(&self.shared)
    }

    /// Samples until `stop` is set. Groups in flight are then given back to be generated again.
    ///
    /// # Errors
    /// Whatever ended the work: the buffer, the weights, a reward with `on_error = "fail"`, a deadline.
    pub fn run(mut self, buffer: &dyn Producer, stop: &AtomicBool) -> Result<(), RolloutError> {
        let result = self.work(buffer, stop);
        self.begins(Doing::Stopping);
        // The trainer can go on to its last checkpoint.
        self.turn = None;
        for group in self.started.keys() {
            give_back(buffer, *group, true)?;
        }
        let scored = self.scorer.finish(GRACE, self.config.wait);
        // The scorer knows why it ended; that the worker could not reach it any more is only the consequence.
        match result {
            Err(RolloutError::Ended { .. }) | Ok(()) => scored,
            other => other,
        }
    }

    fn work(&mut self, buffer: &dyn Producer, stop: &AtomicBool) -> Result<(), RolloutError> {
        self.waiting_since = Instant::now();
        let pool = Arc::clone(self.engine.pool());
        let mut reservation = None;
        while !stop.load(Ordering::Relaxed) {
            if self.scorer.failed() {
                return Err(RolloutError::Ended { who: "the scoring of trajectories" });
            }
            if !self.has_turn(&mut reservation, stop)? {
                continue;
            }
            self.begins(Doing::Applying);
            self.apply_weights(Duration::ZERO)?;
            if self.pending.is_none() && !self.makes_way() {
                self.begins(Doing::Admitting);
                self.admit(buffer)?;
            }
            let start = Instant::now();
            if self.engine.is_idle() {
                reservation = None;
                self.begins(Doing::Waiting);
                self.apply_weights(LOOK_UP)?;
                self.progress.idle_s += start.elapsed().as_secs_f64();
                if self.waiting_since.elapsed() > self.config.wait {
                    return Err(self.waited_too_long());
                }
            } else {
                // Between two steps nobody else should begin to use its core.
                reservation.get_or_insert_with(|| pool.reserve_core());
                self.begins(Doing::Decoding);
                let ended = self.engine.step()?;
                self.progress.busy_s += start.elapsed().as_secs_f64();
                self.begins(Doing::HandingOver);
                self.hand_over(ended)?;
                self.waiting_since = Instant::now();
            }
            self.progress.engine = self.engine.counts();
            if let Some(curation) = &self.curation {
                self.progress.curation = curation.counts();
            }
            self.show();
        }
        Ok(())
    }

    /// Says what comes next to whoever looks.
    fn begins(&mut self, doing: Doing) {
        self.progress.doing = doing;
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).doing = doing;
    }

    /// Lets others see how far it is.
    fn show(&self) {
        *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = self.progress;
    }

    /// Whether the device is free for the next step. The trainer is given it as soon as it asks, or once nothing is in
    /// flight any more if sequences are to finish under the weights that they began with; then this waits until it comes
    /// back. False if there is a reason to look around first.
    fn has_turn(
        &mut self,
        reservation: &mut Option<CoreReservation>,
        stop: &AtomicBool,
    ) -> Result<bool, RolloutError> {
        let Some(turn) = &self.turn else { return Ok(true) };
        if turn.is_mine() && !self.engine.is_parked() {
            let finishes = self.config.on_update == OnUpdate::Drain && !self.engine.is_idle();
            if finishes || !turn.is_wanted() {
                return Ok(true);
            }
            *reservation = None;
            let start = Instant::now();
            self.progress.freed_bytes = self.engine.park();
            turn.pass();
            self.progress.switch_s += start.elapsed().as_secs_f64();
        }
        self.show();
        let start = Instant::now();
        let taken = turn.take(self.config.wait, stop)?;
        self.progress.idle_s += start.elapsed().as_secs_f64();
        // Whoever gives the device back has published before.
        self.waiting_since = Instant::now();
        while taken && self.engine.is_parked() && !stop.load(Ordering::Relaxed) {
            self.apply_weights(LOOK_UP)?;
            if self.waiting_since.elapsed() > self.config.wait {
                return Err(self.waited_too_long());
            }
        }
        self.progress.switch_s += self.waiting_since.elapsed().as_secs_f64();
        Ok(!self.engine.is_parked())
    }

    /// Whether nothing new starts because the trainer waits for the device.
    fn makes_way(&self) -> bool {
        self.turn.as_ref().is_some_and(DeviceTurn::is_wanted)
    }

    /// Swaps in a newer version if one is ready within `wait`.
    fn apply_weights(&mut self, wait: Duration) -> Result<(), RolloutError> {
        if let Some(ready) = self.applier.take(wait)? {
            self.pending = Some(ready);
        }
        if self.config.on_update == OnUpdate::Drain && !self.engine.is_idle() {
            return Ok(());
        }
        let Some(mut ready) = self.pending.take() else { return Ok(()) };
        let start = Instant::now();
        if self.engine.is_parked() {
            self.engine.unpark(ready.take_served(), ready.version())?;
        } else {
            let before = self.engine.apply(ready.take_served(), ready.version())?;
            if let Some(before) = before {
                self.applier.give_back(before);
            }
            if self.config.on_update == OnUpdate::Recompute {
                self.engine.recompute()?;
            }
        }
        self.progress.stall_s += start.elapsed().as_secs_f64();
        self.progress.served = ready.version();
        self.applier.confirm(&ready, start.elapsed())
    }

    /// Starts as many groups as there are slots and room for.
    fn admit(&mut self, buffer: &dyn Producer) -> Result<(), RolloutError> {
        let version = self.engine.version();
        if let Some(curation) = &self.curation {
            curation.serve(version);
            if curation.exhausted().is_some() {
                return self.end_if_starved(buffer);
            }
        }
        let baseline = usize::from(self.config.greedy_baseline);
        // Who asks from afar would otherwise find that others were there first, every time.
        let afar = self.config.holder.is_some() && self.engine.is_idle();
        let wait = if afar { IN_LINE } else { Duration::ZERO };
        let mut passed_over = 0;
        while self.engine.has_room(self.config.group_size + baseline) && passed_over < PASSED_OVER {
            let one = AdmitRequest { served: version, limit: 1, hold: None, holder: self.config.holder };
            let group = match buffer.admit(one, wait) {
                // If it took one after all, that comes back to the line when its hold is over.
                Err(BufferError::Unclear { .. }) => break,
                admitted => admitted?.pop(),
            };
            let Some(group) = group else { break };
            let (task, prompt) = self.prompts.of(group);
            let whole = Decision::Start { group_size: self.config.group_size };
            let decision = self.curation.as_ref().map_or(whole, |curation| curation.decide(group, task.id));
            let Decision::Start { group_size: samples } = decision else {
                give_back(buffer, group, false)?;
                passed_over += 1;
                continue;
            };
            if self.started.contains_key(&group) || self.scorer.holds(group) {
                // Its hold was over while this sampler was stopped or cut off, and nobody has begun it meanwhile.
                match buffer.claim(group, version) {
                    Err(BufferError::WrongState { .. }) => {}
                    claimed => claimed?,
                }
                continue;
            }
            match buffer.claim(group, version) {
                // A buffer that was started again knows of no admissions: it is in line again.
                Err(BufferError::WrongState { .. }) => {
                    self.curation.iter().for_each(|curation| curation.forget(group));
                    continue;
                }
                claimed => claimed?,
            }
            self.engine.submit(Request {
                group,
                prompt: prompt.to_vec(),
                samples,
                sampling: self.config.sampling,
                max_completion_length: self.config.max_completion_length,
                baseline: self.config.greedy_baseline,
            })?;
            let sequences = samples + baseline;
            self.started.insert(group, Started { sequences, left: sequences });
            self.progress.groups += 1;
        }
        Ok(())
    }

    /// No task can be drawn any more. That is an error once the buffer holds too little for another batch, so that the
    /// trainer would wait for ever.
    fn end_if_starved(&self, buffer: &dyn Producer) -> Result<(), RolloutError> {
        let Some((curation, exhausted)) = self.curation.as_ref().and_then(|c| Some((c, c.exhausted()?)))
        else {
            return Ok(());
        };
        let (config, served) = (curation.config(), self.engine.version());
        if !self.engine.is_idle() || curation.is_pending() || served.0 >= config.steps {
            return Ok(());
        }
        // Every group that the buffer holds, and every batch that is being trained on, takes slots.
        let wanted = config.slots() - config.batch_groups + 1;
        let mut free = Vec::new();
        while free.len() < wanted {
            let request =
                AdmitRequest { served, limit: wanted - free.len(), hold: None, holder: self.config.holder };
            let admitted = match buffer.admit(request, Duration::ZERO) {
                Err(BufferError::Unclear { .. }) => break,
                admitted => admitted?,
            };
            if admitted.is_empty() {
                break;
            }
            free.extend(admitted);
        }
        for group in &free {
            give_back(buffer, *group, true)?;
        }
        if free.len() < wanted { Ok(()) } else { Err(RolloutError::Exhausted(exhausted)) }
    }

    fn hand_over(&mut self, ended: Vec<crate::Completion>) -> Result<(), RolloutError> {
        for completion in ended {
            let group = completion.group;
            // What was submitted is there until its last completion has ended.
            let Some(started) = self.started.get_mut(&group) else { continue };
            started.left -= 1;
            let Started { sequences, left } = *started;
            let ended = Ended {
                task: Arc::clone(self.prompts.of(group).0),
                group_size: sequences,
                max_completion_length: self.config.max_completion_length,
                completion,
            };
            self.scorer.submit(ended, self.config.wait)?;
            if left == 0 {
                self.started.remove(&group);
            }
        }
        Ok(())
    }

    fn waited_too_long(&self) -> RolloutError {
        RolloutError::Deadline {
            who: "a sampler",
            whom: format!(
                "a slot or weights newer than {}; the trainer does not advance",
                self.engine.version()
            ),
            seconds: self.config.wait.as_secs_f64(),
        }
    }
}
