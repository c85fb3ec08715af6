//! Curation in whole runs: which tasks are drawn, which groups are trained on, and what a resume restores.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::support::{CORRECT, Home, Moment, Run, finish};

/// Few tasks, small groups and a policy that does not change: a task passes in about half of its groups.
const STILL: [&str; 5] = [
    "trainer.learning_rate=1e-9",
    "buffer.max_staleness=0",
    "buffer.batch_groups=4",
    "data.arithmetic.eval_tasks=1",
    "rollout.group_size=4",
];

/// A trained group.
#[derive(Debug, PartialEq)]
struct Trained {
    step: u64,
    id: u64,
    task: u64,
    rewards: Vec<f64>,
}

impl Trained {
    fn pass_rate(&self) -> f64 {
        self.rewards.iter().sum::<f64>() / self.rewards.len() as f64
    }
}

/// All groups that were trained on; `small.toml` writes each to `samples/`.
fn trained(run: &Run, steps: std::ops::RangeInclusive<u64>) -> Vec<Trained> {
    let of = |step, group: serde_json::Map<String, Value>| {
        let rewards = group["trajectories"].as_array().unwrap().iter();
        Trained {
            step,
            id: group["group"].as_u64().unwrap(),
            task: group["task"].as_u64().unwrap(),
            rewards: rewards.map(|trajectory| trajectory["reward"].as_f64().unwrap()).collect(),
        }
    };
    steps.flat_map(|step| run.samples(step).into_iter().map(move |group| of(step, group))).collect()
}

fn history(run: &Run) -> Vec<Value> {
    let text = std::fs::read_to_string(run.path.join("curation.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn total(run: &Run, name: &str) -> f64 {
    run.values(&format!("curation/{name}")).iter().sum()
}

#[test]
fn a_run_without_curation_writes_no_history() {
    let home = Home::new();
    let run = home.small("run", &["trainer.steps=1"]);
    assert!(!run.path.join("curation.jsonl").exists());
    assert!(run.metrics().iter().flatten().all(|(name, _)| !name.starts_with("curation")));
}

#[test]
fn dynamic_sampling_trains_only_on_groups_with_variance() {
    let home = Home::new();
    let sets = ["curation.dynamic_sampling=true", "rollout.group_size=2", "trainer.steps=4"];
    let run = home.small("run", &sets);
    let groups = trained(&run, 1..=4);
    assert_eq!(groups.len(), 32);
    assert!(groups.iter().all(|group| group.rewards[0] != group.rewards[1]), "{groups:?}");
    assert!(run.values("reward/frac_zero_std").iter().all(|share| *share == 0.0));
    let refilled = total(&run, "refilled");
    assert!(refilled > 8.0, "about every other group of two is all alike: {refilled}");
    assert_eq!(total(&run, "let_through"), 0.0);
    assert!(history(&run).len() >= 40);
    // In a synchronous run the refill is a function of the seed.
    let synchronous = [&sets[..2], &["trainer.steps=2", "buffer.max_staleness=0"]].concat();
    let runs = ["one", "two"].map(|name| trained(&home.small(name, &synchronous), 1..=2));
    assert_eq!(runs[0], runs[1]);
}

#[test]
fn a_retired_task_is_not_drawn_again_after_a_resume() {
    let home = Home::new();
    let sets =
        [&STILL[..], &["curation.max_pass_rate=0.75", "data.arithmetic.train_tasks=24", "trainer.steps=6"]]
            .concat();
    let run = home.small("run", &sets);
    let before = history(&run).len();
    home.rlrun(&["resume", "run", "--set", "trainer.steps=10"]).ok();
    let (groups, lines) = (trained(&run, 1..=10), history(&run).len());
    assert!(groups.len() == 40 && lines >= 40 && lines > before);
    let mut retired_at: BTreeMap<u64, u64> = BTreeMap::new();
    for group in &groups {
        let since = retired_at.get(&group.task).copied().unwrap_or(u64::MAX);
        assert!(group.step <= since, "{group:?} came after its task was retired in step {since}");
        if group.pass_rate() >= 0.75 {
            retired_at.entry(group.task).or_insert(group.step);
        }
    }
    assert!(
        retired_at.values().any(|step| *step <= 6),
        "some were retired before the resume: {retired_at:?}"
    );
    let again: BTreeSet<u64> = groups.iter().filter(|group| group.id >= 24).map(|group| group.task).collect();
    assert!(!again.is_empty(), "a second epoch was begun");
    assert!(total(&run, "retired") > 0.0, "and places were passed over in it");
}

/// A lost group is sampled again with the history from before it began.
#[test]
fn a_killed_synchronous_run_makes_the_same_choices() {
    let home = Home::new();
    let sets = [
        "buffer.max_staleness=0",
        "rollout.group_size=4",
        // In file order a task is drawn again after forty positions, never within a step, so its result is known.
        "data.arithmetic.train_tasks=40",
        "data.shuffle=false",
        "curation.dynamic_sampling=true",
        "curation.shrink_above=0.2",
        "curation.easy_pass_rate=0.8",
        "curation.easy_share=0.5",
    ];
    let whole = home.small("whole", &sets);
    let killed = home.run("killed");
    let mut child = home.start_small("killed", &sets);
    let mut kills = 0;
    for moment in [Moment::Step(1), Moment::Step(2), Moment::Step(5), Moment::Step(8)] {
        if killed.wait_for(moment, &mut child) {
            child.kill().unwrap();
        }
        kills += usize::from(finish(child).status.code().is_none());
        child = home.start(&["resume", "killed"]);
    }
    finish(child).ok();
    assert!(kills >= 2, "only {kills} kills came in time");
    assert_eq!(trained(&killed, 1..=12), trained(&whole, 1..=12));
    let weights = |run: &Run| std::fs::read(run.checkpoint(12).join("model/model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&killed), "the weights differ");
}

#[test]
fn groups_of_tasks_that_succeed_are_smaller() {
    let home = Home::new();
    let sets = [
        "curation.shrink_above=0.0",
        "curation.min_group_size=2",
        "data.arithmetic.train_tasks=8",
        "trainer.steps=4",
        "buffer.max_staleness=0",
    ];
    let run = home.small("run", &sets);
    let groups = trained(&run, 1..=4);
    assert!(groups.iter().take(8).all(|group| group.rewards.len() == 8), "nothing is known yet");
    let mut rates: BTreeMap<u64, f64> = BTreeMap::new();
    let mut smaller = 0.0;
    for group in &groups {
        let rate = rates.insert(group.task, group.pass_rate()).unwrap_or(0.0);
        let expected = 8 - (6.0 * rate).round() as usize;
        assert_eq!(group.rewards.len(), expected, "{group:?} after a rate of {rate}");
        smaller += f64::from(u8::from(expected < 8));
    }
    assert!(smaller > 0.0);
    assert!(total(&run, "shrunk") >= smaller);
}

#[test]
fn a_run_without_remaining_tasks_ends_with_an_error() {
    let home = Home::new();
    let few = [
        CORRECT,
        "data.arithmetic.train_tasks=8",
        "data.arithmetic.eval_tasks=1",
        "curation.max_pass_rate=0.01",
    ];
    for staleness in ["buffer.max_staleness=0", "buffer.max_staleness=3"] {
        let sets = [&few[..], &[staleness]].concat();
        let args = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["small.toml", "--run-dir", staleness].into_iter().chain(args).collect();
        let done = home.rlrun(&args);
        assert_eq!(done.status.code(), Some(1), "{}\n{}", done.stdout, done.stderr);
        for evidence in ["no task is left to draw: of 8 tasks, 8 pass", "curation.max_pass_rate"] {
            assert!(done.stderr.contains(evidence), "{}", done.stderr);
        }
        assert!(home.run(staleness).steps().len() < 12);
    }
    // The last step needs no more tasks.
    home.small("enough", &[&few[..], &["trainer.steps=1", "buffer.max_staleness=0"]].concat());
}

#[test]
fn a_foreign_curation_history_is_refused_with_its_line() {
    let home = Home::new();
    let run = home.small("run", &["trainer.steps=1", "curation.filter_after=8"]);
    let path = run.path.join("curation.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{text}{{\"task\": 1}}\n")).unwrap();
    let line = format!("curation.jsonl` line {}", text.lines().count() + 1);
    home.rlrun(&["resume", "run", "--set", "trainer.steps=2"]).refused(&[&line, "missing field"]);
    // An incomplete last line after a crash is not an error.
    std::fs::write(&path, format!("{text}{{\"task\": 1, \"gr")).unwrap();
    home.rlrun(&["resume", "run", "--set", "trainer.steps=2"]).ok();
    assert!(std::fs::read_to_string(&path).unwrap().starts_with(&text));
}

#[test]
fn stored_successes_keep_the_bound() {
    let home = Home::new();
    let sets = [
        "curation.success_pool=true",
        "buffer.on_stale=drop",
        "buffer.max_staleness=2",
        "buffer.batch_groups=4",
        "rollout.group_size=2",
        "data.arithmetic.train_tasks=4",
        "trainer.steps=24",
    ];
    let run = home.small("run", &sets);
    assert!(total(&run, "replayed_successes") > 0.0);
    assert!(run.values("staleness/max").iter().all(|max| *max <= 2.0), "{:?}", run.values("staleness/max"));
}

#[test]
fn interrupted_completions_are_trained_on_bit_for_bit() {
    let home = Home::new();
    let sets = [
        "rollout.interrupt_text=;so",
        "rollout.interrupt_after_min=2",
        "rollout.interrupt_after_max=5",
        "rollout.bitwise=true",
        "trainer.steps=3",
        "buffer.max_staleness=0",
    ];
    let run = home.small("run", &sets);
    assert!(total(&run, "interrupted") > 100.0, "{:?}", run.values("curation/interrupted"));
    assert!(run.values("logprob_abs_diff/max").iter().all(|diff| *diff <= 1e-5));
    let texts =
        run.samples(1).into_iter().flat_map(|group| group["trajectories"].as_array().unwrap().clone());
    let places = texts.filter_map(|t| t["completion"].as_str().unwrap().find(";so"));
    assert!(places.clone().count() > 30 && places.clone().all(|place| place >= 2), "{places:?}");
}

/// Once a task has succeeded, its episodes have at most as many turns as its longest success and the margin.
#[test]
fn turns_are_limited_by_the_successes_of_a_task() {
    let home = Home::new();
    let sets = [
        "environment.kind=retry",
        "environment.max_turns=6",
        "environment.max_tokens=90",
        "data.arithmetic.train_tasks=8",
        "buffer.max_staleness=0",
        "curation.turn_margin=0",
        "log.samples=100",
    ];
    let run = home.small("run", &sets);
    let limited = run.values("curation/turn_limited");
    assert!(limited.iter().sum::<f64>() > 0.0, "{limited:?}");
    let most: BTreeMap<u64, usize> = (1..=run.steps().len() as u64)
        .flat_map(|step| run.samples(step))
        .map(|group| {
            let turns = |trajectory: &Value| trajectory["turns"].as_array().map_or(1, Vec::len);
            let most = group["trajectories"].as_array().unwrap().iter().map(turns).max();
            (group["group"].as_u64().unwrap(), most.unwrap())
        })
        .collect();
    // Without staleness a version starts after all results of the versions before.
    let mut longest = BTreeMap::<u64, [u64; 2]>::new();
    let mut compared = 0;
    for outcome in history(&run) {
        let [version, task, group] =
            ["version", "task", "group"].map(|key| outcome[key].as_u64().expect("a number"));
        let [first, success] = longest.get(&task).copied().unwrap_or([u64::MAX, 0]);
        if let Some(turns) = most.get(&group).filter(|_| first < version) {
            assert!(*turns as u64 <= success, "task {task}, version {version}: {turns} turns");
            compared += 1;
        }
        if let Some(turns) = outcome["success_turns"].as_u64() {
            longest.insert(task, [first.min(version), success.max(turns)]);
        }
    }
    assert!(compared > 10, "{compared} groups after a success");
}
