//! Whether the server lives, whether it is of use, and what it has counted.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use crate::Consumer;
use crate::http::body::Accept;
use crate::http::problem::Problem;
use crate::http::state::ServerState;
use crate::http::wire::EmptyAnswer;

/// Does the process live?
#[utoipa::path(
    get, path = "/healthz", tag = "health", security(()),
    responses((status = 200, body = EmptyAnswer, description = "It does"))
)]
pub(super) async fn healthz(accept: Accept) -> Result<Response, Problem> {
    accept.answer(&EmptyAnswer {})
}

/// Can groups be stored and leased?
#[utoipa::path(
    get, path = "/readyz", tag = "health", security(()),
    responses((status = 200, body = EmptyAnswer, description = "They can"))
)]
pub(super) async fn readyz(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    shared.drop_if_failed(&buffer);
    shared.buffer()?;
    accept.answer(&EmptyAnswer {})
}

/// What Prometheus scrapes.
#[utoipa::path(
    get, path = "/metrics", tag = "health",
    responses((status = 200, content_type = "text/plain", body = String, description = "Text format 0.0.4"))
)]
pub(super) async fn metrics(State(shared): State<Arc<ServerState>>) -> Response {
    let stats = shared.buffer().ok().and_then(|buffer| buffer.stats().ok());
    let text = shared.metrics.text(stats.as_ref());
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
