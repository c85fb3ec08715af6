//! The policy version of the trainer, and the counts of the buffer.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use trajectory::PolicyVersion;

use crate::Consumer;
use crate::http::body::{Accept, DecodedBody};
use crate::http::problem::Problem;
use crate::http::state::ServerState;
use crate::http::wire::{EmptyAnswer, StatsBody, VersionBody, VersionRequest};

/// Counts of all states.
#[utoipa::path(
    get, path = "/v1/stats", tag = "buffer",
    responses((status = 200, body = StatsBody, description = "Counts of everything"))
)]
pub(super) async fn stats(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    let stats = buffer.stats().map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&StatsBody::from(&stats))
}

/// The policy version of the trainer.
#[utoipa::path(
    get, path = "/v1/policy/version", operation_id = "get_version", tag = "policy",
    responses((status = 200, body = VersionBody, description = "The newest that the buffer knows of"))
)]
pub(super) async fn version(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    accept.answer(&VersionBody { version: buffer.policy_version()?.0 })
}

/// Set the policy version of the trainer. Idempotent. An older version, or one that would make all groups stale,
/// needs `rewind`.
#[utoipa::path(
    put, path = "/v1/policy/version", operation_id = "set_version", tag = "policy", request_body = VersionRequest,
    responses((status = 200, body = EmptyAnswer, description = "It is known, durably"))
)]
pub(super) async fn set_version(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    body: DecodedBody<VersionRequest>,
) -> Result<Response, Problem> {
    let VersionRequest { version, rewind } = body.value;
    let buffer = shared.buffer()?;
    let set = buffer.set_version_async(PolicyVersion(version), rewind).await;
    set.map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&EmptyAnswer {})
}
