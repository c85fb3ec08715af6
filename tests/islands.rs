//! Islands: whole runs that exchange outer gradients through `rlrun serve islands`.

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use islands::coordinator::new_id;
use islands::{
    CoordinatorAddress, CoordinatorClient, GradientCompression, Island, IslandSchedule, IslandTerms,
};

use crate::served::{SOON, Server};
use crate::support::{Done, Home, Moment, Run, Running, finish, repository, small_args};

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
    let values_of_model =
        std::fs::metadata(a.checkpoint(12).join("model/model.safetensors")).unwrap().len() / 4;
    for run in [&a, &b] {
        assert_eq!(values(run, "island/round").len(), 3);
        assert!(values(run, "island/late").iter().all(|late| *late == 0.0));
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
    refused("hasty", "deadlines.wait_s=30").refused(&["waits up to 300 s", "`deadlines.wait_s` is 30"]);
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

/// Kills of the coordinator; `RLRUN_KILLS` sets another number.
const KILLS: u64 = 5;

/// A client of the coordinator at `address`.
fn client(address: &str, name: &str) -> CoordinatorClient {
    CoordinatorClient::new(CoordinatorAddress {
        url: format!("http://{address}"),
        token: None,
        roots: None,
        island: name.to_owned(),
        run: new_id(),
        wait: SOON,
    })
    .unwrap()
}

#[test]
fn every_outer_gradient_counts_once_while_the_coordinator_is_killed() {
    let kills =
        std::env::var_os("RLRUN_KILLS").map_or(KILLS, |kills| kills.to_str().unwrap().parse().unwrap());
    let rounds = 3 * kills;
    let home = Home::new();
    let args = ["--outer-rate", "1", "--outer-momentum", "0", "--first-islands", "2", "--deadline", "300"];
    let mut server = at(&home, "outer", "127.0.0.1:0", &args);
    let address = server.address.to_string();
    let done = AtomicU64::new(0);
    let island = |name: &str, by: f32| {
        let terms = IslandTerms {
            model: "a".repeat(64),
            local_steps: 1,
            compression: GradientCompression::None,
            ends: vec![50],
        };
        let (schedule, answers) = (IslandSchedule::default(), home.path(&format!("answers-{name}")));
        let mut values = vec![0.0; 50];
        let joined = Island::join(client(&address, name), terms, schedule, answers, 0, &mut values);
        let mut island = joined.unwrap().0;
        for step in 1..=rounds {
            values.iter_mut().for_each(|value| *value += by);
            let report = island.after_step(step, &mut values).unwrap().unwrap();
            assert_eq!((report.round, report.islands, report.is_late), (step, 2, false));
            done.fetch_add(1, Ordering::SeqCst);
        }
        values
    };
    let ends = std::thread::scope(|scope| {
        let islands = [("a", 1.0), ("b", 3.0)].map(|(name, by)| scope.spawn(move || island(name, by)));
        for kill in 0..kills {
            let begun = Instant::now();
            // The moment differs from kill to kill, between two requests or within one.
            while done.load(Ordering::SeqCst) < 4 * kill && begun.elapsed() < SOON {
                std::thread::sleep(Duration::from_millis(1 + kill % 7));
            }
            drop(server);
            server = at(&home, "outer", &address, &args);
        }
        islands.map(|island| island.join().unwrap())
    });
    // A mean of 2 in each round, exactly.
    assert!(ends.iter().flatten().all(|value| *value == 2.0 * rounds as f32), "{:?}", ends[0][0]);
}

/// Final accuracies of `seeds` runs of the default recipe, each of one run or of islands that exchange every `steps` steps.
fn accuracies(home: &Home, steps: Option<u64>, seeds: &[usize]) -> (Vec<f64>, [f64; 2]) {
    let recipe = repository().join("recipes/grpo_math.toml");
    let mut bytes = [0.0; 2];
    let mut found = Vec::new();
    for seed in seeds {
        let label = format!("h{}-{seed}", steps.unwrap_or(0));
        let server = steps.map(|_| {
            at(home, &format!("{label}-outer"), "127.0.0.1:0", &["--deadline", "300", "--first-islands", "2"])
        });
        let start = |island: usize| {
            let name = format!("{label}-{island}");
            let mut sets = vec![format!("seed={}", 100 * seed + island), "trainer.steps=128".to_owned()];
            if let Some((server, steps)) = server.as_ref().zip(steps) {
                sets.extend([
                    format!("island.url=http://{}", server.address),
                    format!("island.name={name}"),
                    format!("island.steps={steps}"),
                ]);
            }
            let sets = sets.iter().flat_map(|set| ["--set", set]);
            let args = [recipe.to_str().unwrap(), "-q", "--run-dir", &name];
            (home.start(&args.into_iter().chain(sets).collect::<Vec<_>>()), home.run(&name))
        };
        let count = if steps.is_some() { 2 } else { 1 };
        let started: Vec<_> = (0..count).map(start).collect();
        let runs: Vec<Run> = started.into_iter().map(|(child, run)| (finish(child).ok(), run).1).collect();
        let last = runs[0].metrics().pop().unwrap();
        found.push(last["eval/accuracy"].as_f64().unwrap());
        if steps.is_some() {
            bytes = ["island/sent_bytes", "island/received_bytes"]
                .map(|name| values(&runs[0], name).iter().sum());
        }
    }
    (found, bytes)
}

#[test]
#[ignore = "takes half an hour: whole runs of the default recipe"]
fn two_islands_learn_as_one_run_with_a_fraction_of_the_bytes() {
    let home = Home::new();
    let seeds = [1, 2, 3];
    let (plain, _) = accuracies(&home, None, &seeds);
    let lowest = plain.iter().copied().fold(f64::INFINITY, f64::min);
    eprintln!("one run: accuracies {plain:?}");
    for steps in [8, 32] {
        let (islands, [sent, received]) = accuracies(&home, Some(steps), &seeds);
        eprintln!(
            "H = {steps}: accuracies {islands:?}, {sent} bytes sent and {received} received in 128 steps"
        );
        let mean = islands.iter().sum::<f64>() / islands.len() as f64;
        assert!(mean >= lowest - 0.02, "H = {steps}: {islands:?}, one run {plain:?}");
    }
}
