//! Tinker's API over HTTP: a [`router`] in front of a [`TrainingService`].
//!
//! # Layout
//! - `access`: keys and limits; `refusal`: errors; `body`: bodies of requests
//! - `training`: sessions, models and their requests; `sampling`: samplers and completions; `futures`: results
//! - `saved`: training runs and what was saved of them; `archive`: downloads of it; `tar`: their form; `dates`: times
//!
//! # Invariants
//! - A request has a user before its body is read. What a route does is up to the service: this module translates.
//! - A request that must not be sent again has a status that tinker's SDK does not repeat: 400, 401, 404, 410, 413.

mod access;
mod archive;
mod body;
mod dates;
mod futures;
mod refusal;
mod sampling;
mod saved;
mod tar;
mod training;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde_json::json;

pub use access::{HttpLimits, ServiceAccess};
pub(crate) use body::ApiState;
use refusal::{HttpRefusal, JsonReply};

use crate::training::TrainingService;

/// The routes of tinker's API under `/api/v1`, and `/health` and `/metrics`.
pub fn router(service: TrainingService, access: ServiceAccess) -> Router {
    routes(ApiState::new(service, access))
}

pub(crate) fn routes(api: ApiState) -> Router {
    Router::new()
        .nest("/api/v1", session_routes().merge(model_routes()).merge(saved_routes()))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(unknown)
        .method_not_allowed_fallback(unknown)
        .with_state(api)
}

fn session_routes() -> Router<ApiState> {
    Router::new()
        .route("/healthz", get(health))
        .route("/get_server_capabilities", get(training::capabilities))
        .route("/client/config", post(training::client_config))
        .route("/client/dynamic_config", post(training::dynamic_config))
        .route("/telemetry", post(training::telemetry))
        .route("/create_session", post(training::create_session))
        .route("/session_heartbeat", post(training::heartbeat))
        .route("/sessions/{session}/finish", post(training::finish_session))
        .route("/create_sampling_session", post(sampling::create_session))
        .route("/samplers/{sampler}", get(sampling::sampler))
        .route("/asample", post(sampling::sample))
        .route("/retrieve_future", post(futures::retrieve))
        .route("/cancel_future", post(futures::cancel))
}

fn model_routes() -> Router<ApiState> {
    Router::new()
        .route("/create_model", post(training::create_model))
        .route("/get_info", post(training::info))
        .route("/forward_backward", post(training::forward_backward))
        .route("/forward", post(training::forward))
        .route("/optim_step", post(training::optim_step))
        .route("/save_weights", post(training::save_weights))
        .route("/load_weights", post(training::load_weights))
        .route("/save_weights_for_sampler", post(training::save_for_sampler))
        .route("/unload_model", post(training::unload))
}

fn saved_routes() -> Router<ApiState> {
    Router::new()
        .route("/training_runs", get(saved::runs))
        .route("/training_runs/{run}", get(saved::run))
        .route("/training_runs/{run}/checkpoints", get(saved::of_run))
        .route("/training_runs/{run}/checkpoints/{kind}/{name}", delete(saved::delete))
        .route("/training_runs/{run}/checkpoints/{kind}/{name}/archive", get(archive::link))
        .route("/archives/{expires}/{user}/{signature}/{run}/{kind}/{name}", get(archive::download))
        .route("/checkpoints", get(saved::of_user))
        .route("/weights_info", post(saved::weights_info))
}

async fn health() -> Response {
    JsonReply(json!({"status": "ok"})).into_response()
}

async fn metrics(State(api): State<ApiState>) -> Response {
    let form = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(CONTENT_TYPE, form)], api.service.metrics_text()).into_response()
}

async fn unknown(request: Request) -> HttpRefusal {
    let route = format!("{} {}", request.method(), request.uri().path());
    HttpRefusal::new(
        404,
        format!("there is no route {route}; this server has those of tinker's SDK for training and sampling"),
    )
}
