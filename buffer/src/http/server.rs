//! Connections, from the listener to the last answer.
//!
//! Invariant: a connection costs only its own task. It is accepted without waiting for another, is closed when its
//! client is too slow, and ends with the server: after a stop none of its tasks is left. The limit of connections is
//! counted here, before any HTTP, where no layer of tower can.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_rustls::TlsAcceptor;

use super::auth::{AccessControl, Role, Tokens};
use super::limits::ServerLimits;
use super::routes;
use super::state::{GroupValidation, OnRefused, ServerState};
use super::tls::Tls;
use super::write_deadline::WriteDeadline;
use crate::{Buffer, BufferError, GroupLimits};

/// Interval at which holds are expired, so that event subscribers see it.
const EXPIRE_EVERY: Duration = Duration::from_millis(250);
/// Interval of attempts to open a failed buffer again.
const REOPEN_EVERY: Duration = Duration::from_secs(1);
/// Pause of the listener when the system cannot accept a connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// Buffer size for the head of a request and for reads of a body, bytes.
const READ_BYTES: usize = 64 << 10;
/// Host names of a server on loopback.
const LOOPBACK_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// Opens the buffer again after its storage failed.
pub type Reopen = Arc<dyn Fn() -> Result<Buffer, BufferError> + Send + Sync>;

/// Receives messages about the state of the storage.
pub type StorageNotice = Arc<dyn Fn(&str) + Send + Sync>;

/// Configuration of a server.
#[derive(Clone)]
pub struct ServerConfig {
    /// Address to listen on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// A socket that already listens there: connections wait while the serving process restarts.
    pub listener: Option<Arc<std::net::TcpListener>>,
    /// Routes beside the buffer's, and the role of their tokens. These routes limit their own bodies.
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
}

impl Server {
    /// Listens. Clients can connect from now on, and are answered from [`Server::serve`] on.
    ///
    /// # Errors
    /// An address that needs protection or cannot be listened on.
    #[expect(clippy::unused_async, reason = "a listener needs the runtime that this runs on")]
    pub async fn bind(mut config: ServerConfig, buffer: Arc<Buffer>) -> Result<Self, ServerError> {
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
        let shared = Arc::new(ServerState::new(buffer, config.limits, config.access(), entry));
        let router = routes::router(&shared, std::mem::take(&mut config.routes));
        Ok(Self { listener, address, router, shared, config })
    }

    /// The address, with the actual port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests until `stop`. Then it accepts no connection any more, ends waits, and gives running requests
    /// [`ServerLimits::stop`] to finish.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { listener, address: _, router, shared, config } = self;
        let watchdog =
            StorageWatchdog { shared: Arc::clone(&shared), reopen: config.reopen, notice: config.notice };
        let mut tasks = JoinSet::new();
        tasks.spawn(watchdog.run());
        let acceptor = ConnectionAcceptor {
            router,
            limits: config.limits,
            tls: config.tls.as_ref().map(Tls::acceptor),
            permits: Arc::new(Semaphore::new(config.limits.connections)),
            shared: Arc::clone(&shared),
        };
        let mut connections = JoinSet::new();
        let graceful = GracefulShutdown::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                // The panic of a handler was printed, and closed only its own connection.
                Some(_) = connections.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => acceptor.accept(stream, peer.ip(), &graceful, &mut connections),
                    // The client left, or the system is out of resources; the listener continues.
                    Err(_) => tokio::time::sleep(ACCEPT_AGAIN).await,
                },
            }
        }
        drop(listener);
        shared.stop();
        // All tasks have ended, in time or aborted.
        let _ = tokio::time::timeout(config.limits.stop, graceful.shutdown()).await;
        connections.shutdown().await;
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

/// The backlog equals the limit of connections, for clients that all connect at once.
fn listen(address: SocketAddr, connections: usize) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted server need not wait for the timeout of earlier connections.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(u32::try_from(connections).unwrap_or(u32::MAX))
}

fn adopt(listener: &std::net::TcpListener) -> std::io::Result<TcpListener> {
    let listener = listener.try_clone()?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// What every connection shares.
struct ConnectionAcceptor {
    router: Router,
    limits: ServerLimits,
    tls: Option<TlsAcceptor>,
    permits: Arc<Semaphore>,
    shared: Arc<ServerState>,
}

impl ConnectionAcceptor {
    /// Starts the task of a connection, or closes it at the limit of connections.
    fn accept(
        &self,
        stream: TcpStream,
        peer: IpAddr,
        graceful: &GracefulShutdown,
        connections: &mut JoinSet<()>,
    ) {
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            self.shared.metrics.refused_connections.inc();
            return;
        };
        // Answers are written whole, so Nagle's algorithm only delays them. Without this option the server is only
        // slower.
        let _ = stream.set_nodelay(true);
        let open = OpenConnection::new(Arc::clone(&self.shared), permit);
        let (router, limits, watcher) = (self.router.clone(), self.limits, graceful.watcher());
        let stream = WriteDeadline::new(stream, limits.write_stall);
        match self.tls.clone() {
            None => connections.spawn(async move {
                serve_connection(stream, ClientAddress(peer), router, limits, watcher).await;
                drop(open);
            }),
            Some(tls) => connections.spawn(async move {
                if let Ok(Ok(stream)) = tokio::time::timeout(limits.handshake, tls.accept(stream)).await {
                    serve_connection(stream, ClientAddress(peer), router, limits, watcher).await;
                }
                drop(open);
            }),
        };
    }
}

/// Answers the requests of one connection. An error means that the client left.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: ClientAddress,
    router: Router,
    limits: ServerLimits,
    watcher: Watcher,
) {
    let routes = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        routes.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_read)
        .max_buf_size(READ_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let _ = watcher.watch(connection).await;
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
}

impl StorageWatchdog {
    async fn run(self) {
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
    async fn recover(&self) {
        if let Err(problem) = self.shared.buffer() {
            self.notify(&format!("storage failed: {}", problem.detail));
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
        self.notify("storage works again");
    }

    fn notify(&self, what: &str) {
        if let Some(notice) = &self.notice {
            notice(what);
        }
    }
}
