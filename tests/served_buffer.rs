//! `rlrun serve buffer` under kill -9, full disks and damaged files: every acknowledged group is stored once.
//!
//! Invariant: clients rely only on answers that they received. The environment variable `RLRUN_KILLS` sets the number of
//! kills; the default is what every change has to pass.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};

use serde_json::{Value, json};

use crate::served::{Client, Place, SOON, Server};
use crate::support::Home;

/// Number of kills of the server.
const KILLS: u64 = 30;
const WRITERS: u64 = 4;
const CONSUMERS: [&str; 2] = ["left", "right"];
/// Most groups of a lease.
const BATCH: u64 = 8;
/// Largest number of answers between two kills.
const ANSWERS: u64 = 400;

/// Groups are stored, leased, trained and acknowledged while server and consumers are killed repeatedly.
#[test]
fn every_acknowledged_group_is_trained_once_while_the_server_is_killed() {
    let kills =
        std::env::var_os("RLRUN_KILLS").map_or(KILLS, |kills| kills.to_str().unwrap().parse().unwrap());
    let home = Home::new();
    let world = World::default();
    let stored = std::thread::scope(|scope| {
        let consumers = CONSUMERS.map(|name| scope.spawn(|| Consumer::new(name, &world).run()));
        let world = &world;
        let writers: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(move || write(writer, world))).collect();
        // A failure here must not leave the other threads running.
        let stop = StopOnDrop(world);
        let mut server = serve(&home);
        for kill in 0..kills {
            world.place.set(server.address);
            // Some kills come before the first request.
            world.wait_for_answers(kill * 7919 % ANSWERS);
            drop(server);
            server = serve(&home);
        }
        world.place.set(server.address);
        world.writers_stop.store(true, Ordering::SeqCst);
        let stored: Vec<_> = writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect();
        drop(stop);
        let trained: Vec<String> =
            consumers.into_iter().flat_map(|consumer| consumer.join().unwrap()).collect();
        let once: BTreeSet<&String> = trained.iter().collect();
        assert_eq!(once.len(), trained.len(), "a group was trained twice");
        assert_eq!(once, stored.iter().collect(), "trained is not what was stored");
        let (_, stats, _) = Client::new(&world.place).ask("GET", "/v1/stats", &Value::Null);
        assert_eq!((&stats["finalized"], &stats["leased"]), (&json!(0), &json!(0)), "{stats}");
        stored
    });
    assert!(stored.len() as u64 > kills, "only {} groups were stored", stored.len());
}

/// State that all clients share.
#[derive(Default)]
struct World {
    place: Place,
    answers: Mutex<u64>,
    answered: Condvar,
    writers_stop: AtomicBool,
    /// Whether all groups are stored: consumers then end once the buffer is empty.
    all_stored: AtomicBool,
}

impl World {
    fn answered(&self) {
        *self.answers.lock().unwrap() += 1;
        self.answered.notify_all();
    }

    fn wait_for_answers(&self, more: u64) {
        let answers = self.answers.lock().unwrap();
        let enough = *answers + more;
        let (_answers, waited) =
            self.answered.wait_timeout_while(answers, SOON, |answers| *answers < enough).unwrap();
        assert!(!waited.timed_out(), "the clients make no progress");
    }
}

/// Ends writers and consumers, also when the test has failed.
struct StopOnDrop<'a>(&'a World);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.writers_stop.store(true, Ordering::SeqCst);
        self.0.all_stored.store(true, Ordering::SeqCst);
    }
}

fn serve(home: &Home) -> Server {
    Server::start(&mut command(home, &[])).unwrap()
}

fn command(home: &Home, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
    command
        .args(["serve", "buffer", "--listen", "127.0.0.1:0", "--quiet", "--dir"])
        .arg(home.path("journal"));
    command.args(["--batch-groups", "64", "--max-staleness", "100000"]).args(args);
    command
}

/// A group whose text is its key.
fn submission(key: &str, tokens: usize) -> Value {
    json!({"groups": [{
        "key": key,
        "trajectories": [{
            "token_ids": vec![7; tokens],
            "loss_mask": (0..tokens).map(|token| token > 0).collect::<Vec<_>>(),
            "behavior_logprobs": vec![-0.5; tokens],
            "policy_version": 0,
            "text": key,
        }],
    }]})
}

/// Stores groups one after the other, each until it is acknowledged; all of their keys.
fn write(writer: u64, world: &World) -> Vec<String> {
    let mut client = Client::new(&world.place);
    let mut stored: Vec<String> = Vec::new();
    while !world.writers_stop.load(Ordering::SeqCst) {
        let key = format!("writer-{writer}-{}", stored.len());
        let tokens = 2 + stored.len() % 7 * 40;
        let (status, answer, again) = client.ask("POST", "/v1/groups", &submission(&key, tokens));
        let result = &answer["results"][0]["status"];
        assert!(status == 200 && (result == "accepted" || again && result == "duplicate"), "{key}: {answer}");
        stored.push(key);
        world.answered();
    }
    stored
}

/// A trainer that keeps checkpoints, and sometimes falls back to the last one.
struct Consumer<'a> {
    name: &'static str,
    client: Client<'a>,
    world: &'a World,
    /// Steps that it leased and trained since its checkpoint, with their groups; it forgets them when it crashes.
    trained: BTreeMap<u64, Vec<String>>,
    /// The same over all crashes.
    witnessed: BTreeMap<u64, Vec<String>>,
    /// Groups in its checkpoint, acknowledged or about to be.
    checkpoint: Vec<String>,
    turn: u64,
}

impl<'a> Consumer<'a> {
    fn new(name: &'static str, world: &'a World) -> Self {
        let client = Client::new(&world.place);
        let (trained, witnessed) = (BTreeMap::new(), BTreeMap::new());
        Self { name, client, world, trained, witnessed, checkpoint: Vec::new(), turn: 0 }
    }

    /// Trains until the buffer is empty; returns what it trained.
    fn run(mut self) -> Vec<String> {
        loop {
            // A consumer that reads `all_stored` first and then finds nothing to lease has seen every group.
            let all_stored = self.world.all_stored.load(Ordering::SeqCst);
            let any = self.train_a_step();
            self.turn += 1;
            if self.turn % 11 == 3 {
                self.crash();
            }
            if self.turn.is_multiple_of(4) || !any {
                self.save();
            }
            if all_stored && !any {
                return self.checkpoint;
            }
        }
    }

    /// Leases the current step, or the next if it has that one already; false if there was nothing to train.
    fn train_a_step(&mut self) -> bool {
        let (_, version, _) = self.client.ask("GET", "/v1/policy/version", &Value::Null);
        let mut step = version["version"].as_u64().unwrap();
        if self.trained.contains_key(&step) {
            step += 1;
            // The other consumer may have been faster.
            let (status, answer, _) = self.client.ask("PUT", "/v1/policy/version", &json!({"version": step}));
            assert!(status == 200 || answer["code"] == "version_behind", "{answer}");
        }
        self.lease(step).unwrap_or(true)
    }

    /// `None` if the step is over, possibly by the other consumer; false if there is nothing to lease.
    fn lease(&mut self, step: u64) -> Option<bool> {
        let request = json!({
            "consumer": self.name, "step": step, "groups": BATCH, "at_least": 1, "wait_ms": 20, "hold_ms": 3_600_000
        });
        let (status, answer, _) = self.client.ask("POST", "/v1/leases", &request);
        if status != 200 {
            assert!(
                ["step_passed", "future_version"].contains(&answer["code"].as_str().unwrap()),
                "{answer}"
            );
            assert!(
                !self.witnessed.contains_key(&step),
                "{}: step {step} was taken away: {answer}",
                self.name
            );
            return None;
        }
        self.world.answered();
        if answer["lease"].is_null() {
            assert!(
                !self.witnessed.contains_key(&step),
                "{}: step {step} was taken away: {answer}",
                self.name
            );
            return Some(false);
        }
        let groups = answer["lease"]["groups"].as_array().unwrap().iter();
        let keys: Vec<String> =
            groups.map(|group| group["trajectories"][0]["text"].as_str().unwrap().to_owned()).collect();
        let before = self.witnessed.entry(step).or_insert_with(|| keys.clone());
        assert_eq!(*before, keys, "{}: another batch for step {step} than before", self.name);
        self.trained.insert(step, keys);
        Some(true)
    }

    /// Falls back to the checkpoint and trains the same steps again, on the same groups in the same order.
    fn crash(&mut self) {
        self.trained.clear();
        let steps: Vec<u64> = self.witnessed.keys().copied().collect();
        for step in steps {
            assert_eq!(self.lease(step), Some(true), "{}: step {step} is gone", self.name);
        }
        assert_eq!(self.trained, self.witnessed);
    }

    /// Saves a checkpoint, then acknowledges its groups.
    fn save(&mut self) {
        let Some((last, _)) = self.trained.last_key_value() else { return };
        let request = json!({"consumer": self.name, "through": last + 1});
        self.checkpoint.extend(std::mem::take(&mut self.trained).into_values().flatten());
        self.witnessed.clear();
        let (status, answer, _) = self.client.ask("POST", "/v1/leases/ack", &request);
        assert_eq!(status, 200, "{answer}");
        self.world.answered();
    }
}

#[test]
fn a_second_process_and_foreign_files_are_refused() {
    let home = Home::new();
    let first = serve(&home);
    let said = Server::start(&mut command(&home, &[])).err().expect("the journal is in use");
    assert!(said.contains("is open in another process"), "{said}");
    drop(first);
    std::fs::write(home.path("journal/buffer.redb"), "step,reward\n1,0.5\n".repeat(1000)).unwrap();
    let said = Server::start(&mut command(&home, &[])).err().expect("that is not a journal");
    assert!(said.contains("is not a journal") && said.contains("move it away"), "{said}");
}

#[test]
fn an_unwritable_directory_is_an_error() {
    let home = Home::new();
    let directory = home.path("journal");
    std::fs::create_dir(&directory).unwrap();
    let mut permissions = std::fs::metadata(&directory).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&directory, permissions).unwrap();
    if std::fs::write(directory.join("probe"), "").is_ok() {
        eprintln!("SKIPPED: this user can write to read-only directories");
        return;
    }
    let said = Server::start(&mut command(&home, &[])).err().expect("nothing can be written there");
    assert!(said.contains("cannot be written"), "{said}");
}

/// A file size limit in place of a full disk: writes beyond it fail, and the server continues without them.
#[test]
fn a_full_disk_refuses_groups_and_loses_none() {
    let home = Home::new();
    // Blocks of 512 bytes; without the trap the signal would end the process.
    let limited = format!("trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"", 4 << 11);
    let plain = command(&home, &[]);
    let mut command = Command::new("sh");
    command.args(["-c", &limited]).arg(plain.get_program()).args(plain.get_args());
    let server = Server::start(&mut command).unwrap();
    let place = Place::default();
    place.set(server.address);
    let mut client = Client::new(&place);
    let mut stored = Vec::new();
    let refusal = loop {
        let key = format!("key-{}", stored.len());
        let (status, answer) = client.ask_once("POST", "/v1/groups", &submission(&key, 10_000)).unwrap();
        if status != 200 {
            break (status, answer);
        }
        assert_eq!(answer["results"][0]["status"], "accepted", "{answer}");
        stored.push(key);
        assert!(stored.len() < 10_000, "a disk of 4 MiB takes no end of groups");
    };
    assert_eq!((refusal.0, &refusal.1["code"]), (503, &json!("storage_failed")), "{}", refusal.1);
    assert!(!stored.is_empty(), "nothing was stored");
    // It is alive and not ready.
    let (health, _) = client.ask_once("GET", "/healthz", &Value::Null).unwrap();
    assert_eq!(health, 200);

    drop(server);
    let server = serve(&home);
    place.set(server.address);
    for key in &stored {
        let (_, answer, _) = client.ask("POST", "/v1/groups", &submission(key, 2));
        assert_eq!(answer["results"][0]["status"], "duplicate", "{key} is lost");
    }
    drop(server);
}
