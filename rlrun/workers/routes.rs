//! What a run serves to its workers beside the buffer: how to join, what to say each second, and who is there.
//!
//! Invariant: nothing here waits or computes; a request takes one short lock. Bodies are MessagePack or, for people, JSON,
//! and no longer than what a worker has to say.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ::rewards::reward_model::ModelServer;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use model::{Head, ModelDirectory};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::roster::{Beat, Role, Roster, Unwelcome};
use crate::failure::Failure;

/// A file of a model directory that is not weights is at most this large, bytes; tokenizers of large vocabularies have
/// 10 to 35 MB.
const MAX_FILE: u64 = 256 << 20;
/// The files of a model directory that describe a model. A worker takes no others from a run.
pub(crate) const DESCRIBING: [&str; 10] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
];
/// Version of what is said here; another one does not understand this one.
pub(crate) const PROTOCOL: u32 = 1;

/// Longest body, bytes: a worker speaks of itself and of some rewards.
const MAX_BODY: usize = 256 << 10;

const MESSAGE_PACK: &str = "application/msgpack";

/// A worker wants to take part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Join {
    /// What it understands.
    pub(crate) protocol: u32,
    /// What it is.
    pub(crate) role: Role,
    /// The name it wants; `None`: any.
    pub(crate) name: Option<String>,
}

/// What a worker hears in return.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// What the run understands.
    pub(crate) protocol: u32,
    /// `None`: the run prepares itself; later.
    pub(crate) joined: Option<Joined>,
}

/// What a worker has to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Joined {
    /// Its name in the run.
    pub(crate) name: String,
    /// Which of the processes of that name it is.
    pub(crate) instance: u64,
    /// The recipe, every value spelled out.
    pub(crate) recipe: String,
    /// What is trained, for who samples.
    pub(crate) model: Described,
    /// Who serves which reward.
    pub(crate) servers: BTreeMap<String, ModelServer>,
    /// The port at which ranks of the trainer meet, on the host that serves the run.
    pub(crate) ranks: Option<u16>,
}

/// The model that a run trains, without its weights.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Described {
    /// The files of its directory but the weights, by name.
    pub(crate) files: BTreeMap<String, String>,
    /// Whether the published weights have a value head.
    pub(crate) value_head: bool,
}

/// The controller says that the process of a worker has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ended {
    /// Its name in the run.
    pub(crate) name: String,
    /// The process.
    pub(crate) pid: u32,
    /// Its instance, as far as any lead of the run has heard of it.
    pub(crate) instance: Option<u64>,
}

/// What a run tells its workers, and hears from them.
#[derive(Debug)]
pub(crate) struct Desk {
    /// Who takes part.
    pub(crate) roster: Arc<Roster>,
    /// The recipe, every value spelled out.
    pub(crate) recipe: String,
    /// Once it is known.
    pub(crate) model: OnceLock<Described>,
    /// The port of [`Joined::ranks`], while ranks are waited for.
    pub(crate) ranks: Mutex<Option<u16>>,
}

impl Desk {
    /// The run trains the model in `directory`; who wants to sample can begin.
    ///
    /// # Errors
    /// A file of it that cannot be read.
    pub(crate) fn describe(&self, directory: &ModelDirectory) -> Result<(), Failure> {
        let path = directory.path();
        let system = |source| Failure::System { what: format!("read {}", path.display()), source };
        let files = describing_files(path).map_err(system)?;
        let value_head = directory.config().head == Head::LanguageAndValue;
        // It is described once.
        let _ = self.model.set(Described { files, value_head });
        Ok(())
    }

    /// Ranks of the trainer meet at this port from now on, or nowhere.
    pub(crate) fn meet(&self, port: Option<u16>) {
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

/// The files of a model directory that describe the model.
fn describing_files(directory: &Path) -> std::io::Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(name) = name.filter(|name| DESCRIBING.contains(name)) else { continue };
        if std::fs::metadata(&path)?.len() > MAX_FILE {
            continue;
        }
        // What is no text is nothing that describes a model to us.
        if let Ok(text) = String::from_utf8(std::fs::read(&path)?) {
            files.insert(name.to_owned(), text);
        }
    }
    Ok(files)
}

async fn join(State(desk): State<Arc<Desk>>, headers: HeaderMap, body: Bytes) -> Response {
    let Join { protocol, role, name } = match read(&headers, &body) {
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
    let model = match (role, desk.model.get()) {
        (Role::Rollout, None) => return answer(&headers, &Answer { protocol, joined: None }),
        (Role::Rollout, Some(model)) => model.clone(),
        (Role::Trainer | Role::Reward, _) => Described::default(),
    };
    let ranks = *desk.ranks.lock().unwrap_or_else(PoisonError::into_inner);
    if role == Role::Trainer && ranks.is_none() {
        return answer(&headers, &Answer { protocol, joined: None });
    }
    let (name, instance) = match desk.roster.join(role, name) {
        Ok(joined) => joined,
        Err(unwelcome) => return refused(&unwelcome),
    };
    let (recipe, servers) = (desk.recipe.clone(), desk.roster.servers());
    answer(
        &headers,
        &Answer { protocol, joined: Some(Joined { name, instance, recipe, model, servers, ranks }) },
    )
}

async fn beat(State(desk): State<Arc<Desk>>, headers: HeaderMap, body: Bytes) -> Response {
    match read::<Beat>(&headers, &body) {
        Ok(beat) => match desk.roster.beat(beat) {
            Ok(orders) => answer(&headers, &orders),
            Err(unwelcome) => refused(&unwelcome),
        },
        Err(reason) => bad_body(&reason),
    }
}

async fn ended(State(desk): State<Arc<Desk>>, headers: HeaderMap, body: Bytes) -> Response {
    match read::<Ended>(&headers, &body) {
        Ok(Ended { name, pid, instance }) => {
            desk.roster.ended(&name, pid, instance);
            answer(&headers, &())
        }
        Err(reason) => bad_body(&reason),
    }
}

async fn workers(State(desk): State<Arc<Desk>>, headers: HeaderMap) -> Response {
    answer(&headers, &desk.roster.members())
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

fn refused(unwelcome: &Unwelcome) -> Response {
    let (status, code) = match unwelcome {
        Unwelcome::Name(_) => (StatusCode::UNPROCESSABLE_ENTITY, "bad_name"),
        Unwelcome::TooMany => (StatusCode::TOO_MANY_REQUESTS, "too_many_workers"),
    };
    problem(status, code, &unwelcome.to_string())
}

fn bad_body(reason: &str) -> Response {
    problem(StatusCode::UNPROCESSABLE_ENTITY, "bad_body", reason)
}

fn answer(headers: &HeaderMap, value: &impl Serialize) -> Response {
    if named(headers, header::ACCEPT) {
        // Plain data with string keys: neither can fail, and an empty body would be refused by whoever reads it.
        let body = rmp_serde::to_vec_named(value).unwrap_or_default();
        return ([(header::CONTENT_TYPE, MESSAGE_PACK)], body).into_response();
    }
    let body = serde_json::to_vec_pretty(value).unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// An error in the words of the buffer's routes.
fn problem(status: StatusCode, code: &str, detail: &str) -> Response {
    let body = json!({ "type": "about:blank", "title": code, "status": status.as_u16(), "code": code, "detail": detail });
    (status, [(header::CONTENT_TYPE, "application/problem+json")], body.to_string()).into_response()
}
