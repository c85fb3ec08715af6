//! A reward model as a process of its own, over HTTP.
//!
//! Invariant: a request without the token, if there is one, is not scored; a body that is too long, too slow or invalid is
//! refused with the reason. Concurrent requests are packed together; the number of bodies in memory is limited.
//!
//! - `POST /v1/scores`: one sequence, as tokens or as texts: the request of `kind = "model"` with a `url`
//! - `POST /get_reward`: `{"query": [..]}` -> `{"rewards": [..]}`: the request of OpenRLHF and of `kind = "http"`
//! - `GET /v1/model`: the description of the model; `GET /healthz`: liveness of the process

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use model::{
    MemoryBudget, PromptCompletion, Quantization, SequenceScorer, SharedCores, SpecialTokens, ThreadPool,
};
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::service::ScoringService;
use super::wire::{MODEL, ModelDescription, RewardModelRequest, SCORES, ScoreResponse};
use super::{BATCH_TOKENS, checked};
use crate::{RewardError, RewardSpec};

/// Longest body, bytes.
const MAX_BODY: usize = 16 << 20;
/// Longest time to receive a body.
const BODY_TIME: Duration = Duration::from_secs(30);
/// Most queries of one request.
const MAX_QUERIES: usize = 4096;
/// Most bodies in memory at the same time.
const MAX_READ: usize = 32;

/// How a reward model is served.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// Most tokens of a packed batch; `None` for the default.
    pub batch_tokens: Option<usize>,
    /// Most cores at a time; all if not given.
    pub threads: Option<usize>,
    /// Quantization of the weights of the layers.
    pub quantization: Quantization,
    /// Bearer token that clients must send, if any.
    pub token: Option<String>,
    /// Longest time to score one request.
    pub timeout: Duration,
}

/// A server that listens.
pub struct RewardModelServer {
    listener: tokio::net::TcpListener,
    router: Router,
    address: SocketAddr,
}

impl std::fmt::Debug for RewardModelServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RewardModelServer").field("address", &self.address).finish_non_exhaustive()
    }
}

struct ScoringState {
    scorer: Arc<SequenceScorer>,
    service: ScoringService,
    token: Option<String>,
    /// Permits for bodies in memory.
    bodies: Semaphore,
}

impl RewardModelServer {
    /// Opens the model and listens on `address`.
    ///
    /// # Errors
    /// A model that cannot be opened, an address that cannot be used.
    pub async fn bind(path: &Path, config: ServedModel, address: SocketAddr) -> Result<Self, RewardError> {
        let failed = |error: std::io::Error| RewardError::Start {
            reward: "model".to_owned(),
            reason: format!("cannot listen on {address}: {error}"),
        };
        let listener = std::net::TcpListener::bind(address).map_err(failed)?;
        Self::on(path, config, listener).await
    }

    /// Opens the model and serves it on a listening socket.
    ///
    /// # Errors
    /// A model that cannot be opened, a socket that cannot be used.
    #[expect(clippy::unused_async, reason = "a listener needs the runtime that this runs on")]
    pub async fn on(
        path: &Path,
        config: ServedModel,
        listener: std::net::TcpListener,
    ) -> Result<Self, RewardError> {
        let spec = RewardSpec {
            path: Some(path.to_owned()),
            timeout_s: config.timeout.as_secs_f64(),
            ..RewardSpec::new("model")
        };
        let failed = |reason: String| RewardError::Start { reward: spec.name().to_owned(), reason };
        let scorer = SequenceScorer::open(path, config.quantization, &MemoryBudget::default())
            .map_err(|error| failed(error.to_string()))?;
        let scorer = Arc::new(scorer);
        let cores = SharedCores::all();
        let pool = Arc::new(ThreadPool::new(&cores, config.threads.unwrap_or(cores.total())));
        let batch_tokens = config.batch_tokens.unwrap_or(BATCH_TOKENS);
        let service = ScoringService::start(&spec, Arc::clone(&scorer), pool, batch_tokens)?;
        let unusable = |error: std::io::Error| failed(format!("its socket cannot be used: {error}"));
        let address = listener.local_addr().map_err(unusable)?;
        listener.set_nonblocking(true).map_err(unusable)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(unusable)?;
        let served =
            Arc::new(ScoringState { scorer, service, token: config.token, bodies: Semaphore::new(MAX_READ) });
        let router = Router::new()
            .route(SCORES, post(scores))
            .route("/get_reward", post(get_reward))
            .route(MODEL, get(describe))
            .route("/healthz", get(async || "ok\n"))
            .with_state(served)
            .layer(axum::middleware::from_fn(one_host));
        Ok(Self { listener, router, address })
    }

    /// The address that it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`; requests that have begun are completed.
    ///
    /// # Errors
    /// The socket fails.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send + 'static) -> std::io::Result<()> {
        axum::serve(self.listener, self.router).with_graceful_shutdown(stop).await
    }
}

/// Status and reason of a refused request.
struct RequestRefusal(StatusCode, String);

impl IntoResponse for RequestRefusal {
    fn into_response(self) -> Response {
        let body = json!({ "status": self.0.as_u16(), "detail": self.1 }).to_string();
        (self.0, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
    }
}

fn answered(body: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

impl ScoringState {
    fn admit(&self, headers: &HeaderMap) -> Result<(), RequestRefusal> {
        let Some(token) = &self.token else { return Ok(()) };
        let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let sent = sent.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
        // Constant time: a wrong token takes as long as the right one.
        let differs = token.bytes().zip(sent.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
        if differs == 0 && token.len() == sent.len() {
            return Ok(());
        }
        Err(RequestRefusal(
            StatusCode::UNAUTHORIZED,
            "send the token of this server as `Authorization: Bearer`".into(),
        ))
    }

    /// The parsed body, and the permit for its memory.
    async fn body<T: serde::de::DeserializeOwned>(
        &self,
        request: Request,
    ) -> Result<(T, SemaphorePermit<'_>), RequestRefusal> {
        self.admit(request.headers())?;
        let busy = || {
            let detail = format!("{MAX_READ} requests are being answered; try again later");
            RequestRefusal(StatusCode::SERVICE_UNAVAILABLE, detail)
        };
        let permit = tokio::time::timeout(BODY_TIME, self.bodies.acquire()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or_else(busy)?;
        let read = tokio::time::timeout(BODY_TIME, to_bytes(request.into_body(), MAX_BODY)).await;
        let late =
            |_| RequestRefusal(StatusCode::REQUEST_TIMEOUT, format!("no whole body within {BODY_TIME:?}"));
        let long =
            |_| RequestRefusal(StatusCode::PAYLOAD_TOO_LARGE, format!("at most {MAX_BODY} bytes are read"));
        let bytes = read.map_err(late)?.map_err(long)?;
        let body = serde_json::from_slice(&bytes).map_err(|error| {
            RequestRefusal(StatusCode::UNPROCESSABLE_ENTITY, format!("the body is not valid: {error}"))
        })?;
        Ok((body, permit))
    }

    async fn score(&self, tokens: Result<PromptCompletion, String>) -> ScoreResponse {
        let score = match tokens.and_then(|tokens| checked(tokens, self.scorer.max_context())) {
            Ok(tokens) => self.service.submit(tokens, || ()).await.map_err(|error| error.to_string()),
            Err(reason) => Err(reason),
        };
        match score {
            Ok(score) => ScoreResponse { score: Some(score), error: None },
            Err(reason) => ScoreResponse { score: None, error: Some(reason) },
        }
    }
}

async fn scores(
    State(served): State<Arc<ScoringState>>,
    request: Request,
) -> Result<Response, RequestRefusal> {
    let (request, _permit) = served.body(request).await?;
    let tokens = match request {
        RewardModelRequest::Tokens { prompt_ids: prompt, completion_ids: completion } => {
            Ok(PromptCompletion { prompt, completion })
        }
        RewardModelRequest::Texts { prompt, completion, ended } => {
            served.scorer.encode(&prompt.into(), &completion, ended).map_err(|error| error.to_string())
        }
    };
    Ok(answered(&json!(served.score(tokens).await)))
}

/// OpenRLHF's form: decoded texts of prompt and completion, special tokens included.
async fn get_reward(
    State(served): State<Arc<ScoringState>>,
    request: Request,
) -> Result<Response, RequestRefusal> {
    #[derive(serde::Deserialize)]
    struct Queries {
        #[serde(deserialize_with = "queries")]
        query: Vec<String>,
    }
    let (Queries { query }, _permit) = served.body(request).await?;
    let encode = |text: &String| {
        let completion = served.scorer.tokenizer().encode(text, SpecialTokens::Omit);
        completion
            .map(|completion| PromptCompletion { prompt: Vec::new(), completion })
            .map_err(|error| error.to_string())
    };
    let scores = query.iter().map(|text| Box::pin(served.score(encode(text))) as crate::BoxFuture<'_, _>);
    let answers: Vec<ScoreResponse> = crate::join(scores).await;
    if let Some((index, reason)) = answers.iter().enumerate().find_map(|(i, a)| Some((i, a.error.clone()?))) {
        return Err(RequestRefusal(StatusCode::UNPROCESSABLE_ENTITY, format!("query {index}: {reason}")));
    }
    let rewards: Vec<_> = answers.iter().map(|answer| answer.score).collect();
    Ok(answered(&json!({ "rewards": rewards, "scores": rewards, "extra_logs": {} })))
}

/// Fails at the first query above the limit, before it takes memory.
fn queries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    struct QueryListVisitor;
    impl<'de> Visitor<'de> for QueryListVisitor {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "at most {MAX_QUERIES} queries at once")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<String>, A::Error> {
            let mut queries = Vec::new();
            while let Some(query) = sequence.next_element()? {
                if queries.len() == MAX_QUERIES {
                    return Err(de::Error::invalid_length(MAX_QUERIES + 1, &self));
                }
                queries.push(query);
            }
            Ok(queries)
        }
    }
    deserializer.deserialize_seq(QueryListVisitor)
}

/// Before all routes: refuses a request with two `Host` headers, which different programs would read differently.
async fn one_host(request: Request, next: Next) -> Response {
    if request.headers().get_all(header::HOST).iter().nth(1).is_some() {
        return RequestRefusal(StatusCode::BAD_REQUEST, "send one header `Host`".to_owned()).into_response();
    }
    next.run(request).await
}

async fn describe(
    State(served): State<Arc<ScoringState>>,
    headers: HeaderMap,
) -> Result<Response, RequestRefusal> {
    served.admit(&headers)?;
    let (tokenizer, max_context) = (served.scorer.reads_tokens_of(), served.scorer.max_context());
    Ok(answered(&json!(ModelDescription { tokenizer: tokenizer.map(str::to_owned), max_context })))
}
