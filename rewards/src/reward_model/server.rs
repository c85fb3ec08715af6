//! A reward model as a process of its own, over HTTP.
//!
//! Invariant: nothing is scored for whoever lacks the token, if there is one; a body that is too long, too slow or no
//! question is refused and said why. Requests that come together are packed together; only so many are read at a time, so
//! that what they take is bounded.
//!
//! - `POST /v1/scores`: one sequence, as tokens or as texts: what `kind = "model"` with a `url` sends
//! - `POST /get_reward`: `{"query": [..]}` -> `{"rewards": [..]}`: what OpenRLHF and `kind = "http"` send
//! - `GET /v1/model`: what the model is; `GET /healthz`: that the process is there

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

use super::service::Service;
use super::wire::{Answer, Asked, Described, MODEL, SCORES};
use super::{BATCH_TOKENS, checked};
use crate::{RewardError, RewardSpec};

/// Longest body, bytes.
const MAX_BODY: usize = 16 << 20;
/// Longest time that a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(30);
/// Most queries of one request.
const MAX_QUERIES: usize = 4096;
/// Bodies that are read, and until they are answered kept, at the same time.
const MAX_READ: usize = 32;

/// How a reward model is served.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// Most tokens of a packed batch; `None` for the usual number.
    pub batch_tokens: Option<usize>,
    /// Most cores at a time; all if not given.
    pub threads: Option<usize>,
    /// How coarsely the weights of the layers are represented.
    pub quantization: Quantization,
    /// What clients have to send as a bearer token, if anything.
    pub token: Option<String>,
    /// Longest time for one request's turn.
    pub timeout: Duration,
}

/// A server that listens.
pub struct Server {
    listener: tokio::net::TcpListener,
    router: Router,
    address: SocketAddr,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

struct Served {
    scorer: Arc<SequenceScorer>,
    service: Service,
    token: Option<String>,
    /// For bodies.
    room: Semaphore,
}

impl Server {
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

    /// Opens the model and serves it on a socket that listens already.
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
        let service = Service::start(&spec, Arc::clone(&scorer), pool, batch_tokens)?;
        let unusable = |error: std::io::Error| failed(format!("its socket cannot be used: {error}"));
        let address = listener.local_addr().map_err(unusable)?;
        listener.set_nonblocking(true).map_err(unusable)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(unusable)?;
        let served =
            Arc::new(Served { scorer, service, token: config.token, room: Semaphore::new(MAX_READ) });
        let router = Router::new()
            .route(SCORES, post(scores))
            .route("/get_reward", post(get_reward))
            .route(MODEL, get(describe))
            .route("/healthz", get(async || "ok\n"))
            .with_state(served)
            .layer(axum::middleware::from_fn(one_host));
        Ok(Self { listener, router, address })
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `stop`, and then what it has begun.
    ///
    /// # Errors
    /// If the system takes its socket away.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send + 'static) -> std::io::Result<()> {
        axum::serve(self.listener, self.router).with_graceful_shutdown(stop).await
    }
}

/// Why a request is refused.
struct Refused(StatusCode, String);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let body = json!({ "status": self.0.as_u16(), "detail": self.1 }).to_string();
        (self.0, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
    }
}

fn answered(body: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

impl Served {
    fn admit(&self, headers: &HeaderMap) -> Result<(), Refused> {
        let Some(token) = &self.token else { return Ok(()) };
        let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let sent = sent.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
        // As many steps for a wrong token as for the right one.
        let differs = token.bytes().zip(sent.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
        if differs == 0 && token.len() == sent.len() {
            return Ok(());
        }
        Err(Refused(
            StatusCode::UNAUTHORIZED,
            "send the token of this server as `Authorization: Bearer`".into(),
        ))
    }

    /// What is asked; while the permit lives, what it took is not free for others.
    async fn body<T: serde::de::DeserializeOwned>(
        &self,
        request: Request,
    ) -> Result<(T, SemaphorePermit<'_>), Refused> {
        self.admit(request.headers())?;
        let busy = || {
            let detail = format!("{MAX_READ} requests are being answered; try again later");
            Refused(StatusCode::SERVICE_UNAVAILABLE, detail)
        };
        let room = tokio::time::timeout(BODY_TIME, self.room.acquire()).await;
        let room = room.ok().and_then(Result::ok).ok_or_else(busy)?;
        let read = tokio::time::timeout(BODY_TIME, to_bytes(request.into_body(), MAX_BODY)).await;
        let late = |_| Refused(StatusCode::REQUEST_TIMEOUT, format!("no whole body within {BODY_TIME:?}"));
        let long = |_| Refused(StatusCode::PAYLOAD_TOO_LARGE, format!("at most {MAX_BODY} bytes are read"));
        let bytes = read.map_err(late)?.map_err(long)?;
        let asked = serde_json::from_slice(&bytes).map_err(|error| {
            Refused(StatusCode::UNPROCESSABLE_ENTITY, format!("not what is asked for: {error}"))
        })?;
        Ok((asked, room))
    }

    async fn score(&self, tokens: Result<PromptCompletion, String>) -> Answer {
        let score = match tokens.and_then(|tokens| checked(tokens, self.scorer.max_context())) {
            Ok(tokens) => self.service.ask(tokens, || ()).await.map_err(|lost| lost.to_string()),
            Err(reason) => Err(reason),
        };
        match score {
            Ok(score) => Answer { score: Some(score), error: None },
            Err(reason) => Answer { score: None, error: Some(reason) },
        }
    }
}

async fn scores(State(served): State<Arc<Served>>, request: Request) -> Result<Response, Refused> {
    let (asked, _room) = served.body(request).await?;
    let tokens = match asked {
        Asked::Tokens { prompt_ids: prompt, completion_ids: completion } => {
            Ok(PromptCompletion { prompt, completion })
        }
        Asked::Texts { prompt, completion, ended } => {
            served.scorer.encode(&prompt.into(), &completion, ended).map_err(|error| error.to_string())
        }
    };
    Ok(answered(&json!(served.score(tokens).await)))
}

/// OpenRLHF's form: decoded texts of prompt and completion, special tokens included.
async fn get_reward(State(served): State<Arc<Served>>, request: Request) -> Result<Response, Refused> {
    #[derive(serde::Deserialize)]
    struct Queries {
        #[serde(deserialize_with = "queries")]
        query: Vec<String>,
    }
    let (Queries { query }, _room) = served.body(request).await?;
    let encode = |text: &String| {
        let completion = served.scorer.tokenizer().encode(text, SpecialTokens::Omit);
        completion
            .map(|completion| PromptCompletion { prompt: Vec::new(), completion })
            .map_err(|error| error.to_string())
    };
    let asked = query.iter().map(|text| Box::pin(served.score(encode(text))) as crate::BoxFuture<'_, _>);
    let answers: Vec<Answer> = crate::join(asked).await;
    if let Some((index, reason)) = answers.iter().enumerate().find_map(|(i, a)| Some((i, a.error.clone()?))) {
        return Err(Refused(StatusCode::UNPROCESSABLE_ENTITY, format!("query {index}: {reason}")));
    }
    let rewards: Vec<_> = answers.iter().map(|answer| answer.score).collect();
    Ok(answered(&json!({ "rewards": rewards, "scores": rewards, "extra_logs": {} })))
}

/// Stops at the first query too many, before it takes memory.
fn queries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    struct Bounded;
    impl<'de> Visitor<'de> for Bounded {
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
    deserializer.deserialize_seq(Bounded)
}

/// In front of all routes: what checks one host and what uses another would not mean the same.
async fn one_host(request: Request, next: Next) -> Response {
    if request.headers().get_all(header::HOST).iter().nth(1).is_some() {
        return Refused(StatusCode::BAD_REQUEST, "send one header `Host`".to_owned()).into_response();
    }
    next.run(request).await
}

async fn describe(State(served): State<Arc<Served>>, headers: HeaderMap) -> Result<Response, Refused> {
    served.admit(&headers)?;
    let (tokenizer, max_context) = (served.scorer.reads_tokens_of(), served.scorer.max_context());
    Ok(answered(&json!(Described { tokenizer: tokenizer.map(str::to_owned), max_context })))
}
