//! Bytes that the buffer did not write: flipped bits, files that were cut off, files of other programs.
//!
//! Invariant: the answer to any bytes is a journal that contains nothing but what was stored, or an error that says what
//! is wrong and what to do. A damaged journal may lose a group. It may not lose one without an error.

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

/// A journal with groups of all sizes, two leases and a removed group; its content.
fn journal() -> (Vec<u8>, Content) {
    let disk = SimulatedDisk::empty();
    let buffer = Buffer::open_on(disk.clone(), CONFIG()).unwrap();
    for n in 0..40 {
        let tokens = if n % 8 == 7 { 9000 } else { 30 };
        buffer.submit(&n.to_string(), group_of(GroupId(0), PolicyVersion(0), n, tokens)).unwrap();
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

/// Outcome of opening some bytes as a journal and reading all of it.
#[derive(Debug)]
enum DamageOutcome {
    /// All stored groups and leases are there.
    Whole,
    /// An error reported the damage.
    Reported(BufferError),
    /// The content differs, without an error.
    Silent(Vec<String>),
}

fn outcome(image: Vec<u8>, stored: &Content) -> DamageOutcome {
    let read = || {
        let buffer = Buffer::open_on(SimulatedDisk::holding(image), CONFIG())?;
        Content::of(&buffer)
    };
    match catch_unwind(AssertUnwindSafe(read)).expect("no bytes make the buffer panic") {
        Err(error) => DamageOutcome::Reported(error),
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
fn a_flipped_bit_is_harmless_or_reported() {
    let (image, stored) = journal();
    let written: Vec<usize> = written_sectors(&image);
    let mut reported = 0;
    for seed in cases(120) {
        let case = DamageCase(seed);
        let mut dice = TestRng(seed);
        let at = written[dice.below(written.len())] * SECTOR + dice.below(SECTOR);
        let mut damaged = image.clone();
        damaged[at] ^= 1 << dice.below(8);
        match outcome(damaged, &stored) {
            DamageOutcome::Whole => {}
            DamageOutcome::Reported(error) => {
                assert_says_what_to_do(&error);
                reported += 1;
            }
            DamageOutcome::Silent(differences) => panic!("byte {at}: no error said that {differences:?}"),
        }
        drop(case);
    }
    assert!(reported > 0, "no flip hit anything that matters");
}

/// A fuzzer found this byte: the list of free pages then names one that does not exist, on which redb panics in the midst
/// of a commit, and once more while that unwinds, which ends the process.
#[test]
fn a_free_page_that_does_not_exist_is_reported() {
    let disk = SimulatedDisk::empty();
    let buffer = Buffer::open_on(disk.clone(), CONFIG()).unwrap();
    for n in 0..20 {
        let streams = SampleStreams {
            token_ids: vec![1, 2],
            loss_mask: vec![false, true],
            behavior_logprobs: vec![0.0, -1.0],
            versions: vec![VersionRun { version: PolicyVersion(0), len: 2 }],
            kept: None,
            experts: None,
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
            branches: Vec::new(),
            baseline: false,
            role: None,
        }];
        buffer.submit(&n.to_string(), Group { id: GroupId(0), task, trajectories }).unwrap();
    }
    let stored = Content::of(&buffer).unwrap();
    drop(buffer);
    let mut image = disk.image();
    image[0x403a] = 0x49;
    match outcome(image, &stored) {
        DamageOutcome::Reported(error) => assert_says_what_to_do(&error),
        other => panic!("no error said that a page does not exist: {other:?}"),
    }
}

/// Unless all checksums are compared first, redb panics on some of these, and keeps quiet about others.
#[test]
fn a_damaged_byte_in_what_redb_keeps_for_itself_is_harmless_or_reported() {
    let disk = SimulatedDisk::empty();
    let buffer = Buffer::open_on(disk.clone(), CONFIG()).unwrap();
    for n in 0..20 {
        buffer.submit(&n.to_string(), group_of(GroupId(0), PolicyVersion(0), n, 1)).unwrap();
    }
    let stored = Content::of(&buffer).unwrap();
    drop(buffer);
    let image = disk.image();
    let bytes = written_sectors(&image).into_iter().flat_map(|sector| sector * SECTOR..(sector + 1) * SECTOR);
    let mut reported = 0;
    for at in bytes.step_by(23) {
        let mut damaged = image.clone();
        damaged[at] = if damaged[at] == 0x49 { 0xff } else { 0x49 };
        match outcome(damaged, &stored) {
            DamageOutcome::Whole => {}
            DamageOutcome::Reported(error) => {
                assert_says_what_to_do(&error);
                reported += 1;
            }
            DamageOutcome::Silent(differences) => panic!("byte {at}: no error said that {differences:?}"),
        }
    }
    assert!(reported > 0, "no damage hit anything that matters");
}

#[test]
fn a_file_that_was_cut_off_is_reported() {
    let (image, stored) = journal();
    for seed in cases(100) {
        let case = DamageCase(seed);
        let length = TestRng(seed).below(image.len() - 1) + 1;
        match outcome(image[..length].to_vec(), &stored) {
            DamageOutcome::Reported(error) => assert_says_what_to_do(&error),
            DamageOutcome::Whole => {}
            DamageOutcome::Silent(differences) => {
                panic!("{length} bytes: no error said that {differences:?}")
            }
        }
        drop(case);
    }
}

#[test]
fn a_file_of_another_program_is_refused_and_left_alone() {
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
            assert_eq!(tables, 1, "a table was added to a file of another program");
        } else {
            assert_eq!(disk.image(), image, "a file of another program was changed");
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
