//! The training loop's step: lease a batch, run its optimizer updates, publish the new policy version.
//!
//! A step trains on one batch, which [`update`](crate::update) splits into minibatches (one optimizer update each) and
//! [`learner`](crate::learner) into micro-batches on data-parallel ranks (gradient accumulation).

pub mod elastic;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use buffer::{BufferError, Consumer, Lease, LeaseRequest};
use model::{DeviceTurn, MemoryBudget, ModelDirectory};
use trajectory::{Group, PolicyVersion, Sample, Task};

use self::elastic::{ElasticState, Elasticity, own_error};
use crate::TrainerError;
use crate::algorithm::Algorithm;
use crate::batch::{Batch, BatchCounts, BatchRow, BatchSplit};
use crate::checkpoint::{
    CheckpointArchive, CheckpointContents, CheckpointTime, CheckpointWriter, CheckpointWriterConfig,
    NetworkState, TrainerState,
};
use crate::colocation::Colocation;
use crate::critic::{Critic, CriticNetwork};
use crate::frozen::Frozen;
use crate::lead::{RankCommand, UpdateCommand};
use crate::learner::Learner;
use crate::microbatch::{MicrobatchControl, MicrobatchReport};
use crate::outer_exchange::OuterExchange;
use crate::quarantine::Quarantine;
use crate::report::{BatchStatistics, LogprobMismatch, StepReport, StepTime};
use crate::schedule::LearningRateSchedule;
use crate::update::{CriticUpdate, PolicyUpdate, UpdateResult};
use crate::weight_publisher::WeightPublisher;

/// Builds a demonstration for a task; `None` if the task has none.
pub type Demonstrate = Box<dyn Fn(&Task) -> Option<Sample> + Send>;

/// The auxiliary models of a run (reference, critic) and the source of demonstrations.
#[derive(Default)]
pub struct AuxiliaryModels {
    /// The reference policy or teacher.
    pub reference: Option<Frozen>,
    /// The critic.
    pub critic: Option<Critic>,
    /// Source of demonstrations for groups that the policy does not solve (HPT).
    pub demonstrate: Option<Demonstrate>,
}

impl std::fmt::Debug for AuxiliaryModels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuxiliaryModels")
            .field("reference", &self.reference.is_some())
            .field("critic", &self.critic)
            .field("demonstrate", &self.demonstrate.is_some())
            .finish()
    }
}

/// Settings of the trainer.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerConfig {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Learning rate per step.
    pub schedule: LearningRateSchedule,
    /// How a batch is divided into minibatches.
    pub split: BatchSplit,
    /// Passes over a batch (PPO epochs).
    pub epochs: usize,
    /// Whether samples of the version at the start of a step must have exactly the log-probabilities that the trainer
    /// computes, bit for bit.
    pub bitwise: bool,
    /// Steps between checkpoints; 0 disables all but the last.
    pub checkpoint_interval: u64,
    /// How checkpoints are written.
    pub checkpoint: CheckpointWriterConfig,
    /// Whether the size of a micro-batch adapts, up to that of the learner.
    pub adapt_microbatch: bool,
    /// Number of groups of a batch whose tokens are reported, the first ones.
    pub logged_groups: usize,
    /// Deadline for a batch.
    pub wait: Duration,
}

/// How often a trainer that waits for a batch checks the stop flag.
const STOP_POLL: Duration = Duration::from_millis(100);
/// Consumer name of the trainer's leases.
pub const CONSUMER: &str = "trainer";

/// What a trainer works with.
pub struct TrainerParts {
    /// The policy.
    pub learner: Learner,
    /// Reference, critic and demonstrations.
    pub auxiliary: AuxiliaryModels,
    /// The model files of the policy other than weights.
    pub directory: Arc<ModelDirectory>,
    /// Source of batches.
    pub buffer: Arc<dyn Consumer>,
    /// Destination of new policy versions.
    pub publisher: WeightPublisher,
    /// Flag that stops training before the next step.
    pub stop: Arc<AtomicBool>,
    /// A second place for checkpoints. Groups are acknowledged once it has the checkpoint that contains them.
    pub archive: Option<Arc<dyn CheckpointArchive>>,
    /// Exchanges outer gradients with other islands.
    pub exchange: Option<Box<dyn OuterExchange>>,
    /// How training continues when ranks that are processes are lost; without it, it ends.
    pub elasticity: Option<Elasticity>,
}

impl std::fmt::Debug for TrainerParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainerParts").field("auxiliary", &self.auxiliary).finish_non_exhaustive()
    }
}

/// Trains the policy: one call of [`Trainer::step`] per batch and policy version.
pub struct Trainer {
    config: TrainerConfig,
    learner: Learner,
    auxiliary: AuxiliaryModels,
    colocation: Option<Colocation>,
    microbatch: Option<MicrobatchControl>,
    directory: Arc<ModelDirectory>,
    buffer: Arc<dyn Consumer>,
    publisher: WeightPublisher,
    exchange: Option<Box<dyn OuterExchange>>,
    elastic: Option<ElasticState>,
    quarantine: Quarantine,
    version: PolicyVersion,
    trained_tokens: u64,
    writer: CheckpointWriter,
    stop: Arc<AtomicBool>,
    /// Wall time of earlier processes of this run, seconds.
    earlier_s: f64,
    started: Instant,
    lost_lease: Option<BufferError>,
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer")
            .field("config", &self.config)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Trainer {
    /// Starts at the version of `state`: publishes that version and acknowledges all earlier versions to the buffer. No
    /// step begins once `stop` is set.
    ///
    /// # Errors
    /// If the buffer or the transport of the weights fails.
    pub fn start(
        config: TrainerConfig,
        parts: TrainerParts,
        state: &TrainerState,
    ) -> Result<Self, TrainerError> {
        let TrainerParts {
            learner,
            auxiliary,
            directory,
            buffer,
            publisher,
            stop,
            archive,
            exchange,
            elasticity,
        } = parts;
        let microbatch = config.adapt_microbatch.then(|| MicrobatchControl::new(learner.microbatch_tokens()));
        let mut trainer = Self {
            writer: CheckpointWriter::new(config.checkpoint.clone()).archived(archive),
            config,
            learner,
            auxiliary,
            colocation: None,
            microbatch,
            quarantine: Quarantine::new(directory.config()),
            directory,
            buffer,
            publisher,
            exchange,
            elastic: elasticity.map(ElasticState::new),
            version: state.version,
            trained_tokens: state.trained_tokens,
            stop,
            earlier_s: state.time_s,
            started: Instant::now(),
            lost_lease: None,
        };
        trainer.acknowledge_start()?;
        trainer.publish()?;
        trainer.take_snapshot()?;
        Ok(trainer)
    }

    /// Acknowledges everything before the start version, which is in a checkpoint.
    fn acknowledge_start(&mut self) -> Result<(), TrainerError> {
        match self.buffer.ack_through(CONSUMER, self.version) {
            // An empty buffer, or one that has not seen the steps before the checkpoint.
            Err(BufferError::FutureVersion { .. }) => {
                self.buffer.set_version(self.version, true)?;
                Ok(self.buffer.ack_through(CONSUMER, self.version)?)
            }
            // The checkpoint contains groups that were also leased to another consumer. Training cannot undo that.
            Err(error @ BufferError::LeaseLost { .. }) => {
                self.lost_lease = Some(error);
                Ok(())
            }
            acknowledged => Ok(acknowledged?),
        }
    }

    /// Makes the trainer share its device with a sampler in turns: between two steps it keeps state up to `budget` in
    /// memory and moves the rest to files in `directory`.
    pub fn colocate(&mut self, turn: DeviceTurn, directory: &Path, budget: &MemoryBudget) {
        let networks = networks(&mut self.learner, &mut self.auxiliary);
        self.colocation = Some(Colocation::new(turn, directory, budget, networks));
    }

    /// The policy's version: the number of steps done.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// The learner of the policy.
    #[must_use]
    pub fn learner(&self) -> &Learner {
        &self.learner
    }

    /// A lease that was lost before the start although its groups are in the checkpoint.
    #[must_use]
    pub fn lost_lease(&self) -> Option<&BufferError> {
        self.lost_lease.as_ref()
    }

    /// Wall time of the run, earlier processes included, seconds.
    #[must_use]
    pub fn time_s(&self) -> f64 {
        self.earlier_s + self.started.elapsed().as_secs_f64()
    }

    /// The critic, if there is one.
    #[must_use]
    pub fn critic(&self) -> Option<&Critic> {
        self.auxiliary.critic.as_ref()
    }

    /// Tokens trained on.
    #[must_use]
    pub fn trained_tokens(&self) -> u64 {
        self.trained_tokens
    }

    /// One training step: lease a batch, score it if the algorithm needs that, forward and backward passes, gradient
    /// clipping, optimizer updates, next version, publish. `None` if the stop flag was set before a batch arrived. If
    /// [`Self::checkpoint_due`], the caller takes a checkpoint after it has written the records of the step to disk.
    ///
    /// # Errors
    /// No batch before the deadline, a gradient that is not finite, a sampler that serves other weights than
    /// it reports, log-probabilities that differ where they must be equal, a checkpoint that could not be written.
    pub fn step(&mut self) -> Result<Option<StepReport>, TrainerError> {
        let CheckpointTime { stall, wait, write } = self.checkpoint_time()?;
        let mut time = StepTime {
            save_checkpoint: stall,
            wait_for_checkpoint: wait,
            write_checkpoint: write,
            ..StepTime::default()
        };
        let Some(lease) = self.batch(&mut time)? else { return Ok(None) };
        time.switched_at = self.time_s();
        self.let_ranks_join()?;

        // The sampler may use all cores while the trainer waits for a batch.
        let _reservation = self.learner.pool().reserve_core();
        time.trained_from = self.time_s();
        let clock = Instant::now();
        let batch = BatchStatistics::of(&lease.groups, self.version);
        let learning_rate = self.config.schedule.at(self.version.0);
        let updates_before = self.learner.updates();
        self.publisher.drop_taken()?;
        let (counts, updated) =
            self.with_ranks(own_error, |trainer| trainer.update(&lease.groups, learning_rate))?;
        let UpdateResult { sums, grad_norm, critic, tokens, began, ranks } = updated;
        time.updated_from = time.trained_from + began.map_or(0.0, |began| (began - clock).as_secs_f64());
        fail::fail_point!("after-optimizer");
        self.version = self.version.next();
        self.trained_tokens += sums.tokens;
        time.forward_backward = clock.elapsed().as_secs_f64();
        let exchange = match &mut self.exchange {
            Some(exchange) => exchange.after_updates(self.version, &mut self.learner)?,
            None => None,
        };

        self.colocation.iter().for_each(Colocation::release);
        let clock = Instant::now();
        self.remember(&lease.groups, learning_rate);
        self.with_ranks(own_error, |trainer| trainer.publish())?;
        time.weight_sync = clock.elapsed().as_secs_f64();
        self.snapshot_if_due()?;
        let (quarantined, quarantined_groups) = self.quarantine.take();
        let (regroupings, snapshots) = self.take_regroupings();
        time.snapshot = snapshots.iter().map(|taken| taken.end - taken.start).sum();
        Ok(Some(StepReport {
            version: self.version,
            groups: lease.groups,
            counts,
            buffer_size: self.buffer.stats()?.finalized,
            dropped_stale: lease.dropped_stale,
            sums,
            critic,
            tokens,
            ranks,
            grad_norm,
            updates: self.learner.updates() - updates_before,
            learning_rate,
            batch,
            freed_bytes: self.colocation.as_ref().map_or(0, Colocation::freed_bytes),
            quarantined,
            quarantined_groups,
            exchange,
            regroupings,
            snapshots,
            microbatch: self.next_microbatch(),
            world: self.learner.world(),
            time,
        }))
    }

    /// Whether `checkpoint_interval` asks for a checkpoint of the current version.
    #[must_use]
    pub fn checkpoint_due(&self) -> bool {
        let interval = self.config.checkpoint_interval;
        interval > 0 && self.version.0.is_multiple_of(interval)
    }

    /// Acknowledges the current version to the buffer without a checkpoint. For buffers in memory, which a crash loses
    /// anyway.
    ///
    /// # Errors
    /// If the buffer fails.
    pub fn forget(&self) -> Result<(), TrainerError> {
        Ok(self.buffer.ack_through(CONSUMER, self.version)?)
    }

    /// Takes a checkpoint of the current version. With `asynchronous` it is written in the background; the next step
    /// that finds it durable acknowledges its groups to the buffer.
    ///
    /// # Errors
    /// If the checkpoint, or the one before, cannot be written.
    pub fn checkpoint(&mut self) -> Result<(), TrainerError> {
        self.save(|writer, contents| writer.save(contents))
    }

    /// The last checkpoint of a run; durable when this returns.
    ///
    /// # Errors
    /// As [`Self::checkpoint`].
    pub fn last_checkpoint(&mut self) -> Result<PathBuf, TrainerError> {
        self.save(|writer, contents| writer.save_now(&contents))
    }

    /// Writes a checkpoint with `write`, then acknowledges what is durable.
    fn save<R>(
        &mut self,
        write: impl FnOnce(&mut CheckpointWriter, CheckpointContents<'_>) -> Result<R, TrainerError>,
    ) -> Result<R, TrainerError> {
        if let Some(colocation) = &mut self.colocation {
            colocation.wake(networks(&mut self.learner, &mut self.auxiliary))?;
        }
        self.with_ranks(own_error, Self::take_snapshot)?;
        let updates = self.learner.updates();
        let critic = self.auxiliary.critic.as_ref().and_then(|critic| critic.network.as_ref());
        let state = TrainerState {
            updates,
            critic_updates: critic.map_or(0, |network| network.learner.updates()),
            trained_tokens: self.trained_tokens,
            time_s: self.time_s(),
            ..TrainerState::at(self.version)
        };
        let snapshot = self.elastic.as_ref().and_then(|elastic| elastic.states_at(self.version));
        let (policy, critic) = match snapshot {
            Some(states) => states,
            None => (
                NetworkState::of(&self.directory, &self.learner)?,
                critic.map(|network| NetworkState::of(&network.directory, &network.learner)).transpose()?,
            ),
        };
        let island = self.exchange.as_ref().map(|exchange| Cow::Owned(exchange.state()));
        let contents = CheckpointContents { policy, critic, state: &state, island };
        let written = write(&mut self.writer, contents)?;
        self.forget_durable()?;
        Ok(written)
    }

    /// Acknowledges the groups of a checkpoint that became durable since the last call.
    fn forget_durable(&mut self) -> Result<(), TrainerError> {
        match self.writer.take_durable()? {
            Some(version) => Ok(self.buffer.ack_through(CONSUMER, version)?),
            None => Ok(()),
        }
    }

    /// Time spent on checkpoints since the last step.
    fn checkpoint_time(&mut self) -> Result<CheckpointTime, TrainerError> {
        self.forget_durable()?;
        Ok(self.writer.take_time())
    }

    /// Leases the next batch and acquires the device. A sampler that shares the device has it meanwhile, unless the
    /// batch is ready.
    fn batch(&mut self, time: &mut StepTime) -> Result<Option<Lease>, TrainerError> {
        let mut ready = None;
        if let Some(colocation) = self.colocation.as_mut().filter(|colocation| !colocation.is_resting()) {
            let request = LeaseRequest::step(CONSUMER, self.version);
            ready = match self.buffer.lease(&request, Duration::ZERO) {
                Ok(lease) => self.quarantine.pass(&*self.buffer, lease)?,
                Err(BufferError::LeaseTimeout { .. }) => None,
                Err(error) => return Err(error.into()),
            };
            if ready.is_none() {
                let clock = Instant::now();
                colocation.rest(networks(&mut self.learner, &mut self.auxiliary))?;
                time.phase_switch += clock.elapsed().as_secs_f64();
            }
        }
        let clock = Instant::now();
        let lease = match ready {
            Some(lease) => lease,
            None => match self.lease()? {
                Some(lease) => lease,
                None => return Ok(None),
            },
        };
        time.wait_for_batch = clock.elapsed().as_secs_f64();
        time.leased_at = self.time_s();
        let clock = Instant::now();
        if let Some(colocation) = &mut self.colocation {
            let networks = networks(&mut self.learner, &mut self.auxiliary);
            if !colocation.take(networks, self.config.wait, &self.stop)? {
                return Ok(None);
            }
            time.phase_switch += clock.elapsed().as_secs_f64();
        }
        Ok(Some(lease))
    }

    fn lease(&mut self) -> Result<Option<Lease>, TrainerError> {
        fail::fail_point!("before-lease");
        let deadline = Instant::now() + self.config.wait;
        let request = LeaseRequest::step(CONSUMER, self.version);
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            // The missing groups may come from a sampler that waits for the weights.
            self.publisher.resend(&self.learner)?;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.buffer.lease(&request, left.min(STOP_POLL)) {
                Ok(lease) => {
                    if let Some(lease) = self.quarantine.pass(&*self.buffer, lease)? {
                        return Ok(Some(lease));
                    }
                }
                Err(BufferError::LeaseTimeout { .. }) if left > STOP_POLL => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Trains with micro-batches of at most `tokens` from now on, as a recorded run did; the size does not adapt any more.
    ///
    /// # Panics
    /// If every rank is a process.
    pub fn set_microbatch_tokens(&mut self, tokens: usize) {
        self.microbatch = None;
        self.learner.set_microbatch_tokens(tokens);
    }

    /// The micro-batch of the step that has been made, if its size adapts; sets that of the next one.
    fn next_microbatch(&mut self) -> Option<MicrobatchReport> {
        let (time, tokens) = (self.learner.take_update_time(), self.learner.microbatch_tokens());
        let mut change = None;
        if let Some(control) = &mut self.microbatch {
            change = control.observe(time);
            self.learner.set_microbatch_tokens(control.tokens());
        }
        self.config.adapt_microbatch.then_some(MicrobatchReport { tokens, change })
    }

    /// All optimizer updates of one batch.
    fn update(
        &mut self,
        groups: &[Arc<Group>],
        learning_rate: f32,
    ) -> Result<(BatchCounts, UpdateResult), TrainerError> {
        let demonstrations: Vec<Option<Sample>> = match &self.auxiliary.demonstrate {
            Some(demonstrate) => {
                let of = |group: &Arc<Group>| demonstrate(&group.task).filter(|s| self.quarantine.sees(s));
                groups.iter().map(of).collect()
            }
            None => Vec::new(),
        };
        let batch = Batch::new(groups, &self.config.algorithm, self.config.split, &demonstrations);
        self.broadcast_update(groups, &demonstrations, learning_rate)?;
        let AuxiliaryModels { reference, critic, .. } = &mut self.auxiliary;
        let critic = critic.as_mut().map(|Critic { config, network }| CriticUpdate {
            config: *config,
            network: network.as_mut().map(|network| &mut network.learner),
        });
        let update = PolicyUpdate {
            algorithm: &self.config.algorithm,
            epochs: self.config.epochs,
            version: self.version,
            bitwise: self.config.bitwise,
            learning_rate,
            learner: &mut self.learner,
            critic,
            reference: reference.as_ref(),
            logged: &groups[..groups.len().min(self.config.logged_groups)],
        };
        match update.run(&batch)? {
            Ok(updated) => Ok((batch.counts, updated)),
            Err((row, mismatch)) => Err(self.not_bitwise(groups, row, mismatch)),
        }
    }

    /// Sends the same updates to the other processes of the trainer.
    fn broadcast_update(
        &self,
        groups: &[Arc<Group>],
        demonstrations: &[Option<Sample>],
        learning_rate: f32,
    ) -> Result<(), TrainerError> {
        let Some(remote) = self.learner.remote() else { return Ok(()) };
        if let Some(reference) = &self.auxiliary.reference {
            remote.send_reference(reference)?;
        }
        let number = |network: &CriticNetwork| network.learner.remote().map(|remote| remote.network);
        let critic = self.auxiliary.critic.as_ref();
        remote.send_command(&RankCommand::Update(Box::new(UpdateCommand {
            network: remote.network,
            critic: critic.map(|critic| (critic.config, critic.network.as_ref().and_then(number))),
            algorithm: Cow::Borrowed(&self.config.algorithm),
            split: self.config.split,
            epochs: self.config.epochs,
            bitwise: self.config.bitwise,
            version: self.version,
            learning_rate,
            groups: groups.iter().map(|group| Cow::Borrowed(&**group)).collect(),
            demonstrations: Cow::Borrowed(demonstrations),
        })))
    }

    fn not_bitwise(
        &self,
        groups: &[Arc<Group>],
        row: BatchRow<'_>,
        mismatch: LogprobMismatch,
    ) -> TrainerError {
        let LogprobMismatch { token, behavior, proximal, .. } = mismatch;
        let mut all = groups.iter().flat_map(|group| group.trajectories.iter().map(|t| (group.id, t)));
        let (group, trajectory) = all
            .find(|(_, trajectory)| trajectory.samples().any(|sample| std::ptr::eq(sample, row.sample)))
            .expect("rows are made of the samples of the batch");
        let (step, trajectory) = (self.version.next().0, trajectory.index);
        TrainerError::NotBitwise { step, group, trajectory, token, behavior, proximal }
    }

    fn publish(&self) -> Result<(), TrainerError> {
        fail::fail_point!("weights-publish");
        // Another process that has taken the buffer over publishes this version itself, with other weights.
        self.buffer.confirm()?;
        self.publisher.publish(self.version, &self.learner)
    }
}

/// The networks in training: the policy, then a separate critic.
fn networks<'a>(policy: &'a mut Learner, auxiliary: &'a mut AuxiliaryModels) -> Vec<&'a mut Learner> {
    let critic = auxiliary.critic.as_mut().and_then(|critic| critic.network.as_mut());
    [policy].into_iter().chain(critic.map(|network| &mut network.learner)).collect()
}
