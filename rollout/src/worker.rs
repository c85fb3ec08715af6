//! The rollout worker: newer weights, admission control, one poll of the sampler, episodes to be scored.
//!
//! It drives a [`Sampler`] through its trait alone and does not know where the engine runs. Its groups are episodes in an
//! environment, which [`EpisodeDriver`] plays; without one, an episode is a single completion.
//!
//! Invariant: between two polls the order is always the same: weights first, then admission with the version that is
//! served now, then the poll. A group never starts under an older version than its slot was granted for.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use buffer::{AdmitRequest, BufferError, Producer};
use model::{DeviceTurn, Sampling};
use rewards::load::unix_seconds;
use trajectory::{GroupId, PolicyVersion};

use crate::RolloutError;
use crate::activity::ActivityLog;
use crate::admission_pace::AdmissionPace;
use crate::curation::{Curation, CurationCounts, Decision};
use crate::episode::{Episode, EpisodeConfig, EpisodeDriver};
use crate::prompts::PromptSet;
use crate::sampler::{EngineCounts, OnUpdate, RequestOptions, SampleRequest, Sampler};
use crate::scoring::{ScoreRequest, Scorer, give_back};

/// Longest wait for the sampler or for weights before the worker looks for a stop and asks for a slot again.
const LOOK_UP: Duration = Duration::from_millis(5);

/// How long an idle worker of another process waits for a slot before it looks for weights again.
const IN_LINE: Duration = Duration::from_millis(20);

/// How long rewards that are still running may take when a run ends; their groups are sampled again after a resume.
const GRACE: Duration = Duration::from_secs(5);

/// Most places of the stream of tasks skipped before the worker looks for weights and for a stop again.
const MAX_SKIPS: usize = 256;

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
    /// Longest wait for another role.
    pub wait: Duration,
    /// Connection id under which the buffer leases slots to this worker, so that it can take them back if the worker dies;
    /// `None` for a worker of the buffer's own process.
    pub holder: Option<u64>,
}

/// What a rollout worker does at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerPhase {
    /// It has not begun.
    #[default]
    Starting,
    /// It polls the sampler: a decode step.
    Decoding,
    /// No sequence is in flight: every open episode waits for its environment.
    Stepping,
    /// Admission control: it asks the buffer for slots and claims them.
    Admitting,
    /// It has no sequence in flight: no slot is free until the trainer advances, or newer weights arrive.
    Waiting,
    /// Sends episodes to scoring.
    HandingOver,
    /// It applies newer weights.
    Applying,
    /// It stops, and waits for rewards that are still running.
    Stopping,
    /// Its process had no processor: it was stopped, or the machine is overloaded.
    Paused,
}

impl std::fmt::Display for WorkerPhase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Starting => "is starting",
            Self::Decoding => "is decoding",
            Self::Stepping => "waits for environments to answer turns",
            Self::Admitting => "asks the buffer for slots",
            Self::Waiting => "waits for a slot or for newer weights: the trainer has to advance",
            Self::HandingOver => "waits for rewards: too many completions are being scored",
            Self::Applying => "swaps weights",
            Self::Stopping => "waits for rewards that are still running, to stop",
            Self::Paused => "had no processor",
        })
    }
}

/// What a rollout worker has done since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Progress {
    /// What it does at the moment.
    pub doing: WorkerPhase,
    /// Work of the engine.
    pub engine: EngineCounts,
    /// Time with sequences in flight in which it did not wait: decoding, applying weights, starting groups, handing over
    /// trajectories, seconds.
    pub busy_s: f64,
    /// Time without a sequence in flight (no slot, or no weights), and waits for a slot or for rewards, seconds.
    pub idle_s: f64,
    /// Time that decoding stood still for newer weights, seconds.
    pub stall_s: f64,
    /// The version that is served.
    pub served: PolicyVersion,
    /// Groups started.
    pub groups: u64,
    /// What curation did; all zero without it.
    pub curation: CurationCounts,
    /// Bytes that the sampler freed when it last yielded the device to the trainer; 0 unless they are colocated.
    pub freed_bytes: u64,
    /// Time in which the sampler freed its memory for the trainer, or staged weights and recomputed its KV cache after it,
    /// seconds.
    pub switch_s: f64,
}

impl Progress {
    /// Adds what another worker did. The served version is the older of both.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        self.busy_s += other.busy_s;
        self.idle_s += other.idle_s;
        self.stall_s += other.stall_s;
        self.groups = self.groups.saturating_add(other.groups);
        self.served = self.served.min(other.served);
        self.engine += other.engine;
        self.curation += other.curation;
        self
    }
}

/// A rollout worker: one sampler, its tasks and its rewards.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    sampler: Box<dyn Sampler>,
    episodes: EpisodeDriver,
    prompts: Arc<PromptSet>,
    scorer: Scorer,
    /// Since when the sampler has been applying a version.
    applying_since: Option<Instant>,
    /// Since when the trainer has been behind the served version: its process was started again from an older checkpoint.
    ahead_since: Option<Instant>,
    open: HashMap<GroupId, OpenGroup>,
    pace: AdmissionPace,
    curation: Option<Curation>,
    /// Its turn on a device that it shares with the trainer.
    turn: Option<DeviceTurn>,
    /// Since when no completion has been possible: no slot, no weights, or no device.
    waiting_since: Instant,
    /// How long the current iteration has waited for a slot and for rewards.
    waited: Duration,
    progress: Progress,
    shared: Arc<Mutex<Progress>>,
    activity: Arc<ActivityLog>,
}

/// A group of which an episode has not ended.
#[derive(Clone, Copy, Debug)]
struct OpenGroup {
    /// Episodes, the baseline included.
    episodes: usize,
    /// Episodes that have not ended.
    left: usize,
    /// When it got its slot, seconds since 1970.
    admitted: f64,
}

impl Worker {
    /// A worker that samples the tasks of `prompts` with `sampler`.
    #[must_use]
    pub fn new(
        config: WorkerConfig,
        sampler: Box<dyn Sampler>,
        prompts: Arc<PromptSet>,
        scorer: Scorer,
    ) -> Self {
        let progress = Progress { served: sampler.version(), ..Progress::default() };
        let shared = Arc::new(Mutex::new(progress));
        let episodes = EpisodeDriver::new(EpisodeConfig::single_turn(), scorer.runtime().clone());
        let activity = scorer.activity();
        Self {
            config,
            sampler,
            episodes,
            prompts,
            scorer,
            applying_since: None,
            ahead_since: None,
            open: HashMap::new(),
            pace: AdmissionPace::default(),
            curation: None,
            turn: None,
            waiting_since: Instant::now(),
            waited: Duration::ZERO,
            progress,
            shared,
            activity,
        }
    }

    /// The same, with episodes in the environments of `config`.
    #[must_use]
    pub fn acting_in(self, config: EpisodeConfig) -> Self {
        let episodes = EpisodeDriver::new(config, self.scorer.runtime().clone());
        Self { episodes, ..self }
    }

    /// The same, asking `curation` which tasks to draw. Its scorer shares it.
    #[must_use]
    pub fn curated(self, curation: Option<Curation>) -> Self {
        Self { curation, ..self }
    }

    /// The same, colocated with the trainer: the sampler sleeps whenever the trainer has the device. It sleeps until its
    /// first turn, in which the published version is applied.
    ///
    /// # Errors
    /// If the sampler cannot sleep.
    pub fn taking_turns(mut self, turn: Option<DeviceTurn>) -> Result<Self, RolloutError> {
        if turn.is_some() {
            self.sampler.sleep()?;
        }
        Ok(Self { turn, ..self })
    }

    /// Where its progress can be read while it runs.
    #[must_use]
    pub fn progress(&self) -> Arc<Mutex<Progress>> {
        Arc::clone(&self.shared)
    }

    /// Where its phases and the times of its episodes can be taken while it runs.
    #[must_use]
    pub fn activity(&self) -> Arc<ActivityLog> {
        Arc::clone(&self.activity)
    }

    /// Samples until `stop` is set. Groups in flight are then given back to be sampled again.
    ///
    /// # Errors
    /// The first failure: of the buffer, the sampler, the weights, a reward with `on_error = "fail"`, a deadline.
    pub fn run(mut self, buffer: &dyn Producer, stop: &AtomicBool) -> Result<(), RolloutError> {
        let result = self.work(buffer, stop);
        self.begins(WorkerPhase::Stopping);
        let Self { sampler, turn, open, scorer, config, .. } = self;
        // The trainer can continue to its last checkpoint, and use the memory.
        drop(sampler);
        drop(turn);
        for group in open.keys() {
            give_back(buffer, *group, true)?;
        }
        let scored = scorer.finish(GRACE, config.wait);
        // The scorer knows why it ended; the worker only failed to reach it.
        match result {
            Err(RolloutError::Ended { .. }) | Ok(()) => scored,
            other => other,
        }
    }

    fn work(&mut self, buffer: &dyn Producer, stop: &AtomicBool) -> Result<(), RolloutError> {
        self.waiting_since = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if self.scorer.failed() {
                return Err(RolloutError::Ended { who: "the scoring of trajectories" });
            }
            if !self.has_turn(stop)? {
                continue;
            }
            let start = Instant::now();
            self.waited = Duration::ZERO;
            self.begins(WorkerPhase::Applying);
            let staged = self.update_weights(Duration::ZERO)?;
            if !staged && !self.makes_way() {
                self.begins(WorkerPhase::Admitting);
                self.admit(buffer)?;
            }
            if self.episodes.is_idle() {
                self.begins(WorkerPhase::Waiting);
                self.update_weights(LOOK_UP)?;
                self.progress.idle_s += start.elapsed().as_secs_f64();
                // The wait for a trainer that is behind has a deadline of its own, which begins later.
                let wait =
                    self.config.wait + self.ahead_since.map_or(Duration::ZERO, |_| self.config.wait / 2);
                if self.waiting_since.elapsed() > wait {
                    return Err(self.waited_too_long());
                }
            } else {
                let decodes = !self.sampler.is_idle();
                self.begins(if decodes { WorkerPhase::Decoding } else { WorkerPhase::Stepping });
                let ended = self.episodes.poll(&mut *self.sampler, LOOK_UP)?;
                self.begins(WorkerPhase::HandingOver);
                self.hand_over(ended)?;
                let lasted = start.elapsed();
                let worked = if decodes { lasted.saturating_sub(self.waited) } else { Duration::ZERO };
                self.progress.busy_s += worked.as_secs_f64();
                self.progress.idle_s += (lasted - worked).as_secs_f64();
                self.waiting_since = Instant::now();
            }
            self.progress.engine = self.sampler.counts();
            if let Some(limit) = self.sampler.running_limit() {
                self.activity.limited(limit, self.sampler.take_limit_changes());
            }
            if let Some(curation) = &self.curation {
                self.progress.curation = curation.counts();
            }
            self.show();
        }
        Ok(())
    }

    /// Publishes the worker's next activity.
    fn begins(&mut self, phase: WorkerPhase) {
        self.progress.doing = phase;
        self.activity.enter(phase);
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).doing = phase;
    }

    /// Publishes its progress.
    fn show(&self) {
        *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = self.progress;
    }

    /// Whether the sampler has the device. It yields the device as soon as the trainer asks, or once no episode is open
    /// with `on_update = "drain"`, and waits until it is back. False if the loop has to look for a stop first.
    fn has_turn(&mut self, stop: &AtomicBool) -> Result<bool, RolloutError> {
        let Some(turn) = &self.turn else { return Ok(true) };
        if turn.is_mine() && !self.sampler.is_asleep() {
            let finishes = self.config.on_update == OnUpdate::Drain && !self.episodes.is_idle();
            if finishes || !turn.is_wanted() {
                return Ok(true);
            }
            let start = Instant::now();
            self.progress.freed_bytes = self.sampler.sleep()?;
            turn.pass();
            self.progress.switch_s += start.elapsed().as_secs_f64();
        }
        self.show();
        let start = Instant::now();
        let taken = turn.take(self.config.wait, stop)?;
        self.progress.idle_s += start.elapsed().as_secs_f64();
        // The trainer publishes before it yields the device.
        self.waiting_since = Instant::now();
        while taken && self.sampler.is_asleep() && !stop.load(Ordering::Relaxed) {
            self.update_weights(LOOK_UP)?;
            if self.waiting_since.elapsed() > self.config.wait {
                return Err(self.waited_too_long());
            }
        }
        self.progress.switch_s += self.waiting_since.elapsed().as_secs_f64();
        Ok(!self.sampler.is_asleep())
    }

    /// Whether no group starts because the trainer waits for the device.
    fn makes_way(&self) -> bool {
        self.turn.as_ref().is_some_and(DeviceTurn::is_wanted)
    }

    /// Applies a newer version if one is staged within `wait`. True if a staged version is not applied yet: open
    /// episodes finish first, or the engine is still applying it.
    fn update_weights(&mut self, wait: Duration) -> Result<bool, RolloutError> {
        let Some(staged) = self.sampler.newer_weights(wait)? else { return Ok(false) };
        if self.config.on_update == OnUpdate::Drain && !self.episodes.is_idle() {
            return Ok(true);
        }
        let since = *self.applying_since.get_or_insert_with(Instant::now);
        let Some(applied) = self.sampler.apply_weights(self.config.on_update)? else {
            if since.elapsed() > self.config.wait {
                return Err(RolloutError::Deadline {
                    who: "a rollout worker",
                    whom: format!(
                        "its rollout engine to apply {staged}; it serves {}",
                        self.sampler.version()
                    ),
                    seconds: self.config.wait.as_secs_f64(),
                });
            }
            return Ok(true);
        };
        self.applying_since = None;
        self.activity.applied(applied.version, since.elapsed());
        self.progress.stall_s += applied.stalled.as_secs_f64();
        self.progress.served = applied.version;
        Ok(false)
    }

    /// Admission control: starts groups while the buffer grants slots and the sampler has capacity.
    fn admit(&mut self, buffer: &dyn Producer) -> Result<(), RolloutError> {
        let version = self.sampler.version();
        if let Some(curation) = &self.curation {
            curation.serve(version);
            if curation.exhausted().is_some() {
                return self.end_if_starved(buffer);
            }
        }
        let baseline = usize::from(self.config.greedy_baseline);
        let afar = self.config.holder.is_some();
        if afar && !self.pace.is_due(version, Instant::now()) {
            return Ok(());
        }
        // Without a wait, a worker that asks over the network would always come after those of the buffer's process.
        let wait = if afar && self.sampler.is_idle() { IN_LINE } else { Duration::ZERO };
        let mut skipped = 0;
        while self.sampler.has_capacity(self.config.group_size + baseline) && skipped < MAX_SKIPS {
            let one = AdmitRequest { served: version, limit: 1, hold: None, holder: self.config.holder };
            let (asked, answer) = (Instant::now(), buffer.admit(one, wait));
            self.waited += if wait.is_zero() { Duration::ZERO } else { asked.elapsed() };
            let group = match answer {
                // If the buffer granted a slot after all, it takes it back when the hold expires.
                Err(BufferError::Unclear { .. }) => break,
                Err(error @ BufferError::FutureVersion { .. }) if afar => self.wait_for_trainer(error)?,
                admitted => {
                    self.ahead_since = None;
                    admitted?.pop()
                }
            };
            let Some(group) = group else {
                self.pace.refused(version, Instant::now());
                break;
            };
            self.pace.granted();
            let admitted = unix_seconds();
            let (task, prompt) = self.prompts.of(group);
            let whole = Decision::Start { group_size: self.config.group_size, max_turns: None };
            let decision = self.curation.as_ref().map_or(whole, |curation| curation.decide(group, task.id));
            let Decision::Start { group_size: samples, max_turns } = decision else {
                give_back(buffer, group, false)?;
                skipped += 1;
                continue;
            };
            if self.open.contains_key(&group) || self.scorer.holds(group) {
                // Its hold expired while this worker was stopped or cut off, and no other worker has started it since.
                claim(buffer, group, version)?;
                continue;
            }
            if !claim(buffer, group, version)? {
                self.curation.iter().for_each(|curation| curation.forget(group));
                continue;
            }
            let request = SampleRequest {
                group,
                prompt: prompt.to_vec(),
                first_index: 0,
                turn: 0,
                samples,
                sampling: self.config.sampling,
                max_completion_length: self.config.max_completion_length,
                baseline: self.config.greedy_baseline,
                keep_cache: false,
                options: RequestOptions::default(),
            };
            let max_turns = max_turns.unwrap_or(usize::MAX);
            let episodes = self.episodes.start_within(&mut *self.sampler, task, request, max_turns)?;
            self.open.insert(group, OpenGroup { episodes, left: episodes, admitted });
            self.progress.groups += 1;
        }
        Ok(())
    }

    /// No slot, while the trainer of another process is behind the served version. It can reach that version with groups that it
    /// has or that other workers sample.
    ///
    /// # Errors
    /// `error` after half of the wait: a worker that connects again serves the trainer's version, in time for its next batch.
    fn wait_for_trainer(&mut self, error: BufferError) -> Result<Option<GroupId>, RolloutError> {
        let since = *self.ahead_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= self.config.wait / 2 { Err(error.into()) } else { Ok(None) }
    }

    /// No task can be drawn any more. That is an error once the buffer holds too few groups for another batch: the trainer
    /// would wait for ever.
    fn end_if_starved(&self, buffer: &dyn Producer) -> Result<(), RolloutError> {
        let Some((curation, exhausted)) = self.curation.as_ref().and_then(|c| Some((c, c.exhausted()?)))
        else {
            return Ok(());
        };
        let (config, served) = (curation.config(), self.sampler.version());
        if !self.sampler.is_idle() || curation.is_pending() || served.0 >= config.steps {
            return Ok(());
        }
        // Every group in the buffer and every batch in training takes slots.
        let wanted = config.slots() - config.batch_groups + 1;
        let mut free = Vec::new();
        while free.len() < wanted {
            let request =
                AdmitRequest { served, limit: wanted - free.len(), hold: None, holder: self.config.holder };
            let admitted = match buffer.admit(request, Duration::ZERO) {
                Err(BufferError::Unclear { .. } | BufferError::FutureVersion { .. }) => break,
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

    fn hand_over(&mut self, ended: Vec<Episode>) -> Result<(), RolloutError> {
        for episode in ended {
            let group = episode.group;
            let Some(open) = self.open.get_mut(&group) else { continue };
            open.left -= 1;
            let OpenGroup { episodes, left, admitted } = *open;
            let request = ScoreRequest {
                task: Arc::clone(self.prompts.of(group).0),
                group_size: episodes,
                max_completion_length: self.config.max_completion_length,
                episode,
                admitted,
                sampled: unix_seconds(),
            };
            self.waited += self.scorer.submit(request, self.config.wait)?;
            if left == 0 {
                self.open.remove(&group);
            }
        }
        Ok(())
    }

    fn waited_too_long(&self) -> RolloutError {
        RolloutError::Deadline {
            who: "a rollout worker",
            whom: format!(
                "a slot or weights newer than {}; the trainer does not advance",
                self.sampler.version()
            ),
            seconds: self.config.wait.as_secs_f64(),
        }
    }
}

/// Claims `group`; false if a buffer that was restarted has forgotten the admission: it will admit the group again.
fn claim(buffer: &dyn Producer, group: GroupId, version: PolicyVersion) -> Result<bool, RolloutError> {
    match buffer.claim(group, version) {
        Err(BufferError::WrongState { .. } | BufferError::FutureVersion { .. }) => Ok(false),
        claimed => Ok(claimed.map(|()| true)?),
    }
}
