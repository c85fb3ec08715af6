//! Runs on a buffer that is served elsewhere, and runs that serve their own.

use std::process::Command;

use serde_json::{Value, json};

use crate::served::{Client, Place, Server};
use crate::support::{Home, Moment, Run, finish, interrupt, small_args};
use crate::workers::{served_on, until};

/// Synchronous, so that two runs compute the same bits.
const SYNCHRONOUS: [&str; 3] = ["buffer.max_staleness=0", "checkpoint.interval=2", "buffer.batch_groups=4"];

fn serve(home: &Home) -> Server {
    serve_in(home, "served")
}

/// A served buffer of batches of four without staleness, in `directory`.
pub(crate) fn serve_in(home: &Home, directory: &str) -> Server {
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
    Server::start(command.arg(home.path(directory))).unwrap()
}

/// Four steps in two attempts.
fn half_and_half(home: &Home, name: &str, sets: &[&str]) -> Run {
    let run = home.small(name, &[sets, &["trainer.steps=2"]].concat());
    home.rlrun(&["resume", name, "--set", "trainer.steps=4"]).ok();
    run
}

fn weights(run: &Run, step: u64) -> Vec<u8> {
    std::fs::read(run.checkpoint(step).join("model/model.safetensors")).unwrap()
}

#[test]
fn a_run_on_a_served_buffer_has_the_bits_of_a_local_one_also_after_a_resume() {
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

/// Rewards are delayed from the first training group on (20 evaluation tasks come before it), and the run is killed: the next
/// process has the slots of its groups at once.
#[test]
fn what_a_killed_run_had_in_flight_is_sampled_again_at_once() {
    let home = Home::new();
    let server = serve(&home);
    let url = format!("buffer.url=http://{}", server.address);
    let sets = [&SYNCHRONOUS[..], &["buffer.store=http", &url, "trainer.steps=1"]].concat();
    let mut child = home
        .start_with(&[("RLRUN_FAILPOINTS", "reward-score=delay(600000)@21-1000")], &small_args("run", &sets));
    let stats = || Client::new(&Place::at(server.address)).ask("GET", "/v1/stats", &Value::Null).1;
    until("a group in flight", &|| stats()["claimed"] == 4, &|| stats().to_string());
    child.kill().unwrap();
    finish(child);
    let done = home.rlrun(&["resume", "run"]).ok();
    let said = "4 groups that an earlier process had in flight are sampled again";
    assert!(done.stdout.contains(said) || done.stderr.contains(said), "{}\n{}", done.stdout, done.stderr);
}

#[test]
fn a_served_buffer_with_another_bound_is_refused_before_sampling() {
    let home = Home::new();
    let server = serve(&home);
    let url = format!("buffer.url=http://{}", server.address);
    let said = home
        .rlrun(&["small.toml", "--run-dir", "run", "--set", "buffer.store=http", "--set", &url])
        .refused(&["has batch_groups = 4 and max_staleness = 0", "--batch-groups"]);
    assert!(said.contains(&server.address.to_string()), "{said}");
}

#[test]
fn a_served_buffer_reports_the_state_of_its_run() {
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

/// A client with all permissions cannot act as the trainer of a run: it can neither end the run nor damage what a resume
/// restores.
#[test]
fn a_client_that_acknowledges_untrained_groups_is_refused_and_the_run_continues() {
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

/// A group of one trajectory with these tokens, sampled by `version`.
fn group(key: &str, tokens: &[u64], version: u64) -> Value {
    let trained: Vec<bool> = (0..tokens.len()).map(|t| t > 0).collect();
    let logprobs: Vec<f64> = trained.iter().map(|trained| if *trained { -0.5 } else { 0.0 }).collect();
    json!({ "key": key, "trajectories": [{
        "token_ids": tokens, "loss_mask": trained, "behavior_logprobs": logprobs, "policy_version": version,
        "reward": 1.0,
    }] })
}

fn events(run: &Run, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(run.path.join("events.jsonl")).unwrap();
    // The last line may be incomplete.
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == name).collect()
}

/// A buffer without a model accepts any tokens; the run quarantines such groups and continues.
#[test]
fn an_invalid_group_in_the_journal_is_quarantined_and_named() {
    let home = Home::new();
    let run = home.small("run", &[&SYNCHRONOUS[..], &["trainer.steps=2"]].concat());
    let server = serve_in(&home, "run");
    let place = Place::at(server.address);
    let mut client = Client::new(&place);
    // Groups that the sampler has finalized already would occupy all slots.
    assert_eq!(client.ask("DELETE", "/v1/groups?below_version=9", &Value::Null).0, 200);
    let groups = json!({ "groups": [group("poison", &[1, 50_000], 2)] });
    let (status, answer, _) = client.ask("POST", "/v1/groups", &groups);
    assert_eq!((status, &answer["results"][0]["status"]), (200, &json!("accepted")), "{answer}");
    drop(server);
    let said = home.rlrun(&["resume", "run", "--set", "trainer.steps=4"]).ok();
    assert_eq!(run.values("buffer/quarantined").last(), Some(&1.0));
    let quarantined = events(&run, "quarantine");
    assert_eq!(quarantined.len(), 1, "{quarantined:?}");
    assert_eq!(quarantined[0]["fields"]["sender"], "127.0.0.1 as \"poison\"");
    let reason = quarantined[0]["fields"]["reason"].as_str().unwrap();
    assert!(reason.contains("token id 50000; the vocabulary of the run has"), "{reason}");
    for named in ["1 groups were set aside in quarantine", "as \"poison\" was quarantined", reason] {
        assert!(said.stdout.contains(named), "`{named}` is missing in {}", said.stdout);
    }
    assert!(std::fs::read_to_string(run.path.join("quarantine.jsonl")).unwrap().contains("50000"));
    let trained = (1..=4).flat_map(|step| run.samples(step)).count();
    assert_eq!(trained, 16, "its place was taken by another");
}

/// Registers as the run's own sampler and sends false receipts.
fn send_false_receipts(ask: &dyn Fn(&str, &str, &Value) -> (u16, Value)) {
    let subscribe = |name: &str| ask("POST", "/v1/weights/subscribers", &json!({ "name": name }));
    assert_eq!(subscribe("sampler 0").1["code"], "name_taken");
    let wrong = "00".repeat(32);
    for (name, version) in [("liar", None), ("prophet", Some(u64::MAX))] {
        let connection = subscribe(name).1["connection"].as_u64().unwrap();
        let newest = format!("/v1/weights/newest?name={name}&connection={connection}&wait_ms=20000");
        let update = ask("GET", &newest, &Value::Null).1;
        let digest = update["news"]["digest"].as_str().map_or(wrong.clone(), |digest| {
            digest.chars().map(|c| if c == '0' { '1' } else { '0' }).collect()
        });
        let receipt = json!({
            "name": name, "connection": connection, "life": update["life"], "digest": digest,
            "version": version.unwrap_or_else(|| update["news"]["version"].as_u64().unwrap()),
            "took_us": u64::MAX, "stalled_us": u64::MAX, "bytes": u64::MAX,
        });
        let (status, answer) = ask("POST", "/v1/weights/receipts", &receipt);
        assert_eq!(status, 409, "{answer}");
        assert_eq!(ask("GET", &newest, &Value::Null).1["code"], "left_out");
    }
    let foreign = json!({
        "name": "sampler 0", "connection": u64::MAX, "life": 0, "digest": wrong, "version": 1,
        "took_us": 0, "stalled_us": 0, "bytes": 0,
    });
    assert_eq!(ask("POST", "/v1/weights/receipts", &foreign).0, 400);
}

/// A client with write access may send impossible values; the run ignores them and continues.
#[test]
fn invalid_requests_of_peers_do_not_end_a_run() {
    let home = Home::new();
    let run = home.run("run");
    let sets = ["buffer.listen=127.0.0.1:0", "trainer.learning_rate=1e-9"];
    let mut child = home.start_endless("run", &sets);
    assert!(run.wait_for(Moment::Step(2), &mut child));
    let place = Place::at(served_on(&run).strip_prefix("http://").unwrap().parse().unwrap());
    let ask = |method: &str, path: &str, body: &Value| {
        let (status, answer, _) = Client::new(&place).ask(method, path, body);
        (status, answer)
    };
    let mut kept = group("kept", &[1, 2], 0);
    kept["trajectories"][0]["kept"] = json!({ "offsets": [0, 2], "ids": [2, 50_000] });
    let bad = [
        group("ids", &[1, 50_000], 0),
        kept,
        group("long", &[1; 100_000], 0),
        group("late", &[1, 2], u64::MAX),
    ];
    let (status, answer) = ask("POST", "/v1/groups", &json!({ "groups": bad }));
    let codes: Vec<&Value> =
        answer["results"].as_array().unwrap().iter().map(|result| &result["code"]).collect();
    let expected =
        ["token_out_of_vocabulary", "token_out_of_vocabulary", "too_many_tokens", "future_version"];
    assert_eq!((status, codes), (200, expected.map(Value::from).iter().collect()), "{answer}");
    send_false_receipts(&ask);
    // Workers.
    let long = "x".repeat(100_000);
    let join = json!({ "protocol": 1, "role": "rollout", "name": long });
    assert_eq!(ask("POST", "/v1/run/join", &join).1["code"], "bad_name");
    let progress = json!({ "groups": u64::MAX, "engine": {
        "sampled_tokens": u64::MAX, "prefilled_tokens": u64::MAX, "steps": u64::MAX, "interrupted": u64::MAX
    } });
    for name in ["a", "b"] {
        let beat = json!({
            "name": name, "role": "rollout", "instance": 7, "pid": 1, "host": "h", "doing": "d", "progress": progress,
            "rewards": [], "serves": null, "leaves": false,
        });
        assert_eq!(ask("POST", "/v1/run/beat", &beat).0, 200);
    }
    for (sender, code) in
        [("127.0.0.1", "token_out_of_vocabulary"), ("liar", "left_out"), ("prophet", "left_out")]
    {
        let of = |event: &Value| event["fields"]["sender"] == sender && event["fields"]["code"] == code;
        let show = || format!("{:?}", events(&run, "refused"));
        until(&format!("{code} of {sender}"), &|| events(&run, "refused").iter().any(of), &show);
    }
    let steps = run.steps().len() as u64;
    assert!(run.wait_for(Moment::Step(steps + 2), &mut child), "the run goes on");
    interrupt(&child);
    finish(child).ok();
    assert!(run.values("peers/refused").last() >= Some(&6.0), "{:?}", run.values("peers/refused"));
}
