//! The routes, and the connections they are reached by.
//!
//! Invariant: a connection costs its own task and a place in the limit of connections. After a stop, requests that have begun
//! are finished within the limit for it, and no task is left.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::protocol::{Protocol, answer};
use crate::protocols::chat::ChatCompletions;
use crate::protocols::completions::Completions;
use crate::protocols::generate::Generate;
use crate::protocols::messages::Messages;
use crate::protocols::plain;
use crate::protocols::responses::Responses;
use crate::protocols::sglang::SglangGenerate;
use crate::service::Service;

/// Longest time to receive the head of a request.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Pause of the listener when the system cannot accept a connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// Buffer size for the head of a request and for reads of a body, bytes.
const READ_BYTES: usize = 64 << 10;

/// Why an endpoint cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The address is reachable from other machines, without a key.
    #[error(
        "{address} can be reached from other machines: give a key with a token file, or listen on 127.0.0.1"
    )]
    NoToken {
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

/// The routes of an endpoint, at the root and under `/v1`.
pub fn router(service: Service) -> Router {
    let v1 = Router::new()
        .route("/chat/completions", post(protocol::<ChatCompletions>))
        .route("/completions", post(protocol::<Completions>))
        .route("/responses", post(protocol::<Responses>))
        .route("/messages", post(protocol::<Messages>))
        .route("/messages/count_tokens", post(plain::count_tokens))
        .route("/models", get(plain::models))
        .route("/models/{*name}", get(plain::model));
    // Clients whose base address has no `/v1`.
    let root = v1.clone();
    Router::new()
        .nest("/v1", v1)
        .merge(root)
        .route("/inference/v1/generate", post(protocol::<Generate>))
        .route("/generate", post(protocol::<SglangGenerate>))
        .route("/tokenize", post(plain::tokenize))
        .route("/detokenize", post(plain::detokenize))
        .route("/health", get(plain::health))
        .route("/ping", get(plain::health))
        .route("/version", get(plain::version))
        .route("/load", get(plain::load))
        .route("/metrics", get(plain::metrics))
        .fallback(plain::unknown)
        .with_state(service)
}

async fn protocol<P: Protocol>(State(service): State<Service>, request: Request) -> Response {
    answer::<P>(service, request).await
}

/// An endpoint that listens.
#[derive(Debug)]
pub struct EndpointServer {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    service: Service,
}

impl EndpointServer {
    /// Listens on `address`; port 0 takes a free one.
    ///
    /// # Errors
    /// An address that others can reach, without a key; an address that cannot be used.
    #[expect(clippy::unused_async, reason = "a listener needs the runtime that this runs on")]
    pub async fn bind(service: Service, address: SocketAddr) -> Result<Self, EndpointError> {
        if !address.ip().is_loopback() && !service.requires_key() {
            return Err(EndpointError::NoToken { address });
        }
        let failed = |source| EndpointError::Listen { address, source };
        let listener = listen(address, service.limits().max_connections).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let router = router(service.clone());
        Ok(Self { listener, address, router, service })
    }

    /// The same with further routes, such as those of sessions.
    #[must_use]
    pub fn with_routes(self, routes: Router) -> Self {
        Self { router: self.router.merge(routes), ..self }
    }

    /// The address, with the actual port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests until `stop`; those that have begun are finished within [`crate::EndpointLimits::stop`].
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { listener, address: _, router, service } = self;
        let limits = *service.limits();
        let permits = Arc::new(Semaphore::new(limits.max_connections));
        let graceful = GracefulShutdown::new();
        let mut connections = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                // The panic of a handler was printed, and closed only its own connection.
                Some(_) = connections.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        // A connection above the limit is closed at once.
                        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else { continue };
                        let (router, watcher) = (router.clone(), graceful.watcher());
                        connections.spawn(async move {
                            serve_connection(stream, router, watcher).await;
                            drop(permit);
                        });
                    }
                    // The client left, or the system is out of resources; the listener continues.
                    Err(_) => tokio::time::sleep(ACCEPT_AGAIN).await,
                },
            }
        }
        drop(listener);
        // All tasks have ended, in time or aborted.
        let _ = tokio::time::timeout(limits.stop, graceful.shutdown()).await;
        connections.shutdown().await;
    }
}

/// The backlog equals the limit of connections, for clients that all connect at once.
fn listen(address: SocketAddr, connections: usize) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(u32::try_from(connections).unwrap_or(u32::MAX))
}

/// Answers the requests of one connection. An error means that the client left, which drops its answer.
async fn serve_connection(stream: TcpStream, router: Router, watcher: Watcher) {
    // Events are small; Nagle's algorithm would delay them. Without this option the server is only slower.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(READ_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let _ = watcher.watch(connection).await;
}
