//! Polls the state of the workers from the run, on a separate thread: a run that does not answer must not block the
//! controller.
//!
//! Invariant: every answer is stored with the time of its request.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use buffer::http::{Client, ClientConfig};

use super::child::Child;
use super::system;
use crate::failure::Failure;
use crate::workers::api::ProcessEnded;
use crate::workers::membership::token;
use crate::workers::registry::WorkerStatus;

/// How often it asks.
const EVERY: Duration = Duration::from_millis(250);
/// How long it waits for an answer.
const ANSWER: Duration = Duration::from_secs(5);

/// See the module.
pub(super) struct Health {
    known: Arc<Mutex<HealthState>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct HealthState {
    /// Time of the request of the last answer from the current lead.
    answered: Option<Instant>,
    /// Time of its first answer.
    first: Option<Instant>,
    /// Whether any lead has answered.
    ever: bool,
    /// Number of leads so far; answers to requests to an earlier lead are ignored.
    lead: u64,
    members: Vec<WorkerStatus>,
    /// Ended processes that are not yet reported to the run.
    ended: Vec<ProcessEnded>,
}

impl Health {
    pub(super) fn start(url: &str, token_file: &Path, roots: Option<&Path>) -> Result<Self, Failure> {
        let token = Some(token(token_file, "writer")?);
        let patience = Duration::ZERO;
        let roots = roots.map(Path::to_path_buf);
        let client = Client::new(ClientConfig { token, patience, roots, ..ClientConfig::new(url) })?;
        let (known, over) = (Arc::new(Mutex::new(HealthState::default())), Arc::new(AtomicBool::new(false)));
        let (shared, stopping) = (Arc::clone(&known), Arc::clone(&over));
        let ask = move || {
            while !stopping.load(Ordering::Relaxed) {
                let ended = std::mem::take(&mut lock(&shared).ended);
                for ended in ended {
                    // The report may fail: a restarted run has no state of the ended process.
                    let _ = client.ask_once::<()>("/v1/run/ended", &ended, ANSWER);
                }
                let (asked, lead) = (Instant::now(), lock(&shared).lead);
                if let Ok(members) = client.ask_once::<Vec<WorkerStatus>>("/v1/run/workers", &(), ANSWER) {
                    let mut known = lock(&shared);
                    if known.lead == lead {
                        (known.answered, known.ever, known.members) = (Some(asked), true, members);
                        known.first.get_or_insert(asked);
                    }
                }
                std::thread::park_timeout(EVERY);
            }
        };
        let thread = std::thread::Builder::new().name("health".to_owned()).spawn(ask);
        Ok(Self {
            known,
            over,
            thread: Some(thread.map_err(system("start the thread that asks how workers are"))?),
        })
    }

    /// Whether the run has answered at least once.
    pub(super) fn has_answered(&self) -> bool {
        lock(&self.known).ever
    }

    /// Whether it has answered a request that was sent after `then`.
    pub(super) fn answered_after(&self, then: Instant) -> bool {
        lock(&self.known).answered.is_some_and(|answered| answered > then)
    }

    /// Time since the last answer; `None` before the first.
    pub(super) fn silent_since_answer(&self) -> Option<Duration> {
        lock(&self.known).answered.map(|answered| answered.elapsed())
    }

    /// Resets the state for a new lead.
    pub(super) fn forget(&self) {
        let mut known = lock(&self.known);
        (known.answered, known.first) = (None, None);
        known.lead += 1;
        known.members.clear();
    }

    /// Reports the end of a worker's process to the run.
    pub(super) fn ended(&self, worker: &Child) {
        let (name, pid, instance) = (worker.name().to_owned(), worker.pid(), worker.instance());
        lock(&self.known).ended.push(ProcessEnded { name, pid, instance });
        self.thread.iter().for_each(|thread| thread.thread().unpark());
    }

    /// Time of the first answer of the current lead.
    pub(super) fn first_answer(&self) -> Option<Instant> {
        lock(&self.known).first
    }

    /// The last known state of a worker's process, and the time of that report.
    pub(super) fn member(&self, name: &str, pid: u32) -> Option<(WorkerStatus, Instant)> {
        let known = lock(&self.known);
        let member = known.members.iter().find(|member| member.name == name && member.pid == pid)?;
        Some((member.clone(), known.answered?))
    }
}

fn lock(known: &Mutex<HealthState>) -> MutexGuard<'_, HealthState> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Health {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of it was printed.
            drop(thread.join());
        }
    }
}
