//! Atomic creation of files and directories.
//!
//! Invariant: a path is renamed to its name after everything under it is on disk. A crash leaves at most a `*.partial`, which
//! the next attempt replaces. Nothing is overwritten.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::ModelError;

/// Calls `write` for a temporary file beside `path`, syncs it to disk and renames it.
pub fn file(path: &Path, write: impl FnOnce(&Path) -> Result<(), ModelError>) -> Result<(), ModelError> {
    let temporary = partial(path);
    let error = write_error(path);
    // What libraries write through a temporary file of their own is readable by the owner only; a model is not secret.
    let permissions =
        File::create(&temporary).and_then(|file| file.metadata()).map_err(&error)?.permissions();
    let written = write(&temporary).and_then(|()| {
        fs::set_permissions(&temporary, permissions).map_err(&error)?;
        sync(&temporary).map_err(&error)?;
        fs::rename(&temporary, path).map_err(&error)
    });
    if written.is_err() {
        // The first error is the one to report; what may be left is a `.partial` that no reader looks at.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Calls `fill` for a temporary directory, syncs it to disk and renames it.
///
/// # Errors
/// [`ModelError::Exists`] if there is something at `path`, besides what `fill` and the file system report.
pub fn directory(path: &Path, fill: impl FnOnce(&Path) -> Result<(), ModelError>) -> Result<(), ModelError> {
    if path.exists() {
        return Err(ModelError::Exists { path: path.to_owned() });
    }
    let temporary = partial(path);
    let error = write_error(path);
    if temporary.exists() {
        fs::remove_dir_all(&temporary).map_err(&error)?;
    }
    fs::create_dir_all(&temporary).map_err(&error)?;
    let written = fill(&temporary).and_then(|()| {
        sync_tree(&temporary).map_err(&error)?;
        fs::rename(&temporary, path).map_err(&error)?;
        path.parent().map_or(Ok(()), sync_directory).map_err(&error)
    });
    if written.is_err() {
        // As above.
        let _ = fs::remove_dir_all(&temporary);
    }
    written
}

fn write_error(path: &Path) -> impl Fn(io::Error) -> ModelError + '_ {
    |source| ModelError::Write { path: path.to_owned(), source }
}

fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Syncs everything under a directory to disk, then the directory.
fn sync_tree(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() { sync_tree(&path)? } else { sync(&path)? }
    }
    sync_directory(directory)
}

/// Makes a rename survive a power cut, where directories can be opened at all.
fn sync_directory(path: &Path) -> io::Result<()> {
    if cfg!(unix) && !path.as_os_str().is_empty() { sync(path) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fails() -> ModelError {
        ModelError::NoWeights { dir: PathBuf::new() }
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a");
        let err = file(&path, |temporary| {
            fs::write(temporary, "half").unwrap();
            Err(fails())
        });
        assert!(matches!(err, Err(ModelError::NoWeights { .. })));
        directory(&path, |temporary| {
            fs::write(temporary.join("b"), "half").unwrap();
            Err(fails())
        })
        .unwrap_err();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn leftovers_of_a_crash_are_replaced_and_finished_work_is_not() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("deep/a");
        fs::create_dir_all(partial(&path)).unwrap();
        fs::write(partial(&path).join("old"), "").unwrap();
        let fill = |temporary: &Path| {
            file(&temporary.join("new"), |new| {
                fs::write(new, "x").unwrap();
                Ok(())
            })
        };
        directory(&path, fill).unwrap();
        let names: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["new"]);
        assert!(matches!(directory(&path, fill), Err(ModelError::Exists { .. })));
    }
}
