//! Liveness, readiness and metrics of the server.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use crate::Consumer;
use crate::http::body::Accept;
use crate::http::metrics::BufferMetrics;
use crate::http::problem::Problem;
use crate::http::state::ServerState;
use crate::http::wire::EmptyAnswer;

/// Liveness of the process.
#[utoipa::path(
    get, path = "/healthz", tag = "health", security(()),
    responses((status = 200, body = EmptyAnswer, description = "The process is alive"))
)]
pub(super) async fn healthz(accept: Accept) -> Result<Response, Problem> {
    accept.answer(&EmptyAnswer {})
}

/// Readiness: whether groups can be stored and leased.
#[utoipa::path(
    get, path = "/readyz", tag = "health", security(()),
    responses((status = 200, body = EmptyAnswer, description = "Groups can be stored and leased"))
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

/// Metrics for Prometheus.
#[utoipa::path(
    get, path = "/metrics", tag = "health",
    responses((status = 200, content_type = "application/openmetrics-text", body = String,
        description = "OpenMetrics text format 1.0"))
)]
pub(super) async fn metrics(State(shared): State<Arc<ServerState>>) -> Response {
    let stats = shared.buffer().ok().and_then(|buffer| buffer.stats().ok());
    let text = shared.metrics.text(stats.as_ref());
    ([(CONTENT_TYPE, BufferMetrics::MEDIA_TYPE)], text).into_response()
}
