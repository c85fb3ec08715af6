//! The coordinator over HTTP.
//!
//! - `POST /v1/islands/join`: an island joins; `POST /v1/islands/leave`: it leaves
//! - `PUT /v1/islands/weights/NAME/RUN`: the weights of the first island; `GET /v1/islands/weights`: the outer weights
//! - `PUT /v1/islands/contributions/NAME/RUN`: the outer gradient of an island
//! - `GET /v1/islands/rounds/ROUND`: the outer update of a round, or status 202 after a while if it is open
//! - `GET /v1/islands`: round and islands; `GET /healthz`: liveness of the process
//!
//! Invariant: a request without the token, if there is one, changes nothing and reads nothing but `/healthz`. A body that is too
//! long or too slow is refused, and the number of bodies in memory is limited.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Bytes, to_bytes};
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use connect::listener::{AcceptedConnection, ConnectionLimits, accept_connections, answer_requests, listen};
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::IslandError;
use crate::coordinator::{Coordinator, IslandJoin, RoundAnswer};
use crate::frame::{FRAME_HEAD, RoundMessage};
use crate::refusal::CoordinatorRefusal;
use crate::terms::IslandTerms;

/// Longest body without values, bytes.
pub(crate) const MAX_JSON: usize = 64 << 10;
/// Longest time to receive a body: a slow link needs minutes for the values of a model.
const BODY_TIME: Duration = Duration::from_secs(1800);
/// Most bodies with values in memory.
const MAX_READ: usize = 16;
/// Longest wait of a request with values until one of these has ended.
const READ_WAIT: Duration = Duration::from_secs(60);
/// Longest wait of a request for the end of a round.
const ROUND_WAIT: Duration = Duration::from_secs(10);
/// Time between two looks at the deadline of a round.
const DUE_EVERY: Duration = Duration::from_millis(50);
/// Bounds of connections.
const LIMITS: ConnectionLimits = ConnectionLimits {
    connections: 1024,
    head_read: Duration::from_secs(10),
    write_stall: Duration::from_secs(120),
    stop: Duration::from_secs(10),
};
/// Longest TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A coordinator that listens.
pub struct CoordinatorServer {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    coordinator: Arc<Coordinator>,
    tls: Option<TlsAcceptor>,
}

impl std::fmt::Debug for CoordinatorServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoordinatorServer").field("address", &self.address).finish_non_exhaustive()
    }
}

/// What every request shares.
struct ServedCoordinator {
    coordinator: Arc<Coordinator>,
    token: Option<blake3::Hash>,
    bodies: Semaphore,
}

impl CoordinatorServer {
    /// Listens on `address`; port 0 takes a free one. Clients need `token`, if there is one.
    ///
    /// # Errors
    /// An address that the system refuses.
    #[expect(clippy::unused_async, reason = "a listener needs the runtime that this runs on")]
    pub async fn bind(
        coordinator: Arc<Coordinator>,
        address: SocketAddr,
        token: Option<&str>,
        tls: Option<TlsAcceptor>,
    ) -> Result<Self, IslandError> {
        let failed = |source| IslandError::Listen { address, source };
        let listener = listen(address, LIMITS.connections).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let token = token.map(|token| blake3::hash(token.as_bytes()));
        let served = ServedCoordinator {
            coordinator: Arc::clone(&coordinator),
            token,
            bodies: Semaphore::new(MAX_READ),
        };
        let served = Arc::new(served);
        let router = Router::new()
            .route("/v1/islands", get(status))
            .route("/v1/islands/join", post(join))
            .route("/v1/islands/leave", post(leave))
            .route("/v1/islands/weights", get(weights))
            .route("/v1/islands/weights/{name}/{run}", put(begin))
            .route("/v1/islands/contributions/{name}/{run}", put(contribute))
            .route("/v1/islands/rounds/{round}", get(round))
            .layer(axum::middleware::from_fn_with_state(Arc::clone(&served), admit))
            .route("/healthz", get(async || "ok\n"))
            .layer(DefaultBodyLimit::disable())
            .with_state(served);
        Ok(Self { listener, address, router, coordinator, tls })
    }

    /// The address that it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests and closes rounds until `stop`.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { listener, router, coordinator, tls, .. } = self;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            loop {
                tokio::time::sleep(DUE_EVERY).await;
                let coordinator = Arc::clone(&coordinator);
                // A failure is the answer to every later request.
                let _ = tokio::task::spawn_blocking(move || coordinator.close_if_due()).await;
            }
        });
        let answer = |accepted: Option<AcceptedConnection>| {
            let AcceptedConnection { stream, permit, watcher, .. } = accepted?;
            let (service, tls) = (TowerToHyperService::new(router.clone()), tls.clone());
            Some(async move {
                match tls {
                    None => answer_requests(stream, watcher, LIMITS.head_read, service).await,
                    Some(tls) => {
                        if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, tls.accept(stream)).await {
                            answer_requests(stream, watcher, LIMITS.head_read, service).await;
                        }
                    }
                }
                drop(permit);
            })
        };
        accept_connections(listener, LIMITS, stop, async || {}, answer).await;
        tasks.shutdown().await;
    }
}

impl IntoResponse for CoordinatorRefusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::json!({ "status": self.status, "detail": self.reason }).to_string();
        (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
    }
}

type CoordinatorOfRequest = State<Arc<ServedCoordinator>>;
type IslandResponse = Result<Response, CoordinatorRefusal>;

fn json(body: &impl serde::Serialize) -> Response {
    let body = serde_json::to_string(body).unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn frame(bytes: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response()
}

fn refusal(status: u16, reason: impl Into<String>) -> CoordinatorRefusal {
    CoordinatorRefusal { status, reason: reason.into() }
}

/// Before all routes of islands: compares the token by its digest, in constant time.
async fn admit(
    State(served): CoordinatorOfRequest,
    request: Request,
    next: Next,
) -> Result<Response, Infallible> {
    let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let sent = sent.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
    let is_right = served.token.is_none_or(|token| token == blake3::hash(sent.as_bytes()));
    if is_right {
        return Ok(next.run(request).await);
    }
    let reason = "send the token of this coordinator: name its file in `island.token_file`";
    Ok(refusal(401, reason).into_response())
}

impl ServedCoordinator {
    /// The body of a request, of at most `limit` bytes.
    async fn body(&self, request: Request, limit: usize) -> Result<Vec<u8>, CoordinatorRefusal> {
        let read = tokio::time::timeout(BODY_TIME, to_bytes(request.into_body(), limit)).await;
        let late = |_| refusal(408, format!("no whole body within {} s", BODY_TIME.as_secs()));
        let long = |_| refusal(413, format!("the body is cut off, or longer than {limit} bytes"));
        Ok(read.map_err(late)?.map_err(long)?.into())
    }

    async fn json<T: DeserializeOwned>(&self, request: Request) -> Result<T, CoordinatorRefusal> {
        let body = self.body(request, MAX_JSON).await?;
        serde_json::from_slice(&body).map_err(|error| refusal(422, format!("the body is not valid: {error}")))
    }

    /// A message with at most `limit` bytes after its head, handled by `handle` on a thread that may block.
    async fn message<R: Send + 'static>(
        &self,
        request: Request,
        limit: u64,
        handle: impl FnOnce(&Coordinator, RoundMessage) -> Result<R, CoordinatorRefusal> + Send + 'static,
    ) -> Result<R, CoordinatorRefusal> {
        let busy = || refusal(503, format!("{MAX_READ} bodies are being received; try again"));
        let permit = tokio::time::timeout(READ_WAIT, self.bodies.acquire()).await;
        let _permit = permit.map_err(|_| busy())?.map_err(|_| busy())?;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).saturating_add(FRAME_HEAD);
        let body = self.body(request, limit).await?;
        self.blocking(move |coordinator| {
            let message = RoundMessage::from_frame(body).map_err(|error| refusal(422, error.to_string()))?;
            handle(coordinator, message)
        })
        .await
    }

    async fn blocking<R: Send + 'static>(
        &self,
        work: impl FnOnce(&Coordinator) -> Result<R, CoordinatorRefusal> + Send + 'static,
    ) -> Result<R, CoordinatorRefusal> {
        let coordinator = Arc::clone(&self.coordinator);
        let done = tokio::task::spawn_blocking(move || work(&coordinator)).await;
        done.unwrap_or_else(|error| Err(refusal(500, error.to_string())))
    }
}

async fn status(State(served): CoordinatorOfRequest) -> IslandResponse {
    Ok(json(&served.blocking(|coordinator| Ok(coordinator.status())).await?))
}

async fn join(State(served): CoordinatorOfRequest, request: Request) -> IslandResponse {
    let request: IslandJoin = served.json(request).await?;
    Ok(json(&served.blocking(move |coordinator| coordinator.join(request)).await?))
}

async fn leave(State(served): CoordinatorOfRequest, request: Request) -> IslandResponse {
    #[derive(Deserialize)]
    struct Leaving {
        name: String,
        run: String,
    }
    let Leaving { name, run } = served.json(request).await?;
    served.blocking(move |coordinator| coordinator.leave(&name, &run)).await?;
    Ok(json(&serde_json::json!({})))
}

async fn weights(State(served): CoordinatorOfRequest) -> IslandResponse {
    Ok(frame(served.blocking(Coordinator::weights).await?))
}

/// The payload of the message is the length of the terms in 8 bytes, the terms as JSON, and the values.
async fn begin(
    State(served): CoordinatorOfRequest,
    Path((name, run)): Path<(String, String)>,
    request: Request,
) -> IslandResponse {
    let limit = served.coordinator.max_bytes().saturating_add(MAX_JSON as u64);
    let begun = served.message(request, limit, move |coordinator, message| {
        let parted = parted(&message.payload).ok_or_else(|| refusal(422, "the body has no valid terms"))?;
        let (terms, values) = parted;
        coordinator.begin(&name, &run, terms, values)
    });
    begun.await?;
    Ok(json(&serde_json::json!({})))
}

/// Terms and values of a body.
fn parted(payload: &[u8]) -> Option<(IslandTerms, &[u8])> {
    let (length, rest) = payload.split_first_chunk::<8>()?;
    let (terms, values) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    Some((serde_json::from_slice(terms).ok()?, values))
}

async fn contribute(
    State(served): CoordinatorOfRequest,
    Path((name, run)): Path<(String, String)>,
    request: Request,
) -> IslandResponse {
    let limit = served.coordinator.max_bytes();
    // Until the answer: the wait for its turn and the body count as one.
    let _coming = served.coordinator.expect(&name, &run);
    let outcome = served
        .message(request, limit, move |coordinator, message| coordinator.contribute(&name, &run, &message));
    Ok(json(&outcome.await?))
}

async fn round(State(served): CoordinatorOfRequest, Path(number): Path<u64>) -> IslandResponse {
    let mut rounds = served.coordinator.rounds();
    // The coordinator lives as long as the server.
    let _ = tokio::time::timeout(ROUND_WAIT, rounds.wait_for(|open| *open > number)).await;
    match served.blocking(move |coordinator| coordinator.round(number)).await? {
        RoundAnswer::Open => Ok(StatusCode::ACCEPTED.into_response()),
        RoundAnswer::Closed(bytes) => Ok(frame(bytes)),
        RoundAnswer::Gone => Err(refusal(410, format!("the outer update of round {number} is kept no more"))),
    }
}
