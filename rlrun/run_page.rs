//! The live page that a run serves of itself, and that a served buffer has.
//!
//! Invariant: the page reads the files of the run as `rlrun view` does; a page that cannot be served does not end the run.

use dashboard::{DashboardConfig, DashboardError, DashboardServer};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::report::Report;
use crate::run_dir::RunDir;
use crate::serve::token;

/// Opens the page of `config`.
///
/// # Errors
/// An address that cannot be used or needs a token, a directory that is no run.
pub(crate) async fn open_page(config: DashboardConfig) -> Result<DashboardServer, Failure> {
    DashboardServer::bind(config).await.map_err(|error| match error {
        DashboardError::Listen { address, source } => {
            Failure::System { what: format!("listen on {address}"), source }
        }
        other => Failure::Argument(other.to_string()),
    })
}

/// The page; it is served until this is dropped.
pub(crate) struct RunPage {
    /// Its loss stops the server.
    stop: Option<oneshot::Sender<()>>,
    task: Option<JoinHandle<()>>,
    runtime: Handle,
}

impl RunPage {
    /// Serves the page of `run_dir` if `recipe` says where.
    ///
    /// # Errors
    /// A token file that cannot be read.
    pub(crate) fn start(
        recipe: &Recipe,
        run_dir: &RunDir,
        runtime: &Handle,
        report: &Report,
    ) -> Result<Option<Self>, Failure> {
        let Some(listen) = recipe.dashboard.listen else { return Ok(None) };
        let token = recipe.dashboard.token_file.as_deref().map(token).transpose()?;
        let runs = vec![run_dir.path().to_path_buf()];
        // Simulations would take cores from the training.
        let config = DashboardConfig { listen, token, runs, advisor: None };
        let server = match runtime.block_on(DashboardServer::bind(config)) {
            Ok(server) => server,
            Err(error) => {
                report.note(&format!("the live page is not served: {error}; the run goes on without it"));
                return Ok(None);
            }
        };
        report.note(&format!("the live page is at http://{}", server.local_addr()));
        let (stop, stopped) = oneshot::channel::<()>();
        let task = runtime.spawn(server.serve(async move {
            // A lost sender stops it too.
            let _ = stopped.await;
        }));
        Ok(Some(Self { stop: Some(stop), task: Some(task), runtime: runtime.clone() }))
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(task) = self.task.take() {
            // The server's own deadline bounds this; a panic of its task was printed.
            drop(self.runtime.block_on(task));
        }
    }
}
