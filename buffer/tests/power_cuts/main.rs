//! What a buffer keeps when the power fails at any moment, the disk is full, or bytes are damaged.
//!
//! Invariant: every case follows from its seed, which a failure prints, but for the order in which appends that are made
//! at the same time reach the disk. `RLRUN_POWER_CUTS=3400` runs so many cases, of three cuts each, instead of the few hundred that a change
//! has to pass; `RLRUN_POWER_CUTS=17..18` runs one of them again.

mod damage;
mod simulated_disk;
mod workload;

use std::ops::Range;
use std::time::Duration;

use buffer::{
    AdmitRequest, Buffer, BufferConfig, BufferError, Consumer, Finalized, LeaseRequest, OnStale, Producer,
};
use trajectory::{
    Component, Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
    Trajectory, Turn, VersionRun,
};

use simulated_disk::{DiskLimit, SimulatedDisk, TestRng};
use workload::{Content, Workload};

/// For what must not wait.
const NOW: Duration = Duration::ZERO;

/// Times that the power fails in the life of one buffer.
const LIVES: usize = 3;
/// Most operations of the disk in one life.
const OPERATIONS: usize = 700;
/// Calls, more than one life has.
const CALLS: usize = 100_000;

#[test]
fn acknowledged_writes_survive_power_cuts() {
    for seed in cases(80) {
        let case = DamageCase(seed);
        let mut workload = Workload::new(seed);
        let mut image = fresh_image(workload.config());
        for _ in 0..LIVES {
            let disk = SimulatedDisk::holding(live_until_power_cut(&mut workload, image));
            let buffer =
                Buffer::open_on(disk.clone(), workload.config()).expect("a power cut spoils no journal");
            workload.check(&buffer);
            drop(buffer);
            image = disk.image();
        }
        drop(case);
    }
}

/// A power cut, and more of them while the journal is opened again.
#[test]
fn repeated_interruptions_of_opening_are_harmless() {
    for seed in cases(50) {
        let case = DamageCase(seed);
        let mut workload = Workload::new(seed);
        let fresh = fresh_image(workload.config());
        let mut image = live_until_power_cut(&mut workload, fresh);
        for _ in 0..6 {
            let cut = workload.dice().below(24) as u64;
            let disk = SimulatedDisk::holding(image).cut_power_at(cut);
            // It may have got as far as being open, or not.
            drop(Buffer::open_on(disk.clone(), workload.config()));
            image = disk.image_after_power_cut(workload.dice());
        }
        workload.check(&open(image, workload.config()));
        drop(case);
    }
}

/// Space is given back after the answer; whichever operation of that is cut off, nothing but the space is at stake.
#[test]
fn power_can_fail_while_space_is_given_back() {
    let config = BufferConfig { compact_above: 32 << 10, ..BufferConfig::new(4, 1000) };
    let disk = SimulatedDisk::empty();
    let buffer = Buffer::open_on(disk.clone(), config).unwrap();
    buffer.set_version(PolicyVersion(1), false).unwrap();
    for n in 0..60 {
        let version = PolicyVersion(u64::from(n % 20 == 0));
        buffer.submit(&n.to_string(), group_of(GroupId(0), version, n, 2000)).unwrap();
    }
    let all = Content::of(&buffer).unwrap();
    drop(buffer);
    let full = disk.image();
    let mut few = all.clone();
    few.groups.retain(|_, (group, _)| group.oldest_version() == Some(PolicyVersion(1)));

    // What it takes without a cut.
    let disk = SimulatedDisk::holding(full.clone());
    let buffer = Buffer::open_on(disk.clone(), config).unwrap();
    let opened = disk.operations();
    assert_eq!(buffer.evict_below(PolicyVersion(1)).unwrap(), 57);
    drop(buffer);
    let (before, after) = (full.len(), disk.image().len());
    assert!(after * 2 < before, "{after} of {before} bytes are left after nearly all groups are gone");

    for operation in opened..disk.operations() {
        let case = DamageCase(operation);
        let disk = SimulatedDisk::holding(full.clone()).cut_power_at(operation);
        let buffer = Buffer::open_on(disk.clone(), config).unwrap();
        let answered = buffer.evict_below(PolicyVersion(1)).is_ok();
        drop(buffer);
        let found = Content::of(&open(disk.image_after_power_cut(&mut TestRng(operation)), config)).unwrap();
        assert!(
            found == few || !answered && found == all,
            "answered: {answered}, groups: {:?}",
            found.groups.keys()
        );
        drop(case);
    }
}

#[test]
fn a_full_disk_is_an_error_and_loses_no_acknowledged_group() {
    let mut full = 0;
    for seed in cases(40) {
        let case = DamageCase(seed);
        let mut workload = Workload::new(seed);
        let disk = SimulatedDisk::holding(fresh_image(workload.config()));
        let more = workload.dice().below(200 << 10);
        let limit = match seed % 2 {
            0 => DiskLimit::Length(disk.image().len() + more),
            _ => DiskLimit::Written(disk.bytes_written() + more),
        };
        disk.limit(Some(limit));
        let buffer = Buffer::open_on(disk.clone(), workload.config()).unwrap();
        // Some of the workloads forget as much as they store.
        if let Err(error) = workload.run(&buffer, 200) {
            let text = error.to_string();
            assert!(text.contains("no space left") && text.contains("check the disk"), "{text}");
            full += 1;
        }
        drop(buffer);
        disk.limit(None);
        workload.check(&Buffer::open_on(disk, workload.config()).unwrap());
        drop(case);
    }
    assert!(full > 0, "no disk was full");
}

/// A group over the bound is dropped, and generated again before the disk has heard of that.
#[test]
fn a_group_that_is_dropped_and_stored_again_in_one_commit_is_there() {
    let config = BufferConfig { on_stale: OnStale::Drop, ..BufferConfig::new(2, 1) };
    let disk = SimulatedDisk::empty();
    let buffer = Buffer::open_on(disk.clone(), config).unwrap();
    let slots = |served| AdmitRequest { served: PolicyVersion(served), limit: 1, hold: None, holder: None };
    let [id] = buffer.admit(slots(0), NOW).unwrap()[..] else { panic!("there are free slots") };
    buffer.claim(id, PolicyVersion(0)).unwrap();
    buffer.finalize(group_of(id, PolicyVersion(0), 1, 3)).unwrap();
    buffer.set_version(PolicyVersion(2), false).unwrap();

    let fresh = group_of(id, PolicyVersion(2), 2, 3);
    std::thread::scope(|scope| {
        let first =
            || drop(scope.spawn(|| buffer.submit("first", group_of(id, PolicyVersion(2), 3, 3)).unwrap()));
        disk.during_a_sync(first, || {
            let none = buffer.lease(&LeaseRequest::step("trainer", PolicyVersion(2)), NOW);
            assert!(matches!(none, Err(BufferError::LeaseTimeout { .. })), "{none:?}");
            assert_eq!(buffer.admit(slots(2), NOW).unwrap(), [id], "what was dropped comes first");
            buffer.claim(id, PolicyVersion(2)).unwrap();
            scope.spawn(|| assert_eq!(buffer.finalize(fresh.clone()).unwrap(), Finalized::Accepted));
            // It has a size as soon as it is on its way to the disk.
            while buffer.get(id).unwrap().is_none_or(|found| found.entry.bytes == 0) {
                std::thread::yield_now();
            }
        });
    });
    drop(buffer);
    let found = Content::of(&open(disk.image(), config)).unwrap();
    assert_eq!(found.groups.get(&id), Some(&(fresh, 0)));
}

/// Runs `workload` on `image` until the power fails; what is on the disk afterwards.
fn live_until_power_cut(workload: &mut Workload, image: Vec<u8>) -> Vec<u8> {
    let cut = workload.dice().below(OPERATIONS) as u64;
    let disk = SimulatedDisk::holding(image).cut_power_at(cut);
    if let Ok(buffer) = Buffer::open_on(disk.clone(), workload.config()) {
        workload.run(&buffer, CALLS).expect_err("the power fails some time");
    }
    disk.image_after_power_cut(workload.dice())
}

/// An empty journal. The power does not fail while it is created, because no group could be lost then.
fn fresh_image(config: BufferConfig) -> Vec<u8> {
    let disk = SimulatedDisk::empty();
    drop(Buffer::open_on(disk.clone(), config).unwrap());
    disk.image()
}

fn open(image: Vec<u8>, config: BufferConfig) -> Buffer {
    Buffer::open_on(SimulatedDisk::holding(image), config).expect("a power cut spoils no journal")
}

/// The seeds to try: `usually` many unless the environment says otherwise.
fn cases(usually: u64) -> Range<u64> {
    let Some(cases) = std::env::var_os("RLRUN_POWER_CUTS") else { return 0..usually };
    let cases = cases.to_str().unwrap();
    let (first, end) = cases.split_once("..").unwrap_or(("0", cases));
    first.parse().unwrap()..end.parse().unwrap()
}

/// Names the case in which a test failed.
struct DamageCase(u64);

impl Drop for DamageCase {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in case {}; to run it again: RLRUN_POWER_CUTS={}..{}", self.0, self.0, self.0 + 1);
        }
    }
}

/// The group number `n`, with a bit of everything and a completion of `tokens`.
fn group_of(id: GroupId, version: PolicyVersion, n: u64, tokens: usize) -> Group {
    let of_n = |token| u32::try_from((n * 7919 + token) % 150_000).unwrap();
    let sample = Sample::new(SampleStreams {
        token_ids: (0..=tokens as u64).map(of_n).collect(),
        loss_mask: std::iter::once(false).chain(std::iter::repeat_n(true, tokens)).collect(),
        behavior_logprobs: (0..=tokens).map(|token| -(token as f32) / 7.0).collect(),
        versions: vec![VersionRun { version, len: u32::try_from(tokens + 1).unwrap() }],
        kept: None,
        experts: None,
        temperature: 0.7,
    })
    .unwrap();
    let component = Component { name: "judge".to_owned(), value: Some(n as f64), ..Component::default() };
    let score = Score {
        total: Some(1.0 / n.max(1) as f64),
        components: vec![component],
        correct: Some(n.is_multiple_of(2)),
    };
    let turns =
        vec![Turn { completion: 1..tokens + 1, stop: StopReason::Length, reward: None, prefill: Vec::new() }];
    let prompt = Prompt::Text(format!("question {n}"));
    Group {
        id,
        task: Task { id: TaskId(n), prompt, answer: None, columns: Default::default() },
        trajectories: vec![Trajectory {
            index: 0,
            sample,
            turns,
            text: format!("answer {n}"),
            score,
            branches: Vec::new(),
            baseline: false,
            role: None,
        }],
    }
}
