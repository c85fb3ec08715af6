//! The watchdog: notices that a run makes no progress, and says what every role waits for.
//!
//! Every role has deadlines of its own, whose errors name both sides of the wait. The watchdog covers the run as a whole. It is
//! silent while any counter of the run changes (steps, tokens, groups). After `deadlines.quiet_s` without progress it reports
//! the phase of every role. After twice `deadlines.wait_s`, if the trainer only waits, all deadlines have failed, and it ends
//! the process: a hanging thread cannot be ended alone, and a restart from the last checkpoint is better than a silent hang.
//!
//! Invariant: it only reads, and blocks on nothing but the counters of the buffer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::failure::Failure;

/// Pause between two snapshots.
const EVERY: Duration = Duration::from_millis(250);

/// The state of a run at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RunSnapshot {
    /// Counters that change only when the run makes progress.
    pub(crate) counts: Vec<u64>,
    /// The phase of every role, a sentence each.
    pub(crate) roles: Vec<String>,
    /// Whether a role computes or writes, which has no deadline.
    pub(crate) busy: bool,
}

/// Limits on the time without progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StallLimits {
    /// Until it reports the roles.
    pub(crate) quiet: Duration,
    /// Until it ends the process.
    pub(crate) hang: Duration,
}

/// The thread of the watchdog. It ends when this is dropped.
pub(crate) struct Watchdog {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Takes snapshots with `look`, reports a stall to `say`, and calls `give_up` when all deadlines have failed.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub(crate) fn start(
        limits: StallLimits,
        look: impl Fn() -> RunSnapshot + Send + 'static,
        say: impl Fn(&str) + Send + 'static,
        give_up: impl Fn() + Send + 'static,
    ) -> Result<Self, Failure> {
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let watch = move || {
            let mut detector = StallDetector::new(limits, Instant::now());
            while !stop.load(Ordering::Relaxed) {
                std::thread::park_timeout(EVERY);
                match detector.see(look(), Instant::now()) {
                    Finding::Progress => {}
                    Finding::Stalled(text) => say(&text),
                    Finding::Hung(text) => {
                        say(&text);
                        give_up();
                    }
                }
            }
        };
        let system = |source| Failure::System { what: "start the watchdog".to_owned(), source };
        let thread = std::thread::Builder::new().name("watchdog".to_owned()).spawn(watch).map_err(system)?;
        Ok(Self { over, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of it was printed.
            drop(thread.join());
        }
    }
}

#[derive(Debug, PartialEq)]
enum Finding {
    Progress,
    Stalled(String),
    Hung(String),
}

/// Measures the time without progress.
#[derive(Debug)]
struct StallDetector {
    limits: StallLimits,
    counts: Vec<u64>,
    moved: Instant,
    /// Time without progress at which the next report is due.
    next: Duration,
}

impl StallDetector {
    fn new(limits: StallLimits, now: Instant) -> Self {
        Self { limits, counts: Vec::new(), moved: now, next: limits.quiet }
    }

    fn see(&mut self, RunSnapshot { counts, roles, busy }: RunSnapshot, now: Instant) -> Finding {
        if counts != self.counts {
            (self.counts, self.moved, self.next) = (counts, now, self.limits.quiet);
            return Finding::Progress;
        }
        let still = now.duration_since(self.moved);
        let text = |end: &str| {
            let roles: String = roles.iter().map(|role| format!("\n  {role}")).collect();
            format!("no progress for {:.0} s{end}:{roles}", still.as_secs_f64())
        };
        if still >= self.limits.hang && !busy {
            return Finding::Hung(text(", and all deadlines have failed; the process ends, resume the run"));
        }
        if still < self.next {
            return Finding::Progress;
        }
        // Reports become rarer.
        self.next = still * 2;
        Finding::Stalled(text(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_silent_while_a_counter_changes_and_then_reports_every_role() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        let limits = StallLimits { quiet: 10 * second, hang: 100 * second };
        let mut detector = StallDetector::new(limits, start);
        let mut see = |counts: &[u64], seconds: u32| {
            let roles = vec!["the trainer waits for a batch".to_owned(), "rollout 0 is decoding".to_owned()];
            detector.see(
                RunSnapshot { counts: counts.to_vec(), roles, busy: counts[0] > 4 },
                start + seconds * second,
            )
        };
        for seconds in 0..50 {
            assert_eq!(see(&[3, u64::from(seconds)], seconds), Finding::Progress, "a count moves");
        }
        assert_eq!(see(&[3, 49], 58), Finding::Progress);
        let Finding::Stalled(text) = see(&[3, 49], 59) else { panic!("ten seconds are over") };
        assert_eq!(text, "no progress for 10 s:\n  the trainer waits for a batch\n  rollout 0 is decoding");
        assert_eq!(see(&[3, 49], 68), Finding::Progress, "it was reported");
        assert!(matches!(see(&[3, 49], 69), Finding::Stalled(_)), "and is reported again later");
        assert_eq!(see(&[4, 49], 148), Finding::Progress, "progress");
        assert_eq!(see(&[4, 49], 157), Finding::Progress);
        assert!(matches!(see(&[4, 49], 158), Finding::Stalled(_)));
        assert!(matches!(see(&[4, 49], 248), Finding::Hung(_)));
        assert_eq!(see(&[5, 49], 249), Finding::Progress);
        assert!(matches!(see(&[5, 49], 900), Finding::Stalled(_)), "a busy run is not ended");
    }
}
