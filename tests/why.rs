//! `rlrun why` as a user runs it: undisturbed runs, runs with one injected fault, and bad input.
//!
//! Invariant: a fault lasts a number of steps of the run that it is injected into, so that no test depends on the speed of a
//! machine. Other programs can disturb a run, too: one repetition is allowed.

use std::time::Duration;

use rlrun::failpoints::VARIABLE;
use serde_json::{Value, json};

use crate::support::{Home, Moment, finish, signal_process};
use crate::workers::pids;

const STEPS: u64 = 16;
const WARMUP_STEPS: u64 = 4;
/// Median steps that a fault lasts.
const FAULT_STEPS: f64 = 8.0;
/// Trajectories of a step.
const TRAJECTORIES: u64 = 192;

/// Two rewards, so that the slow one has to be named.
const TWO_REWARDS: &str = r#"
extends = "small.toml"
[[rewards]]
kind = "regex"
name = "even"
pattern = "[02468]$"
[[rewards]]
kind = "regex"
name = "digits"
pattern = "^[0-9]+$"
[eval.correct]
reward = "even"
"#;

/// A fault of one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InjectedFault {
    SlowCheckpoint,
    SlowJournal,
    SlowReward(&'static str),
    SlowLink,
    SlowPublish,
    SlowRank(usize),
    PausedWorker,
}

use InjectedFault::{PausedWorker, SlowCheckpoint, SlowJournal, SlowLink, SlowPublish, SlowRank, SlowReward};

const FAULTS: [InjectedFault; 9] = [
    SlowCheckpoint,
    SlowJournal,
    SlowReward("even"),
    SlowReward("digits"),
    SlowLink,
    SlowPublish,
    SlowRank(0),
    SlowRank(1),
    PausedWorker,
];

/// Numbers that a seed determines.
struct Draws(u64);

impl Draws {
    /// From `from` to `to`, both included.
    fn between(&mut self, from: u64, to: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        from + (z ^ (z >> 31)) % (to - from + 1)
    }
}

impl InjectedFault {
    /// Cause and name that `rlrun why` has to give.
    fn expected(self) -> (&'static str, String) {
        match self {
            SlowCheckpoint => ("disk", "checkpoint".to_owned()),
            SlowJournal => ("disk", "journal".to_owned()),
            SlowReward(name) => ("reward", name.to_owned()),
            SlowLink => ("weights", "sampler 0".to_owned()),
            SlowPublish => ("weights", "publish".to_owned()),
            SlowRank(rank) => ("slow_rank", format!("trainer rank {rank}")),
            PausedWorker => ("paused", "rollout 0".to_owned()),
        }
    }

    /// Where threads of the run come by, and how often until the fault.
    fn place(self, draws: &mut Draws) -> Option<(String, u64)> {
        // From step 4 to step 11 of 16.
        let step = draws.between(4, 11);
        Some(match self {
            SlowCheckpoint => ("checkpoint-write".to_owned(), step),
            SlowJournal => ("journal-commit".to_owned(), draws.between(40, 60)),
            SlowReward(name) => {
                (format!("reward-score:{name}"), TRAJECTORIES * step + draws.between(0, TRAJECTORIES))
            }
            SlowLink => ("weights-receive".to_owned(), step),
            SlowPublish => ("weights-publish".to_owned(), step),
            // Ranks make the steps of the warm-up, too.
            SlowRank(rank) => (format!("rank-step:{rank}"), WARMUP_STEPS + step),
            PausedWorker => return None,
        })
    }

    /// What the recipe needs for it.
    fn sets(self) -> &'static [&'static str] {
        match self {
            SlowCheckpoint => &["checkpoint.interval=1"],
            SlowRank(_) => &["trainer.world=2"],
            PausedWorker => &["placement.processes=true", "placement.rollout_workers=1"],
            _ => &[],
        }
    }
}

fn new_home() -> Home {
    let home = Home::new();
    home.write("two.toml", TWO_REWARDS);
    home
}

fn arguments<'a>(name: &'a str, sets: &[&'a str]) -> Vec<&'a str> {
    let steps = [
        "trainer.steps=16",
        "trainer.learning_rate=1e-5",
        "warmup.steps=4",
        "buffer.batch_groups=24",
        "checkpoint.interval=5",
        "buffer.max_staleness=0",
    ];
    let sets = steps.iter().chain(sets).flat_map(|set| ["--set", set]);
    ["-q", "two.toml", "--run-dir", name].into_iter().chain(sets).collect()
}

fn why(home: &Home, name: &str) -> Value {
    serde_json::from_str(&home.rlrun(&["why", name, "--json"]).ok().stdout).unwrap()
}

fn median_step(answer: &Value) -> f64 {
    answer["median_step_s"].as_f64().unwrap()
}

/// The causes of stalls with their names, the longest first.
fn named(answer: &Value) -> Vec<(String, String)> {
    let text = |stall: &Value, field: &str| stall[field].as_str().unwrap().to_owned();
    answer["stalls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|stall| (text(stall, "cause"), text(stall, "name")))
        .collect()
}

/// An undisturbed run with the keys of `fault`; its answer.
fn undisturbed(home: &Home, name: &str, sets: &[&str]) -> Value {
    home.rlrun(&arguments(name, sets)).ok();
    why(home, name)
}

/// A run with `fault`, for so long; its answer.
fn disturbed(home: &Home, name: &str, fault: InjectedFault, seconds: f64, draws: &mut Draws) -> Value {
    let sets =
        [fault.sets(), if draws.between(0, 2) == 0 { &["buffer.max_staleness=1"] } else { &[] }].concat();
    // A worker that is paused has all groups in flight only if no batch is ahead.
    let sets = if fault == PausedWorker { fault.sets().to_vec() } else { sets };
    let arguments = arguments(name, &sets);
    if let Some((place, at)) = fault.place(draws) {
        let failpoint = format!("{place}=delay({:.0})@{at}", 1e3 * seconds);
        home.rlrun_with(&[(VARIABLE, &failpoint)], &arguments).ok();
        return why(home, name);
    }
    let run = home.run(name);
    let mut child = home.start(&arguments);
    assert!(run.wait_for(Moment::Step(draws.between(4, 11)), &mut child), "the run ended early");
    let pid = *pids(&run, "rollout 0").last().unwrap();
    signal_process(pid, "STOP");
    std::thread::sleep(Duration::from_secs_f64(seconds));
    signal_process(pid, "CONT");
    finish(child).ok();
    why(home, name)
}

/// What `rlrun why` says of a run with a fault.
struct FaultAnswer {
    /// Whether the longest stall is that of the resource with the fault.
    is_found: bool,
    named: Vec<(String, String)>,
    median_step_s: f64,
}

/// Injects `fault` into a run whose steps take about so long.
fn inject(fault: InjectedFault, median_step_s: f64, draws: &mut Draws) -> FaultAnswer {
    let home = new_home();
    // A worker reports once a second.
    let least_s = if fault == PausedWorker { 3.0 } else { 0.5 };
    let answer = disturbed(&home, "run", fault, (FAULT_STEPS * median_step_s).max(least_s), draws);
    let (cause, name) = fault.expected();
    let named = named(&answer);
    let is_found = named.first() == Some(&(cause.to_owned(), name));
    FaultAnswer { is_found, named, median_step_s: median_step(&answer) }
}

/// Faults of a disk, of the transport of weights and of a process; [`a_hundred_faults_are_found_by_name`] has every kind.
#[test]
fn faults_are_found_by_name_and_undisturbed_runs_name_none() {
    let home = new_home();
    let mut draws = Draws(27);
    let sets: [&[&str]; 2] = [&[], &["trainer.world=2", "buffer.max_staleness=1"]];
    let mut median_step_s: f64 = 0.0;
    for (number, sets) in sets.into_iter().enumerate() {
        let answers = (0..2).map(|attempt| undisturbed(&home, &format!("calm_{number}_{attempt}"), sets));
        let mut seen = Vec::new();
        let calm = answers
            .inspect(|answer| seen.push(answer["stalls"].clone()))
            .find(|answer| named(answer).is_empty());
        let calm = calm.unwrap_or_else(|| panic!("stalls of undisturbed runs: {}", json!(seen)));
        median_step_s = median_step_s.max(median_step(&calm));
        assert_eq!(calm["steps"], STEPS);
    }
    for fault in [SlowJournal, SlowLink, PausedWorker] {
        // Other programs on the machine may cause a longer stall than the fault.
        let mut missed = Vec::new();
        while missed.len() < 3 {
            let answer = inject(fault, median_step_s, &mut draws);
            median_step_s = answer.median_step_s.max(median_step_s);
            if answer.is_found {
                break;
            }
            missed.push(answer.named);
        }
        assert!(missed.len() < 3, "{fault:?}: named {missed:?}");
    }
}

/// `cargo test --workspace --test tests -- --ignored --nocapture why::a_hundred_faults`
#[test]
#[ignore = "takes a quarter of an hour; faults of three kinds are above"]
fn a_hundred_faults_are_found_by_name() {
    let seed = 2_026_112_700;
    let mut draws = Draws(seed);
    let (mut found, mut false_alarms, mut median_step_s) = (0, 0, 0.0_f64);
    for number in 0..10 {
        let home = new_home();
        let sets: &[&str] = match number % 3 {
            0 => &[],
            1 => &["trainer.world=2"],
            _ => &["checkpoint.interval=1", "buffer.max_staleness=1"],
        };
        // What another program on the machine disturbed is repeated.
        let calm = (0..2).map(|attempt| undisturbed(&home, &format!("run_{attempt}"), sets)).find(|answer| {
            median_step_s = median_step_s.max(median_step(answer));
            let stalls = named(answer);
            eprintln!("undisturbed run {number}: {stalls:?}");
            stalls.is_empty()
        });
        false_alarms += u32::from(calm.is_none());
    }
    for number in 0..100 {
        let fault = FAULTS[number % FAULTS.len()];
        let FaultAnswer { is_found, named, median_step_s: newest_s } =
            inject(fault, median_step_s, &mut draws);
        // A machine that became slower needs longer faults.
        median_step_s = newest_s.max(0.9 * median_step_s);
        found += u32::from(is_found);
        eprintln!("{number}: {fault:?} {} {named:?}", if is_found { "found" } else { "MISSED" });
    }
    eprintln!(
        "{found} of 100 faults were found by name (seed {seed}); {false_alarms} of 10 undisturbed runs named one"
    );
    assert!(found >= 95, "{found} of 100");
    assert_eq!(false_alarms, 0);
}

#[test]
fn a_run_is_explained_while_it_runs_and_after_a_kill_with_a_torn_line() {
    let home = new_home();
    let run = home.run("run");
    let sets = ["trainer.steps=100000", "buffer.max_staleness=1"];
    let mut child = home.start(&arguments("run", &sets));
    assert!(run.wait_for(Moment::Step(8), &mut child));
    let text = home.rlrun(&["why", "run"]).ok().stdout;
    for shown in ["run: still running; ", "sampling `sampler 0`", "critical path", "recommendations"] {
        assert!(text.contains(shown), "{shown}:\n{text}");
    }
    assert!(text.is_ascii(), "{text}");
    child.kill().unwrap();
    finish(child);
    let path = run.path.join("timeline.jsonl");
    let mut timeline = std::fs::read(&path).unwrap();
    timeline.extend_from_slice(b"{\"lane\":\"trainer\",\"kind\":\"forw");
    std::fs::write(&path, timeline).unwrap();
    let answer = why(&home, "run");
    assert_eq!((&answer["state"], &answer["unreadable_lines"]), (&json!("interrupted"), &json!(1)));
    let seconds = |list: &Value, field: &str| -> f64 {
        list.as_array().unwrap().iter().map(|of| of[field].as_f64().unwrap()).sum()
    };
    let wall = answer["wall_s"].as_f64().unwrap();
    assert!((seconds(&answer["causes"], "seconds") - wall).abs() < 1e-3, "{answer}");
    assert!((seconds(&answer["causes"], "share") - 1.0).abs() < 1e-2, "{answer}");
    assert!(answer["recommendations"]["changes"].as_array().unwrap().len() <= 5, "{answer}");
    let step: Value =
        serde_json::from_str(&home.rlrun(&["why", "run", "--step", "3", "--json"]).ok().stdout).unwrap();
    assert!((seconds(&step["path"], "seconds") - step["seconds"].as_f64().unwrap()).abs() < 1e-4, "{step}");
    home.rlrun(&["why", "run", "--step", "1000000"]).refused(&["step 1000000 is not in the timeline"]);
}

#[test]
fn what_cannot_be_explained_is_refused_with_its_reason() {
    let home = new_home();
    home.rlrun(&["why", "nowhere"]).refused(&["there is no directory `nowhere`", "rlrun runs"]);
    std::fs::create_dir(home.path("empty")).unwrap();
    home.rlrun(&["why", "empty"]).refused(&["`empty` is no run directory"]);
    home.rlrun(&arguments("silent", &["trainer.steps=2", "log.timeline=0"])).ok();
    home.rlrun(&["why", "silent"]).refused(&["has no `timeline.jsonl`", "log.timeline"]);
}
