//! Pushes between emulated devices: within a process, between processes that are killed, and to several that come and go.

mod broadcast;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use device::bf16;
use device::device::DeviceLocation;
use tokio::runtime::Runtime;

use super::colocated::ColocatedPublisher;
use super::hub_connection::HubConnection;
use super::ipc::{IpcConfig, IpcPublisher, IpcSubscriber, SlotCopyGuard};
use super::*;
use crate::HubConfig;
use crate::http::{RemoteConfig, router};
use crate::hub::{After, SubscriberId};

const SOON: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(100);
const LEN: usize = 5000;

fn device() -> Device {
    Device::open(DeviceLocation::of_tests()).unwrap()
}

/// Where one GPU is not enough: each member of a broadcast needs a device of its own, and a process cannot map its own memory on a GPU.
fn emulated() -> Device {
    Device::open(DeviceLocation::Emulated).unwrap()
}

/// Weights that say of which version they are.
fn values<T: Storage>(version: u64) -> Vec<T> {
    (0..LEN).map(|index| T::narrow(((index as u64 * 31 + version * 7) % 251) as f32)).collect()
}

fn digest_of<T: Storage>(version: u64) -> Digest {
    Digest::from_bytes(*blake3::hash(bytemuck::cast_slice(&values::<T>(version))).as_bytes())
}

fn publish<T: Storage>(publisher: &dyn DevicePublisher<T>, version: u64) -> Result<(), WeightsError> {
    publish_from(&device(), publisher, version)
}

fn publish_from<T: Storage>(
    device: &Device,
    publisher: &dyn DevicePublisher<T>,
    version: u64,
) -> Result<(), WeightsError> {
    let trained = device.upload(&values::<T>(version)).unwrap();
    publisher.publish(PolicyVersion(version), trained.all())
}

fn next<T: Storage>(subscriber: &dyn DeviceSubscriber<T>, after: u64) -> DeviceWeights<T> {
    let new = subscriber.wait_newer(Some(PolicyVersion(after)), SOON).unwrap();
    new.expect("a version in time")
}

fn check<T: Storage + PartialEq>(weights: &DeviceWeights<T>, version: u64) {
    check_on(&device(), weights, version);
}

fn check_on<T: Storage + PartialEq>(device: &Device, weights: &DeviceWeights<T>, version: u64) {
    assert_eq!(weights.version, PolicyVersion(version));
    let found = device.download(weights.values.all()).unwrap();
    assert!(found == values::<T>(version), "not the weights of {version}");
    assert_eq!(weights.digest, digest_of::<T>(version));
}

fn applied<T: Storage>(subscriber: &dyn DeviceSubscriber<T>, weights: &DeviceWeights<T>) {
    subscriber.applied(weights.receipt(Duration::ZERO)).unwrap();
}

fn colocated() -> ColocatedPublisher<bf16> {
    ColocatedPublisher::new(Hub::new(HubConfig::default()), &device())
}

#[test]
fn colocated_samplers_take_turns_between_two_buffers() {
    let publisher = colocated();
    let samplers = ["a", "b"].map(|name| publisher.subscribe(name, &device()).unwrap());
    assert!(samplers[0].newest(None).unwrap().is_none());
    let mut serving: [Option<DeviceWeights<bf16>>; 2] = [None, None];
    let mut places = Vec::new();
    for version in 1..=6 {
        publish(&publisher, version).unwrap();
        for (sampler, serving) in samplers.iter().zip(&mut serving) {
            assert!(publisher.wait_applied(PolicyVersion(version), Duration::ZERO).is_err());
            let new = next(sampler, version - 1);
            check(&new, version);
            applied(sampler, &new);
            if let Some(before) = serving.replace(new) {
                check(&before, version - 1);
                places.push(before.values.id());
                sampler.give_back(before.values);
            }
        }
        publisher.wait_applied(PolicyVersion(version), Duration::ZERO).unwrap();
        let push = publisher.last_push().unwrap().unwrap();
        assert_eq!((push.version, push.bytes), (PolicyVersion(version), 2 * LEN as u64));
    }
    assert_eq!(places[..6], places[4..10], "of each sampler every other version lies in the same place");
    assert!(publisher.lags().unwrap().iter().all(|lag| lag.versions == 0));
    drop(publisher);
    let gone = samplers[0].newest(Some(PolicyVersion(6))).unwrap_err();
    assert!(matches!(gone, WeightsError::PublisherGone { .. }), "{gone}");
}

#[test]
fn a_buffer_in_use_is_not_overwritten_and_missed_versions_are_forgotten() {
    let publisher = colocated();
    let sampler = publisher.subscribe("sampler", &device()).unwrap();
    publish(&publisher, 1).unwrap();
    let serving = next(&sampler, 0);
    for version in 2..=5 {
        publish(&publisher, version).unwrap();
    }
    let ready = next(&sampler, 1);
    publish(&publisher, 6).unwrap();
    check(&serving, 1);
    check(&ready, 5);
    check(&next(&sampler, 5), 6);
    let late = publisher.subscribe("late", &device()).unwrap();
    assert!(late.newest(None).unwrap().is_none(), "it was not there");
    let trained = device().upload(&values::<bf16>(6)).unwrap();
    assert!(publisher.resend(trained.all()).unwrap());
    assert!(!publisher.resend(trained.all()).unwrap(), "all have it");
    check(&next(&late, 0), 6);
}

#[test]
fn weights_with_another_digest_stop_the_run() {
    let publisher = colocated();
    let sampler = publisher.subscribe("sampler", &device()).unwrap();
    publish(&publisher, 1).unwrap();
    let receipt = Receipt { digest: digest_of::<bf16>(2), ..next(&sampler, 0).receipt(Duration::ZERO) };
    let mismatch = sampler.applied(receipt).unwrap_err();
    assert!(matches!(mismatch, WeightsError::Mismatch { .. }), "{mismatch}");
    assert_eq!(publish(&publisher, 2).unwrap_err(), mismatch);
}

#[test]
fn a_version_published_again_must_have_the_same_weights() {
    let publisher = colocated();
    for version in [1, 2, 1] {
        publish(&publisher, version).unwrap();
    }
    let other = device().upload(&values::<bf16>(9)).unwrap();
    let error = publisher.publish(PolicyVersion(1), other.all()).unwrap_err();
    assert!(matches!(error, WeightsError::Republished { .. }), "{error}");
    assert!(matches!(publish(&publisher, 0).unwrap_err(), WeightsError::NotNewer { .. }));
}

#[test]
fn weights_on_a_device_and_on_the_host_are_not_taken_for_each_other() {
    let publisher = colocated();
    let hub = publisher.hub().clone();
    let on_host = hub.subscribe("host").unwrap();
    let other = IpcSubscriber::<bf16>::within(&hub, "ipc", &device()).unwrap();
    let narrow = IpcSubscriber::<f32>::within(&hub, "f32", &device()).unwrap();
    publish(&publisher, 1).unwrap();
    let error = crate::Subscriber::newest(&on_host, None).unwrap_err();
    assert!(matches!(error, WeightsError::OnDevice { .. }), "{error}");
    let error = other.newest(None).unwrap_err().to_string();
    assert!(error.contains("cuda-ipc") && error.contains("otherwise"), "{error}");
    let error = narrow.newest(None).unwrap_err().to_string();
    assert!(error.contains("stored in bf16, and f32"), "{error}");
}

fn ipc(directory: &Path) -> IpcPublisher<f32> {
    ipc_of(&device(), directory)
}

fn ipc_of(device: &Device, directory: &Path) -> IpcPublisher<f32> {
    let config = IpcConfig { directory: directory.to_owned(), wait: SHORT };
    IpcPublisher::new(Hub::new(HubConfig::default()), device, &config).unwrap()
}

#[test]
fn slots_are_copied_out_of_and_used_in_turn() {
    let directory = tempfile::tempdir().unwrap();
    let publisher = ipc_of(&emulated(), directory.path());
    let sampler = IpcSubscriber::<f32>::within(publisher.hub(), "sampler", &emulated()).unwrap();
    let mut serving: Option<DeviceWeights<f32>> = None;
    for version in 1..=6 {
        publish_from(&emulated(), &publisher, version).unwrap();
        let new = next(&sampler, version - 1);
        check_on(&emulated(), &new, version);
        assert_eq!(new.received.bytes, 4 * LEN as u64);
        applied(&sampler, &new);
        publisher.wait_applied(PolicyVersion(version), Duration::ZERO).unwrap();
        if let Some(before) = serving.replace(new) {
            check_on(&emulated(), &before, version - 1);
            sampler.give_back(before.values);
        }
    }
    let own = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    assert_eq!(std::fs::read_dir(own).unwrap().count(), 3, "the owner, and two slots");
    // A model of another size takes new slots.
    let larger = emulated().upload(&vec![1.5_f32; LEN + 3]).unwrap();
    publisher.publish(PolicyVersion(7), larger.all()).unwrap();
    assert_eq!(emulated().download(next(&sampler, 6).values.all()).unwrap(), vec![1.5; LEN + 3]);
    check_on(&emulated(), &serving.unwrap(), 6);
    drop(publisher);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn no_torn_version_is_copied() {
    let directory = tempfile::tempdir().unwrap();
    let config = IpcConfig { directory: directory.path().to_owned(), wait: SOON };
    let publisher = IpcPublisher::<f32>::new(Hub::new(HubConfig::default()), &emulated(), &config).unwrap();
    let hub = publisher.hub().clone();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers = ["a", "b"].map(|name| {
            let sampler = IpcSubscriber::<f32>::within(&hub, name, &emulated()).unwrap();
            let done = &done;
            scope.spawn(move || {
                let mut last = 0;
                while last < 20 || !done.load(Ordering::Relaxed) {
                    let Some(new) = sampler.wait_newer(Some(PolicyVersion(last)), SHORT).unwrap() else {
                        continue;
                    };
                    check_on(&emulated(), &new, new.version.0);
                    last = new.version.0;
                    sampler.give_back(new.values);
                }
            })
        });
        for version in 1..=60 {
            publish_from(&emulated(), &publisher, version).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

/// Serves a hub for as long as it lives; where.
fn serve(hub: Hub) -> (Runtime, String) {
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = tokio.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio.spawn(async move { drop(axum::serve(listener, router(hub)).await) });
    (tokio, url)
}

/// Runs a test of this binary as another process in `directory`.
fn child(test: &str, directory: &Path) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", &format!("direct::tests::{test}"), "--nocapture"])
        .current_dir(directory)
        // Where emulated devices keep what they share; a process that is killed leaves it there.
        .env("TMPDIR", directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = |line: String| line.split_once("HERE ").map(|(_, said)| said.to_owned());
    (child, lines.map_while(Result::ok).filter_map(said))
}

fn say(what: impl std::fmt::Display) {
    // Not through the test harness, which may keep it back.
    let mut stdout = std::io::stdout();
    writeln!(stdout, "HERE {what}").unwrap();
    stdout.flush().unwrap();
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
#[ignore = "the child of a test"]
fn samples_in_another_process() {
    let url = std::fs::read_to_string("url").unwrap();
    let shared = std::env::current_dir().unwrap();
    let config = RemoteConfig { shared, ..RemoteConfig::new(url, "far") };
    let sampler = IpcSubscriber::<f32>::connect(config, &device()).unwrap();
    let mut serving = next(&sampler, 0);
    loop {
        applied(&sampler, &serving);
        sampler.flush().unwrap();
        say(format!("{} {}", serving.version.0, serving.digest));
        serving = next(&sampler, serving.version.0);
    }
}

#[test]
fn a_sampler_in_another_process_gets_every_version_and_may_be_killed() {
    let directory = tempfile::tempdir().unwrap();
    let publisher = ipc(directory.path());
    let (_server, url) = serve(publisher.hub().clone());
    std::fs::write(directory.path().join("url"), url).unwrap();
    for round in 0..2 {
        let (sampler, mut said) = child("samples_in_another_process", directory.path());
        for version in 5 * round + 1..=5 * round + 4 {
            publish(&publisher, version).unwrap();
            publish(&publisher, version).unwrap();
            let expected = format!("{version} {}", digest_of::<f32>(version));
            assert!(said.any(|line| line == expected), "version {version} came");
            publisher.wait_applied(PolicyVersion(version), SOON).unwrap();
        }
        kill(sampler);
        publish(&publisher, 5 * round + 5).unwrap();
    }
}

#[test]
#[ignore = "the child of a test"]
fn copies_and_is_killed() {
    let slot = std::fs::read_to_string("slot").unwrap();
    let _pin = SlotCopyGuard::take(Path::new(&slot), "far", PolicyVersion(1)).unwrap().unwrap();
    say("holds it");
    std::thread::sleep(Duration::from_secs(60));
}

/// The file of the slot with the newest version.
fn slot(hub: &Hub) -> PathBuf {
    let watcher = HubConnection::here(hub, "watcher").unwrap();
    let notice = watcher.next_notice(After::Version(None), Instant::now()).unwrap().unwrap();
    notice.direct.slot.unwrap().lock
}

#[test]
fn a_slot_is_not_written_while_a_process_copies_from_it() {
    let directory = tempfile::tempdir().unwrap();
    let publisher = ipc(directory.path());
    publish(&publisher, 1).unwrap();
    let first = slot(publisher.hub());
    std::fs::write(directory.path().join("slot"), first.to_str().unwrap()).unwrap();
    let (sampler, mut said) = child("copies_and_is_killed", directory.path());
    said.next().expect("it holds the slot");
    publish(&publisher, 2).unwrap();
    let error = publish(&publisher, 3).unwrap_err();
    assert!(error.to_string().contains("far copies out of the slot"), "{error}");
    kill(sampler);
    publish(&publisher, 3).unwrap();
    assert_eq!(slot(publisher.hub()), first);
    assert!(
        SlotCopyGuard::take(&first, "late", PolicyVersion(1)).unwrap().is_none(),
        "it was notice of what is gone"
    );
}

#[test]
#[ignore = "the child of a test"]
fn publishes_and_is_killed() {
    let publisher = ipc(Path::new("."));
    publish(&publisher, 1).unwrap();
    let slot = slot(publisher.hub());
    publish(&publisher, 2).unwrap();
    // As in the middle of a copy.
    publisher.begin_to_write(PolicyVersion(3));
    say(slot.display());
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_publisher_killed_during_a_copy_leaves_no_complete_version() {
    let directory = tempfile::tempdir().unwrap();
    let (publisher, mut said) = child("publishes_and_is_killed", directory.path());
    let slot = directory.path().join(said.next().expect("it got there"));
    assert!(SlotCopyGuard::take(&slot, "sampler", PolicyVersion(1)).unwrap().is_none(), "it is written");
    assert!(!crate::shm::is_left(&slot));
    kill(publisher);
    assert!(crate::shm::is_left(&slot));
    for version in [1, 3] {
        assert!(
            SlotCopyGuard::take(&slot, "sampler", PolicyVersion(version)).unwrap().is_none(),
            "{version}"
        );
    }
    let _next = ipc(directory.path());
    assert!(!slot.exists(), "the next publisher removes what is left");
}
