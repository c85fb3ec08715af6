//! The first screen: which metrics share a panel.
//!
//! Invariant: a panel names metrics as `metrics.jsonl` has them; one that no run has is left out.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::catalog::RunCatalog;
use crate::run::ShownRun;
use crate::table::{CurveAxis, CurveView, MetricCurve};

/// Most metrics of one panel.
const MAX_PANEL_KEYS: usize = 8;

/// A panel of the first screen.
struct PanelSpec {
    /// The row of the screen.
    row: &'static str,
    title: &'static str,
    /// Names of metrics; one `*` stands for any text.
    keys: &'static [&'static str],
    /// Whether the values are parts of a whole and are drawn on top of each other.
    stacked: bool,
}

const fn panel(row: &'static str, title: &'static str, keys: &'static [&'static str]) -> PanelSpec {
    PanelSpec { row, title, keys, stacked: false }
}

const fn stacked(row: &'static str, title: &'static str, keys: &'static [&'static str]) -> PanelSpec {
    PanelSpec { row, title, keys, stacked: true }
}

/// The first screen, row by row.
const PANELS: [PanelSpec; 20] = [
    panel("Reward", "reward", &["reward/mean", "eval/reward"]),
    // A metric with `_low` and `_high` beside it has an interval.
    panel(
        "Reward",
        "held-out accuracy",
        &[
            "eval/accuracy",
            "eval/accuracy_low",
            "eval/accuracy_high",
            "eval/avg@*",
            "eval/pass@*",
            "eval/*/accuracy",
        ],
    ),
    panel("Reward", "reward by component", &["reward/*/mean", "reward/role/*"]),
    panel("Reward", "reward deviation in a batch", &["reward/std"]),
    panel("Stability", "entropy, nats", &["entropy/mean"]),
    panel("Stability", "KL, nats", &["kl/mismatch", "kl/ref"]),
    panel(
        "Stability",
        "clipped and masked share",
        &["clip/low_mean", "clip/high_mean", "clip/dual_mean", "is/masked_frac"],
    ),
    panel("Stability", "gradient norm", &["optim/grad_norm", "critic/grad_norm"]),
    panel("Loss and staleness", "loss", &["loss/mean", "loss/sum", "critic/loss"]),
    panel("Loss and staleness", "staleness, versions", &["staleness/mean", "staleness/p95", "staleness/max"]),
    panel(
        "Loss and staleness",
        "buffer, groups",
        &["buffer/size", "buffer/dropped_stale", "buffer/quarantined"],
    ),
    panel("Loss and staleness", "memory, MiB", &["memory/peak_mib", "memory/*_mib"]),
    panel(
        "Batch",
        "completion length, tokens",
        &["completions/mean_length", "completions/min_length", "completions/max_length"],
    ),
    panel(
        "Batch",
        "truncated, and groups with equal rewards, share",
        &["completions/clipped_ratio", "reward/frac_zero_std"],
    ),
    panel("Batch", "turns of an episode", &["environment/turns"]),
    stacked("Batch", "stop reasons", &["completions/stop/*", "environment/stop/*"]),
    panel("Speed and failures", "tokens per second", &["rollout/tokens_per_s", "trainer/tokens_per_s"]),
    panel(
        "Speed and failures",
        "idle share",
        &["rollout/idle_ratio", "trainer/idle_ratio", "trainer/rank_wait_ratio"],
    ),
    panel(
        "Speed and failures",
        "time of a step, s",
        &[
            "time/step",
            "time/wait_for_batch",
            "time/forward_backward",
            "time/weight_sync",
            "time/decode_stall",
            "time/save_ckpt",
        ],
    ),
    panel(
        "Speed and failures",
        "failures",
        &["environment/failed", "reward/*/errors", "reward/*/timeouts", "eval/failed"],
    ),
];

/// A panel of the first screen with its curves over the steps.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PanelCurves {
    /// The row of the screen, which several panels share.
    pub row: &'static str,
    /// What the panel shows, with its unit.
    pub title: &'static str,
    /// In the order of the runs, and of the metrics of the panel.
    pub curves: Vec<PanelCurve>,
}

/// A metric of a run.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PanelCurve {
    /// The name of the run; unique among those of a report.
    pub run: String,
    /// The name of the metric.
    pub metric: String,
    /// Steps and values; NaN for a value that is not finite.
    pub points: Vec<(f64, f64)>,
}

/// The panels that have a metric in any of the runs, with at most two points of every curve for each of `pixels`.
pub(crate) fn panel_curves(catalog: &RunCatalog, pixels: usize) -> Vec<PanelCurves> {
    let view = CurveView { axis: CurveAxis::Step, pixels, range: None };
    let names = names(catalog);
    let of_run = |run: &ShownRun, keys: &[&str]| -> Vec<PanelCurve> {
        let contents = run.contents();
        let curves = keys.iter().map(|key| (*key, contents.table.curve(key, view)));
        let curves = curves.filter(|(_, curve)| curve.len() > 0);
        let named = |(key, curve): (&str, MetricCurve)| PanelCurve {
            run: run.name().to_owned(),
            metric: key.to_owned(),
            points: curve.points().collect(),
        };
        curves.map(named).collect()
    };
    let chosen = chosen(&names).into_iter();
    let panel = |(spec, keys): (&PanelSpec, Vec<&str>)| PanelCurves {
        row: spec.row,
        title: spec.title,
        curves: catalog.iter().flat_map(|run| of_run(run, &keys)).collect(),
    };
    chosen.map(panel).filter(|panel| !panel.curves.is_empty()).collect()
}

/// The panels that have a metric in any of the runs, and their metrics.
pub(crate) fn first_screen(catalog: &RunCatalog) -> (Value, Vec<String>) {
    let names = names(catalog);
    let mut panels = Vec::new();
    let mut shown = Vec::new();
    for (PanelSpec { row, title, stacked, .. }, keys) in chosen(&names) {
        shown.extend(keys.iter().map(|name| (*name).to_owned()));
        panels.push(json!({ "row": row, "title": title, "keys": keys, "stacked": stacked }));
    }
    (json!({ "panels": panels, "names": names }), shown)
}

/// The names of all metrics, in the order of their first lines.
fn names(catalog: &RunCatalog) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for run in catalog.iter() {
        let known: BTreeSet<String> = names.iter().cloned().collect();
        let contents = run.contents();
        names.extend(contents.table.names().filter(|name| !known.contains(*name)).map(str::to_owned));
    }
    names
}

/// The panels that show any of these metrics, with the metrics.
fn chosen(names: &[String]) -> Vec<(&'static PanelSpec, Vec<&str>)> {
    let mut chosen = Vec::new();
    for spec in &PANELS {
        let mut of_panel: Vec<&str> = Vec::new();
        for pattern in spec.keys {
            let found = names.iter().map(String::as_str).filter(|name| matches(pattern, name));
            for name in found.take(MAX_PANEL_KEYS) {
                if of_panel.len() < MAX_PANEL_KEYS && !of_panel.contains(&name) {
                    of_panel.push(name);
                }
            }
        }
        if !of_panel.is_empty() {
            chosen.push((spec, of_panel));
        }
    }
    chosen
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, end)) => {
            name.len() > start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_any_text() {
        for (pattern, name, expected) in [
            ("reward/*/mean", "reward/math/mean", true),
            ("reward/*/mean", "reward/mean", false),
            ("eval/pass@*", "eval/pass@8", true),
            ("kl/ref", "kl/reference", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn only_metrics_of_a_run_have_panels() {
        let directory = tempfile::tempdir().unwrap();
        let line =
            "{\"step\":1,\"reward/mean\":1,\"reward/math/mean\":2,\"x\":3,\"environment/stop/length\":4}\n";
        std::fs::write(directory.path().join("metrics.jsonl"), line).unwrap();
        let catalog = RunCatalog::open(&[directory.path().to_owned()]);
        let (screen, shown) = first_screen(&catalog);
        assert_eq!(shown, ["reward/mean", "reward/math/mean", "environment/stop/length"]);
        assert_eq!(screen["panels"][1]["title"], "reward by component");
        assert_eq!(screen["panels"][2]["stacked"], true);
        assert_eq!(
            screen["names"],
            json!(["reward/mean", "reward/math/mean", "x", "environment/stop/length"])
        );
        let curves = panel_curves(&catalog, 100);
        assert_eq!((curves.len(), curves[2].row, curves[2].title), (3, "Batch", "stop reasons"));
        assert_eq!(curves[2].curves[0].metric, "environment/stop/length");
        assert_eq!(curves[2].curves[0].points, [(1.0, 4.0)]);
    }
}
