//! Metrics of rewards: values, latencies, and the reward that slows the run down most.
//!
//! Invariant: values are those of the trained batch. Errors, latencies and queues are those of all completions scored during
//! the step, trained or not.

use rewards::{LoadCounts, RewardSpec};
use rollout::FailureKind;
use rollout::scoring::{ENVIRONMENT, FAILED};
use trainer::report::ComponentStatistics;

use super::ObserverInputs;
use crate::metrics::Metrics;

/// Share of a step from which the time until a trajectory is judged counts as long.
const LONG: f64 = 0.25;

/// Reserved names under `reward/NAME/...`; a detail of a reward with such a name is under `reward/NAME/detail/`.
const OURS: [&str; 9] = [
    "mean",
    "weight",
    "errors",
    "timeouts",
    "latency_p50_s",
    "latency_p95_s",
    "latency_max_s",
    "queue",
    "queued_p95_s",
];

/// Sets `reward/NAME/...` for every reward, and `environment/...` for what episodes in an environment count.
pub(super) fn measure(specs: &[RewardSpec], metrics: &mut Metrics, inputs: &ObserverInputs<'_>) {
    for (name, component) in &inputs.step.batch.components {
        if name == ENVIRONMENT && !specs.iter().any(|spec| spec.name() == ENVIRONMENT) {
            measure_environment(metrics, component);
            continue;
        }
        if component.applied > 0 {
            metrics.set(&format!("reward/{name}/mean"), component.values.mean);
        }
        for (detail, mean) in &component.details {
            let kept = if OURS.contains(&detail.as_str()) { "detail/" } else { "" };
            metrics.set(&format!("reward/{name}/{kept}{detail}"), *mean);
        }
    }
    for spec in specs {
        metrics.set(&format!("reward/{}/weight", spec.name()), spec.weight);
    }
    for (name, load) in inputs.rewards {
        let mut set = |what: &str, value: f64| metrics.set(&format!("reward/{name}/{what}"), value);
        set("errors", load.errors as f64);
        set("timeouts", load.timeouts as f64);
        set("latency_p50_s", load.ran.p50_s);
        set("latency_p95_s", load.ran.p95_s);
        set("latency_max_s", load.ran.max_s);
        set("queue", load.waiting as f64);
        set("queued_p95_s", load.waited.p95_s);
    }
}

/// What episodes in an environment count, and how many of them it failed, by kind.
fn measure_environment(metrics: &mut Metrics, component: &ComponentStatistics) {
    let of_failed = |detail: &str| detail.starts_with(FAILED);
    for (detail, mean) in component.details.iter().filter(|(detail, _)| !of_failed(detail)) {
        metrics.set(&format!("environment/{detail}"), *mean);
    }
    let failed = component.failed as f64;
    metrics.set("environment/failed", failed);
    for kind in FailureKind::ALL {
        let detail = format!("{FAILED}{}", kind.name());
        let share = component.details.get(&detail).copied().unwrap_or(0.0);
        metrics.set(&format!("environment/{detail}"), (share * failed).round());
    }
}

/// Adds to what the step line says: rewards that failed, and the reward that the run waits for.
///
/// A run waits for a reward if a role was idle and judging a trajectory, queue included, took a good part of the step.
pub(super) fn name_culprits(metrics: &mut Metrics, inputs: &ObserverInputs<'_>) {
    let mut notes = Vec::new();
    let idle =
        |role: &str| metrics.get(&format!("{role}/idle_ratio")).unwrap_or(0.0) > super::measures::CLEAR;
    let took = |load: &LoadCounts| load.waited.p95_s + load.ran.p95_s;
    let slowest = inputs.rewards.iter().max_by(|a, b| took(&a.1).total_cmp(&took(&b.1)));
    if let Some((name, load)) = slowest
        && took(load) > LONG * inputs.step_s
        && (idle("rollout") || idle("trainer"))
    {
        notes.push(format!(
            "reward `{name}` is slow: {:.2} s each after {:.2} s in the queue (p95), {} waiting",
            load.ran.p95_s, load.waited.p95_s, load.waiting
        ));
    }
    for (name, LoadCounts { errors, timeouts, .. }) in inputs.rewards {
        if *errors > 0 {
            let timeouts = if *timeouts > 0 { format!(", {timeouts} timeouts") } else { String::new() };
            notes.push(format!("reward `{name}`: {errors} errors{timeouts}"));
        }
    }
    metrics.notes.extend(notes);
}
