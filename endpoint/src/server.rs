//! The routes, and the connections they are reached by.
//!
//! Invariant: a connection costs its own task and a place in the limit of connections. After a stop, requests that have begun
//! are finished within the limit for it, and no task is left.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use connect::listener::{AcceptedConnection, ConnectionLimits, accept_connections, answer_requests, listen};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;

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
/// Longest time that a client accepts no byte of an answer.
const WRITE_STALL: Duration = Duration::from_secs(60);

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
        let limits = service.limits();
        let limits = ConnectionLimits {
            connections: limits.max_connections,
            head_read: HEAD_TIME,
            write_stall: WRITE_STALL,
            stop: limits.stop,
        };
        let answer = |accepted: Option<AcceptedConnection>| {
            let AcceptedConnection { stream, permit, watcher, .. } = accepted?;
            let routes = TowerToHyperService::new(router.clone());
            Some(async move {
                answer_requests(stream, watcher, HEAD_TIME, routes).await;
                drop(permit);
            })
        };
        accept_connections(listener, limits, stop, async || {}, answer).await;
    }
}
