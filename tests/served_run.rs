//! Runs whose buffer is not theirs alone: served elsewhere, or served by the run itself.

use std::process::Command;

use serde_json::{Value, json};

use crate::served::{Client, Place, Server};
use crate::support::{Home, Moment, Run, finish, interrupt};

/// Synchronous, so that two runs compute the same bits.
const SYNCHRONOUS: [&str; 3] = ["buffer.max_staleness=0", "checkpoint.interval=2", "buffer.batch_groups=4"];

fn serve(home: &Home) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
    command.args([
        "serve",
        "buffer",
        "--listen",
        "127.0.0.1:0",
        "--batch-groups",
        "4",
        "--max-staleness",
        "0",
        "--dir",
    ]);
    Server::start(command.arg(home.path("served"))).unwrap()
}

/// Four steps in two goes.
fn half_and_half(home: &Home, name: &str, sets: &[&str]) -> Run {
    let run = home.small(name, &[sets, &["trainer.steps=2"]].concat());
    home.rlrun(&["resume", name, "--set", "trainer.steps=4"]).ok();
    run
}

fn weights(run: &Run, step: u64) -> Vec<u8> {
    std::fs::read(run.checkpoint(step).join("model/model.safetensors")).unwrap()
}

#[test]
fn a_run_on_a_served_buffer_computes_what_it_computes_on_its_own_and_goes_on_after_a_stop() {
    let home = Home::new();
    let own = half_and_half(&home, "own", &SYNCHRONOUS);
    let server = serve(&home);
    let url = format!("buffer.url=http://{}", server.address);
    let remote = [&SYNCHRONOUS[..], &["buffer.store=http", &url]].concat();
    let run = half_and_half(&home, "remote", &remote);
    assert_eq!(weights(&run, 4), weights(&own, 4));
    assert!(!run.path.join("buffer.redb").exists(), "nothing is kept twice");
    let (_, stats, _) = Client::new(&Place::at(server.address)).ask("GET", "/v1/stats", &Value::Null);
    assert_eq!(stats["policy_version"], 4, "{stats}");
}

#[test]
fn a_served_buffer_with_another_bound_is_refused_before_anything_is_sampled() {
    let home = Home::new();
    let server = serve(&home);
    let url = format!("buffer.url=http://{}", server.address);
    let said = home
        .rlrun(&["small.toml", "--run-dir", "run", "--set", "buffer.store=http", "--set", &url])
        .refused(&["has batch_groups = 4 and max_staleness = 0", "--batch-groups"]);
    assert!(said.contains(&server.address.to_string()), "{said}");
}

#[test]
fn a_run_can_be_watched_through_the_buffer_that_it_serves() {
    let home = Home::new();
    let run = home.run("run");
    let mut child = home.start_small("run", &["trainer.steps=100000", "buffer.listen=127.0.0.1:0"]);
    assert!(run.wait_for(Moment::Step(2), &mut child));
    let log = std::fs::read_to_string(run.path.join("logs/attempt_1.log")).unwrap();
    let address = log.split("served on http://").nth(1).and_then(|rest| rest.split_whitespace().next());
    let place = Place::at(address.unwrap_or_else(|| panic!("{log}")).parse().unwrap());
    let (status, stats, _) = Client::new(&place).ask("GET", "/v1/stats", &Value::Null);
    assert_eq!(status, 200);
    assert!(stats["next_step"].as_u64() >= Some(2), "{stats}");
    interrupt(&child);
    finish(child).ok();
}

/// A client with every right cannot stand in for the trainer of a run, so that it can neither end the run nor spoil what is
/// resumed.
#[test]
fn a_client_that_acknowledges_what_nobody_trained_is_refused_and_the_run_goes_on() {
    let home = Home::new();
    let run = home.run("run");
    let mut child =
        home.start_small("run", &["trainer.steps=6", "checkpoint.interval=2", "buffer.listen=127.0.0.1:0"]);
    assert!(run.wait_for(Moment::Start(1), &mut child));
    let log = std::fs::read_to_string(run.path.join("logs/attempt_1.log")).unwrap();
    let address = log.split("served on http://").nth(1).and_then(|rest| rest.split_whitespace().next());
    let place = Place::at(address.unwrap_or_else(|| panic!("{log}")).parse().unwrap());
    let mut client = Client::new(&place);
    for (method, path, body) in [
        ("POST", "/v1/leases/ack", json!({ "consumer": "trainer", "through": 99_999 })),
        ("POST", "/v1/leases/0/ack", json!({})),
        ("POST", "/v1/leases/0/release", json!({})),
        ("POST", "/v1/leases/0/extend", json!({ "hold_ms": 100 })),
        ("POST", "/v1/leases", json!({ "consumer": "trainer", "step": 0, "hold_ms": 100 })),
        ("PUT", "/v1/policy/version", json!({ "version": 99_999 })),
        ("PUT", "/v1/policy/version", json!({ "version": u64::MAX, "rewind": true })),
    ] {
        let (status, answer, _) = client.ask(method, path, &body);
        assert_eq!((status, &answer["code"]), (403, &json!("own_trainer")), "{method} {path}: {answer}");
    }
    finish(child).ok();
    home.rlrun(&["resume", "run", "--set", "trainer.steps=8"]).ok();
    assert_eq!(run.values("step"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
}
