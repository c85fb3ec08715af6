//! kill -9 at random moments. The child is this test binary again. It samples and trains on a journal, and prints an
//! answer of the buffer after it received the answer. The parent kills it, restarts it from its last checkpoint, and
//! compares.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use buffer::{AdmitRequest, Buffer, Consumer, Finalized, Producer};
use trajectory::{GroupId, PolicyVersion};

use super::{NOW, SOON, TRAINER, config, group, lease, v};

/// A path, or the URL of a database.
const STORE: &str = "RLRUN_TEST_CRASH_STORE";
const CHECKPOINT: &str = "RLRUN_TEST_CRASH_CHECKPOINT";
/// Number of kills of a process with a journal, by default.
const KILLS: u64 = 15;
/// Number of kills of a process with a database, by default; each opens four sessions.
#[cfg(feature = "postgres")]
const DATABASE_KILLS: u64 = 4;
/// Exit code of a child that failed on any of its threads.
const FAILED: i32 = 3;

#[test]
fn acknowledged_groups_survive_a_kill_and_are_trained_once() {
    let directory = tempfile::tempdir().unwrap();
    survives(directory.path().join("buffer.redb").to_str().unwrap(), super::number("RLRUN_KILLS", KILLS));
}

#[cfg(feature = "postgres")]
#[test]
fn groups_in_a_database_survive_a_kill_and_are_trained_once() {
    let directory = tempfile::tempdir().unwrap();
    let Some(server) = buffer::conformance::database::DatabaseServer::start(directory.path(), &[]) else {
        return;
    };
    let kills = super::number("RLRUN_DATABASE_KILLS", DATABASE_KILLS);
    survives(&server.url(&[]), kills);
}

/// Opens the store at a path or URL.
fn open(store: &str) -> Buffer {
    #[cfg(feature = "postgres")]
    if store.starts_with("postgres:") {
        let config = buffer::postgres::PostgresConfig {
            url: store.to_owned(),
            schema: "crash".to_owned(),
            owner: "a test".to_owned(),
            create: true,
            variables: BTreeMap::new(),
            outage: SOON,
            // The server finds out that the killed process is gone.
            wait: SOON,
            notice: None,
        };
        let opened = buffer::postgres::open_postgres(config).unwrap();
        return Buffer::with_store(config_of_child(), opened).unwrap();
    }
    Buffer::open(store, config_of_child()).unwrap()
}

fn config_of_child() -> buffer::BufferConfig {
    config(2, 2)
}

/// A child on `store` is killed `kills` times.
fn survives(store: &str, kills: u64) {
    let mut seen = Seen::default();
    for round in 0..kills {
        // Spread over the first steps of the child; the kill falls anywhere in what it does next.
        let lines = round * 37 % 61;
        run_and_kill(store, usize::try_from(lines).unwrap(), &mut seen);
    }
    assert!(seen.checkpoint > v(kills.min(40) / 8), "the child came no further than {}", seen.checkpoint);

    let journal = open(store);
    let mut step = seen.checkpoint;
    while let Ok(lease) = lease(&journal, step.0, NOW) {
        let ids: Vec<GroupId> = lease.groups.iter().map(|group| group.id).collect();
        seen.lease(step, &ids);
        step = step.next();
    }
    let left = journal.stats().unwrap().finalized;
    let trained: Vec<GroupId> = seen.batches.values().flatten().copied().collect();
    let once: BTreeSet<GroupId> = trained.iter().copied().collect();
    assert_eq!(once.len(), trained.len(), "a group is in two batches");
    let missing: Vec<_> = seen.acknowledged.difference(&once).collect();
    assert!(missing.len() <= left, "{missing:?} were acknowledged, and {left} groups are left");
    for id in missing {
        assert_eq!(journal.finalize(group(*id, step)).unwrap(), Finalized::Duplicate, "{id} is lost");
    }
}

/// What the child said, over all its lives.
#[derive(Default)]
struct Seen {
    acknowledged: BTreeSet<GroupId>,
    batches: BTreeMap<PolicyVersion, Vec<GroupId>>,
    checkpoint: PolicyVersion,
}

impl Seen {
    fn hear(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<u64> = words[1..].iter().map_while(|word| word.parse().ok()).collect();
        match words[0] {
            "finalized" => assert!(self.acknowledged.insert(GroupId(numbers[0])), "{line} twice"),
            "leased" => {
                let ids: Vec<GroupId> = numbers[1..].iter().map(|id| GroupId(*id)).collect();
                self.lease(v(numbers[0]), &ids);
            }
            "checkpoint" => self.checkpoint = v(numbers[0]),
            _ => {}
        }
    }

    fn lease(&mut self, step: PolicyVersion, ids: &[GroupId]) {
        let before = self.batches.entry(step).or_insert_with(|| ids.to_vec());
        assert_eq!(before, ids, "another batch for {step} than before the crash");
    }
}

fn run_and_kill(store: &str, lines: usize, seen: &mut Seen) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::child", "--ignored", "--nocapture"])
        .env(STORE, store)
        .env(CHECKPOINT, seen.checkpoint.0.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut heard = 0;
    let mut line = String::new();
    // A line without its end was cut off by the kill: the child was not done saying it.
    while output.read_line(&mut line).unwrap() > 0 && line.ends_with('\n') {
        heard += usize::from(line.starts_with("finalized") || line.starts_with("leased"));
        seen.hear(line.trim_end());
        line.clear();
        if heard >= lines {
            // After the first time it is dead, and what it said before is still read.
            child.kill().unwrap();
        }
    }
    assert_ne!(child.wait().unwrap().code(), Some(FAILED), "the child failed by itself");
}

#[test]
#[ignore = "the child of the test above, which runs it"]
fn child() {
    let (Some(store), Some(checkpoint)) = (std::env::var_os(STORE), std::env::var_os(CHECKPOINT)) else {
        return;
    };
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::exit(FAILED);
    }));
    // The test harness has begun a line of its own.
    say("");
    let start: u64 = checkpoint.to_str().unwrap().parse().unwrap();
    let journal = open(store.to_str().unwrap());
    journal.ack_through(TRAINER, v(start)).unwrap();
    let version = AtomicU64::new(start);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let served = v(version.load(Ordering::Acquire));
                    for id in journal
                        .admit(
                            AdmitRequest { served, limit: 1, hold: None, holder: None },
                            Duration::from_millis(1),
                        )
                        .unwrap()
                    {
                        journal.claim(id, served).unwrap();
                        assert_eq!(journal.finalize(group(id, served)).unwrap(), Finalized::Accepted);
                        say(&format!("finalized {}", id.0));
                    }
                }
            });
        }
        for step in start.. {
            let lease = lease(&journal, step, SOON).unwrap();
            assert_eq!(lease.dropped_stale, 0);
            let ids: Vec<String> = lease.groups.iter().map(|group| group.id.0.to_string()).collect();
            say(&format!("leased {step} {}", ids.join(" ")));
            if step % 4 == 3 {
                say(&format!("checkpoint {}", step + 1));
                journal.ack_through(TRAINER, v(step + 1)).unwrap();
            }
            version.store(step + 1, Ordering::Release);
        }
    });
}

/// One whole line, past the capture of the test harness.
fn say(line: &str) {
    std::io::stdout().write_all(format!("{line}\n").as_bytes()).unwrap();
}
