//! Control routes of sessions over HTTP, in the forms of AReaL's proxy, OpenEnv's capture and miles's sessions.
//!
//! | route | key | does |
//! |---|---|---|
//! | `POST /rl/start_session` | admin | starts a session; in a run it takes an episode |
//! | `POST /rl/set_reward` | session | rewards an interaction, or the last one |
//! | `POST /rl/end_session` | session | ends the session |
//! | `POST /export_trajectories` | admin | takes an ended session, as interactions or as rows |
//! | `POST /grant_capacity` | admin | says how many sessions can be started |
//! | `POST /sessions`, `GET`, `DELETE /sessions/{id}` | admin | starts, shows, removes a session |
//! | `GET /sessions/{id}/rollout`, `/trace_entries` | admin | its rows, its calls |
//! | `POST /sessions/{id}/samples` | admin | its rows in the form of miles |
//! | `/sessions/{id}/v1/...`, `/generate` and others | | a route of the endpoint, with the key of the session in the path |
//!
//! The admin key goes wherever that of a session does, with `session_id`. A session is named by its id or by its key.
//!
//! Invariant: no route shows a session of another key to an agent.

mod export;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, RawPathParams, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    EpisodeRequest, SessionCaller, SessionError, SessionPurpose, SessionStart, SessionStore, StartedSession,
    WaitingEpisodes,
};
use crate::auth::api_key;
use crate::server::router;
use crate::{ApiError, Service};

/// The sessions of an endpoint, and who may control them.
#[derive(Clone, Debug)]
pub struct SessionControl {
    /// The sessions.
    pub store: SessionStore,
    /// Episodes that wait for agents; `None` where no run wants any.
    pub waiting: Option<WaitingEpisodes>,
    /// The key of the operator; `None` on a loopback address without one: everyone is the operator.
    pub admin_key: Option<Arc<str>>,
}

/// The control routes, and those of `service` under the key of a session.
pub fn session_routes(control: SessionControl, service: &Service) -> Router {
    let routes = ["v1/{*route}", "inference/v1/{*route}", "generate", "tokenize", "detokenize", "health"];
    let keyed = routes.iter().fold(Router::new(), |keyed, route| {
        keyed.route(&format!("/sessions/{{id}}/{route}"), any(in_session))
    });
    let keyed = keyed.with_state(router(service.clone()));
    Router::new()
        .route("/rl/start_session", post(start_episode))
        .route("/rl/set_reward", post(set_reward))
        .route("/rl/end_session", post(end_session))
        .route("/export_trajectories", post(export::trajectories))
        .route("/grant_capacity", post(capacity))
        .route("/sessions", post(start_session))
        .route("/sessions/{id}", get(show).delete(remove))
        .route("/sessions/{id}/rollout", get(export::rollout))
        .route("/sessions/{id}/trace_entries", get(export::trace_entries))
        .route("/sessions/{id}/samples", post(export::samples))
        .with_state(control)
        .merge(keyed)
}

/// A request of the session whose key is in the path.
async fn in_session(
    State(endpoint): State<Router>,
    parameters: RawPathParams,
    mut request: Request,
) -> Result<Response, ApiError> {
    let wrong = || ApiError::malformed("the path has no key of a session that can be sent on");
    let key = parameters.iter().find(|(name, _)| *name == "id").map(|(_, key)| key).ok_or_else(wrong)?;
    let bearer = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| wrong())?;
    // `/sessions`, the key, and the route.
    let path = request.uri().path().splitn(4, '/').nth(3).unwrap_or_default();
    let route =
        format!("/{path}").parse::<Uri>().map_err(|_| ApiError::malformed("the path is no address"))?;
    *request.uri_mut() = route;
    request.headers_mut().insert(header::AUTHORIZATION, bearer);
    match TowerToHyperService::new(endpoint).call(request).await {
        Ok(response) => Ok(response),
        Err(never) => match never {},
    }
}

impl SessionControl {
    /// Who calls: the operator, or the agent of a session.
    fn caller(&self, headers: &HeaderMap) -> Result<SessionCaller, SessionError> {
        let key = api_key(headers);
        if let Some(key) = key.filter(|key| !matches!(self.store.id_of(key), Err(SessionError::UnknownKey))) {
            // Also that of a session that has ended, which is what it is answered.
            return Ok(SessionCaller::Agent(key.to_owned()));
        }
        match (key, &self.admin_key) {
            (_, None) => Ok(SessionCaller::Admin),
            (Some(key), Some(admin)) if same(key, admin) => Ok(SessionCaller::Admin),
            _ => Err(SessionError::UnknownKey),
        }
    }

    fn admin(&self, headers: &HeaderMap) -> Result<(), SessionError> {
        match self.caller(headers)? {
            SessionCaller::Admin => Ok(()),
            SessionCaller::Agent(_) => Err(SessionError::NotAdmin),
        }
    }

    /// The id of a session that the operator names.
    fn managed(&self, headers: &HeaderMap, name: &str) -> Result<String, SessionError> {
        self.admin(headers)?;
        self.named(name)
    }

    /// The id of a session that is named by its id or its key.
    fn named(&self, name: &str) -> Result<String, SessionError> {
        match self.store.id_of(name) {
            Err(SessionError::UnknownKey) => Ok(name.to_owned()),
            found => found,
        }
    }
}

/// Compares all bytes, whatever the first difference is.
fn same(given: &str, expected: &str) -> bool {
    given.len() == expected.len()
        && given.bytes().zip(expected.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

impl From<SessionError> for ApiError {
    fn from(error: SessionError) -> Self {
        let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let retry_after_s = (error.status() == 429).then_some(1);
        Self { retry_after_s, ..Self::new(status, error.code(), error.to_string()) }
    }
}

/// An answer in JSON.
struct JsonAnswer(Value);

impl IntoResponse for JsonAnswer {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], self.0.to_string()).into_response()
    }
}

/// A body that may be missing.
fn body<T: DeserializeOwned + Default>(bytes: &Bytes) -> Result<T, ApiError> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::malformed(format!("the body is not as documented: {error}")))
}

/// `task_id` as a text or a number.
fn task_name(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StartBody {
    task_id: Value,
    api_key: Option<String>,
    metadata: Value,
}

async fn start_episode(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<Response, ApiError> {
    control.admin(&headers)?;
    let StartBody { task_id, api_key, metadata } = body(&bytes)?;
    let (task_id, now) = (task_name(&task_id), Instant::now());
    let Some(waiting) = &control.waiting else {
        let start = SessionStart { key: api_key, task_id, metadata, ..SessionStart::default() };
        return Ok(started(&control.store.start(start, now)?, None).into_response());
    };
    let wanted = EpisodeRequest { task_id };
    let answer = waiting.take(&wanted, |place, start| {
        let task_id = wanted.task_id.clone().or(start.task_id.clone());
        let started = control.store.start(SessionStart { key: api_key, task_id, metadata, ..start }, now)?;
        let task = json!({
            "id": place.task.id, "group": place.group, "index": place.index, "prompt": place.task.prompt,
            "answer": place.task.answer, "columns": place.task.columns,
        });
        Ok((started.session_id.clone(), (started, task)))
    })?;
    Ok(self::started(&answer.0, Some(answer.1)).into_response())
}

fn started(session: &StartedSession, task: Option<Value>) -> JsonAnswer {
    let mut answer = json!({ "session_id": session.session_id, "api_key": session.api_key });
    if let Some(task) = task {
        answer["task"] = task;
    }
    JsonAnswer(answer)
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PostedReward {
    session_id: Option<String>,
    interaction_id: Option<String>,
    reward: Option<f64>,
}

async fn set_reward(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<JsonAnswer, ApiError> {
    let caller = control.caller(&headers)?;
    let PostedReward { session_id, interaction_id, reward } = body(&bytes)?;
    let Some(reward) = reward else { return Err(ApiError::missing("reward")) };
    let session = session_id.as_deref().map(|name| control.named(name)).transpose()?;
    control.store.set_reward(&caller, session.as_deref(), interaction_id.as_deref(), reward)?;
    Ok(JsonAnswer(json!({ "status": "ok" })))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EndBody {
    session_id: Option<String>,
}

async fn end_session(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<JsonAnswer, ApiError> {
    let caller = control.caller(&headers)?;
    let EndBody { session_id } = body(&bytes)?;
    let session = session_id.as_deref().map(|name| control.named(name)).transpose()?;
    let (session, interactions) = control.store.end(&caller, session.as_deref())?;
    Ok(JsonAnswer(json!({ "session_id": session, "interactions": interactions, "status": "ended" })))
}

async fn capacity(State(control): State<SessionControl>, headers: HeaderMap) -> Result<JsonAnswer, ApiError> {
    control.admin(&headers)?;
    let (open, limit) = (control.store.len(), control.store.limits().max_sessions);
    let free = limit.saturating_sub(open);
    let (episodes, groups) = control.waiting.as_ref().map_or((free, 0), WaitingEpisodes::waiting);
    Ok(JsonAnswer(json!({ "capacity": episodes.min(free), "groups": groups, "open": open })))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SessionBody {
    session_id: Option<String>,
    metadata: Value,
    max_model_calls: Option<usize>,
    purpose: Option<String>,
}

async fn start_session(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<Response, ApiError> {
    control.admin(&headers)?;
    let SessionBody { session_id, metadata, max_model_calls, purpose } = body(&bytes)?;
    let purpose = match purpose.as_deref() {
        None | Some("train" | "auto") => SessionPurpose::Train,
        Some("eval") => SessionPurpose::Eval,
        Some(other) => {
            let message = format!("`purpose` is \"{other}\"; there are train, eval and auto");
            return Err(ApiError::invalid("purpose", message));
        }
    };
    let start = SessionStart {
        key: session_id,
        metadata,
        max_calls: max_model_calls,
        purpose,
        ..SessionStart::default()
    };
    let StartedSession { session_id: id, api_key } = control.store.start(start, Instant::now())?;
    let answer = json!({
        // Clients of this form use the id of a session as the key of its agent.
        "session_id": api_key, "api_key": api_key, "id": id, "capture_level": "tokens", "rollout_type": purpose,
    });
    Ok((StatusCode::CREATED, JsonAnswer(answer)).into_response())
}

async fn show(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<JsonAnswer, ApiError> {
    let id = control.managed(&headers, &name)?;
    let now = Instant::now();
    let shown = control.store.with(&id, |session| {
        let roles = session.roles();
        json!({
            "id": session.id, "task_id": session.task_id, "metadata": session.metadata, "purpose": session.purpose,
            "ended": session.has_ended(), "model_calls": session.interactions().len(),
            "max_model_calls": session.max_calls, "bytes": session.bytes(), "drift": session.drift(),
            "roles": roles, "idle_s": now.saturating_duration_since(session.last_used()).as_secs_f64(),
        })
    })?;
    Ok(JsonAnswer(shown))
}

async fn remove(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<JsonAnswer, ApiError> {
    let id = control.managed(&headers, &name)?;
    if !control.store.give_up(&id) {
        return Err(SessionError::NoSession { session: id }.into());
    }
    Ok(JsonAnswer(json!({ "status": "removed" })))
}
