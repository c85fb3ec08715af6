//! One publisher and samplers that map what it writes, in one process and in several that are killed.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trajectory::PolicyVersion;

use super::*;
use crate::hub::After;
use crate::{
    Digest, Dtype, Hub, HubConfig, HubPublisher, PublishConfig, Publisher, Subscriber, WeightsError,
};

const LEN: usize = 50_000;

/// Weights that say of which version they are.
fn values(version: u64) -> Vec<f32> {
    (0..LEN).map(|index| (index as u64 * 31 + version) as f32).collect()
}

fn publish(store: &mut SlotWriter, version: u64) -> PathBuf {
    store.begin(PolicyVersion(version), LEN, Dtype::F32).unwrap();
    store.place(0, &values(version), 1).unwrap();
    store.commit(PolicyVersion(version)).unwrap().1
}

fn files(directory: &Path) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

#[test]
fn a_version_is_read_in_place_and_slots_alternate() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = SlotWriter::create(directory.path()).unwrap();
    let mut reader = SlotReader::default();
    let mut paths = Vec::new();
    for version in 1..=6 {
        let path = publish(&mut store, version);
        let pinned = reader.pin(&path, PolicyVersion(version)).unwrap().expect("it is the newest");
        assert_eq!(pinned.values[..], values(version)[..]);
        assert!(reader.pin(&path, PolicyVersion(version + 1)).unwrap().is_none(), "that is not there yet");
        paths.push(path);
    }
    assert!(paths[0] != paths[1] && paths[2..] == paths[..4], "{paths:?}");
    drop(store);
    assert_eq!(files(directory.path()), 0);
}

#[test]
fn a_slow_reader_keeps_its_version_and_delays_no_reader() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = SlotWriter::create(directory.path()).unwrap();
    let mut reader = SlotReader::default();
    let first = publish(&mut store, 1);
    let pinned = reader.pin(&first, PolicyVersion(1)).unwrap().unwrap();
    for version in 2..=5 {
        publish(&mut store, version);
    }
    assert_eq!(pinned.values[..], values(1)[..]);
    assert!(reader.pin(&first, PolicyVersion(1)).unwrap().is_none(), "its file is gone for others");
    // The owner, and two slots.
    let own = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    assert_eq!(files(&own), 3);
    drop(store);
    assert_eq!(pinned.values[..], values(1)[..], "also after the publisher");
}

#[test]
fn no_torn_version_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let hub = Hub::new(HubConfig::default());
    let shm = Some(directory.path().to_owned());
    let publisher =
        HubPublisher::new(hub.clone(), PublishConfig { shm, ..PublishConfig::default() }).unwrap();
    let (done, read) = (AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
    let watcher = hub.connect("watcher".to_owned(), true).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut reader = SlotReader::default();
                while !done.load(Ordering::Relaxed) {
                    let Some(newest) = hub.newest(&watcher, After::Version(None)).unwrap() else { continue };
                    let (version, place) =
                        (newest.newest.version(), newest.newest.place().unwrap().to_owned());
                    drop(newest);
                    let Ok(Some(pinned)) = reader.pin(&place, version) else { continue };
                    assert_eq!(Digest::of(&pinned.values), Digest::of(&values(version.0)), "{version}");
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let started = Instant::now();
        let mut version = 0;
        // As fast as it can, until readers have had their chance.
        while version < 300
            || read.load(Ordering::Relaxed) < 20 && started.elapsed() < Duration::from_secs(60)
        {
            version += 1;
            publisher.publish_values(PolicyVersion(version), &values(version)).unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(read.load(Ordering::Relaxed) >= 20, "readers read next to nothing");
}

#[test]
fn owners_of_shards_place_them_and_one_commits() {
    let directory = tempfile::tempdir().unwrap();
    for dtype in Dtype::ALL {
        let hub = Hub::new(HubConfig { dtype, ..HubConfig::default() });
        let shm = Some(directory.path().to_owned());
        let publisher =
            HubPublisher::new(hub.clone(), PublishConfig { shm, ..PublishConfig::default() }).unwrap();
        let subscriber = hub.subscribe("sampler").unwrap();
        for version in 1..=4 {
            let (version, all) = (PolicyVersion(version), values(version));
            let place = publisher.begin(version, LEN).unwrap().unwrap();
            let ranks = [0..7, 7..7, 7..LEN - 100, LEN - 100..LEN];
            std::thread::scope(|scope| {
                for range in ranks {
                    let (place, part) = (&place, &all[range.clone()]);
                    scope.spawn(move || {
                        let owner = ShardOwner::open(place, 1).unwrap();
                        owner.write(version, range.start, part).unwrap();
                    });
                }
            });
            assert!(subscriber.newest(Some(PolicyVersion(version.0 - 1))).unwrap().is_none(), "not yet");
            publisher.commit(version, None).unwrap();
            let new = subscriber.newest(None).unwrap().unwrap();
            assert_eq!(new.version, version);
            assert!(new.values.iter().zip(&all).all(|(new, all)| *new == dtype.round(*all)));
        }
        // A trainer that starts again repeats a version.
        let written = |version, all: &[f32]| {
            let place = publisher.begin(version, LEN).unwrap().unwrap();
            ShardOwner::open(&place, 1).unwrap().write(version, 0, all).unwrap();
            publisher.commit(version, None)
        };
        written(PolicyVersion(3), &values(3)).unwrap();
        assert_eq!(subscriber.newest(None).unwrap().unwrap().version, PolicyVersion(4));
        let other = written(PolicyVersion(3), &values(9));
        assert!(matches!(other, Err(WeightsError::Republished { .. })), "{other:?}");
    }
}

/// An owner of a version that was given up, and writes late, changes no later version.
#[test]
fn a_late_owner_writes_to_no_later_version() {
    let directory = tempfile::tempdir().unwrap();
    let hub = Hub::new(HubConfig::default());
    let shm = Some(directory.path().to_owned());
    let publisher =
        HubPublisher::new(hub.clone(), PublishConfig { shm, ..PublishConfig::default() }).unwrap();
    let subscriber = hub.subscribe("sampler").unwrap();
    let version = PolicyVersion(1);
    let late = ShardOwner::open(&publisher.begin(version, LEN).unwrap().unwrap(), 1).unwrap();
    let place = publisher.begin(version, LEN).unwrap().unwrap();
    ShardOwner::open(&place, 1).unwrap().write(version, 0, &values(1)).unwrap();
    late.write(version, 0, &values(9)).unwrap();
    publisher.commit(version, None).unwrap();
    assert_eq!(subscriber.newest(None).unwrap().unwrap().values[..], values(1));
}

#[test]
fn memory_of_another_host_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = SlotWriter::create(directory.path()).unwrap();
    let place = WritableSlot::new(store.begin(PolicyVersion(1), LEN, Dtype::F32).unwrap());
    let mut other = serde_json::to_value(&place).unwrap();
    other["boot"] = "another".into();
    let refused = ShardOwner::open(&serde_json::from_value(other).unwrap(), 1).unwrap_err().to_string();
    assert!(refused.contains("another host"), "{refused}");
    ShardOwner::open(&place, 1).unwrap();
}

#[test]
fn shards_outside_the_slot_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = SlotWriter::create(directory.path()).unwrap();
    let path = store.begin(PolicyVersion(1), LEN, Dtype::F32).unwrap();
    let open = |path: &Path| ShardOwner::open(&WritableSlot::new(path.to_owned()), 1);
    let owner = open(&path).unwrap();
    for (version, offset, len) in [(2, 0, 1), (1, LEN, 1), (1, LEN - 1, 2), (1, usize::MAX, 1)] {
        let error = owner.write(PolicyVersion(version), offset, &vec![1.0; len]).unwrap_err();
        assert!(matches!(error, WeightsError::Shard { .. }), "{error}");
    }
    store.commit(PolicyVersion(1)).unwrap();
    assert!(owner.write(PolicyVersion(1), 0, &[1.0]).is_err(), "it is visible now");
    assert!(store.commit(PolicyVersion(1)).is_err() && store.place(0, &[1.0], 1).is_err());
    assert!(open(&directory.path().join("none")).is_err());
    let odd = directory.path().join("odd");
    for bytes in [0, 100, 4096, 8192] {
        std::fs::write(&odd, vec![7; bytes]).unwrap();
        assert!(matches!(open(&odd), Err(WeightsError::Shm { .. })), "{bytes}");
    }
    assert!(SlotWriter::create(&odd).is_err(), "that is no directory");
}

/// Runs a test of this binary as another process in `directory`, until it says a line.
fn child(test: &str, directory: &Path) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", test, "--nocapture"])
        .current_dir(directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said =
        lines.map_while(Result::ok).find_map(|line| line.split_once("HERE ").map(|(_, at)| at.to_owned()));
    (child, said.expect("the child got there"))
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Says where this process is, which is then killed.
fn wait_to_be_killed(at: &Path) {
    // Not through the test harness, which may keep it back.
    let mut stdout = std::io::stdout();
    writeln!(stdout, "HERE {}", at.display()).unwrap();
    stdout.flush().unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
#[ignore = "the child of a test"]
fn publishes_and_waits() {
    let mut store = SlotWriter::create(Path::new(".")).unwrap();
    let path = publish(&mut store, 1);
    store.begin(PolicyVersion(2), LEN, Dtype::F32).unwrap();
    store.place(0, &values(2)[..LEN / 2], 1).unwrap();
    wait_to_be_killed(&path);
}

#[test]
fn a_killed_publisher_harms_no_reader_and_its_memory_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let (publisher, path) = child("shm::tests::publishes_and_waits", directory.path());
    let pinned = SlotReader::default().pin(&directory.path().join(path), PolicyVersion(1)).unwrap().unwrap();
    let alive = SlotWriter::create(directory.path()).unwrap();
    assert_eq!(files(directory.path()), 2, "one that lives is left alone");
    kill(publisher);
    assert_eq!(pinned.values[..], values(1)[..]);
    let _next = SlotWriter::create(directory.path()).unwrap();
    assert_eq!(files(directory.path()), 2, "the dead one's is gone, that of the living is not");
    assert_eq!(pinned.values[..], values(1)[..]);
    drop(alive);
}

#[test]
#[ignore = "the child of a test"]
fn reads_and_waits() {
    let path = Path::new("slot-0");
    let pinned = SlotReader::default().pin(path, PolicyVersion(1)).unwrap().unwrap();
    assert_eq!(pinned.values[..], values(1)[..]);
    wait_to_be_killed(path);
}

#[test]
fn a_reader_that_is_killed_gives_its_slot_back() {
    for killed in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let mut store = SlotWriter::create(directory.path()).unwrap();
        let path = publish(&mut store, 1);
        let (reader, _) = child("shm::tests::reads_and_waits", path.parent().unwrap());
        publish(&mut store, 2);
        if killed {
            kill(reader);
            assert_eq!(publish(&mut store, 3), path, "no reader is left");
        } else {
            assert_ne!(publish(&mut store, 3), path, "it is still read");
            kill(reader);
        }
    }
}

#[test]
fn only_files_of_publishers_are_opened() {
    use super::directory::is_of_publisher;
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let own = here.join("rlrun-weights-1-2");
    std::fs::create_dir_all(own.join("slot-directory")).unwrap();
    std::fs::write(own.join("slot-0"), "").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", own.join("slot-link")).unwrap();
    std::os::unix::fs::symlink(&own, here.join("rlrun-weights-link")).unwrap();
    assert!(is_of_publisher(&own.join("slot-0"), here));
    for other in [
        own.join("slot-directory"),
        own.join("slot-link"),
        own.join("owner"),
        own.join("../slot-0"),
        own.join("x/slot-0"),
        here.join("rlrun-weights-link/slot-0"),
        here.join("other/slot-0"),
        here.join("slot-0"),
        "/etc/passwd".into(),
        "slot-0".into(),
    ] {
        assert!(!is_of_publisher(&other, here), "{}", other.display());
    }
}
