//! An append-only file of JSON objects, one per line.
//!
//! Invariant: after a crash at any byte, reopening leaves only whole lines. Lines are removed only for steps that a resume
//! repeats, by an atomic rewrite. The module reads only the field `step` of an object.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

/// Why a file of JSON lines cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JsonLinesError {
    /// The file system refused.
    #[error("cannot {verb} `{path}`: {source}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A whole line is not a JSON object, which no crash of ours leaves behind.
    #[error("`{path}` line {line} is not a JSON object: `{text}`; repair or remove the line")]
    Broken {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// Its first characters.
        text: String,
    },
    /// A line does not say what lines of its file say.
    #[error("`{path}` line {line}: {reason}; repair or remove the line")]
    Unexpected {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The value cannot be written as JSON.
    #[error("cannot write a line of `{path}`: {source}")]
    Encode {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

/// A file of JSON objects open for appending.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Opens or makes the file; cuts off a torn last line and drops lines whose `step` is above `last_step`.
    ///
    /// # Errors
    /// The file cannot be read or written, or holds a whole line that is not a JSON object.
    pub fn open(path: &Path, last_step: Option<u64>) -> Result<Self, JsonLinesError> {
        let io = |verb, source| JsonLinesError::Io { verb, path: path.to_path_buf(), source };
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(io("read", error)),
        };
        let kept = keep(&bytes, last_step, path)?;
        if kept.len() != bytes.len() {
            replace(path, &kept).map_err(|error| io("rewrite", error))?;
        }
        let file =
            OpenOptions::new().append(true).create(true).open(path).map_err(|error| io("open", error))?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// Appends one object in a single write, so that it is torn only by a crash, never by a reader.
    ///
    /// # Errors
    /// The value cannot be encoded or the file cannot be written.
    pub fn append(&mut self, object: &impl Serialize) -> Result<(), JsonLinesError> {
        let encoded = serde_json::to_vec(object);
        let mut line =
            encoded.map_err(|source| JsonLinesError::Encode { path: self.path.clone(), source })?;
        line.push(b'\n');
        let written = self.file.write_all(&line);
        written.map_err(|source| JsonLinesError::Io { verb: "append to", path: self.path.clone(), source })
    }

    /// Waits until everything appended is on the disk.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn sync(&self) -> Result<(), JsonLinesError> {
        let synced = self.file.sync_data();
        synced.map_err(|source| JsonLinesError::Io { verb: "sync", path: self.path.clone(), source })
    }
}

/// Writes a file so that a reader, or a crash, sees either the old content or the new.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

fn keep(bytes: &[u8], last_step: Option<u64>, path: &Path) -> Result<Vec<u8>, JsonLinesError> {
    let mut kept = Vec::with_capacity(bytes.len());
    for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        if line.last() != Some(&b'\n') {
            break;
        }
        let Ok(Value::Object(object)) = serde_json::from_slice(line) else {
            let text = String::from_utf8_lossy(line).trim_end().chars().take(80).collect();
            return Err(JsonLinesError::Broken { path: path.to_path_buf(), line: index + 1, text });
        };
        let step = object.get("step").and_then(Value::as_f64);
        let later = matches!((step, last_step), (Some(step), Some(last)) if step > last as f64);
        if !later {
            kept.extend_from_slice(line);
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_of_later_steps_are_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, None).unwrap();
        for object in [json!({"step": 1}), json!({"note": "x"}), json!({"step": 2.0}), json!({"step": 3})] {
            lines.append(&object).unwrap();
        }
        lines.sync().unwrap();
        let mut lines = JsonLines::open(&path, Some(2)).unwrap();
        lines.append(&json!({"step": 3, "again": true})).unwrap();
        let expected = "{\"step\":1}\n{\"note\":\"x\"}\n{\"step\":2.0}\n{\"step\":3,\"again\":true}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), expected);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_broken_line_in_the_middle_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        fs::write(&path, "{}\n17\n{}\n").unwrap();
        let error = JsonLines::open(&path, None).unwrap_err().to_string();
        assert!(error.ends_with("line 2 is not a JSON object: `17`; repair or remove the line"), "{error}");
    }

    proptest! {
        #[test]
        fn a_crash_at_any_byte_leaves_whole_lines(cut in 0usize..40) {
            let whole = "{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"x\":1}\n";
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("metrics.jsonl");
            fs::write(&path, &whole[..cut]).unwrap();
            JsonLines::open(&path, None).unwrap().append(&json!({"step": 9})).unwrap();
            let whole_lines = whole[..cut].rfind('\n').map_or(0, |at| at + 1);
            let expected = format!("{}{{\"step\":9}}\n", &whole[..whole_lines]);
            prop_assert_eq!(fs::read_to_string(&path).unwrap(), expected);
        }
    }
}
