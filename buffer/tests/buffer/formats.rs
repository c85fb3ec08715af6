//! Journals of earlier formats. Each file in `tests/journals` was written by the ignored test below when its format was the
//! current one, and is never written again. Before the format is raised, that test writes the next.

use std::path::{Path, PathBuf};
use std::time::Duration;

use buffer::{Buffer, BufferError, Consumer, Finalized, LeaseId, LeaseRequest, Producer};
use trajectory::{Group, GroupId, PolicyVersion};

use super::{NOW, SOON, TRAINER, admit, config, generate, group, lease, leased, v};

/// What this program writes.
const CURRENT: u64 = 3;

/// The journal of a format, compressed with Zstandard.
fn kept(format: u64) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/journals/format_{format}.redb.zst"))
}

/// A journal with something in every table: finalized groups with and without a key, named leases that are open, one that
/// was lost, an id that is to be generated again.
fn fill(path: &Path) {
    let buffer = Buffer::open(path, config(2, 2)).unwrap();
    generate(&buffer, v(0), 4);
    assert_eq!(buffer.submit("keyed", group(GroupId(0), v(0))).unwrap().answer, Finalized::Accepted);
    assert_eq!(leased(&buffer, 0), [0, 1]);
    let hold = Some(Duration::from_millis(1));
    let gone = buffer.lease(&LeaseRequest { hold, ..LeaseRequest::step("gone", v(1)) }, NOW).unwrap();
    assert_eq!(gone.id, LeaseId(1));
    let taken = lease(&buffer, 1, SOON).unwrap();
    assert_eq!(taken.groups, gone.groups);
    let ids = admit(&buffer, v(2), 2);
    assert_eq!(ids, [4, 5].map(GroupId));
    buffer.finalize(group(ids[1], v(2))).unwrap();
    // The version is the last change, so that the admissions are written with it.
    buffer.set_version(v(2), false).unwrap();
}

#[test]
#[ignore = "writes the journal of the current format into the sources"]
fn write_the_journal_of_the_current_format() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("buffer.redb");
    fill(&path);
    let bytes = zstd::encode_all(&*std::fs::read(path).unwrap(), 19).unwrap();
    std::fs::create_dir_all(kept(CURRENT).parent().unwrap()).unwrap();
    std::fs::write(kept(CURRENT), bytes).unwrap();
}

/// A group of a journal that knew nothing of correct answers.
fn unjudged(id: GroupId, version: PolicyVersion) -> Group {
    let mut group = group(id, version);
    group.trajectories.iter_mut().for_each(|trajectory| trajectory.score.correct = None);
    group
}

#[test]
fn a_journal_of_an_earlier_format_is_continued() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("buffer.redb");
    let bytes = zstd::decode_all(&*std::fs::read(kept(2)).unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    // The second time it is a journal of the current format.
    for _ in 0..2 {
        let buffer = Buffer::open(&path, config(2, 2)).unwrap();
        let stats = buffer.stats().unwrap();
        assert_eq!((stats.policy_version, stats.next_step), (v(2), v(2)));
        assert_eq!((stats.finalized, stats.leased, stats.again), (2, 4, 1));
        let first = lease(&buffer, 0, NOW).unwrap();
        assert_eq!((first.id, &*first.groups[0]), (LeaseId(0), &unjudged(GroupId(0), v(0))));
        assert_eq!(leased(&buffer, 1), [2, 3]);
        let lost = buffer.ack(LeaseId(1));
        assert!(matches!(lost, Err(BufferError::LeaseLost { lease: LeaseId(1) })), "{lost:?}");
        let again = buffer.submit("keyed", group(GroupId(0), v(0))).unwrap();
        assert_eq!(again.answer, Finalized::Duplicate);
    }
    let buffer = Buffer::open(&path, config(2, 2)).unwrap();
    buffer.ack_through(TRAINER, v(2)).unwrap();
    assert_eq!(admit(&buffer, v(2), 1), [GroupId(4)]);
    let last = lease(&buffer, 2, NOW).unwrap();
    assert_eq!(*last.groups[0], unjudged(GroupId(5), v(2)));
    assert_eq!(last.groups[1].trajectories, unjudged(GroupId(0), v(0)).trajectories);
}
