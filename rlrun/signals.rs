//! Ctrl-C and SIGTERM. The first signal asks the run to stop and save. A second Ctrl-C ends the process at once, after its
//! children. A second SIGTERM has no further effect, because a launcher signals every process of a run and a controller
//! signals its children too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// Exit status of a process after a second stop signal: 128 + SIGINT, as in shells.
pub(crate) const INTERRUPTED: i32 = 130;
/// Between two looks at whether the process that started this one still runs.
const PARENT_LOOK: Duration = Duration::from_millis(200);

/// Listens for signals until the process ends.
#[derive(Debug)]
pub struct Signals {
    stop: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
    at_once: Arc<AtomicBool>,
}

impl Signals {
    /// Starts to listen, on a separate thread.
    ///
    /// # Errors
    /// The system refuses the signal handlers.
    pub fn listen() -> Result<Self, Failure> {
        Self::start(Some("stopping after this step; once more to stop at once"), false)
    }

    /// The same without a message.
    ///
    /// # Errors
    /// The system refuses the signal handlers.
    pub(crate) fn listen_quietly() -> Result<Self, Failure> {
        Self::start(None, false)
    }

    /// The same for a process whose children report the stop. A second Ctrl-C does not end it: it ends them first
    /// ([`Self::at_once`]).
    ///
    /// # Errors
    /// The system refuses the signal handlers.
    pub(crate) fn listen_with_children() -> Result<Self, Failure> {
        Self::start(None, true)
    }

    fn start(message: Option<&'static str>, has_children: bool) -> Result<Self, Failure> {
        let [stop, terminated, at_once] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
        let (theirs, by_launcher, again) = (Arc::clone(&stop), Arc::clone(&terminated), Arc::clone(&at_once));
        let failure = |what: &str, source| Failure::System { what: what.to_owned(), source };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(|source| failure("listen for signals", source))?;
        let mut streams = {
            let _guard = runtime.enter();
            let of = |kind| signal(kind).map_err(|source| failure("listen for signals", source));
            (of(SignalKind::interrupt())?, of(SignalKind::terminate())?)
        };
        let listen = move || {
            runtime.block_on(async {
                // Whether a user has asked before.
                let mut asked = false;
                loop {
                    let interrupted = tokio::select! {
                        _ = streams.0.recv() => true,
                        _ = streams.1.recv() => false,
                    };
                    if !interrupted {
                        by_launcher.store(true, Ordering::Relaxed);
                    }
                    if theirs.swap(true, Ordering::Relaxed) {
                        let second = interrupted && std::mem::replace(&mut asked, true);
                        if second && (!has_children || again.swap(true, Ordering::Relaxed)) {
                            std::process::exit(INTERRUPTED);
                        }
                        asked |= interrupted;
                        continue;
                    }
                    asked = interrupted;
                    message.iter().for_each(|message| eprintln!("{message}"));
                }
            });
        };
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(listen)
            .map_err(|source| failure("start the thread that listens for signals", source))?;
        Ok(Self { stop, terminated, at_once })
    }

    /// Set by a second Ctrl-C of a process with children, which it is to end before itself.
    #[must_use]
    pub(crate) fn at_once(&self) -> &AtomicBool {
        &self.at_once
    }

    /// Whether the stop signal was SIGTERM: it comes from a launcher that reclaims the machine, not from a user.
    #[must_use]
    pub fn terminated(&self) -> bool {
        self.terminated.load(Ordering::Relaxed)
    }

    /// Whether the run was asked to stop.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Set when the run should stop. The run sets it itself when one of its parts has ended.
    #[must_use]
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }
}

/// Sends SIGTERM to this process within [`PARENT_LOOK`] when `parent`, which started it, ends, however that ends. A look at the
/// parent works on every Unix; the signal that Linux has for it is sent when the thread ends that started the process.
///
/// # Errors
/// The parent has ended already; no thread can be started.
pub(crate) fn end_with_parent(parent: u32) -> Result<(), Failure> {
    use rustix::process::{Signal, getpid, getppid, kill_process};
    let lives = move || getppid().is_some_and(|now| now.as_raw_nonzero().get().unsigned_abs() == parent);
    if !lives() {
        return Err(Failure::Requeue("the process that started this one has ended".to_owned()));
    }
    let look = move || {
        while lives() {
            thread::sleep(PARENT_LOOK);
        }
        // A process may always signal itself.
        let _ = kill_process(getpid(), Signal::TERM);
    };
    let started = thread::Builder::new().name("parent".to_owned()).spawn(look);
    started.map(drop).map_err(|source| Failure::System {
        what: "end with the process that started this one".to_owned(),
        source,
    })
}
