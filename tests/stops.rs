//! One Ctrl-C saves and ends a run, a second one ends it at once.

use std::io::{BufRead, BufReader};
use std::process::Child;

use crate::support::{Home, Moment, finish, interrupt};

#[test]
fn one_interrupt_saves_and_names_the_resume_command() {
    let home = Home::new();
    let run = home.run("run");
    let mut child = home.start_small("run", &["trainer.steps=100000", "checkpoint.interval=50000"]);
    assert!(run.wait_for(Moment::Step(2), &mut child));
    interrupt(&child);
    let done = finish(child).ok();
    assert!(done.stdout.contains("go on with: rlrun resume run"), "{}\n{}", done.stdout, done.stderr);
    assert!(done.stderr.contains("once more to stop at once"), "{}", done.stderr);
    let last = run.steps().len() as u64;
    assert!(last >= 2 && run.checkpoint(last).is_dir(), "no checkpoint of step {last}");
    let steps = format!("trainer.steps={}", last + 2);
    home.rlrun(&["resume", "run", "--set", &steps]).ok();
    assert_eq!(run.values("step"), (1..=last + 2).map(|step| step as f64).collect::<Vec<_>>());
}

/// An interrupt saves a checkpoint also with `checkpoint.interval = 0`.
#[test]
fn an_interrupt_saves_even_without_a_checkpoint_interval() {
    let home = Home::new();
    let run = home.run("run");
    let mut child = home.start_small("run", &["trainer.steps=100000", "checkpoint.interval=0"]);
    assert!(run.wait_for(Moment::Step(1), &mut child));
    interrupt(&child);
    finish(child).ok();
    let last = run.steps().len() as u64;
    assert!(run.checkpoint(last).is_dir(), "no checkpoint of step {last}");
    home.rlrun(&["resume", "run", "--set", &format!("trainer.steps={}", last + 1)]).ok();
    assert_eq!(run.steps().len() as u64, last + 1);
}

#[test]
fn an_interrupted_warm_up_names_the_resume_command() {
    let home = Home::new();
    let run = home.run("run");
    let mut child = home.start_small("run", &["warmup.steps=1000", "warmup.batch_tasks=2"]);
    assert!(run.wait_for(Moment::WarmUp, &mut child));
    interrupt(&child);
    let done = finish(child).ok();
    assert!(done.stdout.contains("rlrun resume run"), "{}", done.stdout);
    home.rlrun(&["resume", "run", "--set", "trainer.steps=1"]).ok();
    assert_eq!(run.steps().len(), 1);
}

/// The first step never ends, so the run cannot end before the second interrupt.
#[test]
fn a_second_interrupt_ends_the_process_at_once_and_its_children() {
    let home = Home::new();
    for processes in ["placement.processes=false", "placement.processes=true"] {
        let run = home.run(processes);
        let hangs = [("RLRUN_FAILPOINTS", "before-lease=delay(600000)")];
        let sets = ["--set", "warmup.steps=1", "--set", "trainer.steps=1", "--set", processes];
        let args = [&["small.toml", "--run-dir", processes][..], &sets].concat();
        let mut child = home.start_with(&hangs, &args);
        assert!(run.wait_for(Moment::Step(0), &mut child));
        interrupt(&child);
        wait_for_line(&mut child, "once more to stop at once");
        interrupt(&child);
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert_eq!(run.steps().len(), 0);
        // Nothing holds its directory.
        home.rlrun(&["resume", processes]).ok();
    }
}

fn wait_for_line(child: &mut Child, text: &str) {
    let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains(text)), "{text}");
}
