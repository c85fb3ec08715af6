//! Runs and served buffers in PostgreSQL, on a server of their own. Without its programs the tests are skipped with a message.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use buffer::conformance::database::DatabaseServer;
use serde_json::{Value, json};

use crate::served::{Client, Place, SOON, Server};
use crate::support::{CORRECT, Done, Home, Moment, Run, finish, signal_process};

/// Steps of the small recipe.
const STEPS: u64 = 12;
/// Longest time from the death of a server to the first answer of its standby. It takes a second; other tests run beside this.
const TAKE_OVER: Duration = Duration::from_secs(30);

fn database(home: &Home) -> Option<DatabaseServer> {
    let directory = home.path("database");
    std::fs::create_dir(&directory).unwrap();
    // The user of the server has to reach it.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(home.path("."), open).unwrap();
    DatabaseServer::start(&directory, &[])
}

fn sets(server: &DatabaseServer) -> [String; 3] {
    [
        "buffer.store=postgres".to_owned(),
        format!("buffer.url={}", server.url(&[])),
        "buffer.max_staleness=0".to_owned(),
    ]
}

fn borrowed(sets: &[String]) -> Vec<&str> {
    sets.iter().map(String::as_str).collect()
}

#[test]
fn a_killed_run_in_a_database_ends_with_the_bits_of_one_in_a_journal() {
    let home = Home::new();
    let Some(mut server) = database(&home) else { return };
    let whole = home.small("whole", &["buffer.max_staleness=0"]);
    let sets = sets(&server);
    let run = home.run("killed");
    let mut child = home.start_small("killed", &borrowed(&sets));
    for moment in [Moment::Step(2), Moment::Checkpoint(6), Moment::Step(8)] {
        if run.wait_for(moment, &mut child) {
            child.kill().unwrap();
        }
        let done = finish(child);
        assert!(!matches!(done.status.code(), Some(1..)), "{moment:?}\n{}\n{}", done.stdout, done.stderr);
        child = home.start(&["resume", "killed"]);
        if matches!(moment, Moment::Step(2)) {
            // The run waits until its database is back.
            run.wait_for(Moment::Step(3), &mut child);
            server.crash();
            server.restart();
        }
    }
    finish(child).ok();
    let model = |run: &Run| std::fs::read(run.checkpoint(STEPS).join("model/model.safetensors")).unwrap();
    assert!(model(&whole) == model(&run), "the weights differ");
    assert_eq!(whole.values("reward/mean"), run.values("reward/mean"));
    assert_eq!(server.sql("SELECT epoch FROM rlrun_killed.store"), "4", "each start is an opening");
}

#[test]
fn what_a_run_cannot_use_is_refused_and_no_password_is_shown() {
    let home = Home::new();
    let Some(server) = database(&home) else { return };
    let secret = "buffer.url=postgres://u:opensesame@localhost/d";
    let args = ["small.toml", "--run-dir", "a", "--set", "buffer.store=postgres", "--set", secret];
    let error = home.rlrun(&args).refused(&["has a password", "PGPASSFILE"]);
    assert!(!error.contains("opensesame"), "{error}");
    assert!(!home.path("a").exists());

    let sets = sets(&server);
    let args = |name| {
        let sets = sets.iter().flat_map(|set| ["--set", set.as_str()]);
        let few = ["--set", "trainer.steps=1", "--set", "buffer.schema=shared", "--set", CORRECT];
        ["small.toml", "--run-dir", name].into_iter().chain(sets).chain(few).collect::<Vec<_>>()
    };
    let variables = [("PGPASSWORD", "opensesame")];
    let first: Done = home.rlrun_with(&variables, &args("first")).ok();
    assert!(!shows(&home.path("first"), "opensesame"), "a file of the run shows the password");
    assert!(!first.stderr.contains("opensesame") && !first.stdout.contains("opensesame"));
    home.rlrun(&args("second")).refused(&["schema shared", "belongs to run", "DROP SCHEMA shared CASCADE"]);
    server.sql("DROP SCHEMA shared CASCADE");
    home.rlrun(&["resume", "first", "--set", "trainer.steps=2"])
        .refused(&["is missing", "--without-journal"]);
    home.rlrun(&["resume", "first", "--set", "trainer.steps=2", "--without-journal"]).ok();
}

#[test]
fn doctor_looks_at_the_database_of_a_recipe() {
    let home = Home::new();
    let Some(server) = database(&home) else { return };
    let sets = sets(&server);
    let args =
        ["doctor", "small.toml"].into_iter().chain(sets.iter().flat_map(|set| ["--set", set.as_str()]));
    let args: Vec<&str> = args.chain(["--set", CORRECT]).collect();
    let text = home.rlrun(&args).ok().stdout;
    for part in [
        "\ndatabase\n",
        "not there yet; the run makes it",
        " ms to write and read a group",
        "max_wal_size is",
    ] {
        assert!(text.contains(part), "`{part}` is missing in:\n{text}");
    }
    let json = home.rlrun(&[&args[..], &["--json"]].concat()).ok().stdout;
    let found: Value = serde_json::from_str(&json).unwrap();
    let ahead = found["database"]["clock_ahead_s"].as_f64().unwrap();
    assert!(found["database"]["usable"] == true && ahead.abs() < 5.0, "{found}");
    assert_eq!(server.sql("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'rlrun%'"), "0");
    let none = [&args[..], &["--set", "buffer.url=postgres://rlrun@127.0.0.1:1/none"]].concat();
    assert!(home.rlrun(&none).ok().stdout.contains("not usable: store PostgreSQL at 127.0.0.1 port 1"));
}

/// Whether a file under `directory` contains `text`.
fn shows(directory: &Path, text: &str) -> bool {
    std::fs::read_dir(directory).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            return shows(&path, text);
        }
        let content = std::fs::read(&path).unwrap();
        content.windows(text.len()).any(|window| window == text.as_bytes())
    })
}

fn serve(home: &Home, server: &DatabaseServer, name: &str) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
    command.args(["serve", "buffer", "--listen", "127.0.0.1:0", "--quiet", "--schema", "served", "--dir"]);
    command.arg(home.path(name)).arg("--postgres").arg(server.url(&[]));
    Server::start(command.args(["--batch-groups", "64", "--max-staleness", "100000"])).unwrap()
}

fn submission(key: &str) -> Value {
    json!({"groups": [{
        "key": key,
        "trajectories": [{
            "token_ids": [7, 8, 9],
            "loss_mask": [false, true, true],
            "behavior_logprobs": [0.0, -0.5, -0.5],
            "policy_version": 0,
            "text": key,
        }],
    }]})
}

/// Submits `key` once; whether it was accepted, now or before.
fn accepted(client: &mut Client<'_>, key: &str) -> bool {
    match client.ask_once("POST", "/v1/groups", &submission(key)) {
        Ok((200, answer)) => {
            ["accepted", "duplicate"].contains(&answer["results"][0]["status"].as_str().unwrap())
        }
        _ => false,
    }
}

fn until(what: &str, limit: Duration, mut is: impl FnMut() -> bool) -> Duration {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < limit, "{what} did not happen in {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    started.elapsed()
}

/// Of three servers one is active. When it is killed, and when the next is suspended, a standby takes over with everything that
/// was acknowledged; the suspended one acknowledges nothing afterwards.
#[test]
fn standbys_take_over_from_servers_that_are_killed_or_suspended() {
    let home = Home::new();
    let Some(database) = database(&home) else { return };
    let servers = ["a", "b", "c"].map(|name| serve(&home, &database, name));
    let places = servers.each_ref().map(|server| Place::at(server.address));
    let mut clients = places.each_ref().map(Client::new);
    let mut keys: Vec<String> = Vec::new();
    let mut store = |client: &mut Client<'_>, count: usize| {
        for _ in 0..count {
            let key = format!("key {}", keys.len());
            until(&key, SOON, || accepted(client, &key));
            keys.push(key);
        }
        keys.len()
    };
    store(&mut clients[0], 20);
    for standby in &mut clients[1..] {
        let (status, answer) = standby.ask_once("GET", "/readyz", &Value::Null).unwrap();
        let detail = answer["detail"].as_str().unwrap().to_owned();
        assert!(status == 503 && detail.contains("is open in another process"), "{answer}");
    }
    let [first, second, third] = servers;
    drop(first);
    let is_ready =
        |client: &mut Client<'_>| matches!(client.ask_once("GET", "/readyz", &Value::Null), Ok((200, _)));
    let mut active = 0;
    let killed = until("the take-over from a killed server", TAKE_OVER, || {
        active = if is_ready(&mut clients[1]) { 1 } else { 2 };
        active == 1 || is_ready(&mut clients[2])
    });
    let standby = 3 - active;
    store(&mut clients[active], 20);
    let suspended = if active == 1 { &second } else { &third };
    signal_process(suspended.id(), "STOP");
    let stopped =
        until("the take-over from a suspended server", TAKE_OVER, || is_ready(&mut clients[standby]));
    let stored = store(&mut clients[standby], 20);
    signal_process(suspended.id(), "CONT");
    assert!(!accepted(&mut clients[active], "late"), "a deposed server acknowledged a group");
    let (_, stats, _) = clients[standby].ask("GET", "/v1/stats", &Value::Null);
    assert_eq!(stats["finalized"], json!(stored), "{stats}");
    eprintln!("take-over after {killed:.2?} (killed) and {stopped:.2?} (suspended)");
}

/// A suspended run loses its database to the same run on another machine; when it continues it publishes nothing and ends.
#[test]
fn a_deposed_run_takes_no_further_step() {
    let home = Home::new();
    let Some(database) = database(&home) else { return };
    let (sets, run) = (sets(&database), home.run("run"));
    let mut child = home.start_endless("run", &borrowed(&sets));
    assert!(run.wait_for(Moment::Step(2), &mut child));
    signal_process(child.id(), "STOP");
    // The directory on the other machine.
    let copy = Command::new("cp").arg("-r").arg(&run.path).arg(home.path("copy")).status().unwrap();
    assert!(copy.success());
    let other = home.run("copy");
    let mut resumed = home.start(&["resume", "copy", "-q"]);
    let steps = other.steps().len() as u64;
    assert!(other.wait_for(Moment::Step(steps + 2), &mut resumed), "the other machine continues");
    let before = run.steps().len();
    signal_process(child.id(), "CONT");
    let done = finish(child);
    assert_eq!(done.status.code(), Some(1), "{}", done.stderr);
    assert!(done.stderr.contains("another process has taken it over"), "{}", done.stderr);
    assert!(run.steps().len() <= before + 1, "it has made steps after it was deposed");
    resumed.kill().unwrap();
}
