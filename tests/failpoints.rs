//! Runs that fail at each failpoint in turn and are resumed.

use std::collections::BTreeSet;
use std::fs;

use rlrun::failpoints::{PLACES, VARIABLE};

use crate::support::{Done, Home, Run};

const STEPS: u64 = 6;
const BATCH: u64 = 8;
/// A checkpoint after every second step, so that each failpoint is passed several times.
const SETS: [&str; 3] = ["trainer.steps=6", "checkpoint.interval=2", "buffer.max_staleness=1"];

/// Starts or resumes the run `run` with `failpoints` armed; with an archive where the program has object stores.
fn attempt(home: &Home, first: bool, failpoints: &str) -> Done {
    let archive = format!("checkpoint.url=file://{}", home.path("archive").display());
    let archive = cfg!(feature = "object-store").then_some(&archive[..]);
    let sets = SETS.into_iter().chain(archive).flat_map(|set| ["--set", set]);
    let start: Vec<&str> = ["small.toml", "--run-dir", "run"].into_iter().chain(sets).collect();
    let args = if first { &start[..] } else { &["resume", "run"] };
    home.rlrun_with(&[(VARIABLE, failpoints)], args)
}

/// Asserts that every step is recorded once and that no two steps share a group.
fn every_group_was_trained_once(run: &Run) {
    let steps: Vec<_> = run.metrics().iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (0..=STEPS).collect::<Vec<_>>(), "every step is in metrics.jsonl once");
    let groups: Vec<_> =
        (1..=STEPS).flat_map(|step| run.samples(step)).map(|group| group["group"].as_u64()).collect();
    assert_eq!(groups.len() as u64, BATCH * STEPS);
    assert_eq!(groups.iter().collect::<BTreeSet<_>>().len(), groups.len(), "{groups:?}");
    assert!(run.checkpoint(STEPS).join("trainer.json").is_file());
}

/// Asserts that every directory with the name of a checkpoint is complete.
fn no_checkpoint_is_half_written(run: &Run) {
    for entry in fs::read_dir(run.path.join("checkpoints")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("step_") && !name.ends_with(".partial") {
            assert!(path.join("trainer.json").is_file(), "{name} is not complete");
        }
    }
}

#[test]
fn a_run_killed_at_any_failpoint_trains_every_group_once() {
    let home = Home::new();
    // `tests/archive.rs` kills runs in those of an archive.
    let is_of_the_run = |place: &&str| !place.starts_with("archive");
    for (number, place) in PLACES.into_iter().map(|(place, _)| place).filter(is_of_the_run).enumerate() {
        // The hit differs per failpoint, limited by how often a resumed run passes it.
        let at = if place.starts_with("checkpoint") { 1 } else { 1 + number % 2 };
        let done = attempt(&home, number == 0, &format!("{place}=kill@{at}"));
        assert_eq!(done.status.code(), None, "killed at {place}\n{}\n{}", done.stdout, done.stderr);
        no_checkpoint_is_half_written(&home.run("run"));
    }
    attempt(&home, false, "").ok();
    every_group_was_trained_once(&home.run("run"));
}

#[test]
fn a_full_disk_ends_a_run_and_leaves_nothing_half_written() {
    let home = Home::new();
    for (place, first) in [("checkpoint-write", true), ("checkpoint-rename", false)] {
        // The second checkpoint of the process: a resume needs the first, after the warm-up or the next due.
        let done = attempt(&home, first, &format!("{place}=disk-full@2"));
        assert_eq!(done.status.code(), Some(1), "{}\n{}", done.stdout, done.stderr);
        let (says, run) = (&done.stderr, home.run("run"));
        assert!(
            says.contains("checkpoints/step_") && says.contains(" bytes, and the disk is full"),
            "{says}"
        );
        let entries = fs::read_dir(run.path.join("checkpoints")).unwrap();
        assert!(entries.map(|entry| entry.unwrap().path()).all(|path| path.join("trainer.json").is_file()));
    }
    attempt(&home, false, "").ok();
    every_group_was_trained_once(&home.run("run"));
}

#[test]
fn a_journal_error_ends_a_run_that_can_be_resumed() {
    let home = Home::new();
    let done = attempt(&home, true, "journal-commit=error@5");
    assert_eq!(done.status.code(), Some(1), "{}\n{}", done.stdout, done.stderr);
    assert!(done.stderr.contains("journal") && done.stderr.contains("os error 5"), "{}", done.stderr);
    attempt(&home, false, "").ok();
    every_group_was_trained_once(&home.run("run"));
}

#[test]
fn delays_change_nothing_but_time() {
    let home = Home::new();
    let delays: Vec<_> = PLACES.into_iter().map(|(place, _)| format!("{place}=delay(3)")).collect();
    attempt(&home, true, &delays.join(";")).ok();
    every_group_was_trained_once(&home.run("run"));
}

#[test]
fn a_slow_disk_delays_the_next_checkpoint_and_says_so() {
    let home = Home::new();
    let args =
        ["small.toml", "--run-dir", "run", "--set", "trainer.steps=6", "--set", "checkpoint.interval=1"];
    home.rlrun_with(&[(VARIABLE, "checkpoint-write=delay(1000)")], &args).ok();
    let run = home.run("run");
    every_group_was_trained_once(&run);
    let (waited, wrote) = (run.values("time/wait_ckpt"), run.values("time/write_ckpt"));
    assert!(wrote.iter().any(|seconds| *seconds >= 1.0), "{wrote:?}");
    assert!(waited.iter().any(|seconds| *seconds > 0.0), "{waited:?}");
}

#[test]
fn unknown_failpoints_are_refused() {
    let home = Home::new();
    attempt(&home, true, "everywhere=kill").refused(&[VARIABLE, "there is no place `everywhere`"]);
    assert!(!home.path("run").exists());
}
