//! The service without its listener: sessions, models, samplers and futures.
//!
//! A thread `trainer` makes the passes and updates of all models, one request at a time. Engines sample on threads of their own.
//!
//! # Layout
//! - `requests`: what is asked for; `config`: how the service is set up
//! - `registry`: who has what; `calls`: the requests of a model in order; `futures`: outcomes
//! - `worker`: the thread of passes and updates; `samplers`: what is sampled from; `publishing`: weights on their way to engines; `saved`: weights in files; `metrics`: numbers
//! - `accepted`: requests as they come
//!
//! # Invariants
//! - The locks of the registry and of samplers are never kept during a pass, an update, or the reading and writing of weights. Who
//!   needs both takes that of the registry first.
//! - Users take turns: while one waits, every other has at most one request done before it.
//! - A user sees only what is its own.

mod accepted;
mod calls;
mod config;
mod futures;
mod metrics;
mod publishing;
mod registry;
mod requests;
mod samplers;
mod saved;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::Semaphore;

pub use config::{ServiceConfig, ServiceLimits};
pub use requests::{
    BaseInfo, LoadInto, LoraRequest, ModelInfo, NewModel, SampleFrom, SamplerInfo, SamplerSave, SaveRequest,
    SavedInfo, UserId,
};

use crate::base::BaseModel;
use crate::outcome::{FutureState, Refusal};
use registry::ServiceRegistry;
use samplers::SamplerTable;
use worker::ModelWorker;

/// The service. Clones are the same; it ends with the last.
#[derive(Clone, Debug)]
pub struct TrainingService {
    shared: Arc<ServiceShared>,
    /// Ends the thread when it is dropped.
    _thread: Arc<TrainerThread>,
}

/// What the handlers of requests and the trainer share.
#[derive(Debug)]
struct ServiceShared {
    config: ServiceConfig,
    registry: Mutex<ServiceRegistry>,
    /// Notified when the trainer may have work.
    work: Condvar,
    samplers: Mutex<SamplerTable>,
    /// The permit to read weights and start engines.
    preparing: Arc<Semaphore>,
    /// Kept while weights are saved and deleted.
    saving: Mutex<()>,
    /// A random number of the process, for ids.
    random: u64,
    ids: AtomicU64,
    stop: AtomicBool,
}

/// The thread of passes and updates.
#[derive(Debug)]
struct TrainerThread {
    shared: Arc<ServiceShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl TrainingService {
    /// Starts a service.
    ///
    /// # Errors
    /// If its directory cannot be made, or its thread not be started.
    pub fn start(config: ServiceConfig) -> Result<Self, Refusal> {
        let failed =
            |what: &str, error: &dyn std::fmt::Display| Refusal::new(500, format!("{what}: {error}"));
        std::fs::create_dir_all(&config.dir)
            .map_err(|error| failed(&format!("cannot make {}", config.dir.display()), &error))?;
        let mut random = [0; 8];
        // Without randomness ids are unique within the process.
        let _ = getrandom::fill(&mut random);
        let registry = Mutex::new(ServiceRegistry::of_saved(&config.dir));
        let samplers = Mutex::new(SamplerTable::default());
        let shared = Arc::new(ServiceShared {
            config,
            registry,
            work: Condvar::new(),
            samplers,
            preparing: Arc::new(Semaphore::new(1)),
            saving: Mutex::default(),
            random: u64::from_le_bytes(random),
            ids: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let worker = ModelWorker::new(Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("trainer".to_owned()).spawn(move || worker.run());
        let thread = Mutex::new(Some(thread.map_err(|error| failed("cannot start the trainer", &error))?));
        let _thread = Arc::new(TrainerThread { shared: Arc::clone(&shared), thread });
        Ok(Self { shared, _thread })
    }

    /// The base models.
    #[must_use]
    pub fn bases(&self) -> Vec<BaseInfo> {
        self.shared.config.bases.iter().map(|base| base.info().clone()).collect()
    }

    /// What a request has come to, after at most `wait`.
    ///
    /// # Errors
    /// 410 for a request that is not known, or whose outcome is no longer kept.
    pub async fn retrieve(
        &self,
        user: UserId,
        request_id: &str,
        wait: Duration,
    ) -> Result<FutureState, Refusal> {
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            let (changed, pending) = {
                let mut registry = self.shared.registry();
                let gone = || {
                    Refusal::new(
                        410,
                        format!("request {request_id} is not known, or its outcome is no longer kept"),
                    )
                };
                let request = registry.futures.get(request_id, user).ok_or_else(gone)?;
                if let Some((ended, _)) = &request.ended {
                    let state = match ended {
                        Ok(outcome) => FutureState::Done(Arc::clone(outcome)),
                        Err(failure) => FutureState::Failed(failure.clone()),
                    };
                    registry.futures.retrieved(request_id);
                    return Ok(state);
                }
                // It is counted as waiting before the lock is released, so that no end is missed.
                let changed = Arc::clone(&request.changed).notified_owned();
                (changed, registry.pending(request_id, request.model.as_deref()))
            };
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Ok(pending);
            }
        }
    }
}

impl ServiceShared {
    fn registry(&self) -> MutexGuard<'_, ServiceRegistry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn samplers(&self) -> MutexGuard<'_, SamplerTable> {
        self.samplers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn saving(&self) -> MutexGuard<'_, ()> {
        self.saving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An id that nothing else of this process has.
    fn id(&self, prefix: &str) -> String {
        format!("{prefix}{:016x}{:x}", self.random, self.ids.fetch_add(1, Ordering::Relaxed))
    }

    fn base(&self, name: &str) -> Option<&Arc<BaseModel>> {
        self.config.bases.iter().find(|base| base.info().name == name)
    }

    /// The base model of this name.
    ///
    /// # Errors
    /// 404 with the names that there are.
    fn known_base(&self, name: &str) -> Result<&Arc<BaseModel>, Refusal> {
        self.base(name).ok_or_else(|| {
            let names: Vec<_> = self.config.bases.iter().map(|base| &base.info().name[..]).collect();
            let name: String = name.chars().take(200).collect();
            Refusal::new(
                404,
                format!("there is no base model `{name}`; this service has {}", names.join(", ")),
            )
        })
    }
}

impl Drop for TrainerThread {
    /// Ends the thread after the request that it carries out.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.work.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic of it was printed.
        thread.into_iter().for_each(|thread| drop(thread.join()));
    }
}
