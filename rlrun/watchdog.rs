//! Notices that a run does not get on, and says who waits for whom.
//!
//! Every role has deadlines of its own, whose errors name who waited for whom. This looks at the whole: as long as any
//! count of the run moves (steps, tokens, groups) it is silent. When nothing has moved for `deadlines.quiet_s`, it says what
//! every role does; when nothing has moved for twice `deadlines.wait_s` and the trainer only waits, no role has kept its own
//! deadline, and it ends the process: a thread that hangs cannot be ended alone, and a run that hangs silently
//! is worse than one that is started again from its last checkpoint.
//!
//! Invariant: it only reads, and waits for nothing longer than its own pace but the buffer's counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::failure::Failure;

/// How often it looks.
const EVERY: Duration = Duration::from_millis(250);

/// What a run looks like at a moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Situation {
    /// Counts that only move when the run gets on.
    pub(crate) counts: Vec<u64>,
    /// What every role does, a sentence each.
    pub(crate) roles: Vec<String>,
    /// Whether somebody computes or writes something that may take as long as it takes.
    pub(crate) works: bool,
}

/// How long it lets a run stand still.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Until it says who waits for whom.
    pub(crate) quiet: Duration,
    /// Until it ends the process.
    pub(crate) hang: Duration,
}

/// The thread that looks. It ends when this is dropped.
pub(crate) struct Watchdog {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Looks at what `look` sees, tells `say` when the run stands still, and calls `give_up` when nothing else can help.
    ///
    /// # Errors
    /// A system without room for a thread.
    pub(crate) fn start(
        limits: Limits,
        look: impl Fn() -> Situation + Send + 'static,
        say: impl Fn(&str) + Send + 'static,
        give_up: impl Fn() + Send + 'static,
    ) -> Result<Self, Failure> {
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        let watch = move || {
            let mut stillness = Stillness::new(limits, Instant::now());
            while !told.load(Ordering::Relaxed) {
                std::thread::park_timeout(EVERY);
                match stillness.see(look(), Instant::now()) {
                    Verdict::Fine => {}
                    Verdict::Still(text) => say(&text),
                    Verdict::Hangs(text) => {
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
enum Verdict {
    Fine,
    Still(String),
    Hangs(String),
}

/// For how long nothing has moved.
#[derive(Debug)]
struct Stillness {
    limits: Limits,
    counts: Vec<u64>,
    moved: Instant,
    /// Standing still for so long is said next.
    next: Duration,
}

impl Stillness {
    fn new(limits: Limits, now: Instant) -> Self {
        Self { limits, counts: Vec::new(), moved: now, next: limits.quiet }
    }

    fn see(&mut self, Situation { counts, roles, works }: Situation, now: Instant) -> Verdict {
        if counts != self.counts {
            (self.counts, self.moved, self.next) = (counts, now, self.limits.quiet);
            return Verdict::Fine;
        }
        let still = now.duration_since(self.moved);
        let text = |end: &str| {
            let roles: String = roles.iter().map(|role| format!("\n  {role}")).collect();
            format!("no progress for {:.0} s{end}:{roles}", still.as_secs_f64())
        };
        if still >= self.limits.hang && !works {
            return Verdict::Hangs(text(
                ", and nobody has kept a deadline; the process ends, resume the run",
            ));
        }
        if still < self.next {
            return Verdict::Fine;
        }
        // Not the same every quarter of a second.
        self.next = still * 2;
        Verdict::Still(text(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_silent_while_anything_moves_and_then_says_what_every_role_does() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        let limits = Limits { quiet: 10 * second, hang: 100 * second };
        let mut stillness = Stillness::new(limits, start);
        let mut see = |counts: &[u64], seconds: u32| {
            let roles = vec!["the trainer waits for a batch".to_owned(), "rollout 0 is decoding".to_owned()];
            stillness.see(
                Situation { counts: counts.to_vec(), roles, works: counts[0] > 4 },
                start + seconds * second,
            )
        };
        for seconds in 0..50 {
            assert_eq!(see(&[3, u64::from(seconds)], seconds), Verdict::Fine, "a count moves");
        }
        assert_eq!(see(&[3, 49], 58), Verdict::Fine);
        let Verdict::Still(text) = see(&[3, 49], 59) else { panic!("ten seconds are over") };
        assert_eq!(text, "no progress for 10 s:\n  the trainer waits for a batch\n  rollout 0 is decoding");
        assert_eq!(see(&[3, 49], 68), Verdict::Fine, "it was said");
        assert!(matches!(see(&[3, 49], 69), Verdict::Still(_)), "and is said again later");
        assert_eq!(see(&[4, 49], 148), Verdict::Fine, "it gets on");
        assert_eq!(see(&[4, 49], 157), Verdict::Fine);
        assert!(matches!(see(&[4, 49], 158), Verdict::Still(_)));
        assert!(matches!(see(&[4, 49], 248), Verdict::Hangs(_)));
        assert_eq!(see(&[5, 49], 249), Verdict::Fine);
        assert!(matches!(see(&[5, 49], 900), Verdict::Still(_)), "who works is not ended");
    }
}
