//! The lock that prevents two processes from using one run directory, or one directory of a training service.
//!
//! Invariant: the operating system ties the lock to the open file and releases it when the process ends for any reason, so
//! a dead process never holds a lock. The process id in the file is for the error message only.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::Duration;

use super::{RunDirError, failed};

/// Name of the lock file in a directory.
pub(super) const NAME: &str = "lock";

/// Wait before the second attempt at a lock, milliseconds: [`is_in_use`] has it for an instant.
const RETRY_MS: u64 = 50;

/// An acquired lock, released when it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a directory without waiting.
    pub(crate) fn take(directory: &Path) -> Result<Self, RunDirError> {
        let path = directory.join(NAME);
        // Not truncated here: the file may be another process's.
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(|source| failed("write", &path, source))?;
        let mut tried = file.try_lock();
        if let Err(TryLockError::WouldBlock) = tried {
            std::thread::sleep(Duration::from_millis(RETRY_MS));
            tried = file.try_lock();
        }
        match tried {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let read = file.read_to_string(&mut holder);
                let pid = read.map_or("unknown".to_owned(), |_| holder.trim().to_owned());
                return Err(RunDirError::InUse { path: directory.to_path_buf(), pid });
            }
            Err(TryLockError::Error(source)) => return Err(failed("lock", &path, source)),
        }
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .and_then(|()| file.flush());
        written.map_err(|source| failed("write", &path, source))?;
        Ok(Self { _file: file })
    }
}

/// Whether a process has the run in this directory open. It tries the lock, shared with others that ask, and leaves nothing.
pub(crate) fn is_in_use(directory: &Path) -> bool {
    let file = model::files::open(&directory.join(NAME));
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}
