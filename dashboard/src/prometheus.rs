//! `/metrics`: the last value of every metric of every run, in the text format of Prometheus.
//!
//! Invariant: a series is named by metric and run, and no two have the same name and labels. At most [`MAX_SERIES`] are
//! written. Names and labels are escaped, so that no name of a metric or run can add a line.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::catalog::RunCatalog;

/// Media type of the text.
pub(crate) const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Most series of a response.
const MAX_SERIES: usize = 50_000;
/// Prefix of all names, as engines have it: `vllm:`, `sglang:`.
const PREFIX: &str = "rlrun:";

/// What metrics are, by their names in `metrics.jsonl`.
const HELP: [(&str, &str); 42] = [
    ("reward/mean", "Mean reward of the batch"),
    ("reward/std", "Standard deviation of the rewards of the batch"),
    ("reward/frac_zero_std", "Share of groups whose rewards are equal"),
    ("eval/accuracy", "Share of held-out answers that are correct"),
    ("eval/accuracy_low", "Lower end of the 95 % interval of the held-out accuracy"),
    ("eval/accuracy_high", "Upper end of the 95 % interval of the held-out accuracy"),
    ("eval/reward", "Mean reward of held-out answers"),
    ("eval/failed", "Held-out answers that could not be scored"),
    ("loss/mean", "Mean loss of the step"),
    ("entropy/mean", "Mean entropy of the policy, nats"),
    ("kl/mismatch", "KL divergence between sampler and trainer, nats"),
    ("kl/ref", "KL divergence from the reference policy, nats"),
    ("clip/low_mean", "Share of tokens clipped at the lower bound"),
    ("clip/high_mean", "Share of tokens clipped at the upper bound"),
    ("is/mean", "Mean importance ratio"),
    ("is/max", "Largest importance ratio"),
    ("is/ess", "Effective sample size of the importance ratios, as a share"),
    ("is/masked_frac", "Share of tokens that the correction masks"),
    ("optim/grad_norm", "Norm of the gradient before clipping"),
    ("optim/lr", "Learning rate"),
    ("completions/mean_length", "Mean length of completions, tokens"),
    ("completions/min_length", "Shortest completion, tokens"),
    ("completions/max_length", "Longest completion, tokens"),
    ("completions/clipped_ratio", "Share of completions that were truncated"),
    ("staleness/mean", "Mean staleness of the batch, policy versions"),
    ("staleness/p95", "95th percentile of the staleness, policy versions"),
    ("staleness/max", "Largest staleness, policy versions"),
    ("buffer/size", "Groups in the buffer"),
    ("buffer/dropped_stale", "Groups dropped as stale"),
    ("buffer/quarantined", "Groups that cannot be trained on"),
    ("rollout/tokens_per_s", "Tokens sampled per second"),
    ("trainer/tokens_per_s", "Tokens trained on per second"),
    ("rollout/idle_ratio", "Share of the time that the sampler waits"),
    ("trainer/idle_ratio", "Share of the time that the trainer waits"),
    ("time/step", "Seconds of the step"),
    ("time/wait_for_batch", "Seconds that the trainer waited for its batch"),
    ("time/forward_backward", "Seconds of forward and backward passes"),
    ("time/weight_sync", "Seconds of publishing weights"),
    ("weights/bytes", "Bytes of the published weights"),
    ("weights/apply_s", "Seconds until a sampler served the new weights"),
    ("weights/stall_s", "Seconds that a sampler stood still for new weights"),
    ("memory/peak_mib", "Peak memory of the process, MiB"),
];

/// One series without its name.
struct LabeledValue {
    /// The name in `metrics.jsonl`.
    metric: String,
    run: String,
    value: f64,
}

/// The text of all runs.
pub(crate) fn text(catalog: &RunCatalog) -> String {
    let mut families = BTreeMap::<String, Vec<LabeledValue>>::new();
    let mut series = 0;
    for run in catalog.iter() {
        let contents = run.contents();
        let row = contents.table.last_row();
        let own = [("step", row.map(|row| row.0)), ("time_s", row.map(|row| row.1))];
        let own = own.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let last = contents.table.last_values().into_iter();
        // A value that is not finite is NaN here as in Prometheus.
        let last = last.map(|(name, value)| (name, value.as_f64().unwrap_or(f64::NAN)));
        for (metric, value) in own.chain(last).take(MAX_SERIES.saturating_sub(series)) {
            series += 1;
            let labeled = LabeledValue { run: run.name().to_owned(), value, metric };
            families.entry(name_of(&labeled.metric)).or_default().push(labeled);
        }
    }
    let mut text = String::new();
    for (name, values) in &families {
        // Writing to a string cannot fail.
        let _ = write_family(&mut text, name, values);
    }
    text
}

fn write_family(text: &mut String, name: &str, values: &[LabeledValue]) -> std::fmt::Result {
    if let Some((_, help)) = HELP.iter().find(|(metric, _)| *metric == values[0].metric) {
        writeln!(text, "# HELP {name} {help}")?;
    }
    writeln!(text, "# TYPE {name} gauge")?;
    // Other characters become `_`, so different metrics may get the same name.
    let ambiguous = values.iter().any(|value| value.metric != values[0].metric);
    for LabeledValue { metric, run, value } in values {
        write!(text, "{name}{{run=\"{}\"", escaped(run))?;
        if ambiguous {
            write!(text, ",metric=\"{}\"", escaped(metric))?;
        }
        writeln!(text, "}} {value}")?;
    }
    Ok(())
}

/// The name of a metric: `reward/mean` is `rlrun:reward_mean`.
fn name_of(metric: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    PREFIX.chars().chain(metric.chars().map(letter)).collect()
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_values_of_every_run_are_gauges() {
        let directory = tempfile::tempdir().unwrap();
        let run = |name: &str, lines: &str| {
            let root = directory.path().join(name);
            std::fs::create_dir(&root).unwrap();
            std::fs::write(root.join("metrics.jsonl"), lines).unwrap();
            root
        };
        let roots = [
            run(
                "a",
                "{\"step\":1,\"time_s\":2,\"reward/mean\":0.25}\n{\"step\":2,\"time_s\":3.5,\"reward/mean\":0.5,\"x\":null}\n",
            ),
            run(
                "b\"\\\n",
                "{\"step\":7,\"time_s\":1,\"reward/mean\":1,\"eval/pass@2\":3,\"eval/pass 2\":4,\"n\\nrlrun:up 1\":5}\n",
            ),
        ];
        let text = text(&RunCatalog::open(&roots));
        let expected = r#"# TYPE rlrun:eval_pass_2 gauge
rlrun:eval_pass_2{run="b\"\\\n",metric="eval/pass@2"} 3
rlrun:eval_pass_2{run="b\"\\\n",metric="eval/pass 2"} 4
# TYPE rlrun:n_rlrun_up_1 gauge
rlrun:n_rlrun_up_1{run="b\"\\\n"} 5
# HELP rlrun:reward_mean Mean reward of the batch
# TYPE rlrun:reward_mean gauge
rlrun:reward_mean{run="a"} 0.5
rlrun:reward_mean{run="b\"\\\n"} 1
# TYPE rlrun:step gauge
rlrun:step{run="a"} 2
rlrun:step{run="b\"\\\n"} 7
# TYPE rlrun:time_s gauge
rlrun:time_s{run="a"} 3.5
rlrun:time_s{run="b\"\\\n"} 1
# TYPE rlrun:x gauge
rlrun:x{run="a"} NaN
"#;
        assert_eq!(text, expected);
    }

    #[test]
    fn the_number_of_series_has_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        let metrics: Vec<String> = (0..4096).map(|index| format!("\"m{index}\":1")).collect();
        let line = format!("{{\"step\":1,{}}}\n", metrics.join(","));
        let roots: Vec<_> = (0..16).map(|index| directory.path().join(index.to_string())).collect();
        for root in &roots {
            std::fs::create_dir(root).unwrap();
            std::fs::write(root.join("metrics.jsonl"), &line).unwrap();
        }
        let text = text(&RunCatalog::open(&roots));
        assert_eq!(text.lines().filter(|line| !line.starts_with('#')).count(), MAX_SERIES);
    }
}
