//! The records on disk.
//!
//! ```text
//! "rlrun schedule 1\n"
//! record: length of body, u32 | BLAKE3 of the digest before it and the body, 32 bytes | body, zlib of MessagePack
//! ```
//!
//! All numbers are little-endian. The digest before the first record is that of the first line, so a record that was changed,
//! removed, moved, or taken from another file does not fit those around it.
//!
//! Invariant: the file is only appended to, and a record is on disk before the checkpoint that contains its step. What follows the
//! checkpoint that a run resumes from is cut off, as is a record that a crash left unfinished.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use trajectory::PolicyVersion;

use super::ScheduleError;
use super::record::ScheduleRecord;

/// The first line.
const MAGIC: &str = "rlrun schedule 1";
/// Bytes of a digest.
const DIGEST: usize = 32;
/// Bytes before the body of a record.
const HEADER: usize = 4 + DIGEST;
/// Largest body of a record, decompressed, bytes.
const MOST: u64 = 1 << 32;

/// The schedule of a run, open for appending.
#[derive(Debug)]
pub(super) struct ScheduleFile {
    path: PathBuf,
    file: File,
    /// Digest of the last record.
    digest: [u8; DIGEST],
}

/// A schedule, read record by record.
#[derive(Debug)]
pub(crate) struct ScheduleReader {
    path: PathBuf,
    file: BufReader<File>,
    /// Where the next record begins, and how long the file is, bytes.
    at: u64,
    bytes: u64,
    digest: [u8; DIGEST],
    /// What the last record was, for errors.
    after: String,
    /// The last version that a record reached.
    version: Option<PolicyVersion>,
}

impl ScheduleFile {
    /// Opens or makes the schedule at `path` for steps after `version`. Records of later steps are dropped, and so is one that a
    /// crash cut; a schedule that does not reach `version` begins anew.
    ///
    /// # Errors
    /// A schedule that was edited; a file that cannot be written.
    pub(super) fn open(path: &Path, version: PolicyVersion) -> Result<Self, ScheduleError> {
        let io = |verb, source| ScheduleError::Io { verb, path: path.to_path_buf(), source };
        let (mut kept, mut digest) = (0, first_digest());
        match ScheduleReader::open(path) {
            Err(ScheduleError::NotThere { .. }) => {}
            // A crash cut the first line.
            Err(ScheduleError::Unknown { .. }) if is_beginning(path) => {}
            Err(error) => return Err(error),
            Ok(mut reader) => {
                (kept, digest) = reader.place();
                let start = (kept, digest);
                loop {
                    match reader.next() {
                        Err(ScheduleError::Cut { .. }) | Ok(None) => break,
                        Err(error) => return Err(error),
                        Ok(Some(record)) if record.version() > version => break,
                        Ok(Some(_)) => (kept, digest) = reader.place(),
                    }
                }
                if reader.version.is_some_and(|reached| reached < version) {
                    (kept, digest) = start;
                }
            }
        }
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .read(true)
            .open(path)
            .map_err(|source| io("open", source))?;
        file.set_len(kept).map_err(|source| io("cut", source))?;
        file.seek(SeekFrom::End(0)).map_err(|source| io("write", source))?;
        if kept == 0 {
            file.write_all(format!("{MAGIC}\n").as_bytes()).map_err(|source| io("write", source))?;
        }
        file.sync_data().map_err(|source| io("sync", source))?;
        Ok(Self { path: path.to_path_buf(), file, digest })
    }

    /// Appends the encoded form of a record. It is on disk when this returns.
    ///
    /// # Errors
    /// A record that cannot be compressed, a file that cannot be written.
    pub(super) fn append(&mut self, encoded: &[u8]) -> Result<(), ScheduleError> {
        let mut compressed = ZlibEncoder::new(Vec::new(), Compression::default());
        let body = compressed.write_all(encoded).and_then(|()| compressed.finish());
        let refused = |reason: String| ScheduleError::Encode { path: self.path.clone(), reason };
        let body = body.map_err(|error| refused(error.to_string()))?;
        let length = u32::try_from(body.len()).map_err(|error| refused(error.to_string()))?;
        let digest = chained(&self.digest, &body);
        let record = [&length.to_le_bytes()[..], &digest, &body].concat();
        // In one write, so that a reader sees a record or none.
        let written = self.file.write_all(&record).and_then(|()| self.file.sync_data());
        written.map_err(|source| ScheduleError::Io { verb: "append to", path: self.path.clone(), source })?;
        self.digest = digest;
        Ok(())
    }
}

impl ScheduleReader {
    /// Opens the schedule at `path`.
    ///
    /// # Errors
    /// A file that is not there, is no schedule, or cannot be read.
    pub(crate) fn open(path: &Path) -> Result<Self, ScheduleError> {
        let io = |source| ScheduleError::Io { verb: "read", path: path.to_path_buf(), source };
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(ScheduleError::NotThere { path: path.to_path_buf() });
            }
            opened => opened.map_err(io)?,
        };
        let about = file.metadata().map_err(io)?;
        if !about.is_file() {
            return Err(ScheduleError::Unknown { path: path.to_path_buf(), expected: MAGIC });
        }
        let bytes = about.len();
        if bytes == 0 {
            return Err(ScheduleError::Empty { path: path.to_path_buf() });
        }
        let mut file = BufReader::new(file);
        let mut line = vec![0; MAGIC.len() + 1];
        if file.read_exact(&mut line).is_err() || line != format!("{MAGIC}\n").as_bytes() {
            return Err(ScheduleError::Unknown { path: path.to_path_buf(), expected: MAGIC });
        }
        Ok(Self {
            path: path.to_path_buf(),
            file,
            at: line.len() as u64,
            bytes,
            digest: first_digest(),
            after: "its first line".to_owned(),
            version: None,
        })
    }

    /// Length of the file, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where the next record begins, and the digest before it.
    fn place(&self) -> (u64, [u8; DIGEST]) {
        (self.at, self.digest)
    }

    /// The next record; `None` at the end of the file.
    ///
    /// # Errors
    /// A file that was cut or edited, or cannot be read.
    pub(crate) fn next(&mut self) -> Result<Option<ScheduleRecord>, ScheduleError> {
        if self.at == self.bytes {
            return Ok(None);
        }
        let mut header = [0; HEADER];
        self.fill(&mut header)?;
        let (length, digest) = header.split_at(4);
        let length = u32::from_le_bytes(length.try_into().unwrap_or_default());
        if u64::from(length) > self.bytes.saturating_sub(self.at + HEADER as u64) {
            return Err(self.cut());
        }
        let mut body = vec![0; length as usize];
        self.fill(&mut body)?;
        let expected = chained(&self.digest, &body);
        if expected != digest {
            return Err(self.edited("has other bytes than were written"));
        }
        let mut encoded = Vec::new();
        let inflated = ZlibDecoder::new(&body[..]).take(MOST).read_to_end(&mut encoded);
        let inflated = inflated.map_err(|error| self.edited(&format!("cannot be decompressed: {error}")))?;
        if inflated as u64 == MOST {
            return Err(self.edited("is larger than records are"));
        }
        let record = ScheduleRecord::decode(&encoded).map_err(|reason| self.edited(&reason))?;
        if let Some(reason) = self.misplaced(&record) {
            return Err(self.edited(&reason));
        }
        (self.after, self.version) = (record.to_string(), Some(record.version()));
        self.digest = expected;
        self.at += (HEADER + body.len()) as u64;
        Ok(Some(record))
    }

    /// Why a record cannot follow the one before.
    fn misplaced(&self, record: &ScheduleRecord) -> Option<String> {
        let fits = match (record, self.version) {
            (ScheduleRecord::Start(_), None) => true,
            (ScheduleRecord::Start(start), Some(before)) => start.version == before,
            (ScheduleRecord::Step(step), before) => {
                before.is_some_and(|before| before.next() == step.version)
            }
        };
        (!fits).then(|| format!("is {record}, which does not follow"))
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), ScheduleError> {
        match self.file.read_exact(buffer) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(self.cut()),
            Err(source) => Err(ScheduleError::Io { verb: "read", path: self.path.clone(), source }),
        }
    }

    fn cut(&self) -> ScheduleError {
        ScheduleError::Cut { path: self.path.clone(), bytes: self.bytes, after: self.after.clone() }
    }

    fn edited(&self, reason: &str) -> ScheduleError {
        let (path, after) = (self.path.clone(), self.after.clone());
        ScheduleError::Edited { path, at: self.at, after, reason: reason.to_owned() }
    }
}

/// Whether the file at `path` is the beginning of the first line, or nothing.
fn is_beginning(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|bytes| format!("{MAGIC}\n").as_bytes().starts_with(&bytes))
}

fn first_digest() -> [u8; DIGEST] {
    *blake3::hash(MAGIC.as_bytes()).as_bytes()
}

/// The digest of a record with this body, after the record of digest `before`.
fn chained(before: &[u8; DIGEST], body: &[u8]) -> [u8; DIGEST] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(before).update(body);
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::{SamplerEvents, StartRecord, StepNumbers, StepRecord, TrainedTensors};
    use super::*;

    fn start(version: u64) -> ScheduleRecord {
        let tensors = TrainedTensors { names: vec!["a".to_owned()], digests: vec![version] };
        let (rlrun, build, recipe) = ("0".to_owned(), "b".to_owned(), "seed = 1".to_owned());
        ScheduleRecord::Start(StartRecord { version: PolicyVersion(version), recipe, rlrun, build, tensors })
    }

    fn step(version: u64) -> ScheduleRecord {
        ScheduleRecord::Step(Box::new(StepRecord {
            version: PolicyVersion(version),
            numbers: StepNumbers { time_s: version as f64, ..StepNumbers::default() },
            groups: Vec::new(),
            tensors: TrainedTensors { names: Vec::new(), digests: vec![version] },
            events: SamplerEvents::default(),
        }))
    }

    fn append(path: &Path, version: u64, records: &[ScheduleRecord]) {
        let mut file = ScheduleFile::open(path, PolicyVersion(version)).unwrap();
        records.iter().for_each(|record| file.append(&record.encode().unwrap()).unwrap());
    }

    fn shown(path: &Path) -> Result<Vec<String>, ScheduleError> {
        let mut reader = ScheduleReader::open(path)?;
        let mut records = Vec::new();
        while let Some(record) = reader.next()? {
            records.push(record.to_string());
        }
        Ok(records)
    }

    #[test]
    fn a_resume_drops_what_follows_its_checkpoint() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("schedule.bin");
        append(&path, 0, &[start(0), step(1), step(2), step(3)]);
        append(&path, 2, &[start(2), step(3), step(4)]);
        let (two, all) = ("the start from step 2", shown(&path).unwrap());
        assert_eq!(all, ["the start from step 0", "step 1", "step 2", two, "step 3", "step 4"]);
        // A resume that was killed before its first step.
        append(&path, 4, &[start(4)]);
        append(&path, 4, &[start(4), step(5)]);
        assert_eq!(shown(&path).unwrap().len(), 9);
        // Steps 6 to 8 were not recorded.
        append(&path, 8, &[start(8), step(9)]);
        assert_eq!(shown(&path).unwrap(), ["the start from step 8", "step 9"]);
    }

    #[test]
    fn records_that_do_not_follow_each_other_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        for (n, records) in [[step(1), step(2)], [start(0), step(2)], [start(3), start(0)]].iter().enumerate()
        {
            let path = directory.path().join(n.to_string());
            append(&path, 0, records);
            let error = shown(&path).unwrap_err().to_string();
            assert!(error.contains("which does not follow"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_crash_at_any_byte_leaves_whole_records(share in 0.0..1.0f64) {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("schedule.bin");
            append(&path, 0, &[start(0), step(1), step(2)]);
            let whole = std::fs::read(&path).unwrap();
            let cut = (whole.len() as f64 * share) as usize;
            std::fs::write(&path, &whole[..cut]).unwrap();
            let is_between = shown(&path).is_ok();
            append(&path, 0, &[start(0), step(1)]);
            let all = shown(&path).unwrap();
            prop_assert_eq!(&all[all.len() - 2..], ["the start from step 0", "step 1"]);
            prop_assert!(all.len() <= 3);
            prop_assert!(cut > MAGIC.len() || !is_between);
        }

        #[test]
        fn a_changed_byte_is_found(share in 0.0..1.0f64, bit in 0..8u32) {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("schedule.bin");
            append(&path, 0, &[start(0), step(1), step(2)]);
            let mut bytes = std::fs::read(&path).unwrap();
            let at = (bytes.len() as f64 * share) as usize;
            bytes[at] ^= 1 << bit;
            std::fs::write(&path, &bytes).unwrap();
            let error = shown(&path).unwrap_err();
            prop_assert!(error.is_input(), "{}", error);
        }
    }
}
