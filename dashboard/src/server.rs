//! The listener of the page and its connections.
//!
//! Invariant: a connection costs its own task and a place in the limit of connections. After a stop no task is left.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use connect::listener::{AcceptedConnection, ConnectionLimits, accept_connections, answer_requests, listen};
use hyper_util::service::TowerToHyperService;
use serde_json::{Map, Value};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use crate::access::PageAccess;
use crate::catalog::{RunCatalog, follow};
use crate::routes::{PageState, router};
use crate::stream::MAX_STREAMS;
use crate::why::Advisor;

/// Most open connections: every stream, and as much again for requests.
const MAX_CONNECTIONS: usize = 2 * MAX_STREAMS;
/// Most runs of a page or report.
pub(crate) const MAX_RUNS: usize = 64;
/// Longest time to receive the head of a request.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Longest time that a browser accepts no byte of an answer.
const WRITE_STALL: Duration = Duration::from_secs(60);
/// Longest time that requests in progress have after a stop.
const STOP_TIME: Duration = Duration::from_secs(2);
/// A run directory has one of these from its first moment on; metrics come after the first step.
const RUN_FILES: [&str; 7] =
    ["metrics.jsonl", "resolved.toml", "status.json", "timeline.jsonl", "recipe.toml", "run.json", "lock"];

/// Where a page is served, and of what.
#[derive(Clone)]
pub struct DashboardConfig {
    /// Address and port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The token that requests need; required unless the address is loopback.
    pub token: Option<String>,
    /// Run directories.
    pub runs: Vec<PathBuf>,
    /// Recommends changes of recipes; without it the page shows none.
    pub advisor: Option<Advisor>,
}

impl fmt::Debug for DashboardConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { listen, token, runs, advisor } = self;
        let (token, advisor) = (token.is_some(), advisor.is_some());
        f.debug_struct("DashboardConfig")
            .field("listen", listen)
            .field("token", &token)
            .field("runs", runs)
            .field("advisor", &advisor)
            .finish()
    }
}

/// Why a page cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DashboardError {
    /// The address is reachable from other machines, without a token.
    #[error(
        "{address} can be reached from other machines: give a token with a token file, or listen on 127.0.0.1"
    )]
    NoToken {
        /// The address.
        address: SocketAddr,
    },
    /// A directory is no run.
    #[error(
        "`{path}` is no run directory: it has neither `metrics.jsonl` nor `resolved.toml` nor `status.json`"
    )]
    NotARun {
        /// The directory.
        path: PathBuf,
    },
    /// Too many runs for one page.
    #[error("{given} runs are too many for one page; name at most {most}")]
    TooManyRuns {
        /// Runs that were named.
        given: usize,
        /// Most runs of a page.
        most: usize,
    },
    /// The system refuses to listen.
    #[error("cannot listen on {address}: {source}; choose another address, or port 0 for a free one")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// A page that listens.
#[derive(Debug)]
pub struct DashboardServer {
    listener: TcpListener,
    address: SocketAddr,
    catalog: Arc<RunCatalog>,
    access: PageAccess,
}

impl DashboardServer {
    /// Reads the runs and listens. Runs may have begun just now: their first metrics are shown when they come. It needs a
    /// runtime of tokio with time and I/O, and reads files on its threads for blocking calls alone.
    ///
    /// # Errors
    /// An address that others can reach, without a token; a directory that is no run; an address that cannot be used.
    pub async fn bind(config: DashboardConfig) -> Result<Self, DashboardError> {
        let DashboardConfig { listen: address, token, runs, advisor } = config;
        if !address.ip().is_loopback() && token.is_none() {
            return Err(DashboardError::NoToken { address });
        }
        if runs.len() > MAX_RUNS {
            return Err(DashboardError::TooManyRuns { given: runs.len(), most: MAX_RUNS });
        }
        let failed = |source| DashboardError::Listen { address, source };
        // Files may be on a slow disk, and reading a long run takes longer than a task of the runtime may.
        let checked = tokio::task::spawn_blocking(move || match runs.iter().find(|path| !is_run(path)) {
            Some(path) => Err(DashboardError::NotARun { path: path.clone() }),
            None => Ok(runs),
        });
        let runs = checked.await.map_err(|error| failed(std::io::Error::other(error)))??;
        let listener = listen(address, MAX_CONNECTIONS).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let opened = tokio::task::spawn_blocking(move || RunCatalog::open(&runs)).await;
        let catalog = opened.map_err(|error| failed(std::io::Error::other(error)))?;
        Ok(Self {
            listener,
            address,
            catalog: Arc::new(catalog.advised_by(advisor)),
            access: PageAccess::new(token),
        })
    }

    /// The address, with the actual port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests and follows the files until `stop`. It may be dropped, too: its connections end then.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { listener, address: _, catalog, access } = self;
        let (sender, revisions) = watch::channel(Map::<String, Value>::new());
        let mut follower = FollowTask(tokio::spawn(follow(Arc::clone(&catalog), sender)));
        let state = PageState { catalog, revisions, streams: Arc::new(Semaphore::new(MAX_STREAMS)) };
        let router = router(state, access);
        let limits = ConnectionLimits {
            connections: MAX_CONNECTIONS,
            head_read: HEAD_TIME,
            write_stall: WRITE_STALL,
            stop: STOP_TIME,
        };
        let answer = |accepted: Option<AcceptedConnection>| {
            let AcceptedConnection { stream, permit, watcher, .. } = accepted?;
            let routes = TowerToHyperService::new(router.clone());
            Some(async move {
                answer_requests(stream, watcher, HEAD_TIME, routes).await;
                drop(permit);
            })
        };
        // Drops the sender of the revisions, which ends the streams.
        let stopped = async || {
            follower.0.abort();
            let _ = (&mut follower.0).await;
        };
        accept_connections(listener, limits, stop, stopped, answer).await;
    }
}

/// Whether a directory is that of a run, which may have begun just now.
#[must_use]
pub fn is_run(path: &Path) -> bool {
    RUN_FILES.iter().any(|name| path.join(name).is_file())
}

/// The task that follows the files. It ends when the server is dropped.
struct FollowTask(JoinHandle<()>);

impl Drop for FollowTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
