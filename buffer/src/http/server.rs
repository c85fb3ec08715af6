//! Connections, from the listener to the last answer.
//!
//! Invariant: a connection costs only its own task. It is accepted without waiting for any other, ends when its client is
//! too slow, and ends with the server: after a stop no task of it is left.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
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

/// How often holds that are over are ended, so that watchers hear of it.
const EXPIRE_EVERY: Duration = Duration::from_millis(250);
/// How often a buffer whose storage failed is tried to be opened again.
const REOPEN_EVERY: Duration = Duration::from_secs(1);
/// How long to leave the listener alone when the system has no room for a connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// Bytes of a request's head, and of a body that are read at once.
const READ_BYTES: usize = 64 << 10;
/// Names of a server on loopback.
const LOOPBACK_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// Opens the buffer again after its storage failed.
pub type Reopen = Arc<dyn Fn() -> Result<Buffer, BufferError> + Send + Sync>;

/// Hears of what happens to a server as a whole.
pub type StorageNotice = Arc<dyn Fn(&str) + Send + Sync>;

/// How to serve.
#[derive(Clone)]
pub struct ServerConfig {
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// A socket that listens there already: connections to it wait while the process that serves it starts again.
    pub listener: Option<Arc<std::net::TcpListener>>,
    /// What is served beside the buffer, and whose token it takes. These routes bound their own bodies.
    pub routes: Vec<(Role, Router)>,
    /// What requests may take.
    pub limits: ServerLimits,
    /// Who may do what; `None`, on loopback only: everybody everything.
    pub tokens: Option<Tokens>,
    /// The certificate; `None`: plain HTTP.
    pub tls: Option<Tls>,
    /// Whether tokens may go unencrypted over a network.
    pub insecure: bool,
    /// What the run knows of groups that trains on them, once it does: others are refused, and all of them until then.
    /// `None`: the server takes any group.
    pub group_limits: Option<Arc<OnceLock<GroupLimits>>>,
    /// Who hears of groups that are refused as invalid.
    pub refused: Option<OnRefused>,
    /// Names that clients may use for a server on loopback, beside `localhost` and its addresses.
    pub allow_hosts: Vec<String>,
    /// Whether the serving process trains on the buffer itself, so that no client may lease, acknowledge or set the version.
    pub own_trainer: bool,
    /// How to go on after the storage failed; `None`: not at all.
    pub reopen: Option<Reopen>,
    /// Who hears that the storage failed, and that it works again.
    pub notice: Option<StorageNotice>,
}

impl ServerConfig {
    /// On loopback for everybody, with default limits.
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
        // Elsewhere names are the network's business, and tokens keep strangers out.
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
    /// The address is reachable from elsewhere, and anybody could do anything.
    #[error("{address} can be reached from other machines: name a token file, or listen on 127.0.0.1")]
    NoTokens {
        /// The address.
        address: SocketAddr,
    },
    /// Tokens would go over the network for all to read.
    #[error(
        "tokens would go to {address} unencrypted: name a certificate and its key, or say that the network is safe \
         (insecure)"
    )]
    Unencrypted {
        /// The address.
        address: SocketAddr,
    },
    /// The system does not let it listen.
    #[error("cannot listen on {address}: {source}; choose another address, or port 0 for a free one")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
}

impl ServerError {
    /// Whether the configuration is at fault, whatever the system does.
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
    /// Listens; clients can connect from now on and are answered from [`Server::serve`] on.
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

    /// The address, with the port that it really has.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests until `stop`. Then no connection is accepted any more, waits end, and requests under way have
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
                // A panic of a handler was printed, and took only its own connection with it.
                Some(_) = connections.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => acceptor.accept(stream, peer.ip(), &graceful, &mut connections),
                    // The client left meanwhile, or the system has no room; neither is the listener's end.
                    Err(_) => tokio::time::sleep(ACCEPT_AGAIN).await,
                },
            }
        }
        drop(listener);
        shared.stop();
        // Whether all were done in time or not, none is left.
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

/// As many connections may wait to be accepted as may be open, should they all come at once.
fn listen(address: SocketAddr, connections: usize) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A server that starts again need not wait until the connections of the one before are forgotten.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(u32::try_from(connections).unwrap_or(u32::MAX))
}

fn adopt(listener: &std::net::TcpListener) -> std::io::Result<TcpListener> {
    let listener = listener.try_clone()?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// What every connection gets.
struct ConnectionAcceptor {
    router: Router,
    limits: ServerLimits,
    tls: Option<TlsAcceptor>,
    permits: Arc<Semaphore>,
    shared: Arc<ServerState>,
}

impl ConnectionAcceptor {
    /// Starts the task of a connection, or closes it if there are too many.
    fn accept(
        &self,
        stream: TcpStream,
        peer: IpAddr,
        graceful: &GracefulShutdown,
        connections: &mut JoinSet<()>,
    ) {
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            self.shared.metrics.refused_connections.fetch_add(1, Ordering::Relaxed);
            return;
        };
        // Answers are written whole; nothing is gained by holding the last piece back. If it cannot be set, it is slower.
        let _ = stream.set_nodelay(true);
        let open = OpenConnection::new(Arc::clone(&self.shared), permit);
        let (router, limits, watcher) = (self.router.clone(), self.limits, graceful.watcher());
        let stream = WriteDeadline::new(stream, limits.write_stall);
        match self.tls.clone() {
            None => connections.spawn(async move {
                serve_connection((stream, ClientAddress(peer)), router, limits, watcher).await;
                drop(open);
            }),
            Some(tls) => connections.spawn(async move {
                if let Ok(Ok(stream)) = tokio::time::timeout(limits.handshake, tls.accept(stream)).await {
                    serve_connection((stream, ClientAddress(peer)), router, limits, watcher).await;
                }
                drop(open);
            }),
        };
    }
}

/// Answers the requests of one connection. How it ends is the client's business: it has its answers or has gone.
async fn serve_connection(
    (stream, peer): (impl AsyncRead + AsyncWrite + Unpin + Send + 'static, ClientAddress),
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

/// Where a request comes from; each has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientAddress(pub(crate) IpAddr);

/// Counts a connection while it is open.
struct OpenConnection {
    shared: Arc<ServerState>,
    _permit: OwnedSemaphorePermit,
}

impl OpenConnection {
    fn new(shared: Arc<ServerState>, permit: OwnedSemaphorePermit) -> Self {
        shared.metrics.connections.fetch_add(1, Ordering::Relaxed);
        Self { shared, _permit: permit }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.shared.metrics.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Looks after the buffer while nobody asks for it.
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
            // It may write, and on a failing disk that can take long.
            let looked_after = tokio::task::spawn_blocking(move || {
                // A failure shows when it is asked for below.
                let _ = buffer.expire();
                buffer
            });
            if let Ok(buffer) = looked_after.await {
                self.shared.drop_if_failed(&buffer);
            }
        }
    }

    /// Opens the buffer again, as soon as that is possible.
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
                // It panicked, and its message was printed; perhaps not the next time.
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
