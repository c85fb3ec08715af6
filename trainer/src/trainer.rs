//! One training step, top to bottom.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use buffer::{BufferError, Consumer, Lease, LeaseRequest};
use model::{DeviceTurn, MemoryBudget, ModelDirectory};
use trajectory::{Group, PolicyVersion, Sample, Task};

use crate::TrainerError;
use crate::algorithm::Algorithm;
use crate::batch::{Batch, BatchCounts, Row, Split};
use crate::checkpoint::{CheckpointTime, Contents, NetworkState, TrainerState, Writer, WriterConfig};
use crate::colocation::Colocation;
use crate::critic::{Critic, Network};
use crate::lead::{Command, UpdateCommand};
use crate::learner::{Frozen, Learner};
use crate::publishing::Publishing;
use crate::quarantine::Quarantine;
use crate::report::{BatchStatistics, Mismatch, StepReport, StepTime};
use crate::schedule::Schedule;
use crate::update::{Update, Updated};

/// Makes something to imitate of a task; `None` for a task that has nothing.
pub type Demonstrate = Box<dyn Fn(&Task) -> Option<Sample> + Send>;

/// What stands beside the policy.
#[derive(Default)]
pub struct Companions {
    /// The reference policy or teacher.
    pub reference: Option<Frozen>,
    /// The critic.
    pub critic: Option<Critic>,
    /// Demonstrations in place of groups that the policy does not solve.
    pub demonstrate: Option<Demonstrate>,
}

impl std::fmt::Debug for Companions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Companions")
            .field("reference", &self.reference.is_some())
            .field("critic", &self.critic)
            .field("demonstrate", &self.demonstrate.is_some())
            .finish()
    }
}

/// What a trainer does with its batches.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerConfig {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The learning rate.
    pub schedule: Schedule,
    /// How a batch is cut up.
    pub split: Split,
    /// Passes over a batch.
    pub epochs: usize,
    /// Whether a sample of the version that a step starts from must have the log-probabilities that the trainer
    /// computes, bit for bit.
    pub bitwise: bool,
    /// Steps between checkpoints; 0 for none between.
    pub checkpoint_interval: u64,
    /// How checkpoints are written.
    pub checkpoint: WriterConfig,
    /// Longest wait for a batch.
    pub wait: Duration,
}

/// How often a trainer that waits for a batch looks whether it should stop.
const LOOK_UP: Duration = Duration::from_millis(100);
/// The name under which a trainer leases.
pub const CONSUMER: &str = "trainer";

/// Turns batches into versions.
pub struct Trainer {
    config: TrainerConfig,
    learner: Learner,
    companions: Companions,
    colocation: Option<Colocation>,
    directory: Arc<ModelDirectory>,
    buffer: Arc<dyn Consumer>,
    publisher: Publishing,
    quarantine: Quarantine,
    version: PolicyVersion,
    trained_tokens: u64,
    writer: Writer,
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
    /// A trainer at the version of `state`. Publishes that version, and tells the buffer that everything before is
    /// safe. Once `stop` is set it begins no further step.
    ///
    /// # Errors
    /// If the buffer or the transport of the weights fails.
    pub fn start(
        config: TrainerConfig,
        (learner, companions, state): (Learner, Companions, &TrainerState),
        directory: Arc<ModelDirectory>,
        (buffer, publisher): (Arc<dyn Consumer>, Publishing),
        stop: Arc<AtomicBool>,
    ) -> Result<Self, TrainerError> {
        let mut trainer = Self {
            writer: Writer::new(config.checkpoint.clone()),
            config,
            learner,
            companions,
            colocation: None,
            quarantine: Quarantine::new(directory.config()),
            directory,
            buffer,
            publisher,
            version: state.version,
            trained_tokens: state.trained_tokens,
            stop,
            earlier_s: state.time_s,
            started: Instant::now(),
            lost_lease: None,
        };
        trainer.acknowledge_start()?;
        trainer.publish()?;
        Ok(trainer)
    }

    /// Everything before the version that it starts from is in a checkpoint.
    fn acknowledge_start(&mut self) -> Result<(), TrainerError> {
        match self.buffer.ack_through(CONSUMER, self.version) {
            // A buffer that has seen none of the steps before the checkpoint, such as an empty one.
            Err(BufferError::FutureVersion { .. }) => {
                self.buffer.set_version(self.version, true)?;
                Ok(self.buffer.ack_through(CONSUMER, self.version)?)
            }
            // The checkpoint contains groups that another consumer got as well. That cannot be changed by training on.
            Err(error @ BufferError::LeaseLost { .. }) => {
                self.lost_lease = Some(error);
                Ok(())
            }
            acknowledged => Ok(acknowledged?),
        }
    }

    /// From now on it takes turns with a sampler on one device: between two steps it keeps in memory what `budget` has room
    /// for, and the rest in a file in `directory`.
    pub fn colocate(&mut self, turn: DeviceTurn, directory: &Path, budget: &MemoryBudget) {
        let networks = networks(&mut self.learner, &mut self.companions);
        self.colocation = Some(Colocation::new(turn, directory, budget, networks));
    }

    /// The policy's version: the number of steps done.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// What is trained.
    #[must_use]
    pub fn learner(&self) -> &Learner {
        &self.learner
    }

    /// A lease that was lost before the start, although its groups are in the checkpoint that it starts from.
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
        self.companions.critic.as_ref()
    }

    /// Tokens trained on.
    #[must_use]
    pub fn trained_tokens(&self) -> u64 {
        self.trained_tokens
    }

    /// One training step: lease, pack, score if the algorithm needs it, forward and backward, clip, optimizer, the next
    /// version, publish. `None` if it was asked to stop before a batch was there. A checkpoint comes after it, if
    /// [`Self::checkpoint_due`], because what is written down of a step has to be on disk before the step counts as done.
    ///
    /// # Errors
    /// No batch in time, a gradient that is not finite, a sampler that serves other weights than it says, bits that
    /// differ where they must not, a checkpoint that could not be written.
    pub fn step(&mut self) -> Result<Option<StepReport>, TrainerError> {
        let CheckpointTime { stall, wait, write } = self.checkpoint_time()?;
        let mut time = StepTime {
            save_checkpoint: stall,
            wait_for_checkpoint: wait,
            write_checkpoint: write,
            ..StepTime::default()
        };
        let Some(lease) = self.batch(&mut time)? else { return Ok(None) };

        // While it waits for a batch the sampler has the cores.
        let _reservation = self.learner.pool().reserve_core();
        let clock = Instant::now();
        let batch = BatchStatistics::of(&lease.groups, self.version);
        let learning_rate = self.config.schedule.at(self.version.0);
        let updates_before = self.learner.updates();
        let (counts, updated) = self.update(&lease.groups, learning_rate)?;
        let Updated { sums, grad_norm, critic } = updated;
        fail::fail_point!("after-optimizer");
        self.version = self.version.next();
        self.trained_tokens += sums.tokens;
        time.forward_backward = clock.elapsed().as_secs_f64();

        self.colocation.iter().for_each(Colocation::release);
        let clock = Instant::now();
        self.publish()?;
        time.weight_sync = clock.elapsed().as_secs_f64();
        let (quarantined, quarantined_groups) = self.quarantine.take();
        Ok(Some(StepReport {
            version: self.version,
            groups: lease.groups,
            counts,
            buffer_size: self.buffer.stats()?.finalized,
            dropped_stale: lease.dropped_stale,
            sums,
            critic,
            grad_norm,
            updates: self.learner.updates() - updates_before,
            learning_rate,
            batch,
            freed_bytes: self.colocation.as_ref().map_or(0, Colocation::freed_bytes),
            quarantined,
            quarantined_groups,
            time,
        }))
    }

    /// Whether the current version is one that is kept between the first and the last.
    #[must_use]
    pub fn checkpoint_due(&self) -> bool {
        let interval = self.config.checkpoint_interval;
        interval > 0 && self.version.0.is_multiple_of(interval)
    }

    /// Lets the buffer forget what was trained on without a checkpoint that contains it: where a crash loses the buffer
    /// anyway, keeping it would only fill the memory.
    ///
    /// # Errors
    /// If the buffer fails.
    pub fn forget(&self) -> Result<(), TrainerError> {
        Ok(self.buffer.ack_through(CONSUMER, self.version)?)
    }

    /// Takes a checkpoint of the current version. With `asynchronous` it is on disk some steps later; as soon as a step
    /// finds it there the buffer forgets the groups that are in it.
    ///
    /// # Errors
    /// If the checkpoint, or the one before, cannot be written.
    pub fn checkpoint(&mut self) -> Result<(), TrainerError> {
        self.save(|writer, contents| writer.save(contents))
    }

    /// The last checkpoint of a run: that of the current version, on disk when this returns.
    ///
    /// # Errors
    /// As [`Self::checkpoint`].
    pub fn last_checkpoint(&mut self) -> Result<PathBuf, TrainerError> {
        self.save(|writer, contents| writer.save_now(&contents))
    }

    /// Writes what there is with `write`, then lets the buffer forget the groups of what is on disk.
    fn save<R>(
        &mut self,
        write: impl FnOnce(&mut Writer, Contents<'_>) -> Result<R, TrainerError>,
    ) -> Result<R, TrainerError> {
        if let Some(colocation) = &mut self.colocation {
            colocation.wake(networks(&mut self.learner, &mut self.companions))?;
        }
        let updates = self.learner.updates();
        let critic = self.companions.critic.as_ref().and_then(|critic| critic.network.as_ref());
        let state = TrainerState {
            critic_updates: critic.map_or(0, |network| network.learner.updates()),
            ..TrainerState::new(self.version, updates, self.trained_tokens, self.time_s())
        };
        let critic =
            critic.map(|network| NetworkState::of(&network.directory, &network.learner)).transpose()?;
        let policy = NetworkState::of(&self.directory, &self.learner)?;
        let written = write(&mut self.writer, Contents { policy, critic, state: &state })?;
        self.forget_durable()?;
        Ok(written)
    }

    /// Lets the buffer forget the groups that are in a checkpoint that has reached the disk since the last look.
    fn forget_durable(&mut self) -> Result<(), TrainerError> {
        match self.writer.look()? {
            Some(version) => Ok(self.buffer.ack_through(CONSUMER, version)?),
            None => Ok(()),
        }
    }

    /// Where the time of checkpoints went since the last step, which looks whether one has reached the disk.
    fn checkpoint_time(&mut self) -> Result<CheckpointTime, TrainerError> {
        self.forget_durable()?;
        Ok(self.writer.take_time())
    }

    /// The next batch, and the device to train on it. A sampler that shares the device has it until then, unless the batch
    /// is there already.
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
                colocation.rest(networks(&mut self.learner, &mut self.companions))?;
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
        let clock = Instant::now();
        if let Some(colocation) = &mut self.colocation {
            let networks = networks(&mut self.learner, &mut self.companions);
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
            // Groups may be waited for from a sampler that waits for the weights.
            self.publisher.resend(&self.learner)?;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.buffer.lease(&request, left.min(LOOK_UP)) {
                Ok(lease) => {
                    if let Some(lease) = self.quarantine.pass(&*self.buffer, lease)? {
                        return Ok(Some(lease));
                    }
                }
                Err(BufferError::LeaseTimeout { .. }) if left > LOOK_UP => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// All updates of one batch.
    fn update(
        &mut self,
        groups: &[Arc<Group>],
        learning_rate: f32,
    ) -> Result<(BatchCounts, Updated), TrainerError> {
        fail::fail_point!("rank-step");
        let demonstrations: Vec<Option<Sample>> = match &self.companions.demonstrate {
            Some(demonstrate) => {
                let of = |group: &Arc<Group>| demonstrate(&group.task).filter(|s| self.quarantine.sees(s));
                groups.iter().map(of).collect()
            }
            None => Vec::new(),
        };
        let batch = Batch::new(groups, &self.config.algorithm, self.config.split, &demonstrations);
        self.tell_update(groups, &demonstrations, learning_rate)?;
        let Companions { reference, critic, .. } = &mut self.companions;
        let critic = critic.as_mut().map(|Critic { config, network }| {
            (*config, network.as_mut().map(|network| &mut network.learner))
        });
        let update = Update {
            algorithm: &self.config.algorithm,
            epochs: self.config.epochs,
            version: self.version,
            bitwise: self.config.bitwise,
            learning_rate,
            learner: &mut self.learner,
            critic,
            reference: reference.as_ref(),
        };
        match update.run(&batch)? {
            Ok(updated) => Ok((batch.counts, updated)),
            Err((row, mismatch)) => Err(self.not_bitwise(groups, row, mismatch)),
        }
    }

    /// Tells other processes of the trainer to make the same updates.
    fn tell_update(
        &self,
        groups: &[Arc<Group>],
        demonstrations: &[Option<Sample>],
        learning_rate: f32,
    ) -> Result<(), TrainerError> {
        let Some(remote) = self.learner.remote() else { return Ok(()) };
        if let Some(reference) = &self.companions.reference {
            remote.send_reference(reference)?;
        }
        let number = |network: &Network| network.learner.remote().map(|remote| remote.network);
        let critic = self.companions.critic.as_ref();
        remote.tell(&Command::Update(Box::new(UpdateCommand {
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

    fn not_bitwise(&self, groups: &[Arc<Group>], row: Row<'_>, mismatch: Mismatch) -> TrainerError {
        let Mismatch { token, behavior, proximal, .. } = mismatch;
        let mut all = groups.iter().flat_map(|group| group.trajectories.iter().map(|t| (group.id, t)));
        let (group, trajectory) = all
            .find(|(_, trajectory)| std::ptr::eq(&raw const trajectory.sample, row.sample))
            .expect("rows are made of the samples of the batch");
        let (step, trajectory) = (self.version.next().0, trajectory.index);
        TrainerError::NotBitwise { step, group, trajectory, token, behavior, proximal }
    }

    fn publish(&self) -> Result<(), TrainerError> {
        fail::fail_point!("weights-publish");
        self.publisher.publish(self.version, &self.learner)
    }
}

/// What learns: the policy, then a critic of its own.
fn networks<'a>(policy: &'a mut Learner, companions: &'a mut Companions) -> Vec<&'a mut Learner> {
    let critic = companions.critic.as_mut().and_then(|critic| critic.network.as_mut());
    [policy].into_iter().chain(critic.map(|network| &mut network.learner)).collect()
}
