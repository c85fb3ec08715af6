//! Asynchronous checkpoints: a thread writes a copy of the state while training continues.
//!
//! The copy is taken between two steps. Invariants: at most one checkpoint is being written, and the next one waits for
//! it; a version is reported as durable only after its directory has its final name, and with an archive only after the
//! archive has it too; an error of the thread is returned by the next call.

use std::borrow::Cow;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use model::ModelDirectory;
use trajectory::PolicyVersion;

use super::{CheckpointContents, NetworkState, Retention, TrainerState, path, save};
use crate::TrainerError;
use crate::lora::Adapter;
use crate::optimizer::Optimizer;
use crate::state_weights::StateWeights;

/// Settings of checkpoint writing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointWriterConfig {
    /// Directory of the checkpoints.
    pub checkpoints: PathBuf,
    /// Which checkpoints are kept.
    pub retention: Retention,
    /// Whether training continues while a checkpoint is written.
    pub asynchronous: bool,
    /// Deadline for a checkpoint that is being written.
    pub wait: Duration,
}

/// A second place for every checkpoint, which survives the loss of this machine.
pub trait CheckpointArchive: Debug + Send + Sync {
    /// Stores the complete checkpoint of `version` in `directory`; it is durable in the archive when this returns. Storing
    /// what is stored already changes nothing.
    ///
    /// # Errors
    /// [`TrainerError::Archive`]; also if the archive makes no progress before a deadline of its own.
    fn store(&self, directory: &Path, version: PolicyVersion) -> Result<(), TrainerError>;
}

/// Time spent on checkpoints, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CheckpointTime {
    /// Training was stalled: waiting, copying, or synchronous writing.
    pub stall: f64,
    /// The part of `stall` spent waiting for the previous checkpoint, seconds.
    pub wait: f64,
    /// Writing checkpoints that became durable, concurrent with training or not.
    pub write: f64,
}

/// Writes the checkpoints of one run.
#[derive(Debug)]
pub struct CheckpointWriter {
    config: CheckpointWriterConfig,
    archive: Option<Arc<dyn CheckpointArchive>>,
    in_flight: Option<PendingCheckpoint>,
    durable: Option<PolicyVersion>,
    time: CheckpointTime,
}

/// A checkpoint that is being written.
#[derive(Debug)]
struct PendingCheckpoint {
    version: PolicyVersion,
    /// Whether it is on disk. From then on the deadline of the archive applies.
    on_disk: Arc<AtomicBool>,
    /// Receives the seconds that the write took.
    done: Receiver<Result<f64, TrainerError>>,
}

impl CheckpointWriter {
    /// A writer without a checkpoint.
    #[must_use]
    pub fn new(config: CheckpointWriterConfig) -> Self {
        Self { config, archive: None, in_flight: None, durable: None, time: CheckpointTime::default() }
    }

    /// Also stores every checkpoint in `archive`.
    #[must_use]
    pub fn archived(mut self, archive: Option<Arc<dyn CheckpointArchive>>) -> Self {
        self.archive = archive;
        self
    }

    /// Writes a checkpoint, or copies `contents` and starts a thread that writes the copy. The previous checkpoint is
    /// durable when this returns.
    ///
    /// # Errors
    /// If this checkpoint or the previous one cannot be written, or the previous one is not durable before the
    /// deadline.
    pub fn save(&mut self, contents: CheckpointContents<'_>) -> Result<(), TrainerError> {
        if !self.config.asynchronous {
            return self.save_now(&contents).map(drop);
        }
        let clock = Instant::now();
        self.join()?;
        let version = contents.state.version;
        let snapshot = CheckpointSnapshot::of(contents);
        let (checkpoints, retention) = (self.config.checkpoints.clone(), self.config.retention);
        let (archive, on_disk) = (self.archive.clone(), Arc::<AtomicBool>::default());
        let (sender, done) = sync_channel(1);
        let is_on_disk = Arc::clone(&on_disk);
        let write = move || {
            let clock = Instant::now();
            let written = save(&checkpoints, &snapshot.contents(), retention);
            // The copy uses memory, and the archive reads the files.
            drop(snapshot);
            is_on_disk.store(true, Ordering::Release);
            let stored = written.and_then(|path| store(archive.as_deref(), &path, version));
            // The receiver is dropped if the run has ended with an error.
            let _ = sender.send(stored.map(|()| clock.elapsed().as_secs_f64()));
        };
        let spawned = thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        spawned.map_err(|error| self.failed(version, format!("no thread to write it: {error}")))?;
        self.in_flight = Some(PendingCheckpoint { version, on_disk, done });
        self.time.stall += clock.elapsed().as_secs_f64();
        Ok(())
    }

    /// Writes a checkpoint; it and the previous one are durable when this returns.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn save_now(&mut self, contents: &CheckpointContents<'_>) -> Result<PathBuf, TrainerError> {
        let clock = Instant::now();
        self.join()?;
        let writing = Instant::now();
        let path = save(&self.config.checkpoints, contents, self.config.retention)?;
        store(self.archive.as_deref(), &path, contents.state.version)?;
        self.time.write += writing.elapsed().as_secs_f64();
        self.time.stall += clock.elapsed().as_secs_f64();
        self.durable = Some(contents.state.version);
        Ok(path)
    }

    /// The newest version that became durable since the last call. Does not wait.
    ///
    /// # Errors
    /// If a checkpoint could not be written.
    pub fn take_durable(&mut self) -> Result<Option<PolicyVersion>, TrainerError> {
        if let Some(PendingCheckpoint { version, done, .. }) = &self.in_flight {
            match done.try_recv() {
                Err(TryRecvError::Empty) => {}
                result => {
                    let version = *version;
                    self.finish(version, result.ok())?;
                }
            }
        }
        Ok(self.durable.take())
    }

    /// Returns and resets the time spent on checkpoints.
    pub fn take_time(&mut self) -> CheckpointTime {
        std::mem::take(&mut self.time)
    }

    /// Waits until no checkpoint is being written.
    fn join(&mut self) -> Result<(), TrainerError> {
        let Some(PendingCheckpoint { version, on_disk, done }) = &self.in_flight else { return Ok(()) };
        let (clock, version) = (Instant::now(), *version);
        let mut received = done.recv_timeout(self.config.wait);
        while matches!(received, Err(RecvTimeoutError::Timeout)) && on_disk.load(Ordering::Acquire) {
            received = done.recv_timeout(self.config.wait);
        }
        let result = match received {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                let seconds = self.config.wait.as_secs_f64();
                let reason = format!(
                    "is not on disk after {seconds} s; check whether the disk hangs, or raise deadlines.wait_s or \
                     checkpoint.interval"
                );
                return Err(self.failed(version, reason));
            }
        };
        self.time.wait += clock.elapsed().as_secs_f64();
        self.finish(version, result)
    }

    /// Handles the result of the thread for `version`; `None` if it panicked.
    fn finish(
        &mut self,
        version: PolicyVersion,
        result: Option<Result<f64, TrainerError>>,
    ) -> Result<(), TrainerError> {
        self.in_flight = None;
        let panicked = || Err(self.failed(version, "the thread that writes it panicked".to_owned()));
        self.time.write += result.unwrap_or_else(panicked)?;
        self.durable = Some(version);
        Ok(())
    }

    fn failed(&self, version: PolicyVersion, reason: String) -> TrainerError {
        TrainerError::Checkpoint { path: path(&self.config.checkpoints, version), reason }
    }
}

impl Drop for CheckpointWriter {
    /// Waits for the checkpoint in progress, which the next process can use; its error is dropped.
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// Stores the checkpoint of `version` in `directory` in the archive, if there is one.
fn store(
    archive: Option<&dyn CheckpointArchive>,
    directory: &Path,
    version: PolicyVersion,
) -> Result<(), TrainerError> {
    archive.map_or(Ok(()), |archive| archive.store(directory, version))
}

/// A copy of the state, for the thread.
#[derive(Debug)]
struct CheckpointSnapshot {
    policy: NetworkCopy,
    critic: Option<NetworkCopy>,
    state: TrainerState,
    island: Option<Vec<u8>>,
}

/// A copy of the state of a network in training.
#[derive(Debug)]
pub(crate) struct NetworkCopy {
    directory: Arc<ModelDirectory>,
    pub(crate) weights: StateWeights,
    pub(crate) optimizer: Optimizer,
    pub(crate) adapter: Option<Adapter>,
}

impl CheckpointSnapshot {
    /// State that was gathered from ranks is already a copy.
    fn of(contents: CheckpointContents<'_>) -> Self {
        let CheckpointContents { policy, critic, state, island } = contents;
        let island = island.map(Cow::into_owned);
        Self { policy: policy.into(), critic: critic.map(NetworkCopy::from), state: *state, island }
    }

    fn contents(&self) -> CheckpointContents<'_> {
        CheckpointContents {
            policy: self.policy.state(),
            critic: self.critic.as_ref().map(NetworkCopy::state),
            state: &self.state,
            island: self.island.as_deref().map(Cow::Borrowed),
        }
    }
}

impl From<NetworkState<'_>> for NetworkCopy {
    fn from(network: NetworkState<'_>) -> Self {
        Self {
            directory: Arc::clone(network.directory),
            weights: network.weights,
            optimizer: network.optimizer.into_owned(),
            adapter: network.adapter.cloned(),
        }
    }
}

impl NetworkCopy {
    pub(crate) fn state(&self) -> NetworkState<'_> {
        let Self { directory, weights, optimizer, adapter } = self;
        let (weights, optimizer) = (weights.clone(), Cow::Borrowed(optimizer));
        NetworkState { directory, weights, optimizer, adapter: adapter.as_ref() }
    }
}
