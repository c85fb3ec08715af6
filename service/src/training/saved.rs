//! Saved weights: a run directory for every model, in which names stand for checkpoints and exported weights.
//!
//! ```text
//! DIR/s1_train_0/                     a run directory: `rlrun export` and `rlrun serve policy` read it
//!   metrics.jsonl                     a line for each update, as of a run
//!   model.json                        base, adapter, owner, and what was saved under which name
//!   checkpoints/step_000012/          weights and optimizer: `tinker://s1:train:0/weights/NAME`
//!   sampler_weights/NAME/             an adapter in PEFT's layout, or a model: `tinker://s1:train:0/sampler_weights/NAME`
//! ```
//!
//! Invariant: a name is in `model.json` once its files are whole. Names are checked before they become parts of paths.

use std::path::{Path, PathBuf};

use model::{ModelError, atomic, files};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use super::{LoraRequest, SavedInfo, UserId};

/// File of a model.
const RECORD: &str = "model.json";
/// Most bytes of that file.
const MAX_RECORD_BYTES: u64 = 16 << 20;
/// Longest name of saved weights, bytes.
const MAX_NAME_BYTES: usize = 200;
/// Scheme of paths.
const SCHEME: &str = "tinker://";

/// What is known of a model beside its weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ModelRecord {
    pub(super) model_id: String,
    pub(super) base: String,
    pub(super) lora: Option<LoraRequest>,
    pub(super) owner: [u8; 16],
    /// Seconds since 1970.
    pub(super) created: u64,
    /// Digest of the base model under its adapter; empty without one.
    #[serde(default)]
    pub(super) base_digest: String,
    pub(super) saved: Vec<SavedRecord>,
}

/// Weights under a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedRecord {
    pub(super) name: String,
    /// Whether it has the state of the optimizer.
    pub(super) is_state: bool,
    /// The version of the model.
    pub(super) version: u64,
    /// Seconds since 1970.
    pub(super) saved: u64,
    /// When it is deleted, seconds since 1970.
    pub(super) expires: Option<u64>,
    pub(super) bytes: u64,
    /// How often the name was overwritten.
    #[serde(default)]
    pub(super) copy: u64,
}

/// A path of saved weights: `tinker://MODEL/weights/NAME` or `tinker://MODEL/sampler_weights/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedPath {
    pub(super) model_id: String,
    pub(super) is_state: bool,
    pub(super) name: String,
}

impl SavedPath {
    /// Reads a path.
    pub(super) fn parse(path: &str) -> Option<Self> {
        let mut parts = path.strip_prefix(SCHEME)?.splitn(3, '/');
        let (model_id, kind, name) = (parts.next()?, parts.next()?, parts.next()?);
        let is_state = match kind {
            "weights" => true,
            "sampler_weights" => false,
            _ => return None,
        };
        let valid = !model_id.is_empty() && check_name(name).is_ok();
        valid.then(|| Self { model_id: model_id.to_owned(), is_state, name: name.to_owned() })
    }
}

impl std::fmt::Display for SavedPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_state { "weights" } else { "sampler_weights" };
        write!(f, "{SCHEME}{}/{kind}/{}", self.model_id, self.name)
    }
}

/// Checks a name of saved weights.
///
/// # Errors
/// A name that is empty, too long, or no single part of a path.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && !name.starts_with('.')
        && name.chars().all(allowed)
    {
        true => Ok(()),
        false => Err(format!(
            "a name of saved weights has 1 to {MAX_NAME_BYTES} letters, digits and . _ -, and does not begin with a dot"
        )),
    }
}

/// The run directory of a model.
pub(super) fn run_dir(dir: &Path, model_id: &str) -> PathBuf {
    dir.join(model_id.replace(':', "_"))
}

/// The checkpoints in a run directory.
pub(super) fn checkpoints(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

impl ModelRecord {
    pub(super) fn owner(&self) -> UserId {
        UserId(self.owner)
    }

    /// Reads those of all models in `dir`. A directory without one is passed over.
    pub(super) fn read_all(dir: &Path) -> Vec<Self> {
        let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
        let read = |entry: std::io::Result<std::fs::DirEntry>| {
            let run = entry.ok()?.path();
            let bytes = files::read(&run.join(RECORD), MAX_RECORD_BYTES).ok()?;
            let record: Self = serde_json::from_slice(&bytes).ok()?;
            (run_dir(dir, &record.model_id) == run).then_some(record)
        };
        let mut records: Vec<Self> = entries.filter_map(read).collect();
        records.sort_by(|a, b| (a.created, &a.model_id).cmp(&(b.created, &b.model_id)));
        records
    }

    /// Writes it to the run directory `run`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write(&self, run: &Path) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", run.join(RECORD).display());
        std::fs::create_dir_all(run).map_err(|error| failed(&error))?;
        let text = serde_json::to_vec_pretty(self).map_err(|error| failed(&error))?;
        let write = |path: &Path| {
            std::fs::write(path, &text).map_err(|source| ModelError::Write { path: path.to_owned(), source })
        };
        atomic::file(&run.join(RECORD), write).map_err(|error| failed(&error))
    }

    /// What is saved under a name.
    pub(super) fn find(&self, is_state: bool, name: &str) -> Option<&SavedRecord> {
        self.saved.iter().find(|saved| saved.is_state == is_state && saved.name == name)
    }

    /// Where the files of saved weights are, in the run directory `run`.
    pub(super) fn files(&self, run: &Path, saved: &SavedRecord) -> PathBuf {
        match saved.is_state {
            true => trainer::checkpoint::path(&checkpoints(run), PolicyVersion(saved.version)),
            // Not a name that could be chosen.
            false if saved.copy > 0 => {
                run.join("sampler_weights").join(format!("{}~{}", saved.name, saved.copy))
            }
            false => run.join("sampler_weights").join(&saved.name),
        }
    }

    /// What is said about saved weights.
    pub(super) fn info(&self, saved: &SavedRecord) -> SavedInfo {
        let SavedRecord { name, is_state, saved, expires, bytes, .. } = saved.clone();
        let path = SavedPath { model_id: self.model_id.clone(), is_state, name };
        SavedInfo { path: path.to_string(), is_state, saved, bytes, expires }
    }

    /// Removes a name, and its files unless another name has them.
    ///
    /// # Errors
    /// If files cannot be removed.
    pub(super) fn remove(&mut self, run: &Path, is_state: bool, name: &str) -> Result<bool, String> {
        let Some(at) = self.saved.iter().position(|saved| saved.is_state == is_state && saved.name == name)
        else {
            return Ok(false);
        };
        let removed = self.saved.remove(at);
        // The name goes first: what it stood for is never half of its files.
        self.write(run)?;
        self.remove_files(run, &removed)?;
        Ok(true)
    }

    /// Removes the files of a name that is gone, unless another name has them.
    ///
    /// # Errors
    /// If they cannot be removed.
    pub(super) fn remove_files(&self, run: &Path, removed: &SavedRecord) -> Result<(), String> {
        let path = self.files(run, removed);
        if !path.exists() || self.saved.iter().any(|other| self.files(run, other) == path) {
            return Ok(());
        }
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        // Half of them are never taken for the whole.
        let mut aside = path.clone().into_os_string();
        aside.push(".deleted");
        // What an earlier attempt left.
        let _ = std::fs::remove_dir_all(&aside);
        std::fs::rename(&path, &aside).map_err(failed)?;
        std::fs::remove_dir_all(&aside).map_err(failed)
    }
}

/// Bytes of the files in `dir` and below.
pub(super) fn bytes_of(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    let of = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_of(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.filter_map(Result::ok).map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_as_they_are_written_and_lead_nowhere_else() {
        for path in ["tinker://s1:train:0/weights/st1", "tinker://s1:train:0/sampler_weights/000010"] {
            assert_eq!(SavedPath::parse(path).unwrap().to_string(), path);
        }
        for path in [
            "tinker://s1/weights/..",
            "tinker://s1/weights/a/b",
            "tinker://s1/weights/",
            "tinker:///weights/a",
            "tinker://s1/other/a",
            "s1/weights/a",
            "tinker://s1/weights/.a",
            "tinker://s1/weights/a\0",
        ] {
            assert_eq!(SavedPath::parse(path), None, "{path}");
        }
        assert!(check_name(&"a".repeat(201)).is_err());
    }

    #[test]
    fn a_record_survives_and_a_name_goes_before_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let saved = |name: &str, is_state| SavedRecord {
            name: name.to_owned(),
            is_state,
            version: 3,
            saved: 1,
            expires: None,
            bytes: 0,
            copy: 0,
        };
        let mut record = ModelRecord {
            model_id: "s1:train:0".to_owned(),
            base: "tiny".to_owned(),
            lora: None,
            owner: [7; 16],
            created: 5,
            base_digest: String::new(),
            saved: vec![saved("a", true), saved("b", true), saved("a", false)],
        };
        let run = run_dir(dir.path(), &record.model_id);
        record.write(&run).unwrap();
        assert_eq!(ModelRecord::read_all(dir.path()), [record.clone()]);
        let state = record.files(&run, &record.saved[0]);
        std::fs::create_dir_all(&state).unwrap();
        std::fs::write(state.join("numbers"), [0; 10]).unwrap();
        assert_eq!(bytes_of(&run.join("checkpoints")), 10);
        assert_eq!(record.remove(&run, true, "a"), Ok(true));
        assert!(state.exists(), "another name has the same state");
        assert_eq!(record.remove(&run, true, "b"), Ok(true));
        assert!(!state.exists());
        assert_eq!(record.remove(&run, true, "b"), Ok(false));
        assert_eq!(ModelRecord::read_all(dir.path()), [record]);
    }
}
