//! The API: what the page asks for.
//!
//! - `/api/overview?x=&pixels=`: runs, panels and curves of the first screen, in one response
//! - `/api/runs`; `/api/metrics?keys=&run=&x=&pixels=&from=&to=`
//! - `/api/steps?run=`, `/api/samples?run=&step=&offset=&text=`, `/api/search?run=&text=&before=`
//! - `/api/tokens?run=&step=&group=&index=`, `/api/shared?run=&step=&before=`, `/api/compare?run=&step=&other=&offset=`
//! - `/api/timeline?run=&from=&to=&pixels=`, `/api/why?run=`, `/api/status?run=`, `/api/about?run=`
//! - `/api/recipe?run=&against=`, `/api/history?run=`
//!
//! Invariant: a response has at most [`MAX_POINTS`] points, however many runs, metrics and pixels are asked for. A run is
//! named by its name on the page, never by a path.

use std::time::SystemTime;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::about::about;
use crate::catalog::RunCatalog;
use crate::compare::{self, StepPair};
use crate::recipe::ResolvedRecipe;
use crate::run::ShownRun;
use crate::samples::{self, SampleFilter, SamplePage};
use crate::table::{CurveAxis, CurveView};
use crate::timeline::{self, TimelineQuery};
use crate::tokens::{self, TrajectoryName};
use crate::{panels, status};

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

/// Computes the answer to a request.
pub(crate) type ApiAnswer = fn(&RunCatalog, &ApiQuery) -> Result<Value, PageRefusal>;

/// The answers by their paths.
pub(crate) const ANSWERS: [(&str, ApiAnswer); 15] = [
    ("/api/overview", overview),
    ("/api/runs", |catalog, _| Ok(catalog.describe().into())),
    ("/api/metrics", metrics),
    ("/api/steps", |catalog, query| Ok(samples::steps(query.run(catalog)?.root())?.into())),
    ("/api/samples", sample_page),
    ("/api/search", search),
    ("/api/tokens", token_rows),
    ("/api/shared", |catalog, query| {
        Ok(compare::shared(query.run(catalog)?.root(), query.step, query.before)?)
    }),
    ("/api/compare", compared),
    ("/api/timeline", timeline_window),
    ("/api/why", |catalog, query| Ok(query.run(catalog)?.why(catalog.advisor())?)),
    ("/api/status", run_status),
    ("/api/about", about_run),
    ("/api/recipe", recipe),
    ("/api/history", |catalog, query| Ok(query.run(catalog)?.contents().history.entries(MAX_ENTRIES))),
];

/// What a request says; every route takes what it needs.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ApiQuery {
    run: Option<String>,
    /// Another run to compare the recipe with.
    against: Option<String>,
    step: u64,
    /// A second step.
    other: u64,
    /// A trajectory.
    group: u64,
    index: u64,
    /// Groups before a page.
    offset: usize,
    /// A text to search for.
    text: String,
    /// A search starts below this step.
    before: Option<u64>,
    /// Only groups with a reward in this range, with this reason to stop, with different rewards.
    reward_from: Option<f64>,
    reward_to: Option<f64>,
    stop: String,
    differing: bool,
    /// Names of metrics, separated by commas.
    keys: String,
    x: CurveAxis,
    /// Width of a drawing, pixels.
    pixels: Option<usize>,
    /// First and last x or time.
    from: Option<f64>,
    to: Option<f64>,
}

impl ApiQuery {
    /// The run that is asked for.
    fn run<'a>(&self, catalog: &'a RunCatalog) -> Result<&'a ShownRun, PageRefusal> {
        run_of(catalog, self.run.as_deref().unwrap_or_default())
    }

    fn filter(&self) -> SampleFilter<'_> {
        let reward = match (self.reward_from, self.reward_to) {
            (None, None) => None,
            (from, to) => Some((from.unwrap_or(f64::NEG_INFINITY), to.unwrap_or(f64::INFINITY))),
        };
        SampleFilter { text: &self.text, reward, stop: &self.stop, differing: self.differing }
    }

    /// Curves of these metrics, by run and metric, of the run that is asked for or of all.
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

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) enum PageRefusal {
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

fn run_of<'a>(catalog: &'a RunCatalog, name: &str) -> Result<&'a ShownRun, PageRefusal> {
    catalog.get(name).ok_or_else(|| PageRefusal::NoRun(name.to_owned()))
}

fn overview(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let (screen, keys) = panels::first_screen(catalog);
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "runs": catalog.describe(),
        "panels": screen["panels"],
        "names": screen["names"],
        "curves": query.curves(catalog, &keys)?,
    }))
}

fn metrics(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let keys: Vec<String> = query.keys.split(',').filter(|key| !key.is_empty()).map(str::to_owned).collect();
    query.curves(catalog, &keys)
}

fn sample_page(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    if query.text.len() > MAX_TEXT_BYTES {
        return Err(PageRefusal::TextTooLong);
    }
    let asked = SamplePage { step: query.step, offset: query.offset, filter: query.filter() };
    let page = samples::page(query.run(catalog)?.root(), asked)?;
    page.ok_or(PageRefusal::NoSamples(query.step))
}

fn search(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let root = query.run(catalog)?.root();
    if query.text.len() > MAX_TEXT_BYTES {
        return Err(PageRefusal::TextTooLong);
    }
    if query.text.is_empty() {
        return Ok(json!({ "hits": [], "next": null }));
    }
    Ok(samples::search(root, &query.text, query.before)?)
}

fn token_rows(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let ApiQuery { step, group, index, .. } = *query;
    let rows = tokens::rows(query.run(catalog)?.root(), TrajectoryName { step, group, index })?;
    rows.ok_or(PageRefusal::NoTokens(step))
}

fn compared(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let ApiQuery { step, other, offset, .. } = *query;
    let pairs = compare::pairs(query.run(catalog)?.root(), StepPair { step, other, offset })?;
    pairs.ok_or(PageRefusal::NoSamples(other))
}

fn timeline_window(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let ApiQuery { from, to, pixels, .. } = *query;
    let run = query.run(catalog)?;
    let planned = run.timeline().plan(TimelineQuery { from, to, pixels });
    Ok(timeline::answer(run.root(), planned)?)
}

fn run_status(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let found = status::read(query.run(catalog)?.root(), SystemTime::now())?;
    Ok(found.unwrap_or_else(|| json!({ "status": null, "age_s": null })))
}

fn about_run(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let run = query.run(catalog)?;
    Ok(about(run.root(), &run.contents().table)?)
}

fn recipe(catalog: &RunCatalog, query: &ApiQuery) -> Result<Value, PageRefusal> {
    let read = |run: &ShownRun| {
        let found = ResolvedRecipe::read(run.root())?;
        found.ok_or_else(|| PageRefusal::NoRecipe(run.name().to_owned()))
    };
    let other = query.against.as_deref().map(|name| read(run_of(catalog, name)?)).transpose()?;
    Ok(read(query.run(catalog)?)?.compare(other.as_ref()))
}
