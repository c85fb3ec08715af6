//! The directory of a run: all files needed to inspect, resume and repeat it.
//!
//! Invariant: at most one process locks a run directory, and a new run never starts in one that already has files. Files
//! are authoritative; this module does not interpret checkpoints or samples.
//!
//! ```text
//! run.json recipe.toml resolved.toml metrics.jsonl events.jsonl curation.jsonl timeline.jsonl schedule.bin status.json
//! archive.json address.json credentials/ samples/ logs/ checkpoints/ lock
//! ```

mod lines;
mod lock;

use std::io;
use std::path::{Path, PathBuf};

pub(crate) use lines::replace;
pub use lines::{JsonLines, JsonLinesError};
pub(crate) use lock::{Lock, is_in_use};

/// Why a run directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunDirError {
    /// A new run was to start where one has been.
    #[error(
        "run directory `{path}` is not empty; continue it with `rlrun resume {path}`, or start another with `--name NAME`"
    )]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// A new run was to start among files that are no run.
    #[error(
        "directory `{path}` is not empty and holds no run; remove it, or start elsewhere with `--name NAME`"
    )]
    Occupied {
        /// The directory.
        path: PathBuf,
    },
    /// There is nothing to resume.
    #[error("`{path}` is no run directory: it has no `resolved.toml`; start a run with `rlrun RECIPE`")]
    NotARun {
        /// The directory.
        path: PathBuf,
    },
    /// Another process holds it.
    #[error(
        "run directory `{path}` is in use by process {pid}; stop that process, or start another run with `--name NAME`"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The description that the owner of the lock wrote.
        pid: String,
    },
    /// It was written by another rlrun in a way that this one does not know.
    #[error("run directory `{path}` {reason}; use the rlrun that wrote it")]
    Format {
        /// The directory.
        path: PathBuf,
        /// What is not known.
        reason: String,
    },
    /// The file system refused.
    #[error("cannot {verb} `{path}`: {source}; choose a writable place with `--run-dir DIR`")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A metrics or events file cannot be used.
    #[error(transparent)]
    Lines(#[from] JsonLinesError),
}

/// Version of the layout: 2 has `run.json` and checkpoints with manifests, 1 had neither.
const FORMAT: u64 = 2;
/// File of the address of a run, while it is served.
pub(crate) const ADDRESS_FILE: &str = "address.json";
/// Its directories.
const DIRECTORIES: [&str; 3] = ["samples", "logs", "checkpoints"];
/// File of the layout's version.
const FORMAT_FILE: &str = "run.json";
/// Longest file of that kind, bytes.
const MAX_FORMAT_BYTES: u64 = 1 << 16;

/// A run directory that this process has locked; dropping it releases the lock.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: Lock,
}

/// A directory without a run that this process has locked; dropping it releases the lock.
#[cfg(feature = "object-store")]
#[derive(Debug)]
pub(crate) struct ReservedDirectory {
    _lock: Lock,
}

/// The first files of a new run directory.
#[derive(Clone, Copy, Debug)]
pub struct RecipeTexts<'a> {
    /// The recipe file as the user gave it.
    pub given: &'a str,
    /// The recipe with every value spelled out.
    pub resolved: &'a str,
}

/// `outputs/<name>`, or `run_dir` if the user named one.
#[must_use]
pub fn place(run_dir: Option<&Path>, name: &str) -> PathBuf {
    run_dir.map_or_else(|| Path::new("outputs").join(name), Path::to_path_buf)
}

impl RunDir {
    /// Makes a new run directory and locks it.
    ///
    /// # Errors
    /// The directory has files in it, another process has locked it, or it cannot be written.
    pub fn create(path: &Path, texts: RecipeTexts<'_>) -> Result<Self, RunDirError> {
        std::fs::create_dir_all(path).map_err(|source| failed("create", path, source))?;
        // A directory with files but no lock file is no run directory; no lock file is written into it.
        if has_files(path)? && !path.join(lock::NAME).exists() {
            return Err(taken(path));
        }
        let lock = Lock::take(path)?;
        if has_files(path)? && !is_unfinished(path)? {
            return Err(taken(path));
        }
        for directory in DIRECTORIES {
            let directory = path.join(directory);
            std::fs::create_dir_all(&directory).map_err(|source| failed("create", &directory, source))?;
        }
        // `resolved.toml` makes it a run, so it comes last: a crash before leaves nothing that looks resumable.
        write_format(path)?;
        for (name, text) in [("recipe.toml", texts.given), ("resolved.toml", texts.resolved)] {
            write_atomic(&path.join(name), text.as_bytes())?;
        }
        Ok(Self { path: path.to_path_buf(), _lock: lock })
    }

    /// Locks a directory that a run is to be copied into: an empty one, or one in which such a copy was begun, as the file
    /// `mark` in it shows.
    ///
    /// # Errors
    /// It has a run or other files in it, another process has locked it, or it cannot be written.
    #[cfg(feature = "object-store")]
    pub(crate) fn reserve(path: &Path, mark: &str) -> Result<ReservedDirectory, RunDirError> {
        std::fs::create_dir_all(path).map_err(|source| failed("create", path, source))?;
        if path.join("resolved.toml").exists() || (has_files(path)? && !path.join(mark).exists()) {
            return Err(taken(path));
        }
        Ok(ReservedDirectory { _lock: Lock::take(path)? })
    }

    /// Locks an existing run directory to resume its run. A directory of format 1, which had no `run.json`, becomes one of
    /// the current format: its files are read as they are, and files written from now on have digests.
    ///
    /// # Errors
    /// It is no run directory, has a newer format, another process has locked it, or it cannot be written.
    pub fn open(path: &Path) -> Result<Self, RunDirError> {
        if !path.join("resolved.toml").is_file() {
            return Err(RunDirError::NotARun { path: path.to_path_buf() });
        }
        let format = read_format(path)?;
        let lock = Lock::take(path)?;
        // Workers would look for the run where it was before.
        let _ = std::fs::remove_file(path.join(ADDRESS_FILE));
        if format < FORMAT {
            write_format(path)?;
        }
        Ok(Self { path: path.to_path_buf(), _lock: lock })
    }

    /// Whether there is anything to lose: a metric or a checkpoint.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        let some = |path: PathBuf| std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
        some(self.checkpoints())
            || std::fs::metadata(self.path.join("metrics.jsonl")).is_ok_and(|m| m.len() > 0)
    }

    /// Removes the directory with everything in it.
    ///
    /// # Errors
    /// The file system refused.
    pub fn remove(self) -> Result<(), RunDirError> {
        std::fs::remove_dir_all(&self.path).map_err(|source| failed("remove", &self.path, source))
    }

    /// The directory itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The recipe that `rlrun resume` continues with.
    #[must_use]
    pub fn resolved_recipe(&self) -> PathBuf {
        self.path.join("resolved.toml")
    }

    /// Directory of checkpoints.
    #[must_use]
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Directory of log files.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }

    /// File of the groups sampled for a step.
    #[must_use]
    pub fn samples(&self, step: u64) -> PathBuf {
        self.path.join("samples").join(format!("step_{step:06}.jsonl"))
    }

    /// File of the same groups token by token.
    #[must_use]
    pub fn tokens(&self, step: u64) -> PathBuf {
        self.path.join("samples").join(format!("step_{step:06}_tokens.jsonl"))
    }

    /// Opens `metrics.jsonl` to append, without the lines of steps after `last_step`; without any if no step is done.
    ///
    /// # Errors
    /// The file cannot be read or written, or holds a whole line that is not a JSON object.
    pub fn metrics(&self, last_step: u64) -> Result<JsonLines, RunDirError> {
        let path = self.path.join("metrics.jsonl");
        if last_step == 0 && path.exists() {
            std::fs::remove_file(&path).map_err(|source| failed("remove", &path, source))?;
        }
        Ok(JsonLines::open(&path, Some(last_step))?)
    }

    /// Opens `events.jsonl` to append. Events are history: none is ever taken back.
    ///
    /// # Errors
    /// As [`metrics`](Self::metrics).
    pub fn events(&self) -> Result<JsonLines, RunDirError> {
        Ok(JsonLines::open(&self.path.join("events.jsonl"), None)?)
    }

    /// How often the run has been resumed.
    ///
    /// # Errors
    /// As [`events`](Self::events).
    pub fn resumes(&self) -> Result<usize, RunDirError> {
        Ok(self.event_names()?.iter().filter(|name| *name == "resume").count())
    }

    /// Whether training has begun since the last resume.
    ///
    /// # Errors
    /// As [`events`](Self::events).
    pub fn has_begun_since_resume(&self) -> Result<bool, RunDirError> {
        let names = self.event_names()?;
        Ok(names
            .rsplit(|name| name == "resume")
            .next()
            .unwrap_or_default()
            .iter()
            .any(|name| name == "start"))
    }

    /// The names of all events, in order.
    fn event_names(&self) -> Result<Vec<String>, RunDirError> {
        drop(self.events()?);
        let path = self.path.join("events.jsonl");
        let text = std::fs::read_to_string(&path).map_err(|source| failed("read", &path, source))?;
        let name = |line: &str| {
            let event: Option<serde_json::Value> = serde_json::from_str(line).ok();
            event.and_then(|event| Some(event["event"].as_str()?.to_owned()))
        };
        Ok(text.lines().filter_map(name).collect())
    }

    /// Replaces `resolved.toml` after a resume with other values.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn replace_resolved(&self, resolved: &str) -> Result<(), RunDirError> {
        write_atomic(&self.resolved_recipe(), resolved.as_bytes())
    }
}

fn write_format(path: &Path) -> Result<(), RunDirError> {
    let format = serde_json::json!({ "format": FORMAT, "rlrun": env!("CARGO_PKG_VERSION") });
    write_atomic(&path.join(FORMAT_FILE), format!("{format:#}\n").as_bytes())
}

fn read_format(path: &Path) -> Result<u64, RunDirError> {
    let file = path.join(FORMAT_FILE);
    let text = match model::files::read(&file, MAX_FORMAT_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(1),
        Err(error) => return Err(failed("read", &file, error)),
    };
    let value: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
    let format = value.as_ref().and_then(|value| value["format"].as_u64());
    let refused = |reason| RunDirError::Format { path: path.to_path_buf(), reason };
    match format {
        Some(format @ 1..=FORMAT) => Ok(format),
        Some(format) => Err(refused(format!("has format {format}, and this rlrun reads 1 to {FORMAT}"))),
        None => Err(refused(format!("has a `{FORMAT_FILE}` without a format"))),
    }
}

/// Whether there is anything beside the lock.
fn has_files(path: &Path) -> Result<bool, RunDirError> {
    let mut entries = std::fs::read_dir(path).map_err(|source| failed("read", path, source))?;
    Ok(entries.any(|entry| entry.is_ok_and(|entry| entry.file_name() != lock::NAME)))
}

/// Whether a process has died while it made this run directory: there is no more than what comes before `resolved.toml`.
fn is_unfinished(path: &Path) -> Result<bool, RunDirError> {
    let entries = std::fs::read_dir(path).map_err(|source| failed("read", path, source))?;
    Ok(entries.flatten().all(|entry| {
        let name = entry.file_name();
        let empty = || std::fs::read_dir(entry.path()).is_ok_and(|mut entries| entries.next().is_none());
        let file = |known: &str| name.to_str().is_some_and(|name| name.strip_prefix(known).is_some());
        DIRECTORIES.iter().any(|known| name == *known && empty())
            || name == lock::NAME
            || [FORMAT_FILE, "recipe.toml", "resolved.toml."].into_iter().any(file)
    }))
}

fn taken(path: &Path) -> RunDirError {
    let path = path.to_path_buf();
    if path.join("resolved.toml").exists() {
        RunDirError::NotEmpty { path }
    } else {
        RunDirError::Occupied { path }
    }
}

fn failed(verb: &'static str, path: &Path, source: io::Error) -> RunDirError {
    RunDirError::Io { verb, path: path.to_path_buf(), source }
}

/// Writes a file that is there whole or not at all.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), RunDirError> {
    lines::replace(path, bytes).map_err(|source| failed("write", path, source))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TEXTS: RecipeTexts<'static> = RecipeTexts { given: "seed = 1 # mine\n", resolved: "seed = 1\n" };

    #[test]
    fn a_new_run_directory_holds_the_recipe_and_its_folders() {
        let directory = tempfile::tempdir().unwrap();
        let path = place(Some(&directory.path().join("a/b")), "ignored");
        let run = RunDir::create(&path, TEXTS).unwrap();
        assert_eq!(fs::read_to_string(path.join("recipe.toml")).unwrap(), TEXTS.given);
        assert_eq!(fs::read_to_string(run.resolved_recipe()).unwrap(), TEXTS.resolved);
        assert!(
            run.logs().is_dir() && run.checkpoints().is_dir() && run.samples(3).parent().unwrap().is_dir()
        );
        assert_eq!(place(None, "x"), Path::new("outputs/x"));
    }

    #[test]
    fn a_run_never_starts_where_one_has_been() {
        let directory = tempfile::tempdir().unwrap();
        drop(RunDir::create(directory.path(), TEXTS).unwrap());
        let error = RunDir::create(directory.path(), TEXTS).unwrap_err().to_string();
        let path = directory.path().display();
        let expected = format!(
            "run directory `{path}` is not empty; continue it with `rlrun resume {path}`, or start another with `--name NAME`"
        );
        assert_eq!(error, expected);
        RunDir::open(directory.path()).unwrap().replace_resolved("seed = 2\n").unwrap();
        assert_eq!(fs::read_to_string(directory.path().join("resolved.toml")).unwrap(), "seed = 2\n");
    }

    #[test]
    fn files_that_are_no_run_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("thesis.tex"), "").unwrap();
        let error = RunDir::create(directory.path(), TEXTS).unwrap_err().to_string();
        assert!(error.contains("is not empty and holds no run"), "{error}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn two_processes_never_hold_one_directory() {
        let directory = tempfile::tempdir().unwrap();
        let first = RunDir::create(directory.path(), TEXTS).unwrap();
        // Locks belong to open files, so a second open in this process stands for another process.
        assert!(matches!(RunDir::create(directory.path(), TEXTS), Err(RunDirError::InUse { .. })));
        let error = RunDir::open(directory.path()).unwrap_err();
        let own = std::process::id().to_string();
        assert!(matches!(&error, RunDirError::InUse { pid, .. } if *pid == own), "{error}");
        drop(first);
        assert!(RunDir::open(directory.path()).is_ok());
    }

    #[test]
    fn the_lock_of_a_dead_process_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        drop(RunDir::create(directory.path(), TEXTS).unwrap());
        fs::write(directory.path().join(lock::NAME), "1\n").unwrap();
        assert!(RunDir::open(directory.path()).is_ok());
    }

    #[test]
    fn other_directories_are_not_resumed() {
        let directory = tempfile::tempdir().unwrap();
        let error = RunDir::open(directory.path()).unwrap_err().to_string();
        assert!(error.ends_with("it has no `resolved.toml`; start a run with `rlrun RECIPE`"), "{error}");
    }

    #[test]
    fn a_directory_of_format_1_becomes_one_of_today_and_a_newer_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        drop(RunDir::create(directory.path(), TEXTS).unwrap());
        let file = directory.path().join(FORMAT_FILE);
        let written = fs::read_to_string(&file).unwrap();
        assert!(written.contains("\"format\": 2"), "{written}");
        fs::remove_file(&file).unwrap();
        drop(RunDir::open(directory.path()).unwrap());
        assert_eq!(fs::read_to_string(&file).unwrap(), written);
        for (content, reason) in
            [("{\"format\": 3}", "has format 3, and this rlrun reads 1 to 2"), ("{}", "without a format")]
        {
            fs::write(&file, content).unwrap();
            let error = RunDir::open(directory.path()).unwrap_err().to_string();
            assert!(error.contains(reason) && error.ends_with("use the rlrun that wrote it"), "{error}");
        }
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let error = RunDir::create(&file.join("run"), TEXTS).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot create `{}", file.join("run").display())), "{error}");
        assert!(error.ends_with("choose a writable place with `--run-dir DIR`"), "{error}");
    }
}
