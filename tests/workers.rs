//! Roles as separate processes: a run of processes computes what one process does, and workers join and leave.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::rewards::python_is_there;
use crate::served::{Client, Place};
use crate::support::{
    Home, Moment, Run, Running, finish, interrupt, lines, signal, signal_process, small_args,
};

/// Two samplers beside the trainer, each a process.
pub(crate) const PROCESSES: [&str; 2] = ["placement.processes=true", "placement.rollout_workers=2"];

/// The processes that were started under a name, first to last.
pub(crate) fn pids(run: &Run, name: &str) -> Vec<u32> {
    let started = |line: &serde_json::Map<String, Value>| line["event"] == "start" && line["name"] == name;
    let lines = run.controller().into_iter().filter(started);
    lines.filter_map(|line| u32::try_from(line["fields"]["pid"].as_u64()?).ok()).collect()
}

/// The address that a run prints.
pub(crate) fn served_on(run: &Run) -> String {
    let log = fs::read_to_string(run.path.join("logs/attempt_1.log")).unwrap();
    let url = log.split("served on ").nth(1).and_then(|rest| rest.split_whitespace().next());
    url.unwrap_or_else(|| panic!("{log}")).to_owned()
}

/// The workers of the run at `url`.
pub(crate) fn members(url: &str) -> Vec<Value> {
    let place = Place::at(url.strip_prefix("http://").unwrap().parse().unwrap());
    let (status, members, _) = Client::new(&place).ask("GET", "/v1/run/workers", &Value::Null);
    assert_eq!(status, 200, "{members}");
    members.as_array().unwrap().clone()
}

/// Waits until a condition is true; panics with the text of `show` after five minutes.
pub(crate) fn until(what: &str, holds: &dyn Fn() -> bool, show: &dyn Fn() -> String) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed().as_secs() < 300, "{what} has not come: {}", show());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether no group of `steps` was trained on twice and no group before the last is missing.
pub(crate) fn every_group_once(run: &Run, steps: u64, batch: u64) -> Result<(), String> {
    let groups: Vec<u64> = (1..=steps)
        .flat_map(|step| run.samples(step))
        .map(|group| group["group"].as_u64().unwrap_or(u64::MAX))
        .collect();
    let unique: BTreeSet<_> = groups.iter().collect();
    if groups.len() as u64 == batch * steps && unique.len() == groups.len() {
        return Ok(());
    }
    Err(format!("{} groups of which {} are different: {groups:?}", groups.len(), unique.len()))
}

/// Two samplers share the work; a completion does not depend on which of them samples it.
#[test]
fn a_synchronous_run_of_processes_has_the_bits_of_one_process() {
    let home = Home::new();
    let sets = ["buffer.max_staleness=0", "trainer.steps=6"];
    let one = home.small("one", &sets);
    for (name, more) in [("shared", "weights.transport=auto"), ("http", "weights.transport=http")] {
        let many = home.small(name, &[&sets[..], &PROCESSES, &[more]].concat());
        assert_eq!(many.values("reward/mean"), one.values("reward/mean"), "{name}");
        let weights = |run: &Run| fs::read(run.checkpoint(6).join("model/model.safetensors")).unwrap();
        assert!(weights(&one) == weights(&many), "{name}: the weights differ");
        every_group_once(&many, 6, 8).unwrap();
        for worker in ["rollout 0", "rollout 1"] {
            assert_eq!(pids(&many, worker).len(), 1, "{name}: {worker}");
        }
        assert!(many.values("weights/subscribers").contains(&2.0), "{name}");
    }
}

/// A trainer that takes much longer than its samplers: one of two gets slots, and the other takes its place when it is killed.
#[test]
fn one_of_two_samplers_is_enough_for_a_slow_trainer_and_the_other_is_a_reserve() {
    let home = Home::new();
    let sets = [
        "placement.adapt_samplers=true",
        "buffer.max_staleness=4",
        "trainer.steps=40",
        "deadlines.heartbeat_s=60",
    ];
    let args = small_args("run", &[&sets[..], &PROCESSES].concat());
    let mut lead = home.start_with(&[("RLRUN_FAILPOINTS", "rank-step=delay(300)")], &args);
    let run = home.run("run");
    let decided = || {
        let events = run.path.join("events.jsonl");
        let events = if events.exists() { lines(&events) } else { Vec::new() };
        events.into_iter().filter(|event| event["event"] == "active_samplers").collect::<Vec<_>>()
    };
    until("one sampler", &|| !decided().is_empty(), &|| {
        format!("{:?}", run.values("rollout/active_samplers"))
    });
    // After the first kill the other one has joined first, and gets the slots.
    let mut killed = 0;
    for name in ["rollout 0", "rollout 1"] {
        killed = run.steps().len();
        signal_process(pids(&run, name)[0], "KILL");
        assert!(run.wait_for(Moment::Step(killed as u64 + 8), &mut lead));
    }
    finish(lead).ok();
    every_group_once(&run, 40, 8).unwrap();
    let first = &decided()[0]["fields"];
    assert_eq!((&first["samplers_before"], &first["samplers"]), (&2.into(), &1.into()), "{first}");
    let samplers = run.values("rollout/active_samplers");
    // On a busy machine sampling may take so long that both get slots again.
    assert!(samplers.contains(&2.0) && samplers[killed..].contains(&1.0), "{samplers:?}");
}

/// One of the ranks is killed: all are restarted and end with the bits of ranks as threads.
#[test]
fn ranks_as_processes_have_the_bits_of_threads_after_a_kill() {
    let home = Home::new();
    let sets = ["buffer.max_staleness=0", "trainer.steps=9", "trainer.world=2", "trainer.zero=3"];
    let threads = home.small("threads", &sets);
    let processes = ["placement.processes=true", "trainer.ranks=processes"];
    let run = home.run("processes");
    let mut child = home.start_small("processes", &[&sets[..], &processes].concat());
    assert!(run.wait_for(Moment::Step(4), &mut child));
    signal_process(pids(&run, "trainer 1")[0], "KILL");
    finish(child).ok();
    assert_eq!((pids(&run, "trainer 1").len(), pids(&run, "the trainer").len()), (2, 2));
    let weights = |run: &Run| fs::read(run.checkpoint(9).join("model/model.safetensors")).unwrap();
    assert!(weights(&threads) == weights(&run), "the weights differ");
    assert_eq!(threads.values("reward/mean"), run.values("reward/mean"));
    every_group_once(&run, 9, 8).unwrap();
}

/// Ranks are killed in a run that may continue without them: nothing else is started again, nothing is read from disk, and the weights are
/// those of ranks that lived.
#[test]
fn killed_ranks_are_replaced_from_memory_with_the_same_bits() {
    let home = Home::new();
    let sets = ["buffer.max_staleness=0", "trainer.steps=10", "trainer.world=4", "trainer.zero=3"];
    let threads = home.small("threads", &sets);
    let elastic = [
        "placement.processes=true",
        "placement.restarts=100",
        "trainer.ranks=processes",
        "trainer.elastic.snapshot_every=2",
        // No checkpoint but the last.
        "checkpoint.interval=0",
        // Both gather the weights in every step.
        "eval.interval=1",
        "log.schedule=true",
    ];
    let run = home.run("elastic");
    let mut child = home.start_small("elastic", &[&sets[..], &elastic].concat());
    let changes = || {
        let text = fs::read_to_string(run.path.join("events.jsonl")).unwrap_or_default();
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events.filter(|event| event["event"] == "regroup").collect::<Vec<_>>()
    };
    for (step, name, fault) in [(3, "trainer 1", "KILL"), (7, "trainer 3", "KILL")] {
        assert!(run.wait_for(Moment::Step(step), &mut child), "the run ended before step {step}");
        let before = changes().len();
        signal_process(*pids(&run, name).last().unwrap(), fault);
        until("the change of the ranks", &|| changes().len() > before, &|| format!("{:?}", changes()));
    }
    finish(child).ok();
    assert_eq!(pids(&run, "the trainer").len(), 1, "the run was not started again");
    assert_eq!((pids(&run, "trainer 1").len(), pids(&run, "trainer 2").len()), (2, 1));
    assert!(
        changes().iter().all(|change| change["fields"]["repeated_steps"].as_u64() <= Some(2)),
        "{:?}",
        changes()
    );
    let why: Value = serde_json::from_str(&home.rlrun(&["why", "elastic", "--json"]).ok().stdout).unwrap();
    for cause in ["regroup", "snapshot"] {
        assert!(why["causes"].as_array().unwrap().iter().any(|of| of["cause"] == cause), "{cause}: {why}");
    }
    let weights = |run: &Run| fs::read(run.checkpoint(10).join("model/model.safetensors")).unwrap();
    assert!(weights(&threads) == weights(&run), "the weights differ");
    assert_eq!(threads.values("reward/mean"), run.values("reward/mean"));
    every_group_once(&run, 10, 8).unwrap();
}

/// The first rank cannot be replaced: it starts again from its checkpoint, and so do the ranks that it leaves.
#[test]
fn ranks_that_may_come_and_go_follow_a_run_that_is_started_again() {
    let home = Home::new();
    let sets = ["buffer.max_staleness=0", "trainer.steps=9", "trainer.world=2"];
    let threads = home.small("threads", &sets);
    let elastic = ["placement.processes=true", "trainer.ranks=processes", "trainer.elastic.snapshot_every=1"];
    let run = home.run("elastic");
    let mut child = home.start_small("elastic", &[&sets[..], &elastic].concat());
    assert!(run.wait_for(Moment::Step(4), &mut child));
    signal_process(pids(&run, "the trainer")[0], "KILL");
    finish(child).ok();
    assert_eq!((pids(&run, "trainer 1").len(), pids(&run, "the trainer").len()), (2, 2));
    let weights = |run: &Run| fs::read(run.checkpoint(9).join("model/model.safetensors")).unwrap();
    assert!(weights(&threads) == weights(&run), "the weights differ");
    every_group_once(&run, 9, 8).unwrap();
}

/// Seconds from the death of a rank to the next step, in a run with `sets`: once for every kill.
fn recoveries(home: &Home, name: &str, sets: &[&str], kills: u64) -> Vec<f64> {
    let run = home.run(name);
    let common = [
        "placement.processes=true",
        "placement.restarts=1000",
        "trainer.ranks=processes",
        "trainer.world=2",
        "trainer.zero=3",
        "checkpoint.interval=5",
    ];
    let mut child = home.start_endless(name, &[&common[..], sets].concat());
    let mut times = Vec::new();
    assert!(run.wait_for(Moment::Step(1), &mut child));
    for kill in 1..=kills {
        // In the middle between two checkpoints.
        let at = run.steps().len() as u64 / 5 * 5 + 8;
        assert!(run.wait_for(Moment::Step(at), &mut child), "the run ended before kill {kill}");
        signal_process(*pids(&run, "trainer 1").last().unwrap(), "KILL");
        let (clock, before) = (Instant::now(), run.steps().len());
        // Steps after the last checkpoint are repeated after a restart.
        until("the next step", &|| run.steps().len() > before, &String::new);
        times.push(clock.elapsed().as_secs_f64());
    }
    interrupt(&child);
    finish(child).ok();
    times.sort_by(f64::total_cmp);
    times
}

/// `cargo test --workspace --test tests -- --ignored --nocapture recovery_from_memory`
#[test]
#[ignore = "measures; takes two minutes"]
fn recovery_from_memory_takes_less_time_than_from_disk() {
    let home = Home::new();
    let disk = recoveries(&home, "disk", &[], 9);
    let memory = recoveries(&home, "memory", &["trainer.elastic.snapshot_every=1"], 9);
    let alone = ["trainer.elastic.snapshot_every=1", "trainer.elastic.patience_s=0"];
    let alone = recoveries(&home, "alone", &alone, 9);
    for (name, times) in [("disk", &disk), ("memory", &memory), ("memory, without a wait", &alone)] {
        eprintln!("{name}: median {:.2} s, {:.2} to {:.2} s", times[4], times[0], times[8]);
    }
    assert!(memory[4] < disk[4] && alone[4] < disk[4]);
}

/// A run that is served and started by hand: a rank is killed, the others continue, and another joins later.
#[test]
fn a_run_shrinks_and_grows_with_its_ranks() {
    let home = Home::new();
    let sets = [
        "buffer.listen=127.0.0.1:0",
        "buffer.insecure=true",
        "trainer.world=2",
        "trainer.ranks=processes",
        "trainer.elastic.snapshot_every=1",
        "trainer.elastic.patience_s=0.5",
        "buffer.max_staleness=0",
    ];
    let run = home.run("run");
    let mut child = home.start_endless("run", &sets);
    let joins = || {
        until("the address of the run", &|| run.path.join("logs/attempt_1.log").is_file(), &String::new);
        until("the address of the run", &|| log_of(&run).contains("served on "), &|| log_of(&run));
        home.start(&["worker", "trainer", "--join", &served_on(&run)])
    };
    let mut rank = joins();
    assert!(run.wait_for(Moment::Step(3), &mut child));
    rank.kill().unwrap();
    rank.wait().unwrap();
    let world = || run.values("trainer/world").last().copied();
    until("a step with one rank", &|| world() == Some(1.0), &|| log_of(&run));
    let mut other = joins();
    until("a step with two ranks", &|| world() == Some(2.0), &|| log_of(&run));
    interrupt(&child);
    finish(child).ok();
    assert!(other.wait().unwrap().success(), "a rank ends with its run");
    let steps = run.steps().len() as u64;
    every_group_once(&run, steps, 8).unwrap();
}

/// The log of the run.
fn log_of(run: &Run) -> String {
    fs::read_to_string(run.path.join("logs/attempt_1.log")).unwrap_or_default()
}

/// Workers join a run in one process: one leaves on request, one is killed, one joins late.
#[test]
fn workers_join_and_leave_during_a_run() {
    let home = Home::new();
    let run = home.run("run");
    // A policy without gradients publishes versions faster than workers apply them.
    let sets = ["buffer.listen=127.0.0.1:0", "buffer.max_staleness=2", "trainer.learning_rate=1e-9"];
    let mut lead = home.start_endless("run", &sets);
    assert!(run.wait_for(Moment::Step(1), &mut lead));
    let url = served_on(&run);
    let join = |name: &str| {
        home.start(&[
            "worker",
            "rollout",
            "--join",
            &url,
            "--name",
            name,
            "--threads",
            "1",
            "--patience",
            "5",
        ])
    };
    let sampled = |name: &str| {
        let member = members(&url).into_iter().find(|member| member["name"] == name);
        member.and_then(|member| member["sampled_tokens"].as_u64()).unwrap_or(0)
    };
    let show = || format!("{:?}", members(&url));
    let (polite, mut killed) = (join("polite"), join("killed"));
    until("work of both", &|| sampled("polite") > 0 && sampled("killed") > 0, &show);
    killed.kill().unwrap();
    interrupt(&polite);
    let said = finish(polite).ok();
    assert!(said.stderr.contains("joined http://"), "{}", said.stderr);
    until("the leaving of one", &|| !show().contains("polite"), &show);
    let late = join("late");
    until("work of the late one", &|| sampled("late") > 0, &show);
    let steps = run.steps().len() as u64;
    assert!(run.wait_for(Moment::Step(steps + 3), &mut lead));
    interrupt(&lead);
    finish(lead).ok();
    // The run has notified the worker of its end.
    finish(late).ok();
    let last = run.steps().len() as u64;
    every_group_once(&run, last, 8).unwrap();
    assert!(run.values("staleness/max").iter().all(|max| *max <= 2.0));
}

/// Weights go from the run to one worker and from there to others; when that one is killed, the run serves them itself.
#[test]
fn workers_pass_weights_on() {
    let home = Home::new();
    let run = home.run("run");
    // All workers are on the host of the run, and would share its memory.
    let sets =
        ["buffer.listen=127.0.0.1:0", "buffer.max_staleness=2", "weights.transport=http", "weights.fanout=1"];
    let mut lead = home.start_endless("run", &[&sets[..], &["trainer.learning_rate=1e-9"]].concat());
    assert!(run.wait_for(Moment::Step(1), &mut lead));
    let url = served_on(&run);
    let join = |name: &str, more: &[&str]| {
        let args = ["worker", "rollout", "--join", &url, "--name", name, "--threads", "1", "--patience", "5"];
        home.start(&[&args[..], more].concat())
    };
    let last = |name: &str| run.values(name).last().copied().unwrap_or(0.0);
    let show = || format!("{:?}", members(&url));
    let relay = ["--relay", "127.0.0.1:0"];
    let mut first = join("first", &relay);
    until("the first relay", &|| last("weights/relays") == 1.0, &show);
    let second = join("second", &relay);
    until("the second relay", &|| last("weights/relays") == 2.0, &show);
    let leaf = join("leaf", &[]);
    // The last of the chain is always behind the others, which may leave it no slot.
    let served = |name: &str| {
        let member = members(&url).into_iter().find(|member| member["name"] == name);
        member.and_then(|member| member["served_version"].as_u64()).unwrap_or(0)
    };
    until("weights of all", &|| ["first", "second", "leaf"].iter().all(|name| served(name) > 0), &show);
    let failures = last("weights/relay_failures");
    first.kill().unwrap();
    until("a failed relay", &|| last("weights/relay_failures") > failures, &show);
    let before = served("leaf");
    until("newer weights of the leaf", &|| served("leaf") > before, &show);
    interrupt(&lead);
    finish(lead).ok();
    let said = finish(second).ok();
    assert!(said.stderr.contains("passing weights on from http://127.0.0.1:"), "{}", said.stderr);
    finish(leaf).ok();
    let log = fs::read_to_string(run.path.join("logs/attempt_1.log")).unwrap();
    assert!(log.contains("second took v") && log.contains("from the run instead of first"), "{log}");
    every_group_once(&run, run.steps().len() as u64, 8).unwrap();
    assert!(run.values("staleness/max").iter().all(|max| *max <= 2.0));
    // One that others could not reach is no relay.
    finish(join("everywhere", &["--relay", "0.0.0.0:0"])).refused(&["--relay-url"]);
}

/// A run names a dataset and a function: a worker reads and runs neither until its operator allows it.
#[test]
fn a_worker_reads_and_runs_only_what_its_operator_allows() {
    if !python_is_there() {
        return;
    }
    let home = Home::new();
    let run = home.run("run");
    let tasks: String =
        (0..20).map(|n| format!("{{\"prompt\": \"{n}+{n}=\", \"answer\": \"{}\"}}\n", n + n)).collect();
    home.write("data/tasks.jsonl", tasks);
    // Every import appends a letter to a file beside it.
    home.write(
        "score.py",
        "import os\nopen(os.path.join(os.path.dirname(__file__), 'imports'), 'a').write('x')\n\
         def score(completions, **kwargs):\n    return [float(len(c) % 2) for c in completions]\n",
    );
    home.write(
        "own.toml",
        "[model.random]\n[data]\ntrain = \"data/tasks.jsonl\"\n[rollout]\ngroup_size = 2\n\
         max_completion_length = 4\nmax_running = 16\n[[rewards]]\nkind = \"python\"\npath = \"score.py\"\n\
         [buffer]\nbatch_groups = 4\nmax_staleness = 2\nlisten = \"127.0.0.1:0\"\n[trainer]\nsteps = 100000\n\
         learning_rate = 1e-9\n",
    );
    let mut lead = home.start(&["-q", "own.toml", "--run-dir", "run"]);
    assert!(run.wait_for(Moment::Step(1), &mut lead));
    let url = served_on(&run);
    let join = |name: &str, more: &[&str]| {
        let args = ["worker", "rollout", "--join", &url, "--name", name, "--threads", "1", "--patience", "5"];
        home.start(&[&args[..], more].concat())
    };
    let imports = || fs::read_to_string(home.path("imports")).unwrap().len();
    assert_eq!(imports(), 1, "the run's own");
    let all = ["`rewards[0].path`", "score.py", "--allow-code", "`data.train`", "--allow-path", "--recipe"];
    finish(join("nothing", &[])).refused(&all);
    let said = finish(join("code", &["--allow-code", "score.py"])).refused(&["`data.train`", "tasks.jsonl"]);
    assert!(!said.contains("rewards[0]"), "{said}");
    finish(join("paths", &["--allow-path", "data"])).refused(&["`rewards[0].path`"]);
    finish(join("other", &["--allow-path", "data", "--allow-code", "own.toml"]))
        .refused(&["`rewards[0].path`"]);
    assert_eq!(imports(), 1, "a worker that was refused has run code");
    let sampled = |name: &str| {
        let member = members(&url).into_iter().find(|member| member["name"] == name);
        member.and_then(|member| member["sampled_tokens"].as_u64()).unwrap_or(0)
    };
    let show = || format!("{:?}", members(&url));
    let flags = join("flags", &["--allow-path", "data", "--allow-code", "score.py"]);
    let recipe = join("recipe", &["--recipe", "own.toml"]);
    until("work of both", &|| sampled("flags") > 0 && sampled("recipe") > 0, &show);
    assert_eq!(imports(), 3);
    interrupt(&lead);
    finish(lead).ok();
    finish(flags).ok();
    finish(recipe).ok();
}

#[test]
fn a_run_that_a_launcher_stops_asks_to_be_requeued() {
    let home = Home::new();
    for (name, sets) in [("one", &[][..]), ("many", &PROCESSES)] {
        let run = home.run(name);
        let mut child = home.start_endless(name, sets);
        assert!(run.wait_for(Moment::Step(2), &mut child));
        signal(&child, "TERM");
        let done = finish(child);
        assert_eq!(done.status.code(), Some(75), "{}\n{}", done.stdout, done.stderr);
        assert!(done.stderr.contains(&format!("rlrun resume {name}")), "{}", done.stderr);
        let last = run.steps().len() as u64;
        assert!(run.checkpoint(last).is_dir(), "no checkpoint of step {last}");
        let steps = format!("trainer.steps={}", last + 1);
        home.rlrun(&["resume", name, "--set", &steps]).ok();
        assert_eq!(run.steps().len() as u64, last + 1);
    }
}

/// The processes of a run save and end with their controller, however it ends.
#[test]
fn a_run_whose_controller_is_killed_can_be_resumed() {
    let home = Home::new();
    let run = home.run("run");
    let sets = [&PROCESSES[..], &["trainer.steps=9", "checkpoint.interval=100"]].concat();
    let mut child = home.start_small("run", &sets);
    assert!(run.wait_for(Moment::Step(3), &mut child));
    child.kill().unwrap();
    child.wait().unwrap();
    let all: Vec<u32> =
        ["the trainer", "rollout 0", "rollout 1"].iter().flat_map(|name| pids(&run, name)).collect();
    assert_eq!(all.len(), 3);
    until("the end of all processes", &|| !all.iter().any(|pid| is_alive(*pid)), &|| format!("{all:?}"));
    home.rlrun(&["resume", "run"]).ok();
    assert_eq!(run.values("step"), (1..=9).map(f64::from).collect::<Vec<_>>());
    every_group_once(&run, 9, 8).unwrap();
}

fn is_alive(pid: u32) -> bool {
    if !cfg!(target_os = "linux") {
        return std::process::Command::new("kill").args(["-0", &pid.to_string()]).status().unwrap().success();
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

#[test]
fn impossible_placements_and_addresses_are_refused_at_once() {
    let home = Home::new();
    let start = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["small.toml", "--run-dir", "run"].into_iter().chain(sets).collect();
        home.rlrun(&args)
    };
    start(&["placement.rollout_workers=3"]).refused(&["has no effect without `placement.processes`"]);
    start(&["placement.processes=true", "buffer.store=memory"]).refused(&["share its journal"]);
    let tokens = home.write("tokens.txt", "writer 0123456789abcdef\n");
    let given = |key: &str| format!("buffer.{key}={:?}", tokens.display().to_string());
    let all = ["token_file", "tls_cert", "tls_key"].map(given);
    let [tokens, certificate, key] = all.each_ref().map(String::as_str);
    start(&["buffer.listen=0.0.0.0:0", "buffer.credentials=keys", tokens, certificate, key])
        .refused(&["there is nothing to make", "buffer.credentials"]);
    assert!(!home.path("run").exists());
    // No server listens there: the worker retries for its patience, then asks to be started again.
    let done = home.rlrun(&["worker", "rollout", "--join", "http://127.0.0.1:1", "--patience", "0.2"]);
    assert_eq!(done.status.code(), Some(75), "{}", done.stderr);
    assert!(done.stderr.contains("http://127.0.0.1:1"), "{}", done.stderr);
}

/// A worker with another token than the run's is refused, and the run does not notice.
#[test]
fn a_worker_needs_the_token_of_the_run() {
    let home = Home::new();
    let run = home.run("run");
    let tokens = home.write("tokens.txt", "writer 0123456789abcdef\nadmin fedcba9876543210\n");
    let wrong = home.write("wrong.txt", "0123456789abcdee\n");
    let sets = format!("buffer.token_file={:?}", tokens.display().to_string());
    let mut lead = home.start_endless("run", &["buffer.listen=127.0.0.1:0", &sets]);
    assert!(run.wait_for(Moment::Step(1), &mut lead));
    let url = served_on(&run);
    let join = |file: &std::path::Path| -> Running {
        let file = file.to_str().unwrap();
        home.start(&["worker", "rollout", "--join", &url, "--token-file", file, "--threads", "1"])
    };
    let refused = finish(join(&wrong));
    assert!(!refused.status.success());
    assert!(refused.stderr.contains("token"), "{}", refused.stderr);
    let worker = join(&tokens);
    interrupt(&lead);
    finish(lead).ok();
    drop(worker);
}
