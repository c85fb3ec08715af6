//! Checkpoints that are written while the next steps go on.
//!
//! Between two steps everything is copied; a thread writes the copy. Invariants: at most one is on its way, and the next
//! one due waits for it; a version is called durable only after its directory has its name; an error of the thread is
//! given to whoever looks next.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use model::{ModelDirectory, Parameters};
use trajectory::PolicyVersion;

use super::{Contents, NetworkState, Retention, TrainerState, path, save};
use crate::TrainerError;
use crate::lora::Adapter;
use crate::optimizer::Optimizer;

/// How checkpoints are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriterConfig {
    /// Where they go.
    pub checkpoints: PathBuf,
    /// Which stay.
    pub retention: Retention,
    /// Whether steps go on while one is written.
    pub asynchronous: bool,
    /// Longest wait for one that is being written.
    pub wait: Duration,
}

/// Where the time of checkpoints went, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CheckpointTime {
    /// No step could be done: waiting, copying, or writing at once.
    pub stall: f64,
    /// Of that, waiting until the one before was on disk.
    pub wait: f64,
    /// Writing what has reached the disk, beside the steps or between.
    pub write: f64,
}

/// Writes the checkpoints of one run.
#[derive(Debug)]
pub struct Writer {
    config: WriterConfig,
    in_flight: Option<InFlight>,
    durable: Option<PolicyVersion>,
    time: CheckpointTime,
}

/// A checkpoint on its way.
#[derive(Debug)]
struct InFlight {
    version: PolicyVersion,
    /// Gets the seconds that it took.
    done: Receiver<Result<f64, TrainerError>>,
}

impl Writer {
    /// One that has written nothing yet.
    #[must_use]
    pub fn new(config: WriterConfig) -> Self {
        Self { config, in_flight: None, durable: None, time: CheckpointTime::default() }
    }

    /// Writes a checkpoint of `contents`, or copies them and lets a thread write the copy. The one before is on disk when
    /// this returns.
    ///
    /// # Errors
    /// If this one or the one before cannot be written, or the one before is not on disk in time.
    pub fn save(&mut self, contents: Contents<'_>) -> Result<(), TrainerError> {
        if !self.config.asynchronous {
            return self.save_now(&contents).map(drop);
        }
        let clock = Instant::now();
        self.settle()?;
        let version = contents.state.version;
        let snapshot = Snapshot::of(contents);
        let (checkpoints, retention) = (self.config.checkpoints.clone(), self.config.retention);
        let (tell, done) = sync_channel(1);
        let write = move || {
            let clock = Instant::now();
            let written = save(&checkpoints, &snapshot.contents(), retention);
            // Nobody hears it if the run has ended by an error meanwhile.
            let _ = tell.send(written.map(|_| clock.elapsed().as_secs_f64()));
        };
        let spawned = thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        spawned.map_err(|error| self.failed(version, format!("no thread to write it: {error}")))?;
        self.in_flight = Some(InFlight { version, done });
        self.time.stall += clock.elapsed().as_secs_f64();
        Ok(())
    }

    /// Writes a checkpoint of `contents`; it, and the one before, are on disk when this returns.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn save_now(&mut self, contents: &Contents<'_>) -> Result<PathBuf, TrainerError> {
        let clock = Instant::now();
        self.settle()?;
        let writing = Instant::now();
        let path = save(&self.config.checkpoints, contents, self.config.retention)?;
        self.time.write += writing.elapsed().as_secs_f64();
        self.time.stall += clock.elapsed().as_secs_f64();
        self.durable = Some(contents.state.version);
        Ok(path)
    }

    /// The newest version that has reached the disk since the last look, if one has. Does not wait.
    ///
    /// # Errors
    /// If one could not be written.
    pub fn look(&mut self) -> Result<Option<PolicyVersion>, TrainerError> {
        if let Some(InFlight { version, done }) = &self.in_flight {
            match done.try_recv() {
                Err(TryRecvError::Empty) => {}
                told => {
                    let version = *version;
                    self.arrived(version, told.ok())?;
                }
            }
        }
        Ok(self.durable.take())
    }

    /// The time since the last call.
    pub fn take_time(&mut self) -> CheckpointTime {
        std::mem::take(&mut self.time)
    }

    /// Waits until nothing is on its way.
    fn settle(&mut self) -> Result<(), TrainerError> {
        let Some(InFlight { version, done }) = &self.in_flight else { return Ok(()) };
        let (clock, version) = (Instant::now(), *version);
        let told = match done.recv_timeout(self.config.wait) {
            Ok(told) => Some(told),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                let seconds = self.config.wait.as_secs_f64();
                let reason = format!(
                    "is not on disk after {seconds} s; look whether the disk hangs, raise deadlines.wait_s or \
                     checkpoint.interval"
                );
                return Err(self.failed(version, reason));
            }
        };
        self.time.wait += clock.elapsed().as_secs_f64();
        self.arrived(version, told)
    }

    /// What the thread has `told` of `version`; nothing if it panicked.
    fn arrived(
        &mut self,
        version: PolicyVersion,
        told: Option<Result<f64, TrainerError>>,
    ) -> Result<(), TrainerError> {
        self.in_flight = None;
        let panicked = || Err(self.failed(version, "the thread that writes it panicked".to_owned()));
        self.time.write += told.unwrap_or_else(panicked)?;
        self.durable = Some(version);
        Ok(())
    }

    fn failed(&self, version: PolicyVersion, reason: String) -> TrainerError {
        TrainerError::Checkpoint { path: path(&self.config.checkpoints, version), reason }
    }
}

impl Drop for Writer {
    /// What is on its way is good for the next process, so it is waited for; its errors no longer matter.
    fn drop(&mut self) {
        let _ = self.settle();
    }
}

/// A copy of what a checkpoint is made of.
#[derive(Debug)]
struct Snapshot {
    policy: NetworkCopy,
    critic: Option<NetworkCopy>,
    state: TrainerState,
}

#[derive(Debug)]
struct NetworkCopy {
    directory: Arc<ModelDirectory>,
    parameters: Parameters,
    optimizer: Optimizer,
    adapter: Option<Adapter>,
}

impl Snapshot {
    /// What was collected from ranks is a copy already.
    fn of(contents: Contents<'_>) -> Self {
        let copy = |network: NetworkState<'_>| NetworkCopy {
            directory: Arc::clone(network.directory),
            parameters: network.parameters.into_owned(),
            optimizer: network.optimizer.into_owned(),
            adapter: network.adapter.cloned(),
        };
        let Contents { policy, critic, state } = contents;
        Self { policy: copy(policy), critic: critic.map(copy), state: *state }
    }

    fn contents(&self) -> Contents<'_> {
        Contents {
            policy: self.policy.state(),
            critic: self.critic.as_ref().map(NetworkCopy::state),
            state: &self.state,
        }
    }
}

impl NetworkCopy {
    fn state(&self) -> NetworkState<'_> {
        let Self { directory, parameters, optimizer, adapter } = self;
        let (parameters, optimizer) = (Cow::Borrowed(parameters), Cow::Borrowed(optimizer));
        NetworkState { directory, parameters, optimizer, adapter: adapter.as_ref() }
    }
}
