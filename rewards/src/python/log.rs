//! What user code prints: kept in a file of bounded size, its last lines at hand for messages.
//!
//! Invariant: a printing process never waits for longer than a write takes, and its flood costs disk up to twice
//! [`MAX_BYTES`] and no more: a full log becomes `.old` and replaces the one before.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

/// Size at which a log is put aside.
const MAX_BYTES: u64 = 8 << 20;
/// Bytes of the last output of a process that are remembered.
const TAIL_BYTES: usize = 2 << 10;
/// How long the last output of a process that has ended is waited for.
const OUTPUT_DEADLINE: Duration = Duration::from_secs(2);
/// Lines of it that a message shows.
const TAIL_LINES: usize = 8;

/// The log file of a reward.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: Mutex<(File, u64)>,
}

impl Log {
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
        let mut held = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, length) = &mut *held;
        if *length + bytes.len() as u64 > MAX_BYTES
            && std::fs::rename(&self.path, self.path.with_extension("log.old")).is_ok()
            && let Ok(fresh) = File::create(&self.path)
        {
            *held = (fresh, 0);
            let (file, length) = &mut *held;
            *length = file.write(bytes).unwrap_or(0) as u64;
        } else if *length <= MAX_BYTES {
            *length += file.write(bytes).unwrap_or(0) as u64;
        }
    }
}

/// The last output of one process.
#[derive(Clone, Debug, Default)]
pub(super) struct Tail {
    kept: Arc<Mutex<VecDeque<u8>>>,
    /// Whether nobody is left to write, and all is kept.
    ended: watch::Sender<bool>,
}

impl Tail {
    /// Copies what arrives to the log, on a thread that ends when nobody is left to write.
    pub(super) fn follow(&self, mut output: PipeReader, log: Arc<Log>) -> io::Result<()> {
        let tail = self.clone();
        let thread = std::thread::Builder::new().name("reward output".to_owned());
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
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]);
        let surplus = kept.len().saturating_sub(TAIL_BYTES);
        kept.drain(..surplus);
    }

    /// [`Self::told`] of a process that has ended: when all of its output is there, or what it has started goes on writing.
    pub(super) async fn told_at_end(&self) -> String {
        let mut ended = self.ended.subscribe();
        let _ = tokio::time::timeout(OUTPUT_DEADLINE, ended.wait_for(|ended| *ended)).await;
        self.told()
    }

    /// The last lines, ready to stand at the end of a message; empty if nothing was printed.
    pub(super) fn told(&self) -> String {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&kept.iter().copied().collect::<Vec<_>>()).into_owned();
        // Our own frames of a Python stack say nothing to the author of the function.
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
    fn a_flood_fills_two_files_at_most_and_the_tail_is_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/reward_mine.log");
        let log = Arc::new(Log::open(&path).unwrap());
        let (output, mut input) = io::pipe().unwrap();
        let tail = Tail::default();
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
        assert!(tail.told().ends_with("the end"), "{}", tail.told());
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 2);
    }
}
