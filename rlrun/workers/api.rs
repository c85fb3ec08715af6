//! The routes of a run for its workers: join, heartbeat, and the list of workers.
//!
//! Invariant: a handler takes one short lock and never waits. Bodies are MessagePack, or JSON for people, and bounded.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ::rewards::reward_model::ModelServer;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use model::{DESCRIPTION_FILES, FrozenParameters, Head, ModelDirectory};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::registry::{Heartbeat, JoinRefused, WorkerRegistry, WorkerRole};

/// Version of this protocol; other versions are refused.
pub(crate) const PROTOCOL: u32 = 1;

/// Longest body, bytes: a heartbeat with what a sampler did and the counters of some rewards.
const MAX_BODY: usize = 1 << 20;

const MESSAGE_PACK: &str = "application/msgpack";

/// The request of a worker to join.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JoinRequest {
    /// The worker's [`PROTOCOL`].
    pub(crate) protocol: u32,
    /// Its role.
    pub(crate) role: WorkerRole,
    /// The name it asks for; `None`: any.
    pub(crate) name: Option<String>,
}

/// The answer to a [`JoinRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JoinReply {
    /// The run's [`PROTOCOL`].
    pub(crate) protocol: u32,
    /// `None`: the run is not ready; the worker asks again.
    pub(crate) joined: Option<WorkerAssignment>,
}

/// The response to a worker that joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WorkerAssignment {
    /// Its name in the run.
    pub(crate) name: String,
    /// Its instance id.
    pub(crate) instance: u64,
    /// The recipe, every value spelled out.
    pub(crate) recipe: String,
    /// The model that is trained, for samplers.
    pub(crate) model: ModelFiles,
    /// The reward servers, by reward.
    pub(crate) servers: BTreeMap<String, ModelServer>,
    /// The port at which ranks of the trainer meet, on the host that serves the run.
    pub(crate) ranks: Option<u16>,
}

/// The model that a run trains, without its weights.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ModelFiles {
    /// The files of its directory but the weights, by name.
    pub(crate) files: BTreeMap<String, String>,
    /// Whether the published weights have a value head.
    pub(crate) value_head: bool,
    /// Digest of the frozen weights, if they stay quantised: samplers read them on their machine.
    #[serde(default)]
    pub(crate) base: Option<String>,
}

/// The controller's report that the process of a worker has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ProcessEnded {
    /// Its name in the run.
    pub(crate) name: String,
    /// Its process id.
    pub(crate) pid: u32,
    /// Its instance id, if a process of the run has known it.
    pub(crate) instance: Option<u64>,
}

/// The state behind the routes.
#[derive(Debug)]
pub(crate) struct WorkerApi {
    /// The workers.
    pub(crate) registry: Arc<WorkerRegistry>,
    /// The recipe, every value spelled out.
    pub(crate) recipe: String,
    /// The model, once it is open.
    pub(crate) model: OnceLock<ModelFiles>,
    /// The port of [`WorkerAssignment::ranks`], while ranks are waited for.
    pub(crate) ranks: Mutex<Option<u16>>,
}

impl WorkerApi {
    /// Sets the model to that in `directory`, over a `base` if that stays quantised; samplers can join from now on.
    pub(crate) fn publish_model(&self, directory: &ModelDirectory, base: Option<&FrozenParameters>) {
        let known = directory.files().filter(|(name, _)| DESCRIPTION_FILES.contains(name));
        // A binary file is skipped: rlrun reads none of these as binary.
        let text = |content: &[u8]| String::from_utf8(content.to_vec()).ok();
        let files = known.filter_map(|(name, content)| Some((name.to_owned(), text(content)?))).collect();
        let value_head = directory.config().head == Head::LanguageAndValue;
        // Set once.
        let _ = self.model.set(ModelFiles { files, value_head, base: base.map(FrozenParameters::digest) });
    }

    /// Sets the port at which ranks of the trainer meet; `None` while no rank is expected.
    pub(crate) fn set_rank_port(&self, port: Option<u16>) {
        *self.ranks.lock().unwrap_or_else(PoisonError::into_inner) = port;
    }

    /// All routes.
    pub(crate) fn router(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/v1/run/join", post(join))
            .route("/v1/run/beat", post(beat))
            .route("/v1/run/ended", post(ended))
            .route("/v1/run/workers", get(workers).post(workers))
            .layer(DefaultBodyLimit::max(MAX_BODY))
            .with_state(Arc::clone(self))
    }
}

async fn join(State(api): State<Arc<WorkerApi>>, headers: HeaderMap, body: Bytes) -> Response {
    let JoinRequest { protocol, role, name } = match read(&headers, &body) {
        Ok(join) => join,
        Err(reason) => return bad_body(&reason),
    };
    if protocol != PROTOCOL {
        return problem(
            StatusCode::CONFLICT,
            "other_protocol",
            &format!(
                "the worker speaks protocol {protocol}, the run {PROTOCOL}: use the same rlrun for both"
            ),
        );
    }
    let model = match (role, api.model.get()) {
        (WorkerRole::Rollout, None) => return answer(&headers, &JoinReply { protocol, joined: None }),
        (WorkerRole::Rollout, Some(model)) => model.clone(),
        (WorkerRole::Trainer | WorkerRole::Reward, _) => ModelFiles::default(),
    };
    let ranks = *api.ranks.lock().unwrap_or_else(PoisonError::into_inner);
    if role == WorkerRole::Trainer && ranks.is_none() {
        return answer(&headers, &JoinReply { protocol, joined: None });
    }
    let (name, instance) = match api.registry.join(role, name) {
        Ok(joined) => joined,
        Err(refusal) => return refused(&refusal),
    };
    let (recipe, servers) = (api.recipe.clone(), api.registry.servers());
    answer(
        &headers,
        &JoinReply {
            protocol,
            joined: Some(WorkerAssignment { name, instance, recipe, model, servers, ranks }),
        },
    )
}

async fn beat(State(api): State<Arc<WorkerApi>>, headers: HeaderMap, body: Bytes) -> Response {
    match read::<Heartbeat>(&headers, &body) {
        Ok(beat) => match api.registry.heartbeat(beat) {
            Ok(orders) => answer(&headers, &orders),
            Err(refusal) => refused(&refusal),
        },
        Err(reason) => bad_body(&reason),
    }
}

async fn ended(State(api): State<Arc<WorkerApi>>, headers: HeaderMap, body: Bytes) -> Response {
    match read::<ProcessEnded>(&headers, &body) {
        Ok(ProcessEnded { name, pid, instance }) => {
            api.registry.process_ended(&name, pid, instance);
            answer(&headers, &())
        }
        Err(reason) => bad_body(&reason),
    }
}

async fn workers(State(api): State<Arc<WorkerApi>>, headers: HeaderMap) -> Response {
    answer(&headers, &api.registry.members())
}

fn named(headers: &HeaderMap, name: header::HeaderName) -> bool {
    headers.get(name).and_then(|value| value.to_str().ok()).is_some_and(|value| value.contains(MESSAGE_PACK))
}

fn read<T: DeserializeOwned>(headers: &HeaderMap, body: &Bytes) -> Result<T, String> {
    if named(headers, header::CONTENT_TYPE) {
        rmp_serde::from_slice(body).map_err(|error| error.to_string())
    } else {
        serde_json::from_slice(body).map_err(|error| error.to_string())
    }
}

fn refused(refusal: &JoinRefused) -> Response {
    let (status, code) = match refusal {
        JoinRefused::Name(_) => (StatusCode::UNPROCESSABLE_ENTITY, "bad_name"),
        JoinRefused::TooMany => (StatusCode::TOO_MANY_REQUESTS, "too_many_workers"),
    };
    problem(status, code, &refusal.to_string())
}

fn bad_body(reason: &str) -> Response {
    problem(StatusCode::UNPROCESSABLE_ENTITY, "bad_body", reason)
}

fn answer(headers: &HeaderMap, value: &impl Serialize) -> Response {
    if named(headers, header::ACCEPT) {
        // Plain data with string keys: neither can fail, and an empty body would be refused by the client.
        let body = rmp_serde::to_vec_named(value).unwrap_or_default();
        return ([(header::CONTENT_TYPE, MESSAGE_PACK)], body).into_response();
    }
    let body = serde_json::to_vec_pretty(value).unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// An error in the format of the buffer's routes (RFC 9457).
fn problem(status: StatusCode, code: &str, detail: &str) -> Response {
    let body = json!({ "type": "about:blank", "title": code, "status": status.as_u16(), "code": code, "detail": detail });
    (status, [(header::CONTENT_TYPE, "application/problem+json")], body.to_string()).into_response()
}
