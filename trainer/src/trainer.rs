//! The training loop's step: lease a batch, run its optimizer updates, publish the new policy version.
//!
//! A step trains on one batch, which [`update`](crate::update) splits into minibatches (one optimizer update each) and
//! [`learner`](crate::learner) into micro-batches on data-parallel ranks (gradient accumulation).
//!
//! # Layout
//! - `batches`: the lease of a batch; `updates`: training on it; `checkpoints`: what is saved, and what the buffer may then forget
//! - [`elastic`]: how training continues without lost ranks

mod batches;
mod checkpoints;
pub mod elastic;
mod updates;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use buffer::{BufferError, Consumer};
use model::{DeviceTurn, MemoryBudget, ModelDirectory};
use trajectory::{PolicyVersion, Sample, Task};

use self::elastic::{ElasticState, Elasticity, own_error};
use crate::TrainerError;
use crate::algorithm::Algorithm;
use crate::batch::BatchSplit;
use crate::checkpoint::{
    CheckpointArchive, CheckpointTime, CheckpointWriter, CheckpointWriterConfig, TrainerState,
};
use crate::colocation::Colocation;
use crate::critic::Critic;
use crate::frozen::Frozen;
use crate::learner::Learner;
use crate::microbatch::MicrobatchControl;
use crate::outer_exchange::OuterExchange;
use crate::quarantine::Quarantine;
use crate::report::{BatchStatistics, StepReport, StepTime};
use crate::schedule::LearningRateSchedule;
use crate::update::UpdateResult;
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
    /// Learning rate per step of the policy. It begins after the steps in which only the critic is trained.
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
        let pretraining = self.critic().map_or(0, |critic| critic.config.pretrain_steps);
        let learning_rate = self.config.schedule.at(self.version.0.saturating_sub(pretraining));
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
