//! Times in which a process had no processor: it was stopped, or its machine is overloaded.
//!
//! A thread sleeps and looks at the clock; a sleep that ends much too late is such a time (jHiccup, Gil Tene).
//!
//! Invariant: at most [`MAX_PAUSES`] are kept. The thread ends when the monitor is dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ::rewards::load::unix_seconds;
use ::rollout::WorkerPhase;
use ::rollout::activity::PhaseSpan;

/// Length of a sleep.
const SLEEP: Duration = Duration::from_millis(50);
/// A sleep that ends so much too late was a pause.
const LATE: Duration = Duration::from_millis(50);
/// Most pauses between two calls of [`PauseMonitor::take`].
const MAX_PAUSES: usize = 64;

/// Watches the process.
#[derive(Debug)]
pub(super) struct PauseMonitor {
    over: Arc<AtomicBool>,
    pauses: Arc<Mutex<Vec<PhaseSpan>>>,
    /// `None` if it could not be started; then no pause is seen.
    thread: Option<JoinHandle<()>>,
}

impl PauseMonitor {
    pub(super) fn start() -> Self {
        let (over, pauses) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<PhaseSpan>>>::default());
        let (stop, seen) = (Arc::clone(&over), Arc::clone(&pauses));
        let watch = move || {
            while !stop.load(Ordering::Relaxed) {
                let clock = Instant::now();
                std::thread::sleep(SLEEP);
                let late = clock.elapsed().saturating_sub(SLEEP);
                if late >= LATE {
                    let end = unix_seconds();
                    let (phase, start) = (WorkerPhase::Paused, end - late.as_secs_f64());
                    let mut pauses = seen.lock().unwrap_or_else(PoisonError::into_inner);
                    if pauses.len() < MAX_PAUSES {
                        pauses.push(PhaseSpan { phase, start, end, version: None });
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("pauses".to_owned()).spawn(watch).ok();
        Self { over, pauses, thread }
    }

    /// The pauses since the last call.
    pub(super) fn take(&self) -> Vec<PhaseSpan> {
        std::mem::take(&mut *self.pauses.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for PauseMonitor {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of it was printed.
            drop(thread.join());
        }
    }
}
