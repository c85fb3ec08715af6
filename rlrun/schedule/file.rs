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
//! checkpoint that a run resumes from is cut off, as is a record that a crash left unfinished. What is appended can be read.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use trajectory::PolicyVersion;

use super::ScheduleError;
use super::record::{ScheduleRecord, StartRecord};

/// The first line.
const MAGIC: &str = "rlrun schedule 1";
/// Bytes of a digest.
const DIGEST: usize = 32;
/// Bytes before the body of a record.
const HEADER: usize = 4 + DIGEST;
/// Largest body of a record, compressed or not, bytes.
const MOST: usize = 1 << 30;
/// Least bytes that are decompressed at a time.
const CHUNK: usize = 1 << 20;

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
    /// The last version that a record reached, with the digests of its tensors.
    reached: Option<(PolicyVersion, Vec<u64>)>,
}

/// The records of a schedule that a resumed run keeps.
struct KeptRecords {
    /// Where they end, bytes; 0 without a whole first line.
    bytes: u64,
    /// Digest of the last.
    digest: [u8; DIGEST],
    /// What they reach.
    reached: Option<(PolicyVersion, Vec<u64>)>,
}

impl KeptRecords {
    /// Those of the schedule at `path` up to `version`, without one that a crash cut.
    ///
    /// # Errors
    /// A schedule that was edited, a file that cannot be read.
    fn of(path: &Path, version: PolicyVersion) -> Result<Self, ScheduleError> {
        let mut reader = match ScheduleReader::open(path) {
            Err(ScheduleError::NotThere { .. } | ScheduleError::Empty { .. }) => return Ok(Self::none(0)),
            // A crash cut the first line.
            Err(ScheduleError::Unknown { .. }) if is_beginning(path) => return Ok(Self::none(0)),
            opened => opened?,
        };
        let mut kept = reader.kept();
        loop {
            match reader.next() {
                Err(ScheduleError::Cut { .. }) | Ok(None) => return Ok(kept),
                Err(error) => return Err(error),
                Ok(Some(record)) if record.version() > version => return Ok(kept),
                Ok(Some(_)) => kept = reader.kept(),
            }
        }
    }

    /// No record after the `bytes` of the first line.
    fn none(bytes: u64) -> Self {
        Self { bytes, digest: first_digest(), reached: None }
    }

    /// Why `start` cannot follow them.
    fn gap(&self, start: &StartRecord) -> Option<String> {
        let (reached, digests) = self.reached.as_ref()?;
        if *reached < start.version {
            return Some(format!("it ends at step {}, and later steps were not recorded", reached.0));
        }
        let same = *digests == start.tensors.digests;
        (!same).then(|| "its weights of this step are not those of the checkpoint".to_owned())
    }
}

/// Cuts the schedule at `path`, if there is one, behind the records up to `version`: the run makes the steps that follow again, and
/// does not record them.
///
/// # Errors
/// A schedule that was edited, a file that cannot be written.
pub(crate) fn cut_after(path: &Path, version: PolicyVersion) -> Result<(), ScheduleError> {
    let kept = KeptRecords::of(path, version)?;
    if kept.bytes == 0 {
        return Ok(());
    }
    let cut = || {
        let file = OpenOptions::new().write(true).open(path)?;
        file.set_len(kept.bytes)?;
        file.sync_data()
    };
    cut().map_err(|source| ScheduleError::Io { verb: "cut", path: path.to_path_buf(), source })
}

impl ScheduleFile {
    /// Opens or makes the schedule at `path` to append `start`. Records of later steps are dropped, and so is one that a crash
    /// cut. A schedule that `start` cannot follow begins anew; `note` gets a line about it before.
    ///
    /// # Errors
    /// A schedule that was edited; a file that cannot be written.
    pub(super) fn open(
        path: &Path,
        start: &StartRecord,
        note: impl FnOnce(&str),
    ) -> Result<Self, ScheduleError> {
        let io = |verb, source| ScheduleError::Io { verb, path: path.to_path_buf(), source };
        let mut kept = KeptRecords::of(path, start.version)?;
        if let Some(reason) = kept.gap(start) {
            let (path, step) = (path.display(), start.version.0);
            note(&format!("`{path}` begins anew after step {step}, without its records so far: {reason}"));
            kept = KeptRecords::none(MAGIC.len() as u64 + 1);
        }
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .read(true)
            .open(path)
            .map_err(|source| io("open", source))?;
        file.set_len(kept.bytes).map_err(|source| io("cut", source))?;
        file.seek(SeekFrom::End(0)).map_err(|source| io("write", source))?;
        if kept.bytes == 0 {
            file.write_all(format!("{MAGIC}\n").as_bytes()).map_err(|source| io("write", source))?;
        }
        file.sync_data().map_err(|source| io("sync", source))?;
        // The name of a new file is on disk once its directory is.
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        let synced = directory.map_or(Ok(()), |directory| File::open(directory)?.sync_all());
        synced.map_err(|source| io("sync the directory of", source))?;
        Ok(Self { path: path.to_path_buf(), file, digest: kept.digest })
    }

    /// Appends the encoded form of a record. It is on disk when this returns.
    ///
    /// # Errors
    /// A record that is too large, a file that cannot be written.
    pub(super) fn append(&mut self, encoded: &[u8]) -> Result<(), ScheduleError> {
        self.append_up_to(MOST, encoded)
    }

    fn append_up_to(&mut self, most: usize, encoded: &[u8]) -> Result<(), ScheduleError> {
        let mut compressed = ZlibEncoder::new(Vec::new(), Compression::default());
        let body = compressed.write_all(encoded).and_then(|()| compressed.finish());
        let refused = |reason: String| ScheduleError::Encode { path: self.path.clone(), reason };
        let body = body.map_err(|error| refused(format!("cannot be compressed: {error}")))?;
        let larger = encoded.len().max(body.len());
        let Some(length) = u32::try_from(body.len()).ok().filter(|_| larger <= most) else {
            return Err(refused(format!("has {larger} bytes, and the largest has {most}")));
        };
        let digest = chained(&self.digest, &body);
        let record = [&length.to_le_bytes()[..], &digest, &body].concat();
        // A reader of a run in progress may see a part of it.
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
            reached: None,
        })
    }

    /// Length of the file, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The records that were read.
    fn kept(&self) -> KeptRecords {
        KeptRecords { bytes: self.at, digest: self.digest, reached: self.reached.clone() }
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
        if length as usize > MOST {
            return Err(self.edited("is larger than records are"));
        }
        let mut body = vec![0; length as usize];
        self.fill(&mut body)?;
        let expected = chained(&self.digest, &body);
        if expected != digest {
            return Err(self.edited("has other bytes than were written"));
        }
        let encoded = inflated(&body, MOST).map_err(|reason| self.edited(&reason))?;
        let record = ScheduleRecord::decode(&encoded).map_err(|reason| self.edited(&reason))?;
        if let Some(reason) = self.misplaced(&record) {
            return Err(self.edited(&reason));
        }
        self.after = record.to_string();
        self.reached = Some((record.version(), record.tensors().digests.clone()));
        self.digest = expected;
        self.at += (HEADER + body.len()) as u64;
        Ok(Some(record))
    }

    /// Why a record cannot follow the one before.
    fn misplaced(&self, record: &ScheduleRecord) -> Option<String> {
        let wrong = match (record, &self.reached) {
            (ScheduleRecord::Start(_), None) => return None,
            (ScheduleRecord::Start(start), Some((before, digests))) if start.version == *before => {
                (start.tensors.digests != *digests).then_some("does not begin with the weights before it")
            }
            (ScheduleRecord::Step(step), Some((before, _))) if before.next() == step.version => return None,
            _ => Some("does not follow"),
        };
        wrong.map(|wrong| format!("is {record}, which {wrong}"))
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

/// `body` decompressed, `[n]` bytes, `n` up to `most`.
///
/// # Errors
/// What is wrong with it.
fn inflated(body: &[u8], most: usize) -> Result<Vec<u8>, String> {
    let (mut decoder, mut encoded) = (ZlibDecoder::new(body), Vec::new());
    loop {
        // One byte more than there may be, to notice it.
        let chunk = encoded.len().max(CHUNK).min(most + 1 - encoded.len());
        encoded.reserve_exact(chunk);
        let read = decoder.by_ref().take(chunk as u64).read_to_end(&mut encoded);
        let read = read.map_err(|error| format!("cannot be decompressed: {error}"))?;
        if encoded.len() > most {
            return Err("is larger than records are".to_owned());
        }
        if read < chunk {
            return Ok(encoded);
        }
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

    use super::super::record::{StepNumbers, StepRecord, TrainedTensors};
    use super::*;

    fn first(version: u64, digest: u64) -> StartRecord {
        let tensors = TrainedTensors { names: vec!["a".to_owned()], digests: vec![digest] };
        let (rlrun, build, recipe) = ("0".to_owned(), "b".to_owned(), "seed = 1".to_owned());
        StartRecord { version: PolicyVersion(version), recipe, rlrun, build, tensors }
    }

    fn start(version: u64) -> ScheduleRecord {
        ScheduleRecord::Start(first(version, version))
    }

    fn step(version: u64) -> ScheduleRecord {
        ScheduleRecord::Step(Box::new(StepRecord {
            version: PolicyVersion(version),
            numbers: StepNumbers { time_s: version as f64, ..StepNumbers::default() },
            groups: Vec::new(),
            tensors: TrainedTensors { names: Vec::new(), digests: vec![version] },
        }))
    }

    /// Appends `records` to what remains for a run that starts from `version`. Returns the notes.
    fn append(path: &Path, version: u64, records: &[ScheduleRecord]) -> String {
        let mut notes = String::new();
        let mut file = ScheduleFile::open(path, &first(version, version), |note| notes += note).unwrap();
        records.iter().for_each(|record| file.append(&record.encode().unwrap()).unwrap());
        notes
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
        assert_eq!(append(&path, 4, &[start(4), step(5)]), "");
        assert_eq!(shown(&path).unwrap().len(), 9);
        // Steps 6 to 8 were not recorded.
        let note = append(&path, 8, &[start(8), step(9)]);
        assert!(note.contains("begins anew after step 8") && note.contains("it ends at step 5"), "{note}");
        assert_eq!(shown(&path).unwrap(), ["the start from step 8", "step 9"]);
        // The checkpoint was replaced by another.
        let mut note = String::new();
        ScheduleFile::open(&path, &first(9, 1), |text| note += text).unwrap();
        assert!(note.contains("its weights of this step are not those of the checkpoint"), "{note}");
        assert!(shown(&path).unwrap().is_empty());
    }

    #[test]
    fn steps_that_are_repeated_without_a_record_are_cut_off() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("schedule.bin");
        cut_after(&path, PolicyVersion(2)).unwrap();
        assert!(!path.exists());
        append(&path, 0, &[start(0), step(1), step(2), step(3)]);
        cut_after(&path, PolicyVersion(2)).unwrap();
        cut_after(&path, PolicyVersion(7)).unwrap();
        assert_eq!(shown(&path).unwrap(), ["the start from step 0", "step 1", "step 2"]);
    }

    #[test]
    fn an_empty_file_is_a_schedule_that_begins() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("schedule.bin");
        append(&path, 0, &[start(0), step(1)]);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        assert!(matches!(ScheduleReader::open(&path), Err(ScheduleError::Empty { .. })));
        append(&path, 0, &[start(0), step(1)]);
        assert_eq!(shown(&path).unwrap(), ["the start from step 0", "step 1"]);
    }

    #[test]
    fn what_a_reader_would_refuse_is_not_appended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("schedule.bin");
        append(&path, 0, &[start(0)]);
        let mut file = ScheduleFile::open(&path, &first(0, 0), |_| {}).unwrap();
        let error = file.append_up_to(9, &[0; 10]).unwrap_err().to_string();
        assert!(
            error.contains("bytes, and the largest has 9") && error.contains("log.schedule=false"),
            "{error}"
        );
        let ScheduleRecord::Step(mut diverged) = step(1) else { unreachable!() };
        diverged.numbers.kl = f64::NAN;
        let reason = ScheduleRecord::Step(diverged).encode().unwrap_err();
        assert_eq!(reason, "has the number NaN as `kl`");
    }

    #[test]
    fn a_body_is_decompressed_up_to_the_limit() {
        for bytes in [0, 1, CHUNK, CHUNK + 1, 5 * CHUNK] {
            let mut compressed = ZlibEncoder::new(Vec::new(), Compression::default());
            compressed.write_all(&vec![7; bytes]).unwrap();
            let body = compressed.finish().unwrap();
            let whole = inflated(&body, bytes).unwrap();
            assert!(whole == vec![7; bytes] && whole.capacity() <= bytes + 1, "{bytes}");
            if let Some(less) = bytes.checked_sub(1) {
                assert_eq!(inflated(&body, less).unwrap_err(), "is larger than records are");
            }
        }
    }

    #[test]
    fn records_that_do_not_follow_each_other_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let other = || ScheduleRecord::Start(first(0, 9));
        for (n, (records, reason)) in [
            ([step(1), step(2)], "which does not follow"),
            ([start(0), step(2)], "which does not follow"),
            ([start(3), start(0)], "which does not follow"),
            ([start(0), other()], "which does not begin with the weights before it"),
        ]
        .iter()
        .enumerate()
        {
            let path = directory.path().join(n.to_string());
            append(&path, 0, records);
            let error = shown(&path).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
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
