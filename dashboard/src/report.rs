//! Runs as one HTML file that opens without a server: the page with the answers of its API inside.
//!
//! Invariant: a report has at most [`MAX_REPORT_BYTES`], whatever its runs have: curves get fewer points, and what does not fit
//! is left out. The texts of a run cannot leave the JSON that they are in.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use crate::about::about;
use crate::bundle::page_with;
use crate::catalog::RunCatalog;
use crate::panels::{self, PanelCurves, first_screen};
use crate::recipe::ResolvedRecipe;
use crate::run::ShownRun;
use crate::samples::{self, SampleFilter, SamplePage};
use crate::server::{MAX_RUNS, is_run};
use crate::table::{CurveAxis, CurveView};
use crate::timeline::{self, TimelineQuery};
use crate::{status, tokens};

/// Most bytes of a report.
pub const MAX_REPORT_BYTES: usize = 20_000_000;
/// Bytes of the page itself, at most.
const PAGE_BYTES: usize = 400_000;
/// Bytes of names and last values above which metrics are left out.
const OVERVIEW_BYTES: usize = 4_000_000;
/// Metrics that are in every report.
const MIN_METRICS: usize = 100;
/// Most bytes of curves.
const CURVE_BYTES: usize = 9_000_000;
/// Most points of all curves over one axis.
const CURVE_POINTS: usize = 120_000;
/// Most pixels that a curve is computed for.
const MAX_PIXELS: usize = 800;
/// Pixels of the timeline, of the newest steps and of the whole run.
const TIMELINE_PIXELS: usize = 1600;
/// Steps whose samples are in a report: the first, the last, and some between them.
const SAMPLED_STEPS: usize = 6;
/// Most events, and most remarks.
const MAX_ENTRIES: usize = 500;

/// A timeline of no run.
const WITHOUT_SPANS: &str = r#"{
    "from": 0, "to": 1, "first": null, "last": null, "indexed": 1, "exact": false, "lanes": [], "sentence": "", "stalls": [],
    "steps": [], "trajectories": [], "trajectories_left_out": 0, "unreadable": 0
}"#;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// A directory is no run.
    #[error(
        "`{path}` is no run directory: it has neither `metrics.jsonl` nor `resolved.toml` nor `status.json`"
    )]
    NotARun {
        /// The directory.
        path: PathBuf,
    },
    /// Too many runs for one report.
    #[error("{given} runs are too many for one report; name at most {most}")]
    TooManyRuns {
        /// Runs that were named.
        given: usize,
        /// Most runs of a report.
        most: usize,
    },
    /// A file of a run cannot be read.
    #[error("a file of `{path}` cannot be read: {source}")]
    Unreadable {
        /// The run directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// One HTML file with curves of all metrics, samples of a few steps with their tokens, timeline, recipe, events, environment
/// and timings of these runs. It loads nothing, and has at most [`MAX_REPORT_BYTES`].
///
/// It reads files, so a task of a runtime calls it in `spawn_blocking`.
///
/// # Errors
/// A directory that is no run; a file that cannot be read; too many runs.
pub fn report(runs: &[PathBuf]) -> Result<String, ReportError> {
    let catalog = opened(runs)?;
    catalog.catch_up();
    let mut budget = ReportBudget { left: MAX_REPORT_BYTES - PAGE_BYTES };
    let (overview, keys) = overview(&catalog);
    budget.left = budget.left.saturating_sub(escaped(&overview).len());
    let mut of_curves = ReportBudget { left: CURVE_BYTES.min(budget.left / 2) };
    let curves = curves(&catalog, &keys, &mut of_curves);
    budget.left = budget.left.saturating_sub(escaped(&curves).len());
    let (mut of_runs, mut remaining) = (Map::new(), runs.len());
    for run in catalog.iter() {
        // What a run does not need is for the runs after it.
        let share = budget.left / remaining.max(1);
        let mut own = ReportBudget { left: share };
        let parts = parts(run, &mut own)
            .map_err(|source| ReportError::Unreadable { path: run.root().to_owned(), source })?;
        of_runs.insert(run.name().to_owned(), parts);
        budget.left -= share - own.left;
        remaining -= 1;
    }
    let data = json!({ "overview": overview, "curves": curves, "of_runs": of_runs });
    // The keys are random for each process; a run was written before.
    let half = || RandomState::new().hash_one(SystemTime::now());
    Ok(page_with(&escaped(&data), &format!("{:016x}{:016x}", half(), half())))
}

/// The panels of the first screen of these runs, with curves of at most two points for each of `pixels`.
///
/// It reads files, so a task of a runtime calls it in `spawn_blocking`.
///
/// # Errors
/// A directory that is no run; too many runs.
pub fn panel_curves(runs: &[PathBuf], pixels: usize) -> Result<Vec<PanelCurves>, ReportError> {
    Ok(panels::panel_curves(&opened(runs)?, pixels))
}

/// The runs of a report, whose metrics are read.
fn opened(runs: &[PathBuf]) -> Result<RunCatalog, ReportError> {
    if runs.len() > MAX_RUNS {
        return Err(ReportError::TooManyRuns { given: runs.len(), most: MAX_RUNS });
    }
    if let Some(path) = runs.iter().find(|path| !is_run(path)) {
        return Err(ReportError::NotARun { path: path.clone() });
    }
    Ok(RunCatalog::open(runs))
}

/// Bytes that are left.
struct ReportBudget {
    left: usize,
}

impl ReportBudget {
    /// The value, if it fits.
    fn take(&mut self, value: Value) -> Option<Value> {
        let bytes = escaped(&value).len() + 64;
        self.left = self.left.checked_sub(bytes)?;
        Some(value)
    }

    /// The value, or `otherwise` if it does not fit.
    fn take_or(&mut self, value: Value, otherwise: Value) -> Value {
        self.take(value).unwrap_or(otherwise)
    }
}

/// JSON as the content of a script element: no `<` can begin its end or a comment.
fn escaped(value: &Value) -> String {
    value
        .to_string()
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// Runs, panels, names and last values, and the names: those of the first screen first. Of very many metrics the last ones are
/// left out.
fn overview(catalog: &RunCatalog) -> (Value, Vec<String>) {
    let (screen, shown) = first_screen(catalog);
    let mut runs = catalog.describe();
    let mut keys = shown;
    let mut known: BTreeSet<String> = keys.iter().cloned().collect();
    let names = screen["names"].as_array().into_iter().flatten().filter_map(Value::as_str);
    keys.extend(names.filter(|name| known.insert((*name).to_owned())).map(str::to_owned));
    loop {
        let overview = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "runs": runs,
            "panels": screen["panels"],
            "names": keys,
        });
        if escaped(&overview).len() <= OVERVIEW_BYTES || keys.len() <= MIN_METRICS {
            return (overview, keys);
        }
        keys.truncate((keys.len() / 2).max(MIN_METRICS));
        let kept: BTreeSet<&String> = keys.iter().collect();
        for last in runs.iter_mut().filter_map(|run| run["last"].as_object_mut()) {
            last.retain(|name, _| kept.contains(name));
        }
    }
}

/// Curves of these metrics by axis, run and metric, as far as they fit.
fn curves(catalog: &RunCatalog, keys: &[String], budget: &mut ReportBudget) -> Value {
    let runs = catalog.iter().count();
    let pixels = (CURVE_POINTS / 2 / (runs * keys.len()).max(1)).clamp(1, MAX_PIXELS);
    let axes = [("step", CurveAxis::Step), ("tokens", CurveAxis::Tokens), ("time", CurveAxis::Time)];
    let mut all: Vec<Map<String, Value>> =
        axes.iter().map(|_| catalog.iter().map(|run| (run.name().to_owned(), json!({}))).collect()).collect();
    'keys: for key in keys {
        for run in catalog.iter() {
            let contents = run.contents();
            let drawn =
                axes.map(|(_, axis)| contents.table.curve(key, CurveView { axis, pixels, range: None }));
            if drawn[0].len() == 0 {
                continue;
            }
            let Some(drawn) = budget.take(json!(drawn)) else { break 'keys };
            for (axis, of_axis) in all.iter_mut().enumerate() {
                of_axis[run.name()][key] = drawn[axis].clone();
            }
        }
    }
    axes.iter()
        .zip(all)
        .map(|((name, _), of_axis)| ((*name).to_owned(), of_axis.into()))
        .collect::<Map<_, _>>()
        .into()
}

/// Everything of one run but its curves. Samples come last: they get what is left.
fn parts(run: &ShownRun, budget: &mut ReportBudget) -> io::Result<Value> {
    let root = run.root();
    let recipe = ResolvedRecipe::read(root)?.map_or_else(|| json!([]), |recipe| recipe.compare(None));
    let (history, about) = {
        let contents = run.contents();
        (contents.history.entries(MAX_ENTRIES), about(root, &contents.table)?)
    };
    let nothing = json!({ "status": null, "age_s": null });
    let found = status::read(root, SystemTime::now())?.unwrap_or_else(|| nothing.clone());
    let window = |from: Option<f64>, to: Option<f64>| {
        let planned = run.timeline().plan(TimelineQuery { from, to, pixels: Some(TIMELINE_PIXELS) });
        timeline::answer(root, planned)
    };
    let newest = window(None, None)?;
    let whole = window(newest["first"].as_f64(), newest["last"].as_f64())?;
    let empty = json!({ "facts": {}, "attempts": [], "timings": [], "page": null });
    let mut parts = json!({
        "recipe": budget.take_or(recipe, json!([])),
        "about": budget.take_or(about, empty),
        "history": budget.take_or(history, json!({ "events": [], "remarks": [], "left_out": 0 })),
        "status": budget.take_or(found, nothing),
    });
    let without_spans = serde_json::from_str(WITHOUT_SPANS).unwrap_or_default();
    let newest = budget.take_or(newest, without_spans);
    let whole = budget.take(whole).unwrap_or_else(|| newest.clone());
    parts["timeline"] = json!({ "newest": newest, "whole": whole });
    // Recommendations are computed for those who ask, not for a file.
    parts["why"] = budget.take_or(run.why(None)?, Value::Null);
    let pages = sampled(run, budget)?;
    parts["tokens"] = tokens_of(run, &pages, budget)?;
    parts["steps"] = pages.iter().map(|(step, _)| *step).collect();
    parts["samples"] = pages.into_iter().map(|(step, page)| (step.to_string(), page)).collect();
    Ok(parts)
}

/// Samples of a few steps: the first page of each.
fn sampled(run: &ShownRun, budget: &mut ReportBudget) -> io::Result<Vec<(u64, Value)>> {
    let steps = samples::steps(run.root())?;
    let count = steps.len().min(SAMPLED_STEPS);
    // With more than one, the first and the last are among them.
    let chosen = (0..count).map(|at| steps[(at * (steps.len() - 1)).checked_div(count - 1).unwrap_or(0)]);
    // Tokens get half of what is left.
    let half = budget.left / 2;
    let (mut own, mut pages) = (ReportBudget { left: half }, Vec::new());
    for step in chosen {
        let asked = SamplePage { step, offset: 0, filter: SampleFilter::default() };
        let page = samples::page(run.root(), asked)?;
        pages.extend(page.and_then(|page| own.take(page)).map(|page| (step, page)));
    }
    budget.left -= half - own.left;
    Ok(pages)
}

/// Tokens of the trajectories on these pages as long as they fit, by step, group and index.
fn tokens_of(run: &ShownRun, pages: &[(u64, Value)], budget: &mut ReportBudget) -> io::Result<Value> {
    let mut found = Map::new();
    // The newest steps are those that a reader looks at.
    for (step, page) in pages.iter().rev() {
        let groups = page["groups"].as_array().into_iter().flatten();
        let groups: BTreeSet<u64> = groups.filter_map(|group| group["group"].as_u64()).collect();
        tokens::for_each_row(run.root(), *step, |group, index, row| {
            if !groups.contains(&group) {
                return true;
            }
            let Some(row) = serde_json::from_slice::<Value>(row).ok().and_then(|row| budget.take(row)) else {
                return false;
            };
            let empty = json!({ "rows": [], "left_out": 0, "complete": true });
            let of_trajectory = found.entry(format!("{step}.{group}.{index}")).or_insert(empty);
            if let Some(rows) = of_trajectory["rows"].as_array_mut() {
                rows.push(row);
            }
            true
        })?;
    }
    Ok(found.into())
}

#[cfg(test)]
mod tests;
