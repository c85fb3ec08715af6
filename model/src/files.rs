//! Bounded reads of untrusted files.
//!
//! Invariant: only regular files are read. A pipe, a socket or a device is an error at once: opening one neither waits
//! for a writer nor reads without an end. A file that is read into memory is no longer than its limit.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use memmap2::Mmap;
use rustix::fs::OFlags;

/// Longest JSON file of a model except its tokenizer, bytes. The longest that are published have about one million.
pub const MAX_JSON_BYTES: u64 = 16 << 20;
/// Longest `tokenizer.json`, bytes. The longest that are published have about 35 million.
pub const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
/// Longest chat template, bytes. The longest that are published have about 20 thousand.
pub const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// Opens a regular file for reading.
///
/// # Errors
/// Those of the system; [`io::ErrorKind::InvalidInput`] if it is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    // Without the flag the call waits for a writer where `path` is a pipe. Regular files ignore it.
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    let file = file.map_err(|error| match std::fs::metadata(path) {
        // Sockets cannot be opened at all, which the system calls by another name.
        Ok(found) if !found.is_file() => not_regular(found.file_type()),
        _ => error,
    })?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() { Ok(file) } else { Err(not_regular(kind)) }
}

/// Maps a regular file of weights.
///
/// # Errors
/// Those of [`open`] and of mapping.
pub(crate) fn map(path: &Path) -> io::Result<Mmap> {
    let file = open(path)?;
    #[expect(
        unsafe_code,
        reason = "reading weights of many gigabytes without a second copy; no process writes to a published model file, and \
                  ours are replaced by renaming"
    )]
    // SAFETY: the map is only read.
    unsafe {
        Mmap::map(&file)
    }
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// Those of [`open`] and of reading; [`io::ErrorKind::FileTooLarge`] if it is longer.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let too_long = |found: u64| {
        let text = format!("it has {found} bytes, and at most {limit} are read");
        io::Error::new(io::ErrorKind::FileTooLarge, text)
    };
    let length = file.metadata()?.len();
    if length > limit {
        return Err(too_long(length));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // It may grow while it is read.
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit { Err(too_long(bytes.len() as u64)) } else { Ok(bytes) }
}

/// The same as text.
///
/// # Errors
/// Those of [`read`]; [`io::ErrorKind::InvalidData`] if it is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit)?).map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidData, format!("it is not UTF-8: {}", error.utf8_error()))
    })
}

/// The same of a file that may be missing.
///
/// # Errors
/// Those of [`read_text`] except that the file is not there.
pub fn read_text_if_there(path: &Path, limit: u64) -> io::Result<Option<String>> {
    match read_text(path, limit) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn not_regular(kind: std::fs::FileType) -> io::Error {
    let found = match kind {
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    io::Error::new(io::ErrorKind::InvalidInput, format!("it is {found}, not a regular file"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn files_that_are_not_regular_are_refused_without_a_wait() {
        let scratch = tempfile::tempdir().unwrap();
        let (pipe, socket) = (scratch.path().join("pipe"), scratch.path().join("socket"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let _listener = UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink(&pipe, scratch.path().join("link")).unwrap();
        let link = scratch.path().join("link");
        for (path, found) in [
            (pipe.as_path(), "a pipe"),
            (&link, "a pipe"),
            (&socket, "a socket"),
            (Path::new("/dev/zero"), "a device"),
            (scratch.path(), "a directory"),
        ] {
            let error = read(path, 10).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{}: {error}", path.display());
            assert!(error.to_string().contains(found), "{}: {error}", path.display());
        }
    }

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        let error = read(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("it has 5 bytes, and at most 4 are read"), "{error}");
        assert_eq!(read_text_if_there(&scratch.path().join("none"), 5).unwrap(), None);
        std::fs::write(&path, [0xff]).unwrap();
        assert!(read_text(&path, 5).unwrap_err().to_string().contains("not UTF-8"));
    }
}
