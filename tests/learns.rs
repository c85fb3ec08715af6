//! The default recipe learns and writes metrics, samples, checkpoints and exports. The longest test: it trains for half of
//! the steps of the recipe after its whole warm-up.

use crate::support::{Home, repository};

/// Metrics of every step.
const NAMES: [&str; 18] = [
    "step",
    "time_s",
    "reward/mean",
    "staleness/mean",
    "staleness/max",
    "kl/mismatch",
    "logprob_abs_diff/max",
    "rollout/tokens_per_s",
    "trainer/tokens_per_s",
    "rollout/idle_ratio",
    "trainer/idle_ratio",
    "time/step",
    "time/wait_for_batch",
    "time/weight_sync",
    "loss/mean",
    "optim/grad_norm",
    "completions/mean_length",
    "reward/frac_zero_std",
];

/// Every seed of `recipes/README.md` has an accuracy above 0.99 at step 60.
#[test]
fn the_default_recipe_learns() {
    learns(&["--set", "trainer.steps=60", "--set", "eval.interval=20"], 20);
}

#[test]
#[ignore = "takes a minute; half of the steps are above"]
fn the_whole_default_recipe_learns() {
    learns(&[], 10);
}

/// Trains the default recipe with further arguments, evaluated every `interval` steps.
fn learns(args: &[&str], interval: u64) {
    let home = Home::new();
    let recipe = repository().join("recipes/grpo_math.toml");
    let recipe = recipe.to_str().unwrap();
    let shown = home.rlrun(&[&[recipe, "--run-dir", "run"], args].concat()).ok().stdout;
    assert!(shown.contains("rlrun generate run"), "{shown}");
    let run = home.run("run");

    let metrics = run.metrics();
    let accuracy =
        |line: &serde_json::Map<String, serde_json::Value>| line["eval/accuracy"].as_f64().unwrap();
    let (before, after) = (accuracy(&metrics[0]), accuracy(&metrics[metrics.len() - 1]));
    assert!((0.2..=0.45).contains(&before) && after >= 0.90, "accuracy {before} -> {after}");
    let steps = run.steps();
    let last = steps.len() as u64;
    assert_eq!(run.values("step"), (1..=last).map(|step| step as f64).collect::<Vec<_>>());
    for (name, line) in NAMES.iter().flat_map(|name| steps.iter().map(move |line| (name, line))) {
        assert!(line.get(*name).is_some_and(serde_json::Value::is_number), "{name} in {line:?}");
    }
    for line in steps.iter().filter(|line| line["step"].as_u64().unwrap().is_multiple_of(interval)) {
        assert!(line.contains_key("eval/accuracy"), "{line:?}");
    }
    assert!(run.values("staleness/max").iter().all(|max| *max <= 4.0));

    assert_eq!(run.samples(last).len(), 2);
    assert!(run.checkpoint(last).join("model/config.json").is_file() && run.checkpoint(last - 20).is_dir());
    let resolved = std::fs::read_to_string(run.path.join("resolved.toml")).unwrap();
    assert!(resolved.contains("max_staleness = 4"), "{resolved}");

    let answer = home.rlrun(&["generate", "run", "12+34=", "5+5="]).ok().stdout;
    assert!(answer.lines().count() == 2 && answer.lines().all(|line| line.contains(';')), "{answer}");
    let measured = home.rlrun(&["eval", "run", "--recipe", recipe]).ok().stdout;
    assert!(
        measured.starts_with(&format!("accuracy {after:.4} on 500 tasks")),
        "{measured}, trained to {after}"
    );
    home.rlrun(&["export", "run", "--out", "model"]).ok();
    let file = |path: std::path::PathBuf| std::fs::read(path.join("model.safetensors")).unwrap();
    assert!(file(home.path("model")) == file(run.checkpoint(last).join("model")));
    assert_eq!(home.rlrun(&["generate", "model", "12+34=", "5+5="]).ok().stdout, answer);
    home.rlrun(&["export", "run", "--step", "17", "--out", "other"])
        .refused(&["no checkpoint of step 17", &format!("{}, {last}", last - 20)]);
}
