//! The directory of a publisher. Invariant: it exists as long as its publisher, and the directory of a killed
//! publisher is removed by the next that starts in the same place.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::slot::failed;
use crate::WeightsError;

/// Prefix of the directories of publishers.
const PREFIX: &str = "rlrun-weights-";
/// Prefix of the files of weights.
const SLOT: &str = "slot-";
/// The file that a live publisher has locked.
const OWNER: &str = "owner";
/// Age from which a directory without a lock is stale: a new publisher locks it sooner.
const MAKING: Duration = Duration::from_secs(60);
/// Attempts to make a directory, in case another publisher removes one before it is locked.
const TRIES: usize = 5;

/// A directory that is removed on drop.
#[derive(Debug)]
pub(crate) struct PublisherDirectory {
    path: PathBuf,
    /// Locked until drop.
    _owner: File,
}

impl PublisherDirectory {
    /// Makes a directory in `directory`, and removes those of killed publishers there.
    pub(crate) fn create(directory: &Path) -> Result<Self, WeightsError> {
        remove_stale(directory);
        for _ in 0..TRIES {
            let number = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
            let path = directory.join(format!("{PREFIX}{}-{number}", std::process::id()));
            let made = DirBuilder::new().mode(0o700).create(&path);
            made.map_err(|error| failed(&path, "make a directory; name another one", &error))?;
            if let Some(owner) = own_lock(&path).map_err(|error| failed(&path, "lock a file", &error))? {
                return Ok(Self { path, _owner: owner });
            }
        }
        let error = io::Error::other(format!("it was removed {TRIES} times"));
        Err(failed(directory, "keep a directory", &error))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether `file` is a regular file in the directory of a publisher in `directory`. Only such paths of a server are
/// opened.
pub(crate) fn is_of_publisher(file: &Path, directory: &Path) -> bool {
    let named = |path: &Path, prefix: &str| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(prefix))
    };
    let of_publisher = |own: &Path| {
        own.parent() == Some(directory) && named(own, PREFIX) && is(own, std::fs::FileType::is_dir)
    };
    named(file, SLOT) && file.parent().is_some_and(of_publisher) && is(file, std::fs::FileType::is_file)
}

/// Whether the path itself, not the target of a link, is of this kind. True for a missing path, which cannot be
/// opened anyway.
fn is(path: &Path, kind: fn(&std::fs::FileType) -> bool) -> bool {
    path.symlink_metadata().map_or(true, |metadata| kind(&metadata.file_type()))
}

/// Whether the publisher of a file has ended.
pub(crate) fn is_left(file: &Path) -> bool {
    File::open(file.with_file_name(OWNER)).map_or(true, |owner| owner.try_lock().is_ok())
}

impl Drop for PublisherDirectory {
    fn drop(&mut self) {
        // If this fails, the next publisher removes it. Readers keep what they have mapped.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Locks a new directory; `None` if another publisher removed it as stale.
fn own_lock(own: &Path) -> io::Result<Option<File>> {
    let path = own.join(OWNER);
    let owner = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    match owner.try_lock() {
        Ok(()) => Ok(path.exists().then_some(owner)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Removes the directories of killed publishers in `directory`. Those of other users cannot be removed and stay.
fn remove_stale(directory: &Path) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX)) {
        let path = entry.path();
        let stale = match File::open(path.join(OWNER)) {
            Ok(owner) => owner.try_lock().is_ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let age = entry.metadata().and_then(|about| about.modified()).map(|made| made.elapsed());
                age.is_ok_and(|age| age.is_ok_and(|age| age > MAKING))
            }
            Err(_) => false,
        };
        if stale {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}
