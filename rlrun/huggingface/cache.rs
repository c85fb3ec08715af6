//! The user's cache of the Hugging Face Hub, in the layout of the Python package `huggingface_hub`, which both read and write.
//!
//! ```text
//!   HUB/models--OWNER--NAME/refs/main                      the commit that the branch was at
//!                          /blobs/ETAG                     a file, by what the hub calls its content
//!                          /blobs/ETAG.incomplete          a download that was interrupted
//!                          /snapshots/COMMIT/config.json   a link to its blob
//!                          /.rlrun/COMMIT.json             which files the commit has, so that no request is needed
//!   HUB/.locks/models--OWNER--NAME/ETAG.lock               taken while a blob is written
//! ```
//! Invariant: a blob, a link and a reference appear under their names when they are complete. A file in a snapshot is used
//! without another check.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::listing::{RepositoryFile, RepositoryListing};
use super::name::{RepositoryKind, is_commit, is_file};

/// Pause between two looks at a lock.
const LOOK_UP: Duration = Duration::from_millis(200);
/// Longest description of a commit, bytes.
const MAX_LISTING_BYTES: u64 = 64 << 20;
/// Most files of a snapshot that are listed, and deepest directory.
const MOST_FILES: usize = 100_000;
const DEEPEST: usize = 8;

/// The cache of all repositories.
#[derive(Clone, Debug)]
pub(super) struct RepositoryCache {
    hub: PathBuf,
}

/// The cache of one repository.
#[derive(Clone, Debug)]
pub(super) struct CachedRepository {
    path: PathBuf,
    locks: PathBuf,
}

impl RepositoryCache {
    /// Where the variables say: `HF_HUB_CACHE`, else `hub` in the home of the hub's tools.
    pub(super) fn of(environment: &BTreeMap<String, String>) -> Option<Self> {
        let named = set(environment, &["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"]).map(PathBuf::from);
        let hub = named.or_else(|| Some(home(environment)?.join("hub")))?;
        Some(Self { hub: std::path::absolute(&hub).unwrap_or(hub) })
    }

    /// Its directory.
    pub(super) fn path(&self) -> &Path {
        &self.hub
    }

    /// The part for one repository.
    pub(super) fn repository(&self, kind: RepositoryKind, name: &str) -> CachedRepository {
        let folder = format!("{}--{}", kind.plural(), name.replace('/', "--"));
        CachedRepository { path: self.hub.join(&folder), locks: self.hub.join(".locks").join(folder) }
    }
}

impl CachedRepository {
    /// The commit that a branch or tag was last seen at.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        let text = fs::read_to_string(self.path.join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Records the commit that a branch or tag is at.
    pub(super) fn refer(&self, revision: &str, commit: &str) -> io::Result<()> {
        if self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        write_whole(&self.path.join("refs").join(revision), commit.as_bytes())
    }

    /// The directory of a commit.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.path.join("snapshots").join(commit)
    }

    /// A file of a commit, if it is there.
    pub(super) fn file(&self, commit: &str, file: &str) -> Option<PathBuf> {
        Some(self.snapshot(commit).join(file)).filter(|path| path.is_file())
    }

    /// What a commit has: as it was recorded, or else the files that are there.
    pub(super) fn listing(&self, commit: &str) -> RepositoryListing {
        let recorded = model::files::read(&self.recorded(commit), MAX_LISTING_BYTES).ok();
        let recorded: Option<RepositoryListing> =
            recorded.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let Some(listing) = recorded.filter(|listing| listing.commit == commit && listing.is_plain()) {
            return listing;
        }
        let mut files = Vec::new();
        list(&self.snapshot(commit), "", DEEPEST, &mut files);
        files.sort_by(|a, b| a.name.cmp(&b.name));
        RepositoryListing { commit: commit.to_owned(), files, configs: serde_json::Value::Null, whole: false }
    }

    /// Records what a commit has.
    pub(super) fn record(&self, listing: &RepositoryListing) -> io::Result<()> {
        let path = self.recorded(&listing.commit);
        if path.exists() {
            return Ok(());
        }
        write_whole(&path, &serde_json::to_vec(listing).map_err(io::Error::other)?)
    }

    fn recorded(&self, commit: &str) -> PathBuf {
        self.path.join(".rlrun").join(format!("{commit}.json"))
    }

    /// Where a blob is, and where its download is until it is complete.
    pub(super) fn blob(&self, etag: &str) -> (PathBuf, PathBuf) {
        let blobs = self.path.join("blobs");
        (blobs.join(etag), blobs.join(format!("{etag}.incomplete")))
    }

    /// Links a file of a commit to its blob.
    pub(super) fn link(&self, commit: &str, file: &str, etag: &str) -> io::Result<PathBuf> {
        let path = self.snapshot(commit).join(file);
        let above = file.split('/').count() + 1;
        let target: PathBuf = std::iter::repeat_n("..", above).collect::<PathBuf>().join("blobs").join(etag);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        if !path.is_file() {
            // A link whose blob is gone.
            let _ = fs::remove_file(&path);
            std::os::unix::fs::symlink(target, &path)?;
        }
        Ok(path)
    }

    /// Takes a blob for this process. While another has it, `wait` is how long its download may stand still.
    pub(super) fn lock(&self, etag: &str, wait: Duration) -> Result<File, LockFailure> {
        let lock = self.locks.join(format!("{etag}.lock"));
        let failed = |source| LockFailure::Write(lock.clone(), source);
        fs::create_dir_all(&self.locks).map_err(failed)?;
        fs::create_dir_all(self.path.join("blobs")).map_err(failed)?;
        let file = File::options().create(true).write(true).truncate(false).open(&lock).map_err(failed)?;
        let (_, partial) = self.blob(etag);
        let length = || fs::metadata(&partial).map_or(0, |file| file.len());
        let (mut last, mut since) = (length(), Instant::now());
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(source)) => return Err(failed(source)),
                Err(TryLockError::WouldBlock) => {}
            }
            let now = length();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            if since.elapsed() > wait {
                return Err(LockFailure::Busy(lock));
            }
            std::thread::sleep(LOOK_UP);
        }
    }
}

/// Why a blob cannot be taken.
pub(super) enum LockFailure {
    /// A directory or the lock cannot be written.
    Write(PathBuf, io::Error),
    /// Another process keeps it.
    Busy(PathBuf),
}

/// The home of the hub's tools: `HF_HOME`, or `huggingface` in the user's cache.
pub(super) fn home(environment: &BTreeMap<String, String>) -> Option<PathBuf> {
    let of = |name: &str| set(environment, &[name]).map(PathBuf::from);
    of("HF_HOME").or_else(|| {
        let cache = of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")))?;
        Some(cache.join("huggingface"))
    })
}

/// The first of these variables that is set and not empty. A leading `~/` is the user's home.
pub(super) fn set(environment: &BTreeMap<String, String>, names: &[&str]) -> Option<String> {
    let value = |name: &&str| environment.get(*name).filter(|value| !value.is_empty());
    let value = names.iter().find_map(value)?;
    match (value.strip_prefix("~/"), environment.get("HOME")) {
        (Some(rest), Some(home)) => Some(format!("{home}/{rest}")),
        _ => Some(value.clone()),
    }
}

/// Writes a small file under its name when it is complete.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    let mut temporary = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
    io::Write::write_all(&mut temporary, bytes)?;
    temporary.as_file().sync_all()?;
    temporary.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// The files under a directory, by their names in the repository.
fn list(directory: &Path, prefix: &str, deepest: usize, files: &mut Vec<RepositoryFile>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let Some(name) = entry.file_name().to_str().map(|name| format!("{prefix}{name}")) else { continue };
        if files.len() >= MOST_FILES || !is_file(&name) {
            continue;
        }
        if path.is_dir() && deepest > 0 {
            list(&path, &format!("{name}/"), deepest - 1, files);
        } else if path.is_file() {
            files.push(RepositoryFile { size: fs::metadata(&path).ok().map(|file| file.len()), name });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_tools_of_the_hub_look() {
        let at = |variables: &[(&str, &str)]| {
            let environment =
                variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            RepositoryCache::of(&environment).map(|cache| cache.path().display().to_string())
        };
        let home = ("HOME", "/home/a");
        assert_eq!(at(&[home]).as_deref(), Some("/home/a/.cache/huggingface/hub"));
        assert_eq!(at(&[home, ("XDG_CACHE_HOME", "/c")]).as_deref(), Some("/c/huggingface/hub"));
        assert_eq!(at(&[home, ("HF_HOME", "~/hf")]).as_deref(), Some("/home/a/hf/hub"));
        assert_eq!(at(&[home, ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/hub")]).as_deref(), Some("/hub"));
        assert_eq!(at(&[]), None);
    }

    #[test]
    fn a_snapshot_without_a_record_is_listed_as_it_lies_there() {
        let directory = tempfile::tempdir().unwrap();
        let cache = RepositoryCache { hub: directory.path().to_owned() };
        let repository = cache.repository(RepositoryKind::Dataset, "openai/gsm8k");
        let commit = "e53f048856ff4f594e959d75785d2c2d37b678ee";
        fs::create_dir_all(directory.path().join("datasets--openai--gsm8k/blobs")).unwrap();
        fs::write(repository.blob("abc").0, "rows").unwrap();
        let path = repository.link(commit, "main/train.parquet", "abc").unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "rows");
        repository.refer("refs/pr/1", commit).unwrap();
        assert_eq!(repository.commit("refs/pr/1").as_deref(), Some(commit));
        let listing = repository.listing(commit);
        assert_eq!((listing.files[0].name.as_str(), listing.whole), ("main/train.parquet", false));
        repository.record(&RepositoryListing { whole: true, ..listing }).unwrap();
        assert!(repository.listing(commit).whole);
        assert!(repository.listing("0000000000000000000000000000000000000000").files.is_empty());
    }

    #[test]
    fn a_blob_that_another_process_keeps_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let cache = RepositoryCache { hub: directory.path().to_owned() };
        let repository = cache.repository(RepositoryKind::Model, "a/b");
        let Ok(_first) = repository.lock("abc", Duration::ZERO) else { panic!("it is free") };
        assert!(matches!(repository.lock("abc", Duration::ZERO), Err(LockFailure::Busy(_))));
    }
}
