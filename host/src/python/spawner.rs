//! Starts workers, and the fork server again after it died.
//!
//! Invariant: at most [`RESTARTS`] fork servers are started in [`RESTART_WINDOW`], so that code which kills its parent fails
//! its calls instead of starting processes for ever.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::batch::PythonWorker;
use super::fork_server::{ForkServer, ServerSetup, lock};

/// Fork servers that may be started in [`RESTART_WINDOW`] after one died.
const RESTARTS: usize = 5;
/// Time over which they are counted.
const RESTART_WINDOW: Duration = Duration::from_secs(60);
/// Failed starts of a worker after which its calls fail.
const STARTS: u32 = 3;

/// The fork server of a pool, and what is needed to start it again.
#[derive(Debug)]
pub(super) struct WorkerSpawner {
    setup: Arc<ServerSetup>,
    server: Mutex<Arc<ForkServer>>,
    /// When fork servers were started again. Locked while one starts: all workers wait for the same one.
    restarts: tokio::sync::Mutex<VecDeque<Instant>>,
}

impl WorkerSpawner {
    pub(super) fn new(server: ForkServer) -> Self {
        let setup = Arc::clone(server.setup());
        Self { setup, server: Mutex::new(Arc::new(server)), restarts: tokio::sync::Mutex::default() }
    }

    pub(super) fn setup(&self) -> &Arc<ServerSetup> {
        &self.setup
    }

    /// Process id of the fork server.
    pub(super) fn pid(&self) -> u32 {
        lock(&self.server).pid()
    }

    /// Ends the fork server and all its workers; no worker is started any more.
    pub(super) fn end(&self) {
        self.setup.closed.store(true, Ordering::Relaxed);
        let server = Arc::clone(&lock(&self.server));
        server.end();
    }

    /// A new worker, and a new fork server if there is none.
    pub(super) async fn worker(&self) -> Result<PythonWorker, String> {
        let mut failures = 0;
        loop {
            let server = self.server().await?;
            match PythonWorker::start(&server).await {
                Ok(worker) => return Ok(worker),
                Err(reason) if server.alive() => {
                    failures += 1;
                    if failures == STARTS {
                        return Err(reason);
                    }
                }
                // The limit on restarts bounds this loop.
                Err(_) => {}
            }
        }
    }

    async fn server(&self) -> Result<Arc<ForkServer>, String> {
        let mut restarts = self.restarts.lock().await;
        let server = Arc::clone(&lock(&self.server));
        if server.alive() {
            return Ok(server);
        }
        drop(server);
        let now = Instant::now();
        restarts.retain(|then| now.duration_since(*then) < RESTART_WINDOW);
        if restarts.len() >= RESTARTS {
            return Err(format!(
                "the parent process of its workers died {} times within {} s; {} says more",
                RESTARTS + 1,
                RESTART_WINDOW.as_secs(),
                self.setup.log.path().display()
            ));
        }
        restarts.push_back(now);
        let setup = Arc::clone(&self.setup);
        let started = tokio::task::spawn_blocking(move || ForkServer::start_process(&setup)).await;
        let server = Arc::new(started.map_err(|_| "the run ended".to_owned())??);
        // If the pool was dropped meanwhile, the drop of this server ends it.
        if self.setup.closed.load(Ordering::Relaxed) {
            return Err("the run ended".to_owned());
        }
        *lock(&self.server) = Arc::clone(&server);
        Ok(server)
    }
}
