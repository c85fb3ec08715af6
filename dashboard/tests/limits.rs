//! Sizes of responses for long runs.

use std::fmt::Write;
use std::time::{Duration, Instant};

use crate::{ServedPage, run_with};

#[test]
fn ten_thousand_steps_of_eighty_metrics_have_a_bounded_first_picture() {
    const STEPS: usize = 10_000;
    // The names of the first screen, and others up to 80.
    let mut names: Vec<String> = [
        "reward/mean",
        "eval/reward",
        "eval/accuracy",
        "reward/math/mean",
        "entropy/mean",
        "kl/mismatch",
        "kl/ref",
        "clip/low_mean",
        "clip/high_mean",
        "optim/grad_norm",
        "loss/mean",
        "staleness/mean",
        "staleness/p95",
        "staleness/max",
        "buffer/size",
        "completions/mean_length",
        "completions/clipped_ratio",
        "reward/frac_zero_std",
        "rollout/tokens_per_s",
        "trainer/tokens_per_s",
        "rollout/idle_ratio",
        "trainer/idle_ratio",
        "time/step",
        "time/forward_backward",
        "memory/peak_mib",
    ]
    .map(str::to_owned)
    .to_vec();
    names.extend((names.len()..80).map(|index| format!("other/{index}")));
    let mut text = String::new();
    for step in 0..STEPS {
        write!(text, "{{\"step\":{step},\"time_s\":{}", step as f64 * 1.25).unwrap();
        for (index, name) in names.iter().enumerate() {
            write!(text, ",\"{name}\":{}", ((step * (index + 3)) as f64).sin()).unwrap();
        }
        text.push_str("}\n");
    }
    let run = run_with(&text);
    let begin = Instant::now();
    let page = ServedPage::of(&[run.path()]);
    let opened = begin.elapsed();
    let begin = Instant::now();
    let reply = page.get("/api/overview?pixels=300");
    let answered = begin.elapsed();
    // A second is the budget of the whole first picture; a loaded machine gets more time.
    assert!(opened + answered < Duration::from_secs(10), "read in {opened:?}, answered in {answered:?}");
    assert!(reply.body.len() < 700_000, "{} bytes", reply.body.len());
    let overview = reply.json();
    let name = run.path().file_name().unwrap().to_str().unwrap();
    let curves = overview["curves"][name].as_object().unwrap();
    assert_eq!(curves.len(), 25);
    assert!(curves.values().all(|curve| curve["x"].as_array().unwrap().len() <= 600));
    // However much is asked for.
    let wide = page.get(&format!("/api/metrics?keys={}&pixels=1000000", names.join(",")));
    assert!(wide.body.len() < 4_000_000, "{} bytes", wide.body.len());
    assert_eq!(wide.json()[name].as_object().unwrap().len(), 80);
    // A range has more points of fewer steps.
    let range = page.get("/api/metrics?keys=reward/mean&pixels=300&from=100&to=200").json();
    assert_eq!(range[name]["reward/mean"]["x"].as_array().unwrap().len(), 103);
}
