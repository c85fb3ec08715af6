//! `rlrun fit` as a user runs it, on metrics whose curve is known.

use std::fmt::Write;

use serde_json::Value;

use crate::support::Home;

/// The metrics of a run: an evaluation before training and after every tenth of 600 steps of 50 tokens, along the curve
/// with asymptote `a` and exponent `b` that has half its gain at 3000 tokens. Its noise is a fixed wave of 0.004.
fn metrics(a: f64, b: f64) -> String {
    let value = |step: f64| 0.27 + (a - 0.27) / (1.0 + (60.0 / step).powf(b)) + 0.004 * (step * 0.77).sin();
    let mut out = "{\"step\":0,\"time_s\":0,\"eval/accuracy\":0.27}\n".to_owned();
    for step in 1..=600 {
        let reward = value(f64::from(step) - 1.0);
        let eval = if step % 10 == 0 {
            format!(",\"eval/accuracy\":{}", value(f64::from(step)))
        } else {
            String::new()
        };
        let speed = "\"trainer/tokens_per_s\":100,\"time/forward_backward\":0.5";
        writeln!(out, "{{\"step\":{step},\"time_s\":{step},\"reward/mean\":{reward},{speed}{eval}}}")
            .unwrap();
    }
    out
}

fn objects(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_is_fitted_shown_and_drawn() {
    let home = Home::new();
    home.write("slow/metrics.jsonl", metrics(0.645, 1.7));
    let done = home.rlrun(&["fit", "slow", "--until", "15000", "--svg", "curve.svg"]).ok();
    for shown in [
        "slow: eval/accuracy over tokens, 31 points (o), 30 held-out (x)",
        "R = R_0 + (A - R_0) / (1 + (C_mid / C)^B)",
        "at 10 times the compute, 3.00e5 tokens: 0.6",
        "R = A - D / C^B",
    ] {
        assert!(done.stdout.contains(shown), "{shown}:\n{}", done.stdout);
    }
    assert!(done.stdout.is_ascii() && done.stdout.lines().all(|line| line.len() <= 120), "{}", done.stdout);
    let svg = std::fs::read_to_string(home.path("curve.svg")).unwrap();
    assert_eq!(svg.matches("<circle").count(), 60, "the start has no place on a logarithmic axis");
    let json = home.rlrun(&["fit", "slow", "--until", "15000", "--json"]).ok().stdout;
    let fit = &objects(&json)[0];
    let number = |pointer: &str| {
        fit.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer}: {fit}"))
    };
    assert!((number("/a/value") - 0.645).abs() < 0.02, "{fit}");
    assert!((number("/b/value") - 1.7).abs() < 0.3, "{fit}");
    assert!(number("/a/low") < 0.645 && 0.645 < number("/a/high"), "{fit}");
    assert!(number("/held_out_rms") < 0.01 && number("/power_law/held_out_rms") > 0.01, "{fit}");
    assert_eq!(home.rlrun(&["fit", "slow", "--until", "15000", "--json"]).ok().stdout, json);
}

#[test]
fn runs_are_compared_at_a_common_asymptote() {
    let home = Home::new();
    home.write("slow/metrics.jsonl", metrics(0.645, 1.3));
    home.write("fast/metrics.jsonl", metrics(0.645, 2.2));
    let text = home
        .rlrun(&["fit", "slow", "fast", "--metric", "reward/mean", "--compute", "step", "--ceiling", "1"])
        .ok();
    assert!(text.stdout.contains("B at common A"), "{}", text.stdout);
    let json = home.rlrun(&["fit", "slow", "fast", "--json"]).ok().stdout;
    let [slow, fast] = &objects(&json)[..] else { panic!("{json}") };
    assert_eq!(slow["common_a"]["a"], fast["common_a"]["a"]);
    let exponent = |fit: &Value| fit["common_a"]["b"].as_f64().unwrap();
    assert!((exponent(slow) - 1.3).abs() < 0.2 && (exponent(fast) - 2.2).abs() < 0.2, "{json}");
}

#[test]
fn metrics_that_cannot_be_fitted_are_refused_with_the_reason() {
    let home = Home::new();
    home.write("run/metrics.jsonl", metrics(0.645, 1.7));
    home.write(
        "short/metrics.jsonl",
        metrics(0.645, 1.7).lines().take(31).map(|l| format!("{l}\n")).collect::<String>(),
    );
    home.write("falling/metrics.jsonl", metrics(0.1, 1.7));
    home.write("flat/metrics.jsonl", metrics(0.27, 1.7));
    home.rlrun(&["fit", "flat"]).refused(&["eval/accuracy does not rise in `flat`"]);
    home.rlrun(&["fit", "nowhere"]).refused(&["`nowhere` is no run with metrics", "metrics.jsonl"]);
    home.rlrun(&["fit", "run", "--metric", "eval/acuracy"])
        .refused(&["no metric eval/acuracy", "eval/accuracy, "]);
    home.rlrun(&["fit", "short"]).refused(&["`short` has 4 points of eval/accuracy", "at least 8"]);
    home.rlrun(&["fit", "falling"]).refused(&["eval/accuracy does not rise in `falling`"]);
    home.rlrun(&["fit", "run", "--compute", "reward/mean"])
        .refused(&["reward/mean is no measure of compute"]);
    home.rlrun(&["fit", "run", "--ceiling", "0.1"]).refused(&["ceiling of 0.1", "`--ceiling`"]);
    home.rlrun(&["fit", "run", "--skip=-3"]).refused(&["--skip"]);
}
