//! Sessions: processes that keep state from one call to the next.
//!
//! A session has a worker for itself until it ends. A worker whose session ended well is used by the next one; the code
//! starts anew by a call of its own. All others are killed.
//!
//! Invariant: at most [`SessionOptions::processes`] workers run, whatever their sessions do. A call is never repeated: the
//! state that it was made on is lost.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::batch::{BatchMode, PythonWorker, run};
use super::fork_server::{ForkServer, lock};
use super::pool::queued;
use super::protocol::{LoadedCode, MAX_ARGUMENTS};
use super::spawner::WorkerSpawner;
use super::{CallError, MAX_TIMEOUT};

/// Sizes of a pool of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    /// Most sessions at a time, a process each.
    pub processes: usize,
}

/// Processes for sessions.
#[derive(Debug)]
pub struct SessionPool {
    state: Arc<SessionPoolState>,
    loaded: LoadedCode,
}

#[derive(Debug)]
struct SessionPoolState {
    spawner: WorkerSpawner,
    /// Workers without a session.
    idle: Mutex<Vec<PythonWorker>>,
    free: Arc<Semaphore>,
}

/// A process with state. To drop it is to kill the process; [`Session::finish`] keeps it for others.
#[derive(Debug)]
pub struct Session {
    state: Arc<SessionPoolState>,
    /// `None` after the process ended.
    worker: Option<PythonWorker>,
    _permit: OwnedSemaphorePermit,
}

impl SessionPool {
    /// Sessions of the code of `server`. No process starts before its session.
    #[must_use]
    pub fn start(server: ForkServer, options: SessionOptions) -> Self {
        let loaded = server.loaded().clone();
        let free = Arc::new(Semaphore::new(options.processes.max(1)));
        let state = SessionPoolState { spawner: WorkerSpawner::new(server), idle: Mutex::default(), free };
        Self { state: Arc::new(state), loaded }
    }

    /// The code as its adapter found it.
    #[must_use]
    pub fn loaded(&self) -> &LoadedCode {
        &self.loaded
    }

    /// Opens a session, as soon as a process is free.
    ///
    /// # Errors
    /// A process that cannot be started.
    pub async fn open(&self) -> Result<Session, CallError> {
        let state = Arc::clone(&self.state);
        let ended = |_| CallError::Failed { reason: "the run ended".to_owned() };
        let permit = Arc::clone(&state.free).acquire_owned().await.map_err(ended)?;
        let mut worker = None;
        while worker.is_none()
            && let Some(mut idle) = state.idle()
        {
            // One that ended while it was idle is left.
            let ended = tokio::time::timeout(Duration::ZERO, idle.unusable()).await;
            worker = ended.is_err().then_some(idle);
        }
        let worker = match worker {
            Some(worker) => worker,
            None => state.spawner.worker().await.map_err(|reason| CallError::Failed { reason })?,
        };
        Ok(Session { state, worker: Some(worker), _permit: permit })
    }

    /// Process ids now: of the fork server, then of idle workers.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let idle = lock(&self.state.idle);
        let workers = idle.iter().filter_map(|worker| u32::try_from(worker.pid()).ok());
        std::iter::once(self.state.spawner.pid()).chain(workers).collect()
    }
}

impl SessionPoolState {
    fn idle(&self) -> Option<PythonWorker> {
        lock(&self.idle).pop()
    }
}

impl Drop for SessionPool {
    fn drop(&mut self) {
        lock(&self.state.idle).clear();
        self.state.spawner.end();
    }
}

impl Session {
    /// Makes a call with `arguments`, JSON, in at most `timeout`. After a call that ran over its time or ended its process,
    /// every further call fails.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn call(&mut self, arguments: String, timeout: Duration) -> Result<Value, CallError> {
        let failed = |reason: String| Err(CallError::Failed { reason });
        if arguments.len() > MAX_ARGUMENTS {
            return failed(format!(
                "the arguments have {} bytes, more than {MAX_ARGUMENTS}",
                arguments.len()
            ));
        }
        let Some(worker) = self.worker.take() else {
            return failed("its process ended in a call before".to_owned());
        };
        let timeout = timeout.min(MAX_TIMEOUT);
        let mode = BatchMode { timeout, batch: false, concurrent: false, whole_groups: false };
        let (call, pending) = queued(arguments);
        let (kept, repeated) = run(worker, vec![call], mode).await;
        match kept {
            Ok(worker) => self.worker = Some(worker),
            Err(why) if !repeated.is_empty() => return failed(why),
            Err(why) => {
                let line = format!("rlrun: the process of a session ended: {why}\n");
                self.state.spawner.setup().log.append(line.as_bytes());
            }
        }
        pending.result().await
    }

    /// Ends the session; its process may be used by another one, whose code starts anew.
    pub fn finish(mut self) {
        if let Some(worker) = self.worker.take() {
            lock(&self.state.idle).push(worker);
        }
    }
}
