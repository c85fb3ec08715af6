//! Bytes that are not what the buffer wrote: flipped, cut off, or of somebody else.
//!
//! Invariant: the answer to any bytes whatever is a journal that holds nothing but what was stored, or an error that says
//! what is wrong and what to do. That a group of a damaged journal can be lost is not held against it; that the buffer
//! keeps quiet about it is.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use buffer::{Buffer, BufferConfig, BufferError, Consumer, LeaseRequest, Producer};
use redb::TableDefinition;
use trajectory::{
    Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Task, TaskId, Trajectory, VersionRun,
};

use super::simulated_disk::{SECTOR, SimulatedDisk, TestRng};
use super::workload::Content;
use super::{DamageCase, NOW, cases, group_of};

const CONFIG: fn() -> BufferConfig = || BufferConfig::new(4, 1000);

/// A journal with groups of all sizes, two leases and a group that is gone; with what it holds.
fn journal() -> (Vec<u8>, Content) {
    let disk = SimulatedDisk::empty();
    let buffer = Buffer::open_on(disk.clone(), CONFIG()).unwrap();
    for n in 0..40 {
        let tokens = if n % 8 == 7 { 9000 } else { 30 };
        buffer.submit(&n.to_string(), group_of(GroupId(0), PolicyVersion(0), (n, tokens))).unwrap();
    }
    let scored =
        LeaseRequest { step: None, groups: Some(1), ..LeaseRequest::step("scorer", PolicyVersion(0)) };
    let lease = buffer.lease(&scored, NOW).unwrap();
    buffer.ack(lease.id).unwrap();
    buffer.lease(&LeaseRequest::step("trainer", PolicyVersion(0)), NOW).unwrap();
    let content = Content::of(&buffer).unwrap();
    drop(buffer);
    (disk.image(), content)
}

/// What came of opening and reading everything in some bytes.
#[derive(Debug)]
enum DamageOutcome {
    /// All that was stored is there.
    Whole,
    /// An error said so.
    Told(BufferError),
    /// Something else is there, and nothing was said.
    Silent(Vec<String>),
}

fn outcome(image: Vec<u8>, stored: &Content) -> DamageOutcome {
    let read = || {
        let buffer = Buffer::open_on(SimulatedDisk::holding(image), CONFIG())?;
        Content::of(&buffer)
    };
    match catch_unwind(AssertUnwindSafe(read)).expect("no bytes make the buffer panic") {
        Err(error) => DamageOutcome::Told(error),
        Ok(found) if found == *stored => DamageOutcome::Whole,
        Ok(found) => DamageOutcome::Silent(super::workload::differences(stored, &found)),
    }
}

fn assert_says_what_to_do(error: &BufferError) {
    let text = error.to_string();
    let remedies = ["move it away", "check the disk", "use the program"];
    assert!(remedies.iter().any(|remedy| text.contains(remedy)), "no way out in: {text}");
}

#[test]
fn a_flipped_bit_is_harmless_or_told() {
    let (image, stored) = journal();
    let written: Vec<usize> = written_sectors(&image);
    let mut told = 0;
    for seed in cases(300) {
        let case = DamageCase(seed);
        let mut dice = TestRng(seed);
        let at = written[dice.below(written.len())] * SECTOR + dice.below(SECTOR);
        let mut damaged = image.clone();
        damaged[at] ^= 1 << dice.below(8);
        match outcome(damaged, &stored) {
            DamageOutcome::Whole => {}
            DamageOutcome::Told(error) => {
                assert_says_what_to_do(&error);
                told += 1;
            }
            DamageOutcome::Silent(differences) => panic!("byte {at}: nobody said that {differences:?}"),
        }
        drop(case);
    }
    assert!(told > 0, "no flip hit anything that matters");
}

/// A fuzzer found this byte: the list of free pages then names one that does not exist, on which redb panics in the midst
/// of a commit, and once more while that unwinds, which ends the process.
#[test]
fn a_free_page_that_does_not_exist_is_told() {
    let disk = SimulatedDisk::empty();
    let buffer = Buffer::open_on(disk.clone(), CONFIG()).unwrap();
    for n in 0..20 {
        let streams = SampleStreams {
            token_ids: vec![1, 2],
            loss_mask: vec![false, true],
            behavior_logprobs: vec![0.0, -1.0],
            versions: vec![VersionRun { version: PolicyVersion(0), len: 2 }],
            kept: None,
            temperature: 1.0,
        };
        let sample = Sample::new(streams).unwrap();
        let (prompt, answer) = (Prompt::Text(n.to_string()), Some("stored".to_owned()));
        let task = Task { id: TaskId(n), prompt, answer, columns: Default::default() };
        let trajectories = vec![Trajectory {
            index: 0,
            sample,
            turns: Vec::new(),
            text: String::new(),
            score: Default::default(),
            baseline: false,
        }];
        buffer.submit(&n.to_string(), Group { id: GroupId(0), task, trajectories }).unwrap();
    }
    let stored = Content::of(&buffer).unwrap();
    drop(buffer);
    let mut image = disk.image();
    image[0x403a] = 0x49;
    match outcome(image, &stored) {
        DamageOutcome::Told(error) => assert_says_what_to_do(&error),
        other => panic!("nobody said that a page does not exist: {other:?}"),
    }
}

/// Unless all checksums are compared first, redb panics on some of these, and keeps quiet about others.
#[test]
fn a_damaged_byte_in_what_redb_keeps_for_itself_is_harmless_or_told() {
    let disk = SimulatedDisk::empty();
    let buffer = Buffer::open_on(disk.clone(), CONFIG()).unwrap();
    for n in 0..20 {
        buffer.submit(&n.to_string(), group_of(GroupId(0), PolicyVersion(0), (n, 1))).unwrap();
    }
    let stored = Content::of(&buffer).unwrap();
    drop(buffer);
    let image = disk.image();
    let bytes = written_sectors(&image).into_iter().flat_map(|sector| sector * SECTOR..(sector + 1) * SECTOR);
    let mut told = 0;
    for at in bytes.step_by(23) {
        let mut damaged = image.clone();
        damaged[at] = if damaged[at] == 0x49 { 0xff } else { 0x49 };
        match outcome(damaged, &stored) {
            DamageOutcome::Whole => {}
            DamageOutcome::Told(error) => {
                assert_says_what_to_do(&error);
                told += 1;
            }
            DamageOutcome::Silent(differences) => panic!("byte {at}: nobody said that {differences:?}"),
        }
    }
    assert!(told > 0, "no damage hit anything that matters");
}

#[test]
fn a_file_that_was_cut_off_is_told() {
    let (image, stored) = journal();
    for seed in cases(100) {
        let case = DamageCase(seed);
        let length = TestRng(seed).below(image.len() - 1) + 1;
        match outcome(image[..length].to_vec(), &stored) {
            DamageOutcome::Told(error) => assert_says_what_to_do(&error),
            DamageOutcome::Whole => {}
            DamageOutcome::Silent(differences) => panic!("{length} bytes: nobody said that {differences:?}"),
        }
        drop(case);
    }
}

#[test]
fn a_file_of_somebody_else_is_refused_and_left_alone() {
    let mut dice = TestRng(1);
    let noise: Vec<u8> = (0..100_000).map(|_| u8::try_from(dice.below(256)).unwrap()).collect();
    let text = b"step,reward\n1,0.5\n".repeat(1000);
    let disk = SimulatedDisk::empty();
    let database = redb::Builder::new().create_with_backend(disk.clone()).unwrap();
    let transaction = database.begin_write().unwrap();
    let theirs: TableDefinition<'_, u64, &str> = TableDefinition::new("theirs");
    transaction.open_table(theirs).unwrap().insert(1, "kept").unwrap();
    transaction.commit().unwrap();
    drop(database);
    for image in [noise, text, vec![7], disk.image()] {
        let disk = SimulatedDisk::holding(image.clone());
        let error = Buffer::open_on(disk.clone(), CONFIG()).expect_err("it is not a journal");
        assert!(error.to_string().contains("is not a journal"), "{error}");
        assert_says_what_to_do(&error);
        if image.starts_with(b"redb") {
            let database = redb::Builder::new().create_with_backend(disk).unwrap();
            let tables = database.begin_write().unwrap().list_tables().unwrap().count();
            assert_eq!(tables, 1, "a table was added to a file of somebody else");
        } else {
            assert_eq!(disk.image(), image, "a file of somebody else was changed");
        }
    }
}

/// Sectors that are not all zeros.
fn written_sectors(image: &[u8]) -> Vec<usize> {
    let sectors = image.chunks_exact(SECTOR).enumerate();
    let written: BTreeSet<usize> =
        sectors.filter(|(_, sector)| sector.iter().any(|byte| *byte != 0)).map(|(n, _)| n).collect();
    written.into_iter().collect()
}
