//! The samplers of a run: a thread of this process, rollout workers, or both.
//!
//! Invariant: their counts are added up; the run does not depend on where they run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ::rewards::{LoadCounts, RewardSet};
use buffer::Producer;
use rollout::{Activity, ActivityLog, Progress, RolloutError, Worker};

use crate::failure::Failure;
use crate::observe::Observer;
use crate::workers::registry::WorkerRegistry;

/// Name of the sampler of this process.
pub(super) const SAMPLER_NAME: &str = "sampler 0";
/// Time for workers to leave a run that has ended. Later their requests fail, and they end.
const LEAVING: Duration = Duration::from_secs(10);

/// All samplers of a run.
pub(super) struct Samplers {
    /// The sampler of this process.
    pub(super) local: Option<SamplerThread>,
    /// Rollout workers, among other workers.
    pub(super) registry: Arc<WorkerRegistry>,
    /// The rewards of the local sampler.
    pub(super) rewards: Option<Arc<RewardSet>>,
}

impl Samplers {
    /// Counts of all samplers.
    pub(super) fn progress(&self) -> Progress {
        self.registry.progress(self.local.as_ref().map(SamplerThread::progress))
    }

    /// What each has done since the last call, by name.
    pub(super) fn take_activity(&self) -> Vec<(String, Activity)> {
        let local = self.local.as_ref().map(|local| (SAMPLER_NAME.to_owned(), local.activity.take()));
        local.into_iter().chain(self.registry.take_activity()).collect()
    }

    /// Counts of their rewards since the last call.
    pub(super) fn take_loads(&self) -> Vec<(String, LoadCounts)> {
        let mut loads = self.rewards.as_deref().map(RewardSet::take_loads).unwrap_or_default();
        for (name, counts) in self.registry.take_loads() {
            match loads.iter_mut().find(|(known, _)| *known == name) {
                Some((_, load)) => load.add(counts),
                None => loads.push((name, counts)),
            }
        }
        loads
    }

    /// Waits for the end of the local sampler, after its stop flag was set; `observer` gets what it did until then.
    ///
    /// # Errors
    /// The error that ended it.
    pub(super) fn join(&mut self, observer: &mut Observer<'_>) -> Result<(), Failure> {
        observer.late_reports(&self.take_activity(), &self.take_loads());
        self.local.take().map_or(Ok(()), SamplerThread::join)
    }

    /// Notifies the workers of the end of the run and waits until they have left; `observer` gets their last reports.
    pub(super) fn stop_workers(&self, observer: &mut Observer<'_>) {
        self.registry.stop(LEAVING);
        observer.late_reports(&self.take_activity(), &self.take_loads());
    }
}

/// The thread of a sampler.
pub(super) struct SamplerThread {
    thread: JoinHandle<Result<(), RolloutError>>,
    pub(super) progress: Arc<Mutex<Progress>>,
    activity: Arc<ActivityLog>,
}

impl SamplerThread {
    /// Starts `worker`; if it fails, it sets `stop`.
    pub(super) fn spawn(
        worker: Worker,
        producer: Arc<dyn Producer>,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, Failure> {
        let (progress, activity) = (worker.progress(), worker.activity());
        let work = move || {
            let result = worker.run(&*producer, &stop);
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            result
        };
        let system = |source| Failure::System { what: "start the thread of the sampler".to_owned(), source };
        let thread = std::thread::Builder::new().name(SAMPLER_NAME.to_owned()).spawn(work).map_err(system)?;
        Ok(Self { thread, progress, activity })
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
