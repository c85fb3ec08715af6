//! The loop of a sampler: new weights, admission, one step, completions to be scored.
//!
//! Invariant: between two steps the order is always the same: weights first, then admission with the version that is
//! served now, then the step. A group therefore never starts under an older version than its slot was granted for.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use buffer::{AdmitRequest, BufferError, Producer};
use model::Sampling;
use trajectory::{GroupId, PolicyVersion};

use crate::RolloutError;
use crate::applier::{Applier, Ready};
use crate::engine::{Engine, EngineCounts, Request};
use crate::prompts::PromptSet;
use crate::scoring::{Ended, Scorer};

/// How long an idle sampler waits for weights before it asks for a slot again.
const LOOK_UP: Duration = Duration::from_millis(5);

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
    /// Completions per task.
    pub group_size: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Longest completion, tokens.
    pub max_completion_length: usize,
    /// What happens to sequences in flight when new weights are applied.
    pub on_update: OnUpdate,
    /// Longest wait for anybody.
    pub wait: Duration,
}

/// What a worker has done since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
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
    started: HashMap<GroupId, usize>,
    progress: Progress,
    shared: Arc<Mutex<Progress>>,
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
            progress,
            shared,
        }
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
        for group in self.started.keys() {
            match buffer.abort(*group, true) {
                // Done or not, or forgotten by a buffer that was started again: it is not in flight for long.
                Err(BufferError::Unclear { .. } | BufferError::WrongState { .. }) => {}
                aborted => aborted?,
            }
        }
        let scored = self.scorer.finish(self.config.wait);
        // The scorer knows why it ended; that the worker could not reach it any more is only the consequence.
        match result {
            Err(RolloutError::Ended { .. }) | Ok(()) => scored,
            other => other,
        }
    }

    fn work(&mut self, buffer: &dyn Producer, stop: &AtomicBool) -> Result<(), RolloutError> {
        let mut waiting_since = Instant::now();
        let team = Arc::clone(self.engine.team());
        let mut present = None;
        while !stop.load(Ordering::Relaxed) {
            if self.scorer.failed() {
                return Err(RolloutError::Ended { who: "the scoring of trajectories" });
            }
            self.apply_weights(Duration::ZERO)?;
            if self.pending.is_none() {
                self.admit(buffer)?;
            }
            let start = Instant::now();
            if self.engine.is_idle() {
                present = None;
                self.apply_weights(LOOK_UP)?;
                self.progress.idle_s += start.elapsed().as_secs_f64();
                if waiting_since.elapsed() > self.config.wait {
                    return Err(self.waited_too_long());
                }
            } else {
                // Between two steps nobody else should begin to use its core.
                present.get_or_insert_with(|| team.present());
                let ended = self.engine.step()?;
                self.progress.busy_s += start.elapsed().as_secs_f64();
                self.hand_over(ended)?;
                waiting_since = Instant::now();
            }
            self.progress.engine = self.engine.counts();
            *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = self.progress;
        }
        Ok(())
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
        self.engine.apply(ready.take_decoder(), ready.version());
        if self.config.on_update == OnUpdate::Recompute {
            self.engine.recompute()?;
        }
        self.progress.stall_s += start.elapsed().as_secs_f64();
        self.progress.served = ready.version();
        self.applier.confirm(&ready, start.elapsed())
    }

    /// Starts as many groups as there are slots and room for.
    fn admit(&mut self, buffer: &dyn Producer) -> Result<(), RolloutError> {
        while self.engine.has_room(self.config.group_size) {
            let version = self.engine.version();
            let one = AdmitRequest { served: version, limit: 1, hold: None };
            let group = match buffer.admit(one, Duration::ZERO) {
                // If it took one after all, that comes back to the line when its hold is over.
                Err(BufferError::Unclear { .. }) => break,
                admitted => admitted?.pop(),
            };
            let Some(group) = group else { break };
            match buffer.claim(group, version) {
                // A buffer that was started again knows of no admissions: it is in line again.
                Err(BufferError::WrongState { .. }) => continue,
                claimed => claimed?,
            }
            let (_, prompt) = self.prompts.of(group);
            self.engine.submit(Request {
                group,
                prompt: prompt.to_vec(),
                samples: self.config.group_size,
                sampling: self.config.sampling,
                max_completion_length: self.config.max_completion_length,
            })?;
            self.started.insert(group, self.config.group_size);
            self.progress.groups += 1;
        }
        Ok(())
    }

    fn hand_over(&mut self, ended: Vec<crate::Completion>) -> Result<(), RolloutError> {
        for completion in ended {
            let group = completion.group;
            let ended = Ended {
                task: Arc::clone(self.prompts.of(group).0),
                group_size: self.config.group_size,
                max_completion_length: self.config.max_completion_length,
                completion,
            };
            self.scorer.submit(ended, self.config.wait)?;
            if let Some(left) = self.started.get_mut(&group) {
                *left -= 1;
                if *left == 0 {
                    self.started.remove(&group);
                }
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
