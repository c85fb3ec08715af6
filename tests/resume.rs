//! A run that is killed with kill -9 at any moment and resumed ends as an uninterrupted run: no group is lost or used twice.

use std::collections::BTreeSet;
use std::fs;

use crate::support::{Home, Moment, Run, finish};

const STEPS: u64 = 12;
/// Groups per step.
const BATCH: u64 = 8;

/// Runs `small.toml` with `sets` in the run directory `name`, killed at every one of `moments` and resumed.
/// Returns the run, and how often the process was killed before it ended normally.
fn run_with_kills(home: &Home, name: &str, sets: &[&str], moments: &[Moment]) -> (Run, usize) {
    let run = home.run(name);
    let mut kills = 0;
    let mut child = home.start_small(name, sets);
    for moment in moments {
        if run.wait_for(*moment, &mut child) {
            child.kill().unwrap();
        }
        let done = finish(child);
        kills += usize::from(done.status.code().is_none());
        assert!(!matches!(done.status.code(), Some(1..)), "{moment:?}\n{}\n{}", done.stdout, done.stderr);
        child = home.start(&["resume", name]);
    }
    finish(child).ok();
    (run, kills)
}

#[test]
fn a_killed_synchronous_run_ends_with_the_same_bits() {
    let home = Home::new();
    let sets = ["buffer.max_staleness=0"];
    let whole = home.small("whole", &sets);
    let moments =
        [Moment::WarmUp, Moment::Checkpoint(0), Moment::Step(1), Moment::Step(5), Moment::Checkpoint(6)];
    let (killed, kills) = run_with_kills(&home, "killed", &sets, &moments);
    assert!(kills >= 3, "only {kills} kills came in time");
    for file in ["model/model.safetensors", "optimizer.safetensors"] {
        let bytes = |run: &Run| fs::read(run.checkpoint(STEPS).join(file)).unwrap();
        assert!(bytes(&whole) == bytes(&killed), "{file} differs");
    }
    let initial = fs::read(whole.checkpoint(STEPS).join("../../model/model.safetensors")).unwrap();
    assert!(initial != fs::read(whole.checkpoint(STEPS).join("model/model.safetensors")).unwrap());
    for name in ["step", "reward/mean", "loss/mean", "optim/grad_norm", "completions/mean_length"] {
        assert_eq!(whole.values(name), killed.values(name), "{name}");
    }
    assert_eq!(whole.metrics()[0]["eval/accuracy"], killed.metrics()[0]["eval/accuracy"]);
    for step in 1..=STEPS {
        assert_eq!(whole.samples(step), killed.samples(step), "samples of step {step}");
    }
}

#[test]
fn a_killed_lora_run_ends_with_the_same_bits_and_its_adapter_can_be_loaded() {
    let home = Home::new();
    let sets = [
        "buffer.max_staleness=0",
        "lora.rank=4",
        "lora.target_modules=[\"q_proj\", \"down_proj\"]",
        "trainer.optimizer=dion",
        "trainer.dion_rank_fraction=0.5",
        "trainer.schedule=wsd",
        "trainer.decay_steps=4",
    ];
    let whole = home.small("whole", &sets);
    let moments =
        [Moment::WarmUp, Moment::Checkpoint(0), Moment::Step(4), Moment::Checkpoint(6), Moment::Step(8)];
    let (killed, kills) = run_with_kills(&home, "killed", &sets, &moments);
    assert!(kills >= 3, "only {kills} kills came in time");
    let last = |run: &Run, file: &str| fs::read(run.checkpoint(STEPS).join(file)).unwrap();
    for file in [
        "model/model.safetensors",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "../base/model.safetensors",
    ] {
        assert!(last(&whole, file) == last(&killed, file), "{file} differs");
    }
    assert!(last(&whole, "model/model.safetensors") != last(&whole, "../base/model.safetensors"));
    assert_eq!(whole.values("reward/mean"), killed.values("reward/mean"));
    let rates = whole.values("optim/lr");
    assert_eq!(rates[7], f64::from(1e-3_f32));
    assert!((rates[11] / rates[7] - 0.25).abs() < 1e-6, "{rates:?}");

    // Another run continues the adapter on its base model.
    home.rlrun(&["export", "whole", "--adapter", "--out", "adapter"]).ok();
    home.rlrun(&["export", "whole", "--out", "merged"]).ok();
    let exported = fs::read(home.path("adapter/adapter_model.safetensors")).unwrap();
    assert!(exported == last(&whole, "adapter/adapter_model.safetensors"));
    assert!(
        fs::read(home.path("merged/model.safetensors")).unwrap() == last(&whole, "model/model.safetensors")
    );
    let further = ["model.path=whole/checkpoints/base", "lora.path=adapter", "warmup.steps=0"];
    let one_step = ["trainer.steps=1", "trainer.decay_steps=1", "trainer.learning_rate=1e-30"];
    let started = home.small("further", &[&sets[..], &further, &one_step].concat());
    let merged = fs::read(started.checkpoint(1).join("model/model.safetensors")).unwrap();
    assert!(
        merged == last(&whole, "model/model.safetensors"),
        "without a step it is the model that was exported"
    );

    // Another rank, another kind of run, and a run that trains all weights are refused.
    let refused = |args: &[&str], evidence: &[&str]| home.rlrun(args).refused(evidence);
    refused(
        &["resume", "whole", "--set", "lora.rank=8"],
        &["`lora.rank` cannot change when a run is resumed"],
    );
    home.rlrun(&["resume", "whole"]).ok();
    home.small("plain", &["trainer.steps=1"]);
    refused(&["export", "plain", "--adapter", "--out", "x"], &["plain has no adapter"]);
    refused(
        &["resume", "plain", "--set", "lora.rank=8"],
        &["`lora.rank` cannot change when a run is resumed"],
    );
    fs::remove_file(home.path("adapter/adapter_config.json")).unwrap();
    let broken = ["small.toml", "--run-dir", "broken", "--set", "lora.path=adapter"];
    refused(&broken, &["adapter_config.json", "cannot be read"]);
    assert!(!home.path("broken").exists(), "a run directory is left behind");
}

#[test]
fn a_killed_asynchronous_run_uses_every_group_once() {
    let home = Home::new();
    let moments =
        [Moment::Step(2), Moment::Checkpoint(3), Moment::Start(3), Moment::Step(7), Moment::Checkpoint(9)];
    let (run, kills) = run_with_kills(&home, "killed", &["buffer.max_staleness=2"], &moments);
    assert!(kills >= 3, "only {kills} kills came in time");
    let steps: Vec<_> = run.metrics().iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (0..=STEPS).collect::<Vec<_>>(), "every step is in metrics.jsonl once");
    let groups: Vec<_> = (1..=STEPS)
        .flat_map(|step| run.samples(step))
        .map(|group| group["group"].as_u64().unwrap())
        .collect();
    let unique: BTreeSet<_> = groups.iter().collect();
    assert_eq!(
        (groups.len(), unique.len()),
        ((BATCH * STEPS) as usize, (BATCH * STEPS) as usize),
        "{groups:?}"
    );
    // Ids have no gaps; the groups that are not trained on at the end are at most one per slot.
    assert!(**unique.last().unwrap() < BATCH * (STEPS + 3), "groups were lost: {groups:?}");
    assert!(run.values("staleness/max").iter().all(|max| *max <= 2.0), "{:?}", run.values("staleness/max"));
}

/// Without intermediate checkpoints a killed run starts over; groups left in its buffer do not prevent that.
#[test]
fn a_run_without_checkpoints_starts_over() {
    let home = Home::new();
    let sets = ["checkpoint.interval=0", "buffer.max_staleness=0"];
    let whole = home.small("whole", &sets);
    let (killed, kills) = run_with_kills(&home, "killed", &sets, &[Moment::Step(2)]);
    assert_eq!(kills, 1);
    let bytes = |run: &Run| fs::read(run.checkpoint(STEPS).join("model/model.safetensors")).unwrap();
    assert!(bytes(&whole) == bytes(&killed), "the weights differ");
    assert_eq!(killed.steps().len() as u64, STEPS);
}

/// A resume of a finished run says that nothing is left to do, and changes no file.
#[test]
fn a_finished_run_is_unchanged_by_a_resume_and_can_be_extended() {
    let home = Home::new();
    let run = home.small("run", &["trainer.steps=3"]);
    let weights = || fs::read(run.checkpoint(3).join("model/model.safetensors")).unwrap();
    let before = weights();
    home.rlrun(&["resume", "run"]).ok();
    assert!(weights() == before);
    assert_eq!(run.steps().len(), 3);
    home.rlrun(&["resume", "run", "--set", "trainer.steps=5"]).ok();
    assert_eq!(run.values("step"), [1.0, 2.0, 3.0, 4.0, 5.0]);
    assert!(run.checkpoint(5).is_dir());
    assert!(fs::read_to_string(run.path.join("resolved.toml")).unwrap().contains("steps = 5 "));
}

/// Keys that a resume may change apply from the next step on and are recorded; other keys are refused.
#[test]
fn a_resume_applies_allowed_changes_and_refuses_others() {
    let home = Home::new();
    let run = home.small("run", &["trainer.steps=2", "buffer.max_staleness=2"]);
    let files = || {
        ["resolved.toml", "events.jsonl", "metrics.jsonl"].map(|file| fs::read(run.path.join(file)).unwrap())
    };
    let before = files();
    let refused = home.rlrun(&["resume", "run", "--set", "model.path=.", "--set", "trainer.steps=9"]);
    refused.refused(&["`model.path` cannot change when a run is resumed", "--> --set:1:", "start a new run"]);
    home.rlrun_with(&[("RLRUN__SEED", "3")], &["resume", "run"])
        .refused(&["`seed` cannot change", "environment"]);
    assert!(files() == before, "a refused resume has changed a file of the run");

    let sets = [
        "trainer.steps=5",
        "trainer.learning_rate=5e-4",
        "trainer.max_grad_norm=0.5",
        "buffer.max_staleness=0",
        "eval.interval=1",
        "eval.tasks=10",
        "checkpoint.interval=1",
        "checkpoint.keep_last=2",
        "log.samples=1",
        "rollout.temperature=0.9",
    ];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let done = home.rlrun(&[&["resume", "run"], &sets[..]].concat()).ok();
    assert!(
        done.stdout.contains("resume 1 changes ") && done.stdout.contains("trainer.steps 2 -> 5"),
        "{}",
        done.stdout
    );
    // A pipe gets one plain line per step.
    let shown = done.stdout.lines().filter(|line| line.starts_with("step ") && line.contains(" tok/s"));
    assert_eq!((shown.count(), done.stdout.contains('\u{1b}')), (3, false), "{}", done.stdout);
    let rates = run.values("optim/lr");
    let expected = [1e-3, 1e-3, 5e-4, 5e-4, 5e-4];
    assert!(rates.iter().zip(expected).all(|(rate, is)| (rate - is).abs() < 1e-9), "{rates:?}");
    let steps = run.steps();
    assert_eq!(steps.len(), 5);
    assert!(steps[2..].iter().all(|step| step["eval/accuracy"].is_number()), "{steps:?}");
    // Groups sampled before the resume may be older.
    assert_eq!(run.values("staleness/max")[4], 0.0);
    let kept = (0..=5).filter(|step| run.checkpoint(*step).is_dir());
    assert_eq!(kept.collect::<Vec<u64>>(), [4, 5]);
    assert_eq!([1, 3].map(|step| run.samples(step).len()), [8, 1]);

    let resolved = fs::read_to_string(run.path.join("resolved.toml")).unwrap();
    let line = |key: &str| resolved.lines().find(|line| line.starts_with(key)).unwrap();
    assert!(line("learning_rate = 0.0005").ends_with("  # resume 1 (--set)"), "{resolved}");
    assert!(line("group_size = 8").contains("small.toml:"), "{resolved}");
    home.rlrun(&["resume", "run", "--set", "trainer.steps=6"]).ok();
    let events = fs::read_to_string(run.path.join("events.jsonl")).unwrap();
    let resumes: Vec<&str> = events.lines().filter(|line| line.contains(r#""event":"resume""#)).collect();
    assert_eq!(resumes.len(), 2, "{events}");
    assert!(resumes[0].contains(r#"{"key":"eval.tasks","from":null,"to":10}"#), "{events}");
    let second = r#"{"resume":2,"changes":[{"key":"trainer.steps","from":5,"to":6}]}"#;
    assert!(resumes[1].contains(second), "{events}");
}

/// Invalid values are refused and not recorded.
#[test]
fn a_resume_with_invalid_values_changes_nothing() {
    let home = Home::new();
    let run = home.small("run", &["trainer.steps=2"]);
    let resolved = || fs::read_to_string(run.path.join("resolved.toml")).unwrap();
    let before = resolved();
    home.rlrun(&["resume", "run", "--set", "rollout.max_completion_length=5000"])
        .refused(&["the model can see"]);
    assert_eq!(resolved(), before);
}

/// The journal has groups that no checkpoint has: a run without its journal resumes only with the option for it.
#[test]
fn a_run_without_its_journal_resumes_only_with_the_option() {
    let home = Home::new();
    let run = home.small("run", &["trainer.steps=4"]);
    let journal = run.path.join("buffer.redb");
    fs::remove_file(&journal).unwrap();
    let resume = ["resume", "run", "--set", "trainer.steps=6"];
    home.rlrun(&resume).refused(&["buffer.redb is missing", "`rlrun resume run --without-journal`"]);
    assert!(!journal.exists(), "a refusal leaves nothing behind");
    assert!(fs::read_to_string(run.path.join("resolved.toml")).unwrap().contains("steps = 4 "));
    home.rlrun(&[&resume[..], &["--without-journal"]].concat()).ok();
    assert_eq!(run.values("step"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert!(journal.exists());
    // With a journal the option has no effect.
    home.rlrun(&["resume", "run", "--without-journal", "--set", "trainer.steps=7"]).ok();
    assert_eq!(run.steps().len(), 7);
}

/// A run ends with an error if its journal is removed, and leaves no permanent gap.
#[test]
fn a_run_whose_journal_is_removed_ends_with_an_error() {
    let home = Home::new();
    let run = home.run("run");
    let mut child = home.start_endless("run", &[]);
    assert!(run.wait_for(Moment::Step(2), &mut child));
    fs::remove_file(run.path.join("buffer.redb")).unwrap();
    let done = finish(child);
    assert_eq!(done.status.code(), Some(1), "{}", done.stderr);
    assert!(done.stderr.contains("was removed while it was open"), "{}", done.stderr);
    home.rlrun(&["resume", "run"]).refused(&["is missing", "--without-journal"]);
}
