//! Files to objects and back.
//!
//! Invariant: what is stored or fetched has the digest that it was measured with, or is an error. Memory is bounded by
//! [`PARALLEL`] parts. A transfer waits for a store that does not answer, says so, and ends with an error after a time without
//! progress.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use object_store::path::Path as ObjectPath;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::task::JoinSet;

use super::ArchiveError;
use super::bucket::{Bucket, BucketError, PARALLEL};
use super::lead::IndexedFile;

/// Size of a part of an object, bytes.
const PART_BYTES: u64 = 8 << 20;
/// Most parts of an object; S3 has 10,000.
const MAX_PARTS: u64 = 9_000;
/// Bytes that are digested at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// First and longest pause before an unavailable store is asked again.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];
/// Attempts at a download whose bytes are wrong.
const DOWNLOADS: usize = 3;

/// A file with the size and the digest that it was measured with.
#[derive(Clone, Debug)]
pub(super) struct MeasuredFile {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) blake3: String,
}

impl MeasuredFile {
    /// Digests the bytes that the file has now. It may grow meanwhile.
    pub(super) fn measure(path: &Path) -> Result<Self, BucketError> {
        let failed = |source| BucketError::Local("read", path.to_owned(), source);
        let file = model::files::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut file = file.take(length);
        let (mut hasher, mut chunk, mut bytes) = (blake3::Hasher::new(), vec![0; CHUNK_BYTES], 0);
        loop {
            let read = read_some(&mut file, &mut chunk).map_err(failed)?;
            if read == 0 {
                break;
            }
            hasher.update(&chunk[..read]);
            bytes += read as u64;
        }
        Ok(Self { path: path.to_owned(), bytes, blake3: hasher.finalize().to_hex().to_string() })
    }

    /// Whether an object has the same bytes.
    pub(super) fn equals(&self, object: &IndexedFile) -> bool {
        self.bytes == object.bytes && self.blake3 == object.blake3
    }
}

/// Moves files from and to an archive.
pub(super) struct FileTransfer<'a> {
    bucket: &'a Bucket,
    /// How long it may make no progress.
    patience: Duration,
    notice: &'a (dyn Fn(&str) + Send + Sync),
    /// Bytes moved so far.
    moved: Arc<AtomicU64>,
}

impl<'a> FileTransfer<'a> {
    pub(super) fn new(
        bucket: &'a Bucket,
        patience: Duration,
        notice: &'a (dyn Fn(&str) + Send + Sync),
    ) -> Self {
        Self { bucket, patience, notice, moved: Arc::default() }
    }

    /// Repeats `attempt` while the store is unavailable, until the time without progress exceeds the patience.
    pub(super) fn patiently<T>(
        &self,
        what: &str,
        mut attempt: impl FnMut() -> Result<T, BucketError>,
    ) -> Result<T, ArchiveError> {
        let url = self.bucket.url();
        let begun = Instant::now();
        // Bytes that the farthest attempt moved: one that fails where an earlier one did is no progress.
        let (mut farthest, mut progress, mut pause) = (0, begun, PAUSES[0]);
        let mut said = false;
        loop {
            let before = self.moved.load(Ordering::Relaxed);
            let error = match attempt() {
                Ok(done) if said => {
                    let waited = begun.elapsed().as_secs_f64();
                    (self.notice)(&format!("the archive {url} answers again after {waited:.0} s"));
                    return Ok(done);
                }
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let BucketError::Unavailable(reason) = error else { return Err(error.into_error(url, what)) };
            let moved = self.moved.load(Ordering::Relaxed) - before;
            if moved > farthest {
                (farthest, progress, pause) = (moved, Instant::now(), PAUSES[0]);
            }
            let waited = progress.elapsed();
            if waited >= self.patience {
                let (url, what, waited_s) = (url.to_string(), what.to_owned(), waited.as_secs_f64());
                return Err(ArchiveError::Unavailable { url, what, reason, waited_s });
            }
            if !said {
                said = true;
                (self.notice)(&format!(
                    "waiting for the archive {url}, up to {:.0} s without progress: cannot {what}: {reason}",
                    self.patience.as_secs_f64()
                ));
            }
            std::thread::sleep(pause.min(self.patience.saturating_sub(waited)));
            pause = (pause * 2).min(PAUSES[1]);
        }
    }

    /// Stores files under these names at the same time: one of any size, or [`PARALLEL`] of at most a part each.
    pub(super) fn upload(&self, files: &[(String, MeasuredFile)]) -> Result<(), ArchiveError> {
        let Some((first, _)) = files.first() else { return Ok(()) };
        let mut missing: Vec<&(String, MeasuredFile)> = files.iter().collect();
        self.patiently(&format!("store {first}"), || {
            let stored = self.bucket.wait_for(self.upload_together(&missing));
            let mut failure = Ok(());
            let is_stored =
                |object: &str| stored.iter().any(|(name, result)| name == object && result.is_ok());
            missing.retain(|(object, _)| !is_stored(object));
            for (_, result) in stored {
                failure = failure.and(result);
            }
            failure
        })
    }

    /// Stores files at the same time; the result of each by name.
    async fn upload_together(
        &self,
        files: &[&(String, MeasuredFile)],
    ) -> Vec<(String, Result<(), BucketError>)> {
        let mut uploads = JoinSet::new();
        for (object, file) in files.iter().copied().cloned() {
            let (store, path, moved) =
                (self.bucket.store(), self.bucket.path(&object), Arc::clone(&self.moved));
            uploads.spawn(async move { (object, upload(&*store, &path, &file, &moved).await) });
        }
        // A panic of a task goes on here.
        uploads.join_all().await
    }

    /// Fetches the object of `file` to the path `to`, whose directory exists.
    pub(super) fn download(&self, file: &IndexedFile, to: &Path) -> Result<(), ArchiveError> {
        let what = format!("fetch {}", file.object);
        let mut attempts = 0;
        self.patiently(&what, || {
            loop {
                attempts += 1;
                match self.bucket.wait_for(download(self.bucket, file, to, &self.moved)) {
                    // A connection may damage what it carries; an object that is damaged stays so.
                    Err(BucketError::Damaged(_)) if attempts < DOWNLOADS => {}
                    result => return result,
                }
            }
        })
    }

    /// Whether a file needs more than one part.
    pub(super) fn is_large(file: &MeasuredFile) -> bool {
        file.bytes > PART_BYTES
    }
}

async fn upload(
    store: &dyn ObjectStore,
    path: &ObjectPath,
    file: &MeasuredFile,
    moved: &AtomicU64,
) -> Result<(), BucketError> {
    let failed = |source: io::Error| match source.kind() {
        // A log is cut and written again by a run that resumes.
        io::ErrorKind::UnexpectedEof => BucketError::Changed(file.path.clone(), source.to_string()),
        _ => BucketError::Local("read", file.path.clone(), source),
    };
    let mut parts = FileParts {
        file: model::files::open(&file.path).map_err(failed)?,
        hasher: blake3::Hasher::new(),
        left: file.bytes,
        size: part_bytes(file.bytes),
    };
    if file.bytes <= PART_BYTES {
        let bytes = parts.next().map_err(failed)?.unwrap_or_default();
        parts.compare(file)?;
        store.put(path, PutPayload::from(bytes)).await?;
        moved.fetch_add(file.bytes.max(1), Ordering::Relaxed);
        return Ok(());
    }
    let mut upload = store.put_multipart(path).await?;
    let stored = match upload_parts(&mut *upload, &mut parts, moved).await {
        Ok(()) => parts.compare(file),
        Err(PartError::Read(source)) => Err(failed(source)),
        Err(PartError::Store(error)) => Err(error),
    };
    let completed = match stored {
        Ok(()) => upload.complete().await.map(drop).map_err(BucketError::from),
        Err(error) => Err(error),
    };
    if completed.is_err() {
        // The parts would cost space; what cannot be removed now is left to the rules of the bucket.
        let _ = upload.abort().await;
    }
    completed
}

enum PartError {
    Read(io::Error),
    Store(BucketError),
}

async fn upload_parts(
    upload: &mut dyn MultipartUpload,
    parts: &mut FileParts,
    moved: &AtomicU64,
) -> Result<(), PartError> {
    let mut in_flight = JoinSet::new();
    loop {
        let next = parts.next().map_err(PartError::Read)?;
        let is_last = next.is_none();
        if let Some(bytes) = next {
            let (size, part) = (bytes.len() as u64, upload.put_part(PutPayload::from(bytes)));
            in_flight.spawn(async move { part.await.map(|()| size) });
        }
        while in_flight.len() >= PARALLEL || (is_last && !in_flight.is_empty()) {
            let Some(done) = in_flight.join_next().await else { break };
            let done = done.map_err(|error| BucketError::Unavailable(error.to_string()));
            let size = done.and_then(|stored| Ok(stored?)).map_err(PartError::Store)?;
            moved.fetch_add(size, Ordering::Relaxed);
        }
        if is_last {
            return Ok(());
        }
    }
}

/// The parts of a file, in order, digested as they are read.
struct FileParts {
    file: File,
    hasher: blake3::Hasher,
    /// Bytes that are not read yet.
    left: u64,
    /// Size of a part, bytes.
    size: u64,
}

impl FileParts {
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.left == 0 {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        (&mut self.file).take(self.size.min(self.left)).read_to_end(&mut bytes)?;
        if bytes.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter"));
        }
        self.hasher.update(&bytes);
        self.left -= bytes.len() as u64;
        Ok(Some(bytes))
    }

    /// Compares what was read with what was measured.
    fn compare(&self, file: &MeasuredFile) -> Result<(), BucketError> {
        if self.left == 0 && self.hasher.finalize().to_hex().as_str() == file.blake3 {
            return Ok(());
        }
        let reason = "it has other bytes than a moment ago".to_owned();
        Err(BucketError::Changed(file.path.clone(), reason))
    }
}

/// Size of the parts of a file of this size, bytes.
fn part_bytes(bytes: u64) -> u64 {
    PART_BYTES.max(bytes.div_ceil(MAX_PARTS).next_multiple_of(1 << 20))
}

async fn download(
    bucket: &Bucket,
    file: &IndexedFile,
    to: &Path,
    moved: &AtomicU64,
) -> Result<(), BucketError> {
    let (store, path) = (bucket.store(), bucket.path(&file.object));
    let failed = |verb| move |source| BucketError::Local(verb, to.to_owned(), source);
    let size = store.head(&path).await?.size;
    if size != file.bytes {
        return Err(BucketError::Damaged(format!("it has {size} bytes, and {} were written", file.bytes)));
    }
    let target = Arc::new(File::create(to).map_err(failed("create"))?);
    let mut ranges = JoinSet::new();
    let mut begin = 0;
    while begin < size || !ranges.is_empty() {
        if begin < size && ranges.len() < PARALLEL {
            let end = size.min(begin + PART_BYTES);
            let (store, path, target) = (Arc::clone(&store), path.clone(), Arc::clone(&target));
            ranges.spawn(async move {
                let bytes = store.get_range(&path, begin..end).await?;
                if bytes.len() as u64 != end - begin {
                    return Err(BucketError::Damaged(format!(
                        "{} bytes came of {}",
                        bytes.len(),
                        end - begin
                    )));
                }
                Ok(target.write_all_at(&bytes, begin).map(|()| end - begin))
            });
            begin = end;
            continue;
        }
        let Some(done) = ranges.join_next().await else { break };
        let written = done.map_err(|error| BucketError::Unavailable(error.to_string()))??;
        moved.fetch_add(written.map_err(failed("write"))?, Ordering::Relaxed);
    }
    target.sync_all().map_err(failed("write"))?;
    let found = MeasuredFile::measure(to)?;
    if !found.equals(file) {
        let reason = format!("its blake3 digest is {}, and {} was written", found.blake3, file.blake3);
        return Err(BucketError::Damaged(reason));
    }
    Ok(())
}

fn read_some(file: &mut impl Read, chunk: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read(chunk) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;

    const SOON: Duration = Duration::from_secs(1);

    fn bucket(directory: &Path) -> Bucket {
        let url = format!("file://{}/archive", directory.display()).parse().unwrap();
        Bucket::open(&url, &BTreeMap::new()).unwrap()
    }

    fn indexed(object: &str, file: &MeasuredFile) -> IndexedFile {
        IndexedFile { object: object.to_owned(), bytes: file.bytes, blake3: file.blake3.clone() }
    }

    #[test]
    fn files_of_no_one_and_several_parts_come_back() {
        let directory = tempfile::tempdir().unwrap();
        let bucket = bucket(directory.path());
        let silent = |_: &str| {};
        let transfer = FileTransfer::new(&bucket, SOON, &silent);
        for (name, bytes) in [("none", 0), ("one", 1000), ("several", 2 * PART_BYTES as usize + 5)] {
            let path = directory.path().join(name);
            let content: Vec<u8> = (0..bytes).map(|index| (index * 7 % 251) as u8).collect();
            std::fs::write(&path, &content).unwrap();
            let file = MeasuredFile::measure(&path).unwrap();
            assert_eq!(FileTransfer::is_large(&file), name == "several");
            transfer.upload(&[(name.to_owned(), file.clone())]).unwrap();
            let back = directory.path().join("back");
            transfer.download(&indexed(name, &file), &back).unwrap();
            assert!(std::fs::read(&back).unwrap() == content, "{name}");
        }
    }

    #[test]
    fn a_file_that_grows_is_stored_as_measured_and_one_that_changes_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let bucket = bucket(directory.path());
        let silent = |_: &str| {};
        let transfer = FileTransfer::new(&bucket, SOON, &silent);
        let path = directory.path().join("metrics.jsonl");
        std::fs::write(&path, "one\n").unwrap();
        let file = MeasuredFile::measure(&path).unwrap();
        std::fs::write(&path, "one\ntwo\n").unwrap();
        let named = |name: &str| [(name.to_owned(), file.clone())];
        transfer.upload(&named("a")).unwrap();
        assert_eq!(bucket.get("a", 100).unwrap().unwrap().0, b"one\n");
        for content in ["eno\ntwo\n", "one", ""] {
            std::fs::write(&path, content).unwrap();
            let error = transfer.upload(&named("b")).unwrap_err();
            assert!(matches!(error, ArchiveError::Changed { .. }), "{error}");
        }
        assert!(bucket.get("b", 100).unwrap().is_none());
    }

    #[test]
    fn a_truncated_and_a_lying_object_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let bucket = bucket(directory.path());
        let silent = |_: &str| {};
        let transfer = FileTransfer::new(&bucket, SOON, &silent);
        let path = directory.path().join("a");
        std::fs::write(&path, "right").unwrap();
        let file = MeasuredFile::measure(&path).unwrap();
        for (content, reason) in
            [("righ", "it has 4 bytes, and 5 were written"), ("wrong", "its blake3 digest is")]
        {
            bucket.put("a", content.as_bytes().to_vec()).unwrap();
            let error = transfer.download(&indexed("a", &file), &directory.path().join("b")).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
        bucket.delete("a").unwrap();
        let error = transfer.download(&indexed("a", &file), &directory.path().join("b")).unwrap_err();
        assert!(matches!(error, ArchiveError::Damaged { .. }), "{error}");
    }

    #[test]
    fn a_store_that_stays_away_is_announced_once_and_given_up_after_a_time_without_progress() {
        let directory = tempfile::tempdir().unwrap();
        let bucket = bucket(directory.path());
        let said = Mutex::new(Vec::new());
        let note = |text: &str| said.lock().unwrap().push(text.to_owned());
        let transfer = FileTransfer::new(&bucket, SOON, &note);
        let away = || BucketError::Unavailable("503".to_owned());
        let error = transfer.patiently("store x", || Err::<(), _>(away())).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot store x: 503") && text.contains("`deadlines.wait_s`"), "{text}");
        let mut left = 2;
        let back = transfer.patiently("store y", || {
            left -= 1;
            if left > 0 { Err(away()) } else { Ok(()) }
        });
        back.unwrap();
        let said = said.lock().unwrap().clone();
        assert_eq!(said.len(), 3, "{said:?}");
        assert!(said[0].contains("waiting for the archive") && said[2].contains("answers again"), "{said:?}");
        assert!(transfer.patiently("x", || Err::<(), _>(BucketError::Conflict)).is_err());
    }

    #[test]
    fn parts_grow_with_the_file() {
        assert_eq!(part_bytes(1), PART_BYTES);
        let large: u64 = 1 << 40;
        assert!(large.div_ceil(part_bytes(large)) <= MAX_PARTS);
    }
}
