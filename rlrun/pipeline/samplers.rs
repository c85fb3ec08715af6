//! Who samples for a run: a thread of this process, processes that have joined, or both.
//!
//! Invariant: what they did is counted as one; the run does not learn where it was done.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ::rewards::{LoadCounts, RewardSet};
use buffer::Producer;
use rollout::{Progress, RolloutError, Worker};

use crate::failure::Failure;
use crate::workers::roster::Roster;

/// How long workers may take to leave a run that has ended. Those that stay find nobody, and end by themselves.
const LEAVING: Duration = Duration::from_secs(10);

/// All samplers of a run.
pub(super) struct Samplers {
    /// That of this process.
    pub(super) inside: Option<SamplerThread>,
    /// Those of others.
    pub(super) roster: Arc<Roster>,
    /// The rewards of this process' sampler.
    pub(super) rewards: Option<Arc<RewardSet>>,
}

impl Samplers {
    /// What they have done together.
    pub(super) fn progress(&self) -> Progress {
        self.roster.progress(self.inside.as_ref().map(SamplerThread::progress))
    }

    /// What their rewards had to do since this was asked last.
    pub(super) fn take_loads(&self) -> Vec<(String, LoadCounts)> {
        let mut loads = self.rewards.as_deref().map(RewardSet::take_loads).unwrap_or_default();
        for (name, counts) in self.roster.take_loads() {
            match loads.iter_mut().find(|(known, _)| *known == name) {
                Some((_, load)) => load.add(counts),
                None => loads.push((name, counts)),
            }
        }
        loads
    }

    /// Waits until that of this process has ended, which it has been told.
    ///
    /// # Errors
    /// What ended it.
    pub(super) fn join(&mut self) -> Result<(), Failure> {
        self.inside.take().map_or(Ok(()), SamplerThread::join)
    }

    /// Tells the others that the run is over, and waits until they have left.
    pub(super) fn part(self) {
        self.roster.stop(LEAVING);
    }
}

/// The thread of a sampler.
pub(super) struct SamplerThread {
    thread: JoinHandle<Result<(), RolloutError>>,
    pub(super) progress: Arc<Mutex<Progress>>,
}

impl SamplerThread {
    /// Starts `worker`; if it fails, it sets `stop`.
    pub(super) fn spawn(
        worker: Worker,
        producer: Arc<dyn Producer>,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, Failure> {
        let progress = worker.progress();
        let work = move || {
            let result = worker.run(&*producer, &stop);
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            result
        };
        let system = |source| Failure::System { what: "start the thread of the sampler".to_owned(), source };
        let thread = std::thread::Builder::new().name("sampler 0".to_owned()).spawn(work).map_err(system)?;
        Ok(Self { thread, progress })
    }

    fn progress(&self) -> Progress {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(self) -> Result<(), Failure> {
        match self.thread.join() {
            Ok(result) => Ok(result?),
            Err(_) => Err(Failure::Internal("the sampler panicked".to_owned())),
        }
    }
}
