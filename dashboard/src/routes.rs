//! The API: what the page asks for.
//!
//! - `/api/overview?x=&pixels=`: runs, panels and curves of the first screen, in one response
//! - `/api/runs`; `/api/metrics?keys=&run=&x=&pixels=&from=&to=`
//! - `/api/steps?run=`, `/api/samples?run=&step=&offset=&text=`, `/api/search?run=&text=&before=`
//! - `/api/tokens?run=&step=&group=&index=`, `/api/shared?run=&step=&before=`, `/api/compare?run=&step=&other=&offset=`
//! - `/api/timeline?run=&from=&to=&pixels=`, `/api/status?run=`, `/api/about?run=`
//! - `/api/recipe?run=&against=`, `/api/history?run=`, `/api/events` (a stream), `/metrics` (for Prometheus)
//!
//! Invariant: a response has at most [`MAX_POINTS`] points, however many runs, metrics and pixels are asked for. A run is
//! named by its name on the page, never by a path.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::{Semaphore, watch};

use crate::about::about;
use crate::access::{PageAccess, guard};
use crate::catalog::RunCatalog;
use crate::compare::{self, StepPair};
use crate::recipe::ResolvedRecipe;
use crate::run::ShownRun;
use crate::samples::{self, SampleFilter, SamplePage};
use crate::table::{CurveAxis, CurveView};
use crate::timeline::{self, TimelineQuery};
use crate::tokens::{self, TrajectoryName};
use crate::{page, panels, prometheus, status, stream};

/// Most points of a response.
const MAX_POINTS: usize = 150_000;
/// Width of a panel if a request does not say it, pixels.
const DEFAULT_PIXELS: usize = 400;
/// Most pixels of a panel that curves are computed for.
const MAX_PIXELS: usize = 4096;
/// Most metrics of a request.
const MAX_KEYS: usize = 256;
/// Most events, and most remarks, of a response.
const MAX_ENTRIES: usize = 500;
/// Longest text that is searched for, bytes.
const MAX_TEXT_BYTES: usize = 1000;

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
    let mut router = Router::new()
        .route("/api/overview", get(overview))
        .route("/api/runs", get(runs))
        .route("/api/metrics", get(metrics))
        .route("/api/steps", get(steps))
        .route("/api/samples", get(sample_page))
        .route("/api/search", get(search))
        .route("/api/recipe", get(recipe))
        .route("/api/history", get(history))
        .route("/api/timeline", get(timeline_window))
        .route("/api/status", get(run_status))
        .route("/api/about", get(about_run))
        .route("/api/tokens", get(token_rows))
        .route("/api/shared", get(shared_tasks))
        .route("/api/compare", get(compared))
        .route("/api/events", get(stream::revisions))
        .route("/metrics", get(last_values));
    for path in page::paths() {
        let serve = move || async move { page::file(path).ok_or(StatusCode::NOT_FOUND) };
        router = router.route(path, get(serve));
    }
    router
        .fallback(|| async { (StatusCode::NOT_FOUND, "there is no such page") })
        .layer(axum::middleware::from_fn_with_state(access, guard))
        .with_state(state)
}

/// Why a request has no answer.
#[derive(Debug)]
enum PageRefusal {
    NoRun(String),
    NoSamples(u64),
    NoTokens(u64),
    NoRecipe(String),
    TextTooLong,
    File(std::io::Error),
    Panicked,
}

impl From<std::io::Error> for PageRefusal {
    fn from(error: std::io::Error) -> Self {
        Self::File(error)
    }
}

impl IntoResponse for PageRefusal {
    fn into_response(self) -> Response {
        let (status, why) = match self {
            Self::NoRun(name) => (StatusCode::NOT_FOUND, format!("there is no run `{name}`")),
            Self::NoSamples(step) => (StatusCode::NOT_FOUND, format!("step {step} has no samples")),
            Self::NoTokens(step) => {
                (StatusCode::NOT_FOUND, format!("step {step} has no tokens; `log.tokens` writes them"))
            }
            Self::NoRecipe(name) => (StatusCode::NOT_FOUND, format!("run `{name}` has no `resolved.toml`")),
            Self::TextTooLong => {
                (StatusCode::BAD_REQUEST, format!("search for a text of at most {MAX_TEXT_BYTES} bytes"))
            }
            Self::File(error) => {
                (StatusCode::INTERNAL_SERVER_ERROR, format!("a file of the run cannot be read: {error}"))
            }
            Self::Panicked => {
                (StatusCode::INTERNAL_SERVER_ERROR, "a bug of the server: see its output".to_owned())
            }
        };
        (status, why).into_response()
    }
}

/// Computes a response of JSON.
async fn respond(
    state: PageState,
    compute: impl FnOnce(&RunCatalog) -> Result<Value, PageRefusal> + Send + 'static,
) -> Result<Response, PageRefusal> {
    let text = move |catalog: &RunCatalog| compute(catalog).map(|value| value.to_string());
    respond_text(state, "application/json", text).await
}

/// Computes a response on a thread that may wait for files.
async fn respond_text(
    state: PageState,
    media_type: &'static str,
    compute: impl FnOnce(&RunCatalog) -> Result<String, PageRefusal> + Send + 'static,
) -> Result<Response, PageRefusal> {
    let body = tokio::task::spawn_blocking(move || compute(&state.catalog));
    let body = body.await.map_err(|_| PageRefusal::Panicked)??;
    Ok(([(header::CONTENT_TYPE, media_type)], body).into_response())
}

fn run_of<'a>(catalog: &'a RunCatalog, name: &str) -> Result<&'a ShownRun, PageRefusal> {
    catalog.get(name).ok_or_else(|| PageRefusal::NoRun(name.to_owned()))
}

/// The drawing that curves are for.
#[derive(Debug, Default, Deserialize)]
struct CurvesQuery {
    /// Names of metrics, separated by commas.
    #[serde(default)]
    keys: String,
    /// One run; all if it is missing.
    run: Option<String>,
    #[serde(default)]
    x: CurveAxis,
    /// Width of a panel, pixels.
    pixels: Option<usize>,
    from: Option<f64>,
    to: Option<f64>,
}

impl CurvesQuery {
    /// Curves of these metrics, by run and metric.
    fn curves(&self, catalog: &RunCatalog, keys: &[String]) -> Result<Value, PageRefusal> {
        let runs: Vec<&ShownRun> = match &self.run {
            Some(name) => vec![run_of(catalog, name)?],
            None => catalog.iter().collect(),
        };
        let keys = &keys[..keys.len().min(MAX_KEYS)];
        let affordable = MAX_POINTS / 2 / (runs.len() * keys.len()).max(1);
        let pixels = self.pixels.unwrap_or(DEFAULT_PIXELS).clamp(1, MAX_PIXELS).min(affordable.max(1));
        let view = CurveView { axis: self.x, pixels, range: self.from.zip(self.to) };
        let of_run = |run: &ShownRun| {
            let contents = run.contents();
            let curves = keys.iter().map(|key| (key, contents.table.curve(key, view)));
            let curves = curves.filter(|(_, curve)| curve.len() > 0);
            let curves: Map<String, Value> = curves.map(|(key, curve)| (key.clone(), json!(curve))).collect();
            (run.name().to_owned(), Value::Object(curves))
        };
        Ok(Value::Object(runs.into_iter().map(of_run).collect()))
    }
}

async fn overview(
    State(state): State<PageState>,
    Query(query): Query<CurvesQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let (screen, keys) = panels::first_screen(catalog);
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "runs": catalog.describe(),
            "panels": screen["panels"],
            "names": screen["names"],
            "curves": query.curves(catalog, &keys)?,
        }))
    })
    .await
}

async fn runs(State(state): State<PageState>) -> Result<Response, PageRefusal> {
    respond(state, |catalog| Ok(catalog.describe().into())).await
}

async fn metrics(
    State(state): State<PageState>,
    Query(query): Query<CurvesQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let keys: Vec<String> =
            query.keys.split(',').filter(|key| !key.is_empty()).map(str::to_owned).collect();
        query.curves(catalog, &keys)
    })
    .await
}

/// A run, and what of it.
#[derive(Debug, Deserialize)]
struct RunQuery {
    run: String,
    /// Another run to compare the recipe with.
    against: Option<String>,
    #[serde(default)]
    step: u64,
    /// Groups before a page.
    #[serde(default)]
    offset: usize,
    /// A text to search for.
    #[serde(default)]
    text: String,
    /// A search starts below this step.
    before: Option<u64>,
    /// A second step.
    #[serde(default)]
    other: u64,
    /// A trajectory.
    #[serde(default)]
    group: u64,
    #[serde(default)]
    index: u64,
    /// Only groups with a reward in this range, with this reason to stop, with different rewards.
    reward_from: Option<f64>,
    reward_to: Option<f64>,
    #[serde(default)]
    stop: String,
    #[serde(default)]
    differing: bool,
}

impl RunQuery {
    fn filter(&self) -> SampleFilter<'_> {
        let reward = match (self.reward_from, self.reward_to) {
            (None, None) => None,
            (from, to) => Some((from.unwrap_or(f64::NEG_INFINITY), to.unwrap_or(f64::INFINITY))),
        };
        SampleFilter { text: &self.text, reward, stop: &self.stop, differing: self.differing }
    }
}

async fn steps(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| Ok(samples::steps(run_of(catalog, &query.run)?.root())?.into())).await
}

async fn sample_page(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let RunQuery { ref run, step, offset, .. } = query;
        if query.text.len() > MAX_TEXT_BYTES {
            return Err(PageRefusal::TextTooLong);
        }
        let root = run_of(catalog, run)?.root();
        let page = samples::page(root, SamplePage { step, offset, filter: query.filter() })?;
        page.ok_or(PageRefusal::NoSamples(step))
    })
    .await
}

async fn search(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let root = run_of(catalog, &query.run)?.root();
        if query.text.len() > MAX_TEXT_BYTES {
            return Err(PageRefusal::TextTooLong);
        }
        if query.text.is_empty() {
            return Ok(json!({ "hits": [], "next": null }));
        }
        Ok(samples::search(root, &query.text, query.before)?)
    })
    .await
}

async fn recipe(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let read = |name: &str| {
            let found = ResolvedRecipe::read(run_of(catalog, name)?.root())?;
            found.ok_or_else(|| PageRefusal::NoRecipe(name.to_owned()))
        };
        let other = query.against.as_deref().map(read).transpose()?;
        Ok(read(&query.run)?.compare(other.as_ref()))
    })
    .await
}

async fn history(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let contents = run_of(catalog, &query.run)?.contents();
        Ok(contents.history.entries(MAX_ENTRIES))
    })
    .await
}

/// A run, and a range of its timeline.
#[derive(Debug, Deserialize)]
struct WindowQuery {
    run: String,
    from: Option<f64>,
    to: Option<f64>,
    pixels: Option<usize>,
}

async fn timeline_window(
    State(state): State<PageState>,
    Query(query): Query<WindowQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let WindowQuery { run, from, to, pixels } = query;
        let run = run_of(catalog, &run)?;
        let planned = run.timeline().plan(TimelineQuery { from, to, pixels });
        Ok(timeline::answer(run.root(), planned)?)
    })
    .await
}

async fn token_rows(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let RunQuery { ref run, step, group, index, .. } = query;
        let rows = tokens::rows(run_of(catalog, run)?.root(), TrajectoryName { step, group, index })?;
        rows.ok_or(PageRefusal::NoTokens(step))
    })
    .await
}

async fn shared_tasks(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        Ok(compare::shared(run_of(catalog, &query.run)?.root(), query.step, query.before)?)
    })
    .await
}

async fn compared(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let RunQuery { ref run, step, other, offset, .. } = query;
        let pairs = compare::pairs(run_of(catalog, run)?.root(), StepPair { step, other, offset })?;
        pairs.ok_or(PageRefusal::NoSamples(other))
    })
    .await
}

async fn run_status(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let found = status::read(run_of(catalog, &query.run)?.root(), SystemTime::now())?;
        Ok(found.unwrap_or_else(|| json!({ "status": null, "age_s": null })))
    })
    .await
}

async fn last_values(State(state): State<PageState>) -> Result<Response, PageRefusal> {
    respond_text(state, prometheus::MEDIA_TYPE, |catalog| Ok(prometheus::text(catalog))).await
}

async fn about_run(
    State(state): State<PageState>,
    Query(query): Query<RunQuery>,
) -> Result<Response, PageRefusal> {
    respond(state, move |catalog| {
        let run = run_of(catalog, &query.run)?;
        Ok(about(run.root(), &run.contents().table)?)
    })
    .await
}
