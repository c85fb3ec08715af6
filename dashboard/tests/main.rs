//! The page over raw HTTP, of run directories that the tests write.
//!
//! Invariant: tests see what a browser sees; servers listen on loopback and end with their test.

mod client;
mod embedded;
mod files;
mod limits;
mod security;
mod streams;
mod views;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dashboard::{DashboardConfig, DashboardError, DashboardServer};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Deadline of everything that must happen; far longer than needed.
const SOON: Duration = Duration::from_secs(60);

/// A served page, which ends when it is dropped.
struct ServedPage {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    served: Option<JoinHandle<()>>,
    runtime: Runtime,
}

impl ServedPage {
    fn open(runs: &[&Path], token: Option<&str>) -> Result<Self, DashboardError> {
        let config = DashboardConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            token: token.map(str::to_owned),
            runs: runs.iter().map(|run| PathBuf::from(*run)).collect(),
            advisor: None,
        };
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = runtime.block_on(DashboardServer::bind(config))?;
        let address = server.local_addr();
        let (stop, stopped) = oneshot::channel();
        let end = async {
            let _ = stopped.await;
        };
        let served = Some(runtime.spawn(server.serve(end)));
        Ok(Self { address, stop: Some(stop), served, runtime })
    }

    fn of(runs: &[&Path]) -> Self {
        Self::open(runs, None).unwrap()
    }

    /// Stops the server and waits for its end.
    fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(served) = self.served.take() {
            self.runtime.block_on(async { tokio::time::timeout(SOON, served).await }).unwrap().unwrap();
        }
    }
}

impl Drop for ServedPage {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// A run with these metrics.
fn run_with(metrics: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("metrics.jsonl"), metrics).unwrap();
    directory
}

/// Adds text to a file of a run.
fn append(run: &Path, name: &str, text: &str) {
    use std::io::Write;
    let mut file = std::fs::File::options().append(true).create(true).open(run.join(name)).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}
