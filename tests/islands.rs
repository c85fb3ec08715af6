//! Islands: whole runs that exchange outer gradients through `rlrun serve islands`.

use std::process::Command;

use crate::served::Server;
use crate::support::{Done, Home, Moment, Run, Running, finish, small_args};

/// A coordinator with its files in `dir` of `home`.
fn coordinator(home: &Home, dir: &str, deadline: &str) -> Server {
    at(home, dir, "127.0.0.1:0", &["--deadline", deadline])
}

/// The same at the address `listen`, with `args`.
fn at(home: &Home, dir: &str, listen: &str, args: &[&str]) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
    command.args(["serve", "islands", "--listen", listen, "--dir"]).arg(home.path(dir));
    Server::start(command.args(args)).unwrap()
}

/// Settings of an island at `server` with an exchange every four steps.
fn sets(server: &Server, seed: usize) -> Vec<String> {
    let url = format!("island.url=http://{}", server.address);
    vec![url, format!("seed={seed}"), "island.steps=4".to_owned(), "warmup.steps=3".to_owned()]
}

fn refs(sets: &[String]) -> Vec<&str> {
    sets.iter().map(String::as_str).collect()
}

/// Starts the island `name`.
fn start(home: &Home, name: &str, sets: &[String]) -> Running {
    home.start_small(name, &refs(sets))
}

fn weights(run: &Run, step: u64) -> Vec<u8> {
    std::fs::read(run.checkpoint(step).join("model/model.safetensors")).unwrap()
}

/// The values of a metric in the steps that have it.
fn values(run: &Run, name: &str) -> Vec<f64> {
    run.steps().iter().filter_map(|line| line.get(name)?.as_f64()).collect()
}

#[test]
fn two_islands_end_with_one_policy_and_count_their_bytes() {
    let home = Home::new();
    let server = at(&home, "outer", "127.0.0.1:0", &["--deadline", "300", "--first-islands", "2"]);
    let names = ["a", "b"];
    let begun: Vec<Running> = (0..2).map(|index| start(&home, names[index], &sets(&server, index))).collect();
    begun.into_iter().for_each(|child| drop(finish(child).ok()));
    let [a, b] = names.map(|name| home.run(name));
    assert!(weights(&a, 12) == weights(&b, 12), "after a round all islands have the outer weights");
    assert!(weights(&a, 9) != weights(&b, 9), "between rounds each has its own");
    let values_of_model = std::fs::metadata(a.checkpoint(12).join("model/model.safetensors")).unwrap().len() / 4;
    for run in [&a, &b] {
        assert_eq!(values(run, "island/round").len(), 3);
        assert!(values(run, "island/outer_grad_norm").iter().all(|norm| *norm > 0.0));
        let sent = values(run, "island/sent_bytes");
        // A byte for each value, a scale for each 256, and little else.
        let expected = values_of_model as f64 * 1.016;
        assert!(sent[1..].iter().all(|sent| (sent / expected - 1.0).abs() < 0.2), "{sent:?} of {expected}");
    }
    // Both were live when the last round ended, as neither leaves before its last step.
    assert_eq!(values(&a, "island/islands").iter().copied().fold(0.0, f64::max), 2.0);
    assert_eq!(server.signalled("TERM"), Some(0));
}

#[test]
fn an_island_and_its_coordinator_are_killed_and_go_on_with_the_same_bits() {
    let home = Home::new();
    let common = |server: &Server| {
        let own = ["buffer.max_staleness=0", "island.overlap_steps=1", "island.local_weight=0.5"];
        let more = ["island.compression=int4", "island.fragments=2", "checkpoint.keep_last=9"];
        [sets(server, 0), own.iter().chain(&more).map(|set| (*set).to_owned()).collect()].concat()
    };
    let server = coordinator(&home, "outer", "60");
    home.small("whole", &refs(&common(&server)));
    drop(server);
    let server = coordinator(&home, "other", "60");
    let (sets, address) = (common(&server), server.address.to_string());
    let mut child = start(&home, "killed", &sets);
    let run = home.run("killed");
    assert!(run.wait_for(Moment::Step(5), &mut child), "{}", finish(child).stderr);
    // The drop of a server kills it.
    drop(server);
    let server = at(&home, "other", &address, &[]);
    assert!(run.wait_for(Moment::Step(8), &mut child), "{}", finish(child).stderr);
    drop(child);
    home.rlrun(&["resume", "killed"]).ok();
    assert!(weights(&home.run("whole"), 12) == weights(&run, 12));
    drop(server);
}

#[test]
fn an_island_that_dies_costs_the_others_one_deadline_and_a_later_one_joins() {
    let home = Home::new();
    let server = coordinator(&home, "outer", "5");
    let mut dying = home.start_endless("dying", &refs(&sets(&server, 1)));
    assert!(home.run("dying").wait_for(Moment::Step(4), &mut dying));
    let mut child = start(&home, "a", &[sets(&server, 2), vec!["trainer.steps=24".to_owned()]].concat());
    assert!(home.run("a").wait_for(Moment::Step(4), &mut child));
    drop(dying);
    finish(child).ok();
    let rounds = values(&home.run("a"), "island/islands");
    assert_eq!((rounds.len(), rounds.last()), (6, Some(&1.0)), "{rounds:?}");
    let joined = home.small("late", &refs(&sets(&server, 3)));
    let first = values(&joined, "island/round")[0];
    assert!(first > 6.0, "it starts from the newest weights, and not from round {first}");
}

#[test]
fn islands_that_do_not_fit_are_refused_by_name() {
    let home = Home::new();
    let server = coordinator(&home, "outer", "60");
    home.small("a", &refs(&[sets(&server, 0), vec!["trainer.steps=4".to_owned()]].concat()));
    let before = std::fs::read(home.path("outer/state.bin")).unwrap();
    let refused = |name: &str, set: &str| -> Done {
        home.rlrun(&small_args(name, &refs(&[sets(&server, 0), vec![set.to_owned()]].concat())))
    };
    refused("wide", "model.random.hidden_size=32").refused(&["refuses island `wide`: it has model"]);
    refused("long", "island.steps=8").refused(&["`island.steps` 8, and the other islands have 4"]);
    refused("hasty", "deadlines.wait_s=30").refused(&["waits up to 60 s", "`deadlines.wait_s` is 30"]);
    assert!(std::fs::read(home.path("outer/state.bin")).unwrap() == before);
    for (set, evidence) in [
        ("island.overlap_steps=4", "one exchange is under way at a time"),
        ("island.fragments=3", "is no multiple of `island.fragments`, 3"),
        ("island.url=nowhere", "which is no address of a coordinator"),
        ("island.name=a b", "`a b` is no name of an island"),
    ] {
        refused("wrong", set).refused(&[evidence]);
    }
    let far = ["serve", "islands", "--dir", "x", "--listen", "0.0.0.0:0"];
    home.rlrun(&far).refused(&["can be reached from other machines", "token file"]);
    home.rlrun(&["serve", "islands", "--dir", "x", "--outer-rate", "0"]).refused(&["--outer-rate is 0"]);
}
