//! Ctrl-C and SIGTERM: the first asks the run to stop and save, the second ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// Exit status of a process that was told twice to stop, as shells count it.
pub(crate) const INTERRUPTED: i32 = 130;

/// Listens for signals until the process ends.
#[derive(Debug)]
pub struct Signals {
    stop: Arc<AtomicBool>,
}

impl Signals {
    /// Starts to listen, on a thread of its own.
    ///
    /// # Errors
    /// If the system lets nobody listen.
    pub fn listen() -> Result<Self, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
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
                loop {
                    tokio::select! {
                        _ = streams.0.recv() => {}
                        _ = streams.1.recv() => {}
                    }
                    if theirs.swap(true, Ordering::Relaxed) {
                        std::process::exit(INTERRUPTED);
                    }
                    eprintln!("stopping after this step; once more to stop at once");
                }
            });
        };
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(listen)
            .map_err(|source| failure("start the thread that listens for signals", source))?;
        Ok(Self { stop })
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
