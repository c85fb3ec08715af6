//! The routes of the page: its files, its API, the stream of revisions, and the values for Prometheus.
//!
//! Invariant: every request but a file of the page passes the access check. An answer is computed on a thread that may wait for
//! files.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use serde_json::{Map, Value};
use tokio::sync::{Semaphore, watch};

use crate::access::{PageAccess, guard};
use crate::answers::{ANSWERS, ApiAnswer, ApiQuery, PageRefusal};
use crate::catalog::RunCatalog;
use crate::{page, prometheus, stream};

/// What every route needs.
#[derive(Clone, Debug)]
pub(crate) struct PageState {
    pub(crate) catalog: Arc<RunCatalog>,
    /// The sender is the task that follows the files; it is dropped when the server stops.
    pub(crate) revisions: watch::Receiver<Map<String, Value>>,
    /// A permit for every open stream.
    pub(crate) streams: Arc<Semaphore>,
}

/// All routes, behind the access check.
pub(crate) fn router(state: PageState, access: PageAccess) -> Router {
    let mut router =
        Router::new().route("/api/events", get(stream::revisions)).route("/metrics", get(last_values));
    for (path, answer) in ANSWERS {
        router = router.route(path, api(answer));
    }
    for path in page::paths() {
        let serve = move || async move { page::file(path).ok_or(StatusCode::NOT_FOUND) };
        router = router.route(path, get(serve));
    }
    router
        .fallback(|| async { (StatusCode::NOT_FOUND, "there is no such page") })
        .layer(axum::middleware::from_fn_with_state(access, guard))
        .with_state(state)
}

/// A route of the API.
fn api(answer: ApiAnswer) -> MethodRouter<PageState> {
    get(move |State(state): State<PageState>, Query(query): Query<ApiQuery>| {
        let compute = move |catalog: &RunCatalog| answer(catalog, &query).map(|value| value.to_string());
        respond(state, "application/json", Box::new(compute))
    })
}

async fn last_values(State(state): State<PageState>) -> Result<Response, PageRefusal> {
    respond(state, prometheus::MEDIA_TYPE, Box::new(|catalog| Ok(prometheus::text(catalog)))).await
}

/// Computes the text of a response. Boxed, so that the program has one copy of the task.
type TextComputation = Box<dyn FnOnce(&RunCatalog) -> Result<String, PageRefusal> + Send>;

/// Computes a response on a thread that may wait for files.
async fn respond(
    state: PageState,
    media_type: &'static str,
    compute: TextComputation,
) -> Result<Response, PageRefusal> {
    let body = tokio::task::spawn_blocking(move || compute(&state.catalog));
    let body = body.await.map_err(|_| PageRefusal::Panicked)??;
    Ok(([(header::CONTENT_TYPE, media_type)], body).into_response())
}
