//! What only a journal does: come back.

use buffer::{Buffer, BufferError, Consumer, Finalized, Producer};
use redb::{Database, TableDefinition};
use trajectory::GroupId;

use super::{NOW, TRAINER, admit, config, generate, group, lease, leased, v};

#[test]
fn a_journal_restores_finalized_groups_and_admits_groups_in_flight_first() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("buffer.redb");
    let open = || Buffer::open(&path, config(2, 2)).unwrap();

    let buffer = open();
    generate(&buffer, v(0), 3);
    let lost = admit(&buffer, v(0), 3);
    buffer.finalize(group(lost[1], v(0))).unwrap();
    let first = leased(&buffer, 0);
    admit(&buffer, v(1), 2);
    drop(buffer);

    // Groups 6 and 7 left no trace: their ids are simply next.
    let buffer = open();
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.finalized, stats.leased, stats.again), (2, 2, 2));
    assert_eq!((stats.next_id, stats.next_step), (GroupId(6), v(1)));
    assert_eq!(leased(&buffer, 0), first);
    assert_eq!(buffer.finalize(group(lost[1], v(0))).unwrap(), Finalized::Duplicate);
    assert_eq!(admit(&buffer, v(1), 9), [3, 5, 6, 7].map(GroupId));
    assert_eq!(*lease(&buffer, 1, NOW).unwrap().groups[1], group(lost[1], v(0)), "read from disk");
    buffer.ack_through(TRAINER, v(2)).unwrap();
    drop(buffer);

    let buffer = open();
    assert_eq!(buffer.finalize(group(lost[1], v(0))).unwrap(), Finalized::Duplicate, "also once forgotten");
    assert!(matches!(lease(&buffer, 1, NOW), Err(BufferError::StepPassed { .. })));
    assert_eq!(admit(&buffer, v(2), 9), [3, 5, 6, 7, 8, 9].map(GroupId));
}

#[test]
fn a_journal_belongs_to_one_process() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("buffer.redb");
    let _open = Buffer::open(&path, config(1, 0)).unwrap();
    let error = Buffer::open(&path, config(1, 0)).unwrap_err();
    assert!(matches!(error, BufferError::Locked { .. }));
    assert!(
        error
            .to_string()
            .ends_with("buffer.redb is open in another process: stop that run, or use another run directory")
    );
}

#[test]
fn other_files_are_left_alone() {
    const STRANGE: TableDefinition<'_, u64, u64> = TableDefinition::new("strange");
    let directory = tempfile::tempdir().unwrap();
    let text = directory.path().join("notes.txt");
    std::fs::write(&text, "these are notes and not a journal").unwrap();
    assert!(matches!(Buffer::open(&text, config(1, 0)), Err(BufferError::NotAJournal { .. })));
    assert_eq!(std::fs::read_to_string(&text).unwrap(), "these are notes and not a journal");

    let strange = directory.path().join("strange.redb");
    let write = Database::create(&strange).unwrap().begin_write().unwrap();
    write.open_table(STRANGE).unwrap().insert(1, 2).unwrap();
    write.commit().unwrap();
    let error = Buffer::open(&strange, config(1, 0)).unwrap_err().to_string();
    assert!(error.contains("strange.redb is not a journal of this program (a redb file without"), "{error}");

    let missing = Buffer::open(directory.path().join("no/such/directory"), config(1, 0)).unwrap_err();
    assert!(missing.to_string().contains("no/such/directory cannot be written ("), "{missing}");
}

#[test]
fn a_newer_format_is_not_guessed_at() {
    const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("buffer.redb");
    drop(Buffer::open(&path, config(1, 0)).unwrap());
    let write = Database::create(&path).unwrap().begin_write().unwrap();
    write.open_table(META).unwrap().insert("format", 4u64.to_le_bytes().as_slice()).unwrap();
    write.commit().unwrap();
    let error = Buffer::open(&path, config(1, 0)).unwrap_err();
    assert!(matches!(error, BufferError::NewerFormat { found: 4, known: 3, .. }), "{error}");
}

#[test]
fn a_journal_that_is_removed_or_replaced_accepts_nothing_any_more() {
    let directory = tempfile::tempdir().unwrap();
    let (path, aside) = (directory.path().join("buffer.redb"), directory.path().join("aside.redb"));
    for replaced in [false, true] {
        let buffer = Buffer::open(&path, config(2, 2)).unwrap();
        let reopen = buffer.reopen().unwrap();
        buffer.submit("before", group(GroupId(0), v(0))).unwrap();
        assert!(buffer.failure().is_none());
        std::fs::rename(&path, &aside).unwrap();
        if replaced {
            // The same bytes are another file.
            std::fs::copy(&aside, &path).unwrap();
        }
        let found = if replaced { "was replaced by another file while" } else { "was removed while" };
        let refused = buffer.submit(&format!("after {replaced}"), group(GroupId(1), v(0))).unwrap_err();
        assert!(matches!(refused, BufferError::JournalMoved { .. }), "{refused}");
        assert!(refused.to_string().contains(found), "{refused}");
        assert!(buffer.submit("later", group(GroupId(2), v(0))).is_err());
        assert!(buffer.failure().is_some_and(|error| error.to_string().contains(found)));
        drop(buffer);
        assert!(
            matches!(reopen().unwrap_err(), BufferError::JournalMoved { .. }),
            "another file is no way to go on"
        );
        std::fs::rename(&aside, &path).unwrap();
        let again = reopen().unwrap().submit("before", group(GroupId(0), v(0))).unwrap();
        assert_eq!(again.answer, Finalized::Duplicate, "nothing was lost");
    }
}

/// A power cut can undo the rename that ends the making of a journal, and not what was written since.
#[test]
fn a_journal_under_the_name_of_a_new_one_is_kept_and_other_files_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let (path, fresh) = (directory.path().join("buffer.redb"), directory.path().join("buffer.new"));
    let submit =
        || Buffer::open(&path, config(2, 2)).unwrap().submit("before", group(GroupId(0), v(0))).unwrap();
    assert_eq!(submit().answer, Finalized::Accepted);
    std::fs::rename(&path, &fresh).unwrap();
    assert_eq!(submit().answer, Finalized::Duplicate);
    assert!(!fresh.exists());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&fresh, "half of a journal").unwrap();
    assert_eq!(submit().answer, Finalized::Accepted);
    assert!(!fresh.exists());
}

#[test]
fn a_removed_journal_is_detected_without_a_write() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("buffer.redb");
    let buffer = Buffer::open(&path, config(2, 2)).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(buffer.failure().is_some());
    assert!(!path.exists(), "nothing takes its place");
    assert!(Buffer::in_memory(config(2, 2)).unwrap().reopen().is_none());
}

#[test]
fn a_configuration_without_slots_or_with_too_many_is_refused() {
    for wrong in [config(0, 1), config(1, u64::MAX), config(1 << 20, 16)] {
        assert!(matches!(Buffer::in_memory(wrong), Err(BufferError::Config { .. })));
    }
}
