//! Asks the run how its workers are, on a thread of its own: a run that does not answer must not keep the controller from
//! looking after its processes.
//!
//! Invariant: what is known is as old as it says.

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
    /// When the last answer came, of the lead that there is now.
    answered: Option<Instant>,
    /// When its first came.
    first: Option<Instant>,
    /// Whether one ever did.
    ever: bool,
    /// Counts leads: what was asked of the one before says nothing.
    lead: u64,
    members: Vec<WorkerStatus>,
    /// Processes that have ended, of which the run has not heard.
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
                    // A run that is away has nothing to give back: it is started again without it.
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

    /// Whether the run has ever been reached.
    pub(super) fn has_answered(&self) -> bool {
        lock(&self.known).ever
    }

    /// Whether it has answered what was asked after `then`.
    pub(super) fn answered_after(&self, then: Instant) -> bool {
        lock(&self.known).answered.is_some_and(|answered| answered > then)
    }

    /// For how long it has not answered; `None` until it has for the first time.
    pub(super) fn silent_since_answer(&self) -> Option<Duration> {
        lock(&self.known).answered.map(|answered| answered.elapsed())
    }

    /// The lead is another one.
    pub(super) fn forget(&self) {
        let mut known = lock(&self.known);
        (known.answered, known.first) = (None, None);
        known.lead += 1;
        known.members.clear();
    }

    /// Tells the run that the process of a worker has ended.
    pub(super) fn ended(&self, worker: &Child) {
        let (name, pid, instance) = (worker.name().to_owned(), worker.pid(), worker.instance());
        lock(&self.known).ended.push(ProcessEnded { name, pid, instance });
        self.thread.iter().for_each(|thread| thread.thread().unpark());
    }

    /// When the lead that there is now answered for the first time, if it has.
    pub(super) fn first_answer(&self) -> Option<Instant> {
        lock(&self.known).first
    }

    /// What is known of a worker's process, and when that was asked.
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
