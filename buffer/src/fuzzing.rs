//! Doors for the fuzz targets in `buffer/fuzz`, which see no more than other users. Invariant: only a build for fuzzing has
//! them, and they panic for nothing but a mistake of the buffer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use redb::StorageBackend;
use redb::backends::InMemoryBackend;
use trajectory::{
    Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Task, TaskId, Trajectory, VersionRun,
};

use crate::http::fuzzing::{decode, groups};
use crate::ledger::{LeaseRow, Mark, Row};
use crate::payload::{Incoming, Prepared};
use crate::{Buffer, BufferConfig, GroupFilter, Producer};

/// The first byte chooses verb and format, the others are the body.
pub fn bodies(bytes: &[u8]) {
    let Some((&choice, body)) = bytes.split_first() else { return };
    decode(choice, body);
    for group in groups(choice, body) {
        let incoming = Incoming::keyed("key", group.clone());
        let prepared = Prepared::new(incoming, false).expect("what the parser takes can be stored");
        let stored = crate::payload::decode(group.id, &prepared.payload).expect("what is stored can be read");
        assert_eq!(stored, group, "what is stored is what was sent");
    }
}

/// Every kind of record, from the same bytes.
pub fn records(bytes: &[u8]) {
    if let Ok(group) = crate::payload::decode(GroupId(0), bytes) {
        // What was damaged in a way that no checksum noticed is still a group that trains.
        assert!(group.trajectories.iter().all(|trajectory| !trajectory.sample.token_ids().is_empty()));
    }
    drop(rmp_serde::from_slice::<Row>(bytes));
    drop(rmp_serde::from_slice::<LeaseRow>(bytes));
    drop(rmp_serde::from_slice::<Mark>(bytes));
}

/// Each five bytes change one: where, below 4 GiB, and to what.
pub fn journal(bytes: &[u8]) {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    let mut image = IMAGE.get_or_init(image).clone();
    for change in bytes.chunks_exact(5) {
        let at = u32::from_le_bytes([change[0], change[1], change[2], change[3]]) as usize % image.len();
        image[at] = change[4];
    }
    let backend = InMemoryBackend::new();
    let filled = backend.set_len(image.len() as u64).and_then(|()| backend.write(0, &image));
    filled.expect("memory takes what it is given");
    // Such as those that redb has for what it did not expect; a server turns them into errors as well.
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let outcome = catch_unwind(AssertUnwindSafe(|| read_all(backend)));
    std::panic::set_hook(quiet);
    assert!(outcome.is_ok(), "opening or reading a damaged journal panicked");
}

/// Reads all that can be read; errors are as good as groups.
fn read_all(backend: InMemoryBackend) {
    let Ok(buffer) = Buffer::open_on(backend, BufferConfig::new(4, 1000)) else { return };
    let listed = buffer.list(&GroupFilter::default(), None, usize::MAX);
    for entry in listed.into_iter().flat_map(|page| page.groups) {
        if let Ok(Some((_, Some(group)))) = buffer.get(entry.id) {
            assert_eq!(group.task.answer.as_deref(), Some("stored"), "a group that was never stored");
        }
    }
}

/// A journal with some groups.
fn image() -> Vec<u8> {
    let backend = SharedMemory::default();
    let buffer = Buffer::open_on(backend.clone(), BufferConfig::new(4, 1000)).expect("memory can be opened");
    for n in 0..20 {
        buffer.submit(&n.to_string(), group(n)).expect("memory takes what it is given");
    }
    drop(buffer);
    let length = backend.len().expect("memory has a length");
    let mut image = vec![0; usize::try_from(length).expect("it fits into memory")];
    backend.read(0, &mut image).expect("memory can be read");
    image
}

/// Memory that outlives its buffer.
#[derive(Clone, Debug)]
struct SharedMemory(std::sync::Arc<InMemoryBackend>);

impl Default for SharedMemory {
    fn default() -> Self {
        Self(std::sync::Arc::new(InMemoryBackend::new()))
    }
}

impl StorageBackend for SharedMemory {
    fn len(&self) -> Result<u64, std::io::Error> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), std::io::Error> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> Result<(), std::io::Error> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> Result<(), std::io::Error> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), std::io::Error> {
        self.0.write(offset, data)
    }
}

fn group(n: u64) -> Group {
    let streams = SampleStreams {
        token_ids: vec![1, 2],
        loss_mask: vec![false, true],
        behavior_logprobs: vec![0.0, -1.0],
        versions: vec![VersionRun { version: PolicyVersion(0), len: 2 }],
        kept: None,
        temperature: 1.0,
    };
    let sample = Sample::new(streams).expect("all streams have two tokens");
    let prompt = Prompt::Text(n.to_string());
    let task = Task { id: TaskId(n), prompt, answer: Some("stored".to_owned()), columns: Default::default() };
    let (turns, text, score) = (Vec::new(), String::new(), Default::default());
    let trajectory = Trajectory { index: 0, sample, turns, text, score, baseline: false };
    Group { id: GroupId(0), task, trajectories: vec![trajectory] }
}
