//! The file of an open journal. Invariant: while [`OpenFile::still_there`] succeeds, opening the path finds what was
//! committed.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::BufferError;

/// An open file with the path that it must stay at.
#[derive(Debug)]
pub(crate) struct OpenFile {
    path: PathBuf,
    /// A separate handle, so the identity of the file stays known for comparison.
    file: File,
}

impl OpenFile {
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), file: File::open(path)? })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// # Errors
    /// [`BufferError::JournalMoved`].
    pub(crate) fn still_there(&self) -> Result<(), BufferError> {
        self.moved().map_or(Ok(()), |found| Err(BufferError::JournalMoved { path: self.path.clone(), found }))
    }

    /// What is at the path instead of the file; `None` if it is the file.
    pub(super) fn moved(&self) -> Option<String> {
        let identity = |file: Metadata| (file.dev(), file.ino());
        match (self.file.metadata().map(identity), std::fs::metadata(&self.path).map(identity)) {
            (Ok(ours), Ok(theirs)) if ours == theirs => None,
            (Ok(_), Ok(_)) => Some("was replaced by another file".to_owned()),
            (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => Some("was removed".to_owned()),
            (Err(error), _) | (_, Err(error)) => Some(format!("can no longer be found ({error})")),
        }
    }
}
