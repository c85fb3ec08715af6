//! Connections, from the listener to the last answer.
//!
//! Invariant: a connection is bounded as [`connect::listener`] says, and counted while it is open. After a stop waits of clients
//! end before their connections do.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use connect::listener::{AcceptedConnection, ConnectionLimits, accept_connections, answer_requests, listen};
use connect::tls::Tls;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_rustls::TlsAcceptor;

use super::auth::{AccessControl, Role, Tokens};
use super::limits::ServerLimits;
use super::problem::Problem;
use super::routes;
use super::state::{BufferStatus, GroupValidation, OnRefused, ServerState};

use crate::{Buffer, BufferError, GroupLimits};

/// Interval at which holds are expired, so that event subscribers see it.
const EXPIRE_EVERY: Duration = Duration::from_millis(250);
/// Interval of attempts to open a failed buffer again.
const REOPEN_EVERY: Duration = Duration::from_secs(1);
/// Host names of a server on loopback.
const LOOPBACK_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// Opens the buffer again after its storage failed.
pub type Reopen = Arc<dyn Fn() -> Result<Buffer, BufferError> + Send + Sync>;

/// The buffer that a server serves now; `None` until its storage works. A journal stays locked until the answer is dropped.
pub type ServedBuffer = Arc<dyn Fn() -> Option<Arc<Buffer>> + Send + Sync>;

/// Receives messages about the state of the storage.
pub type StorageNotice = Arc<dyn Fn(&str) + Send + Sync>;

/// Configuration of a server.
#[derive(Clone)]
pub struct ServerConfig {
    /// Address to listen on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// A socket that already listens there: connections wait while the serving process restarts.
    pub listener: Option<Arc<std::net::TcpListener>>,
    /// Routes beside the buffer's, and the role of their tokens. These routes limit the size of their bodies themselves.
    pub routes: Vec<(Role, Router)>,
    /// Limits of requests.
    pub limits: ServerLimits,
    /// Tokens and their roles; `None`, on loopback only: every request is allowed.
    pub tokens: Option<Tokens>,
    /// TLS certificate; `None`: plain HTTP.
    pub tls: Option<Tls>,
    /// Whether tokens may be sent unencrypted over a network.
    pub insecure: bool,
    /// Limits of the model and recipe, once the run knows them: other groups are refused, and all groups until then.
    /// `None`: any group is accepted.
    pub group_limits: Option<Arc<OnceLock<GroupLimits>>>,
    /// Receives groups that are refused as invalid.
    pub refused: Option<OnRefused>,
    /// Host names for a server on loopback, beside `localhost` and its addresses.
    pub allow_hosts: Vec<String>,
    /// Whether the serving process trains on the buffer itself, so clients may not lease, acknowledge or set the
    /// version.
    pub own_trainer: bool,
    /// How to open the buffer again after its storage failed; `None`: never.
    pub reopen: Option<Reopen>,
    /// Receives the message that the storage failed, and that it works again.
    pub notice: Option<StorageNotice>,
}

impl ServerConfig {
    /// Loopback without tokens, with default limits.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            listener: None,
            routes: Vec::new(),
            limits: ServerLimits::default(),
            tokens: None,
            tls: None,
            insecure: false,
            group_limits: None,
            refused: None,
            allow_hosts: Vec::new(),
            own_trainer: false,
            reopen: None,
            notice: None,
        }
    }

    fn check(&self) -> Result<(), ServerError> {
        let address = self.listen;
        if address.ip().is_loopback() {
            return Ok(());
        }
        if self.tokens.is_none() {
            return Err(ServerError::NoTokens { address });
        }
        if self.tls.is_none() && !self.insecure {
            return Err(ServerError::Unencrypted { address });
        }
        Ok(())
    }

    fn access(&self) -> AccessControl {
        let names = LOOPBACK_NAMES.into_iter().map(str::to_owned).chain(self.allow_hosts.iter().cloned());
        // On other addresses the network decides on names, and tokens authorize.
        let hosts = self.listen.ip().is_loopback().then(|| names.collect());
        AccessControl { tokens: self.tokens.clone(), hosts, own_trainer: self.own_trainer }
    }
}

impl fmt::Debug for ServerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerConfig")
            .field("listen", &self.listen)
            .field("listener", &self.listener)
            .field("limits", &self.limits)
            .field("tokens", &self.tokens)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The address is reachable from other machines, without tokens.
    #[error("{address} can be reached from other machines: name a token file, or listen on 127.0.0.1")]
    NoTokens {
        /// The address.
        address: SocketAddr,
    },
    /// Tokens would be sent unencrypted over a network.
    #[error(
        "tokens would go to {address} unencrypted: name a certificate and its key, or say that the network is safe \
         (insecure)"
    )]
    Unencrypted {
        /// The address.
        address: SocketAddr,
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

impl ServerError {
    /// Whether the configuration is at fault.
    #[must_use]
    pub fn is_input(&self) -> bool {
        matches!(self, Self::NoTokens { .. } | Self::Unencrypted { .. })
    }
}

/// A server that listens.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    shared: Arc<ServerState>,
    config: ServerConfig,
    /// Whether another process had the store open when this server was bound.
    standby: bool,
}

impl Server {
    /// Listens. Clients can connect from now on, and are answered from [`Server::serve`] on.
    ///
    /// # Errors
    /// An address that needs protection or cannot be listened on.
    #[expect(clippy::unused_async, reason = "a listener needs the runtime that this runs on")]
    pub async fn bind(config: ServerConfig, buffer: Arc<Buffer>) -> Result<Self, ServerError> {
        Self::bound(config, BufferStatus::Buffer(buffer))
    }

    /// Listens as a standby: `reason` is why the buffer cannot be opened yet, and the answer to every request for it until
    /// [`ServerConfig::reopen`] opens it.
    ///
    /// # Errors
    /// Those of [`Server::bind`].
    #[expect(clippy::unused_async, reason = "a listener needs the runtime that this runs on")]
    pub async fn bind_standby(config: ServerConfig, reason: &BufferError) -> Result<Self, ServerError> {
        Ok(Self { standby: true, ..Self::bound(config, BufferStatus::Failed(Problem::from(reason)))? })
    }

    fn bound(mut config: ServerConfig, served: BufferStatus) -> Result<Self, ServerError> {
        config.check()?;
        let address = config.listen;
        let failed = |source| ServerError::Listen { address, source };
        let listener = match &config.listener {
            Some(listener) => adopt(listener),
            None => listen(address, config.limits.connections),
        };
        let listener = listener.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let entry = GroupValidation { limits: config.group_limits.clone(), refused: config.refused.clone() };
        let shared = Arc::new(ServerState::new(served, config.limits, config.access(), entry));
        let router = routes::router(&shared, std::mem::take(&mut config.routes));
        Ok(Self { listener, address, router, shared, config, standby: false })
    }

    /// The address, with the actual port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The buffer, also after it was opened again.
    #[must_use]
    pub fn served(&self) -> ServedBuffer {
        let shared = Arc::clone(&self.shared);
        Arc::new(move || shared.buffer().ok())
    }

    /// Answers requests until `stop`. Then it accepts no connection any more, ends waits, and gives running requests
    /// [`ServerLimits::stop`] to finish.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { listener, address: _, router, shared, config, standby } = self;
        let watchdog = StorageWatchdog {
            shared: Arc::clone(&shared),
            reopen: config.reopen,
            notice: config.notice,
            standby,
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(watchdog.run());
        let answerer = ConnectionAnswerer {
            router,
            handshake: config.limits.handshake,
            head_read: config.limits.head_read,
            tls: config.tls.as_ref().map(Tls::acceptor),
            shared: Arc::clone(&shared),
        };
        let limits = ConnectionLimits {
            connections: config.limits.connections,
            head_read: config.limits.head_read,
            write_stall: config.limits.write_stall,
            stop: config.limits.stop,
        };
        let answer = |accepted: Option<AcceptedConnection>| {
            let Some(accepted) = accepted else {
                answerer.shared.metrics.refused_connections.inc();
                return None;
            };
            Some(answerer.clone().answer(accepted))
        };
        accept_connections(listener, limits, stop, async || shared.stop(), answer).await;
        tasks.shutdown().await;
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("address", &self.address)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn adopt(listener: &std::net::TcpListener) -> std::io::Result<TcpListener> {
    let listener = listener.try_clone()?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// What every connection shares.
#[derive(Clone)]
struct ConnectionAnswerer {
    router: Router,
    handshake: Duration,
    head_read: Duration,
    tls: Option<TlsAcceptor>,
    shared: Arc<ServerState>,
}

impl ConnectionAnswerer {
    /// Answers the requests of a connection.
    async fn answer(self, accepted: AcceptedConnection) {
        let AcceptedConnection { stream, peer, permit, watcher } = accepted;
        let _open = OpenConnection::new(Arc::clone(&self.shared), permit);
        let (peer, routes) = (ClientAddress(peer), TowerToHyperService::new(self.router));
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            routes.call(request)
        });
        match self.tls {
            None => answer_requests(stream, watcher, self.head_read, service).await,
            Some(tls) => {
                if let Ok(Ok(stream)) = tokio::time::timeout(self.handshake, tls.accept(stream)).await {
                    answer_requests(stream, watcher, self.head_read, service).await;
                }
            }
        }
    }
}

/// Address of the client, an extension of every request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientAddress(pub(crate) IpAddr);

/// Counts a connection while it is open.
struct OpenConnection {
    shared: Arc<ServerState>,
    _permit: OwnedSemaphorePermit,
}

impl OpenConnection {
    fn new(shared: Arc<ServerState>, permit: OwnedSemaphorePermit) -> Self {
        shared.metrics.connections.inc();
        Self { shared, _permit: permit }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.shared.metrics.connections.dec();
    }
}

/// Watchdog of the storage: expires holds, and opens a failed buffer again.
struct StorageWatchdog {
    shared: Arc<ServerState>,
    reopen: Option<Reopen>,
    notice: Option<StorageNotice>,
    /// Whether the buffer has not been open here yet.
    standby: bool,
}

impl StorageWatchdog {
    async fn run(mut self) {
        let mut tick = tokio::time::interval(EXPIRE_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let Ok(buffer) = self.shared.buffer() else {
                self.recover().await;
                continue;
            };
            // It may write, which takes long on a failing disk.
            let looked_after = tokio::task::spawn_blocking(move || {
                // A failure is checked below.
                let _ = buffer.expire();
                buffer
            });
            if let Ok(buffer) = looked_after.await {
                self.shared.drop_if_failed(&buffer);
            }
        }
    }

    /// Opens the buffer again as soon as possible.
    async fn recover(&mut self) {
        if let Err(problem) = self.shared.buffer() {
            let state = if self.standby { "standby" } else { "storage failed" };
            self.notify(&format!("{state}: {}", problem.detail));
        }
        let Some(reopen) = &self.reopen else { return std::future::pending().await };
        loop {
            tokio::time::sleep(REOPEN_EVERY).await;
            let reopen = Arc::clone(reopen);
            match tokio::task::spawn_blocking(move || reopen()).await {
                Ok(Ok(buffer)) => break self.shared.reopened(buffer),
                Ok(Err(error)) => self.shared.still_failed(&error),
                // The panic was printed; retry.
                Err(_) => {}
            }
        }
        let standby = std::mem::take(&mut self.standby);
        self.notify(if standby { "active: this server has the buffer now" } else { "storage works again" });
    }

    fn notify(&self, what: &str) {
        if let Some(notice) = &self.notice {
            notice(what);
        }
    }
}
