//! Complete lines of a file that grows, from where the last read ended.
//!
//! Invariant: a line is delivered once, whole, or not at all: a torn last line waits for its end, and a line above
//! [`MAX_LINE_BYTES`] is counted and skipped. Memory is bounded by one line. A file that was replaced or cut is reported
//! before its new lines; lines of a file that was removed stay: the files of a run are removed before their directory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Longest line that is delivered, bytes.
pub(crate) const MAX_LINE_BYTES: usize = 4 << 20;
/// Bytes before the current position by which a file is recognised.
const FINGERPRINT_BYTES: u64 = 64;
/// Bytes of a read.
const READ_BYTES: usize = 64 << 10;

/// Receives the lines of a file.
pub(crate) trait LineSink {
    /// The lines so far are void: the file was replaced or cut.
    fn restart(&mut self);
    /// A complete line, without its line break.
    fn line(&mut self, line: &[u8]);
    /// Before [`LineSink::line`]: the offset of its first byte.
    fn at(&mut self, _offset: u64) {}
}

/// A position in a file that grows.
#[derive(Debug)]
pub(crate) struct LineTail {
    /// The directory that the file must not leave, also not by a symbolic link.
    root: PathBuf,
    path: PathBuf,
    /// Device and inode of the file that was read; `None` if there was none.
    identity: Option<(u64, u64)>,
    /// The first byte that was not delivered.
    offset: u64,
    /// The bytes before `offset`.
    fingerprint: Vec<u8>,
    /// Whether `offset` is inside a line that is skipped.
    skipping: bool,
    skipped: u64,
    /// Length and time of the last change at the last read.
    seen: Option<(u64, SystemTime)>,
    /// Most bytes that one call reads; above [`MAX_LINE_BYTES`], so that every call gets further.
    most: u64,
    /// Whether the last call ended before the end of the file.
    behind: bool,
}

impl LineTail {
    /// The start of `root/name`, which need not exist.
    pub(crate) fn new(root: &Path, name: &str) -> Self {
        Self {
            root: root.to_path_buf(),
            path: root.join(name),
            identity: None,
            offset: 0,
            fingerprint: Vec::new(),
            skipping: false,
            skipped: 0,
            seen: None,
            most: u64::MAX,
            behind: false,
        }
    }

    /// Reads at most `bytes` in one call, so that a call on a long file ends soon.
    pub(crate) fn in_parts(self, bytes: u64) -> Self {
        Self { most: bytes.max(2 * MAX_LINE_BYTES as u64), ..self }
    }

    /// Whether the last call left a part of the file for the next one.
    pub(crate) fn behind(&self) -> bool {
        self.behind
    }

    /// The share of the file that was read, 0 to 1.
    pub(crate) fn share(&self) -> f64 {
        let length = self.seen.map_or(0, |(length, _)| length);
        if self.behind && length > 0 { self.offset as f64 / length as f64 } else { 1.0 }
    }

    /// Lines that were too long.
    pub(crate) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// When the file was last changed.
    pub(crate) fn modified(&self) -> Option<SystemTime> {
        self.seen.map(|(_, modified)| modified)
    }

    /// Delivers the lines that were completed since the last call. Returns whether anything changed.
    ///
    /// # Errors
    /// A file that cannot be read. A file that does not exist is no error.
    pub(crate) fn poll(&mut self, sink: &mut impl LineSink) -> io::Result<bool> {
        let behind = std::mem::take(&mut self.behind);
        let Some(mut file) = open_inside(&self.root, &self.path)? else {
            return Ok(self.seen.take().is_some());
        };
        let metadata = file.metadata()?;
        let (identity, now) = ((metadata.dev(), metadata.ino()), (metadata.len(), metadata.modified()?));
        if self.identity == Some(identity) && self.seen == Some(now) && !behind {
            return Ok(false);
        }
        if self.identity.is_some() && (self.identity != Some(identity) || !self.continues(&mut file)?) {
            self.restart(sink);
        }
        self.identity = Some(identity);
        self.seen = Some(now);
        let end = now.0.min(self.offset.saturating_add(self.most));
        self.behind = end < now.0;
        self.read(&mut file, end, sink)?;
        Ok(true)
    }

    fn restart(&mut self, sink: &mut impl LineSink) {
        self.identity = None;
        self.offset = 0;
        self.fingerprint.clear();
        self.skipping = false;
        self.skipped = 0;
        self.behind = false;
        sink.restart();
    }

    /// Whether the bytes before the position are those that were read.
    fn continues(&self, file: &mut File) -> io::Result<bool> {
        let length = self.fingerprint.len();
        file.seek(SeekFrom::Start(self.offset - length as u64))?;
        let mut bytes = vec![0; length];
        match file.read_exact(&mut bytes) {
            Ok(()) => Ok(bytes == self.fingerprint),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads up to `end`: what a writer appends meanwhile is for the next call.
    fn read(&mut self, file: &mut File, end: u64, sink: &mut impl LineSink) -> io::Result<()> {
        file.seek(SeekFrom::Start(self.offset))?;
        let mut rest = file.take(end.saturating_sub(self.offset));
        let (mut pending, mut chunk) = (Vec::new(), vec![0; READ_BYTES]);
        loop {
            let length = rest.read(&mut chunk)?;
            if length == 0 {
                return Ok(());
            }
            for piece in chunk[..length].split_inclusive(|byte| *byte == b'\n') {
                let ends = piece.last() == Some(&b'\n');
                if !self.skipping {
                    pending.extend_from_slice(piece);
                }
                if !self.skipping && pending.len() > MAX_LINE_BYTES {
                    self.skipped += 1;
                    self.skipping = true;
                    self.advance(&pending);
                    pending.clear();
                } else if self.skipping {
                    self.advance(piece);
                }
                if ends && !std::mem::take(&mut self.skipping) {
                    sink.at(self.offset);
                    sink.line(&pending[..pending.len() - 1]);
                    self.advance(&pending);
                    pending.clear();
                }
            }
        }
    }

    /// Moves the position behind `bytes`.
    fn advance(&mut self, bytes: &[u8]) {
        self.offset += bytes.len() as u64;
        self.fingerprint.extend_from_slice(&bytes[bytes.len().saturating_sub(FINGERPRINT_BYTES as usize)..]);
        let extra = self.fingerprint.len().saturating_sub(FINGERPRINT_BYTES as usize);
        self.fingerprint.drain(..extra);
    }
}

/// Opens a regular file below `root`; `None` if there is none. Symbolic links may not lead outside.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn open_inside(root: &Path, path: &Path) -> io::Result<Option<File>> {
    let resolve = |path: &Path| match std::fs::canonicalize(path) {
        Ok(path) => Ok(Some(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let (Some(root), Some(path)) = (resolve(root)?, resolve(path)?) else { return Ok(None) };
    // A pipe would block its reader.
    if !path.starts_with(&root) || !std::fs::metadata(&path)?.is_file() {
        return Ok(None);
    }
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Calls `f` with every line, `None` for one that is too long, until it returns false. A torn last line is a line.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn for_each_line(file: impl Read, mut f: impl FnMut(Option<&[u8]>) -> bool) -> io::Result<()> {
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    loop {
        line.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        if (&mut reader).take(limit).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let whole = line.len() <= MAX_LINE_BYTES;
        if !whole && line.last() != Some(&b'\n') {
            reader.skip_until(b'\n')?;
        }
        if !f(whole.then_some(&line[..])) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Default)]
    struct Collected(Vec<String>, usize);

    impl LineSink for Collected {
        fn restart(&mut self) {
            self.0.clear();
            self.1 += 1;
        }

        fn line(&mut self, line: &[u8]) {
            self.0.push(String::from_utf8_lossy(line).into_owned());
        }
    }

    fn append(path: &Path, text: &[u8]) {
        let mut file = File::options().append(true).create(true).open(path).unwrap();
        file.write_all(text).unwrap();
    }

    proptest! {
        #[test]
        fn lines_arrive_once_and_whole_however_they_are_written(
            lines in prop::collection::vec("[a-z]{0,40}", 1..20),
            cuts in prop::collection::vec(1_usize..30, 1..20),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("file");
            let (mut tail, mut got) = (LineTail::new(directory.path(), "file"), Collected::default());
            let text: Vec<u8> = lines.iter().flat_map(|line| format!("{line}\n").into_bytes()).collect();
            let (mut rest, mut cuts) = (&text[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (now, later) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                append(&path, now);
                tail.poll(&mut got).unwrap();
                rest = later;
            }
            prop_assert_eq!(got.0, lines);
            prop_assert_eq!(got.1, 0);
        }
    }

    #[test]
    fn files_that_are_replaced_or_cut_begin_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let (mut tail, mut got) = (LineTail::new(directory.path(), "file"), Collected::default());
        assert!(!tail.poll(&mut got).unwrap(), "a missing file is no change");
        append(&path, b"one\ntwo\nthr");
        assert!(tail.poll(&mut got).unwrap());
        assert!(!tail.poll(&mut got).unwrap());
        assert_eq!(got.0, ["one", "two"]);
        std::fs::write(directory.path().join("new"), "ONE\nTWO\nTHREE\n").unwrap();
        std::fs::rename(directory.path().join("new"), &path).unwrap();
        tail.poll(&mut got).unwrap();
        assert_eq!((got.0.join(" "), got.1), ("ONE TWO THREE".to_owned(), 1));
        // The same inode with other content, longer and shorter.
        std::fs::write(&path, "a\nb\nc\nd\ne\nf\ng\nh\n").unwrap();
        tail.poll(&mut got).unwrap();
        assert_eq!((got.0.len(), got.1), (8, 2));
        std::fs::write(&path, "a\n").unwrap();
        tail.poll(&mut got).unwrap();
        assert_eq!((got.0.join(" "), got.1), ("a".to_owned(), 3));
        std::fs::remove_file(&path).unwrap();
        assert!(tail.poll(&mut got).unwrap(), "a file that was removed is a change");
        assert!(!tail.poll(&mut got).unwrap());
        assert_eq!((got.0.join(" "), got.1), ("a".to_owned(), 3), "its lines stay");
        append(&path, b"b\n");
        tail.poll(&mut got).unwrap();
        assert_eq!((got.0.join(" "), got.1), ("b".to_owned(), 4));
    }

    #[test]
    fn a_huge_line_is_skipped_and_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let (mut tail, mut got) = (LineTail::new(directory.path(), "file"), Collected::default());
        append(&path, b"one\n");
        append(&path, &vec![b'x'; MAX_LINE_BYTES + 10]);
        tail.poll(&mut got).unwrap();
        append(&path, &vec![b'x'; MAX_LINE_BYTES]);
        tail.poll(&mut got).unwrap();
        append(&path, b"x\ntwo\n");
        tail.poll(&mut got).unwrap();
        assert_eq!((got.0.join(" "), tail.skipped()), ("one two".to_owned(), 1));
        append(&path, b"three\n");
        tail.poll(&mut got).unwrap();
        assert_eq!((got.0.len(), got.1), (3, 0));
    }

    #[test]
    fn a_long_file_is_read_in_parts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let line = [vec![b'x'; (1 << 20) - 1], vec![b'\n']].concat();
        append(&path, &line.repeat(20));
        let mut tail = LineTail::new(directory.path(), "file").in_parts(0);
        let (mut got, mut polls) = (Collected::default(), 0);
        while tail.poll(&mut got).unwrap() {
            polls += 1;
            assert_eq!(tail.behind(), got.0.len() < 20);
            assert!((tail.share() - got.0.len() as f64 / 20.0).abs() < 0.06, "{}", tail.share());
        }
        assert_eq!((got.0.len(), polls), (20, 3));
    }

    #[test]
    fn links_that_leave_the_directory_and_pipes_are_not_opened() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "secret\n").unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(outside.path().join("secret"), directory.path().join("file")).unwrap();
        std::os::unix::fs::symlink(outside.path(), directory.path().join("folder")).unwrap();
        let (mut tail, mut got) = (LineTail::new(directory.path(), "file"), Collected::default());
        tail.poll(&mut got).unwrap();
        assert!(got.0.is_empty());
        for name in ["folder/secret", "../secret", "."] {
            assert!(open_inside(directory.path(), &directory.path().join(name)).unwrap().is_none(), "{name}");
        }
    }
}
