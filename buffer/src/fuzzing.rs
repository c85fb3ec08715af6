//! Entry points of the fuzz targets in `buffer/fuzz`. Invariant: they exist only in fuzzing builds, and a panic in
//! them is a bug of the buffer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use redb::StorageBackend;
use redb::backends::InMemoryBackend;
use trajectory::{
    Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Task, TaskId, Trajectory, VersionRun,
};

use crate::http::fuzzing::{decode, groups};
use crate::ledger::{GroupRow, LeaseRow, Watermarks};
use crate::payload::{IncomingGroup, PreparedGroup};
use crate::{Buffer, BufferConfig, GroupFilter, Producer};

/// Parses a request body: the first byte selects request type and format, the rest is the body.
pub fn bodies(bytes: &[u8]) {
    let Some((&choice, body)) = bytes.split_first() else { return };
    decode(choice, body);
    for group in groups(choice, body) {
        let incoming = IncomingGroup::keyed("key", group.clone());
        let prepared = PreparedGroup::new(incoming, false).expect("what the parser takes can be stored");
        let stored = crate::payload::decode(group.id, &prepared.payload).expect("what is stored can be read");
        assert_eq!(stored, group, "what is stored is what was sent");
    }
}

/// Decodes every record type from the same bytes.
pub fn records(bytes: &[u8]) {
    if let Ok(group) = crate::payload::decode(GroupId(0), bytes) {
        // Damage that no checksum detects must still decode to a valid group.
        assert!(group.trajectories.iter().all(|trajectory| !trajectory.sample.token_ids().is_empty()));
    }
    drop(rmp_serde::from_slice::<GroupRow>(bytes));
    drop(rmp_serde::from_slice::<LeaseRow>(bytes));
    drop(rmp_serde::from_slice::<Watermarks>(bytes));
}

/// Opens a damaged journal. Each five bytes change one byte: its offset (below 4 GiB) and its new value.
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
    // Panics of redb on unexpected input; the server turns them into errors too.
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let outcome = catch_unwind(AssertUnwindSafe(|| read_all(backend)));
    std::panic::set_hook(quiet);
    assert!(outcome.is_ok(), "opening or reading a damaged journal panicked");
}

/// Reads everything readable; errors are as good as groups.
fn read_all(backend: InMemoryBackend) {
    let Ok(buffer) = Buffer::open_on(backend, BufferConfig::new(4, 1000)) else { return };
    let listed = buffer.list(&GroupFilter::default(), None, usize::MAX);
    for entry in listed.into_iter().flat_map(|page| page.groups) {
        if let Ok(Some((_, Some(group)))) = buffer.get(entry.id) {
            assert_eq!(group.task.answer.as_deref(), Some("stored"), "a group that was never stored");
        }
    }
}

/// A journal with 20 groups.
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
        experts: None,
        temperature: 1.0,
    };
    let sample = Sample::new(streams).expect("all streams have two tokens");
    let prompt = Prompt::Text(n.to_string());
    let task = Task { id: TaskId(n), prompt, answer: Some("stored".to_owned()), columns: Default::default() };
    let (turns, text, score) = (Vec::new(), String::new(), Default::default());
    let trajectory =
        Trajectory { index: 0, sample, turns, branches: vec![], text, score, baseline: false, role: None };
    Group { id: GroupId(0), task, trajectories: vec![trajectory] }
}
