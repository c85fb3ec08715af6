//! Rewards as a user meets them: models that score, programs with rewards of their own, rewards tried by themselves,
//! rewards that are slow.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Done, Home, Run, repository};

/// Trains a small reward model and returns the `[[rewards]]` entry that asks it.
fn reward_model(home: &Home, keys: &str) -> String {
    let base = repository().join("recipes/reward_model_math.toml");
    let text = format!(
        "extends = {base:?}\n[data.arithmetic]\ntrain_tasks = 800\neval_tasks = 50\n[trainer]\nsteps = 25\n"
    );
    home.write("rm.toml", text);
    if !home.path("rm").exists() {
        home.rlrun(&["rm.toml", "--run-dir", "rm", "--quiet"]).ok();
    }
    let path = home.run("rm").checkpoint(25).join("model");
    format!("[[rewards]]\nkind = \"model\"\npath = {path:?}\n{keys}\n")
}

/// A recipe like `small.toml` with these rewards, run with `sets`.
fn run_with(home: &Home, name: &str, rewards: &str, sets: &[&str]) -> (Run, Done) {
    home.write(&format!("{name}.toml"), format!("extends = \"small.toml\"\n{rewards}"));
    let file = format!("{name}.toml");
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let args: Vec<&str> = [&file[..], "--run-dir", name].into_iter().chain(sets).collect();
    let done = home.rlrun(&args).ok();
    (home.run(name), done)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Wherever a reward model computes, and whether it stays in memory or not, the run is the same.
#[test]
fn a_reward_model_gives_equal_scores_wherever_it_is_placed() {
    let home = Home::new();
    let sync = ["buffer.max_staleness=0", "trainer.steps=4"];
    let run = |name: &str, keys: &str, sets: &[&str]| {
        let rewards = reward_model(&home, keys);
        let (run, _) = run_with(&home, name, &rewards, &[&sync, sets].concat());
        let weights = std::fs::read(run.checkpoint(4).join("model/model.safetensors")).unwrap();
        (run.values("reward/model/mean"), weights)
    };
    let separated = run("separated", "placement = \"separated\"\nthreads = 1", &[]);
    let beside = run("beside", "placement = \"colocated\"\nbatch_tokens = 100", &[]);
    let swapped = run("swapped", "placement = \"colocated\"", &["placement.memory_mib=0"]);
    assert_eq!(separated, beside);
    assert_eq!(separated, swapped);
    assert!(separated.0.iter().any(|mean| *mean != separated.0[0]), "{:?}", separated.0);
}

/// A model that has learnt which of two answers is better teaches the policy to answer better.
#[test]
fn a_policy_learns_from_a_reward_model() {
    let home = Home::new();
    let rewards = reward_model(&home, "[[rewards]]\nkind = \"math\"\nweight = 0");
    // Synchronous, so that the numbers compared here are always the same.
    let sets =
        ["trainer.steps=20", "trainer.learning_rate=3e-3", "warmup.steps=200", "buffer.max_staleness=0"];
    let (run, _) = run_with(&home, "run", &rewards, &sets);
    let scores = run.values("reward/model/mean");
    let (before, after) = (mean(&scores[..5]), mean(&scores[15..]));
    assert!(after > before + 0.5, "the score of the model: {scores:?}");
    assert!(run.values("reward/model/latency_p50_s").iter().all(|seconds| *seconds > 0.0));
    assert_eq!(run.values("reward/math/weight"), vec![0.0; 20]);
}

/// A reference and a critic that compute beside the policy give the same bits as those that take turns with it.
#[test]
fn reference_and_critic_give_equal_results_wherever_they_are_placed() {
    let home = Home::new();
    let base = [
        "buffer.max_staleness=0",
        "trainer.steps=3",
        "algorithm.kind=\"ppo\"",
        "algorithm.kl_coef=0.05",
        "critic.learning_rate=1e-3",
        "critic.pretrain_steps=1",
    ];
    let run = |name: &str, sets: &[&str]| {
        let run = home.small(name, &[&base, sets].concat());
        let read = |file: &str| std::fs::read(run.checkpoint(3).join(file)).unwrap();
        (read("model/model.safetensors"), read("critic/model/model.safetensors"), run.values("kl/ref"))
    };
    let turns = run("turns", &[]);
    let beside = run("beside", &["placement.reference=\"separated\"", "placement.critic=\"separated\""]);
    let swapped = run("swapped", &["placement.memory_mib=0"]);
    assert!(turns == beside, "separated differs");
    assert!(turns == swapped, "swapped differs");
    assert!(turns.2.iter().any(|kl| *kl != 0.0), "{:?}", turns.2);
    let idle = ["check", "small.toml", "--set", "placement.critic=\"separated\""];
    home.rlrun(&idle).refused(&["`placement.critic` has no effect"]);
}

/// `examples/custom_reward.rs` as cargo built it beside the program.
fn custom_program() -> std::path::PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_rlrun"));
    program.parent().unwrap().join("examples/custom_reward")
}

#[test]
fn a_program_of_ones_own_has_its_reward_and_everything_else() {
    let home = Home::new();
    home.write(
        "own.toml",
        "extends = \"small.toml\"\n[[rewards]]\nkind = \"vowels\"\non_error = \"zero\"\n[[rewards]]\nkind = \"math\"\n",
    );
    home.rlrun(&["check", "own.toml"]).refused(&["there is no reward of kind \"vowels\""]);
    let own = |args: &[&str]| {
        let output = Command::new(custom_program()).args(args).current_dir(home.path("")).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Done { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) }
    };
    let misspelt = home.write("misspelt.toml", "extends = \"own.toml\"\n[[rewards]]\nkind = \"vowel\"\n");
    own(&["check", misspelt.to_str().unwrap()]).refused(&["did you mean \"vowels\"?"]);
    let done = own(&["own.toml", "--run-dir", "run", "--set", "trainer.steps=2"]).ok();
    let steps = home.run("run").steps();
    assert_eq!(steps.len(), 2);
    // Additions have no letters, so that the function refuses every one, and the step line says so by name.
    assert!(steps.iter().all(|step| step["reward/vowels/errors"].as_f64().unwrap() > 0.0), "{steps:?}");
    assert!(done.stdout.contains("reward `vowels`: "), "{}", done.stdout);
}

#[test]
fn rewards_can_be_tried_by_themselves() {
    let home = Home::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_rlrun"))
        .args(["reward", "grade", "math", "--gold-field", "gold", "--pred-field", "said"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let cases = "{\"gold\": \"1/2\", \"said\": \"so \\\\boxed{0.5}\"}\n{\"gold\": \"7\", \"said\": \"8\"}\n";
    child.stdin.take().unwrap().write_all(cases.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let lines: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.iter().map(|line| line["score"].as_f64()).collect::<Vec<_>>(), [Some(1.0), Some(0.0)]);
    assert!(lines.iter().all(|line| line["decided_by"].is_string()), "{lines:?}");

    home.write("try.toml", "extends = \"small.toml\"\n[[rewards]]\nkind = \"math\"\nweight = 2\n");
    let shown = home.rlrun(&["reward", "test", "try.toml", "--n", "2"]).ok().stdout;
    assert_eq!(shown.matches("reference: ").count(), 2, "{shown}");
    assert_eq!(shown.matches("total 2").count(), 2, "{shown}");
    assert_eq!(shown.matches("total 0").count(), 2, "{shown}");
}
