//! Output of user code: written to a file of limited size; the last lines stay in memory for error messages.
//!
//! Invariant: a process that prints waits for no longer than a write takes, and all of its output takes at most twice
//! [`MAX_BYTES`] on disk: a full log is renamed to `.old` and replaces the older one.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

/// Size at which a log is renamed.
const MAX_BYTES: u64 = 8 << 20;
/// Bytes of the last output of a process that are remembered.
const TAIL_BYTES: usize = 2 << 10;
/// Longest wait for the last output of a process that has ended.
const OUTPUT_DEADLINE: Duration = Duration::from_secs(2);
/// Lines of it that a message shows.
const TAIL_LINES: usize = 8;

/// The log file of a pool.
#[derive(Debug)]
pub(super) struct OutputLog {
    path: PathBuf,
    file: Mutex<(File, u64)>,
}

impl OutputLog {
    /// Appends to the file at `path`.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let file = File::options().create(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file: Mutex::new((file, length)) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what fits. A full disk loses output, not a run.
    pub(super) fn append(&self, bytes: &[u8]) {
        let mut current = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, length) = &mut *current;
        if *length + bytes.len() as u64 > MAX_BYTES
            && std::fs::rename(&self.path, self.path.with_extension("log.old")).is_ok()
            && let Ok(fresh) = File::create(&self.path)
        {
            *current = (fresh, 0);
            let (file, length) = &mut *current;
            *length = file.write(bytes).unwrap_or(0) as u64;
        } else if *length <= MAX_BYTES {
            *length += file.write(bytes).unwrap_or(0) as u64;
        }
    }
}

/// The last output of one process.
#[derive(Clone, Debug, Default)]
pub(super) struct OutputTail {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    /// True when all writers have closed the pipe and all of it is read.
    ended: watch::Sender<bool>,
}

impl OutputTail {
    /// Copies the output to the log, on a thread that ends when all writers have closed the pipe.
    pub(super) fn follow(&self, mut output: PipeReader, log: Arc<OutputLog>) -> io::Result<()> {
        let tail = self.clone();
        let thread = std::thread::Builder::new().name("python output".to_owned());
        let copy = move || {
            let mut bytes = vec![0; 64 << 10];
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                log.append(&bytes[..read]);
                tail.push(&bytes[..read]);
            }
            tail.ended.send_replace(true);
        };
        thread.spawn(copy).map(drop)
    }

    fn push(&self, bytes: &[u8]) {
        let mut last = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        last.extend(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]);
        let surplus = last.len().saturating_sub(TAIL_BYTES);
        last.drain(..surplus);
    }

    /// [`Self::text`] of a process that has ended: waits for all of its output, unless a process that it started still writes.
    pub(super) async fn text_at_end(&self) -> String {
        let mut ended = self.ended.subscribe();
        let _ = tokio::time::timeout(OUTPUT_DEADLINE, ended.wait_for(|ended| *ended)).await;
        self.text()
    }

    /// The last lines as the end of an error message; empty if nothing was printed.
    pub(super) fn text(&self) -> String {
        let last = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&last.iter().copied().collect::<Vec<_>>()).into_owned();
        // The stack frames of this crate are of no use to the author of the code.
        let ours =
            |line: &str| ["File \"<rlrun>\"", "File \"<string>\""].iter().any(|file| line.contains(file));
        let lines: Vec<_> = text.trim_end().lines().filter(|line| !ours(line)).collect();
        if lines.is_empty() {
            return String::new();
        }
        format!("; its last output:\n{}", lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_bounded_to_two_files_and_the_tail_is_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/mine.log");
        let log = Arc::new(OutputLog::open(&path).unwrap());
        let (output, mut input) = io::pipe().unwrap();
        let tail = OutputTail::default();
        tail.follow(output, Arc::clone(&log)).unwrap();
        let line = [b'x'; 1023];
        for _ in 0..3 * MAX_BYTES / 1024 {
            input.write_all(&line).unwrap();
            input.write_all(b"\n").unwrap();
        }
        input.write_all(b"the end\n").unwrap();
        drop(input);
        while Arc::strong_count(&log) > 1 {
            std::thread::yield_now();
        }
        let size = |path: &Path| std::fs::metadata(path).unwrap().len();
        assert!(size(&path) <= MAX_BYTES && size(&path.with_extension("log.old")) <= MAX_BYTES);
        assert!(tail.text().ends_with("the end"), "{}", tail.text());
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 2);
    }
}
