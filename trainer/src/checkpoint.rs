//! Checkpoints: everything that a later process needs to go on as if nothing had happened.
//!
//! ```text
//! checkpoints/step_000120/
//!   model/                  Hugging Face directory: config, tokenizer, weights as f32
//!   optimizer.safetensors   the moments of every weight
//!   trainer.json            version, updates, tokens
//! ```
//!
//! Invariant: a checkpoint appears whole or not at all, so whatever has a name can be resumed from. Random streams are
//! counted from seed and group, and groups come from the buffer's journal, so neither has a state to save.

use std::path::{Path, PathBuf};

use model::{ModelDirectory, Parameters, atomic};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use crate::TrainerError;
use crate::adamw::{AdamW, AdamWConfig};
use crate::learner::Learner;
use crate::moment_files;

/// Version of the layout on disk.
const FORMAT: u32 = 1;

/// The numbers of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Layout on disk.
    pub format: u32,
    /// Training steps completed.
    pub version: PolicyVersion,
    /// Updates of the optimizer.
    pub updates: u64,
    /// Tokens trained on.
    pub trained_tokens: u64,
    /// Wall time of the run so far, seconds.
    pub time_s: f64,
}

/// A checkpoint that was read.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its model directory, without weights.
    pub directory: ModelDirectory,
    /// Its weights.
    pub parameters: Parameters,
    /// Its optimizer.
    pub optimizer: AdamW,
    /// Its numbers.
    pub state: TrainerState,
}

impl TrainerState {
    /// The state after `version` steps.
    #[must_use]
    pub fn new(version: PolicyVersion, updates: u64, trained_tokens: u64, time_s: f64) -> Self {
        Self { format: FORMAT, version, updates, trained_tokens, time_s }
    }
}

/// Directory of the checkpoint after `version` steps.
#[must_use]
pub fn path(checkpoints: &Path, version: PolicyVersion) -> PathBuf {
    checkpoints.join(format!("step_{:06}", version.0))
}

/// Versions that have a checkpoint, ascending.
#[must_use]
pub fn list(checkpoints: &Path) -> Vec<PolicyVersion> {
    let Ok(entries) = std::fs::read_dir(checkpoints) else { return Vec::new() };
    let version = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        name.to_str()?.strip_prefix("step_")?.parse().ok().map(PolicyVersion)
    };
    let mut versions: Vec<_> = entries.filter_map(version).collect();
    versions.sort_unstable();
    versions
}

/// Writes the checkpoint of `state` if it is not there yet, then removes all but the `keep_last` newest.
///
/// # Errors
/// If something cannot be written.
pub fn save(
    checkpoints: &Path,
    directory: &ModelDirectory,
    learner: &Learner,
    state: &TrainerState,
    keep_last: usize,
) -> Result<PathBuf, TrainerError> {
    let target = path(checkpoints, state.version);
    if target.exists() {
        // A run goes on from its newest checkpoint, so this is the same state; to write it anew would mean a moment
        // without it, in which a crash loses what the buffer has already forgotten.
        return Ok(target);
    }
    atomic::directory(&target, |dir| {
        directory.export(&dir.join("model"), learner.parameters())?;
        let write_error = |path: PathBuf| move |source| model::ModelError::Write { path, source };
        let optimizer = dir.join("optimizer.safetensors");
        moment_files::write(&optimizer, learner.parameters().layout(), learner.optimizer())
            .map_err(write_error(optimizer.clone()))?;
        let numbers = dir.join("trainer.json");
        let json = serde_json::to_vec_pretty(state).unwrap_or_default();
        std::fs::write(&numbers, json).map_err(write_error(numbers.clone()))
    })?;
    let versions = list(checkpoints);
    for old in &versions[..versions.len().saturating_sub(keep_last.max(1))] {
        if *old != state.version {
            remove(&path(checkpoints, *old))?;
        }
    }
    Ok(target)
}

/// Reads the checkpoint in `dir`.
///
/// # Errors
/// If a file is missing or broken, the layout is of a newer rlrun, or the moments are of another optimizer than `adamw`.
pub fn load(dir: &Path, adamw: AdamWConfig) -> Result<Checkpoint, TrainerError> {
    let directory = ModelDirectory::open(&dir.join("model"))?;
    let parameters = directory.load_parameters()?;
    let numbers = dir.join("trainer.json");
    let broken = |path: &Path, reason: String| TrainerError::Checkpoint { path: path.to_owned(), reason };
    let json = std::fs::read(&numbers).map_err(|e| broken(&numbers, format!("cannot be read: {e}")))?;
    let state: TrainerState =
        serde_json::from_slice(&json).map_err(|e| broken(&numbers, format!("is not valid: {e}")))?;
    if state.format != FORMAT {
        let reason =
            format!("has format {}, this rlrun reads {FORMAT}; use the rlrun that wrote it", state.format);
        return Err(broken(&numbers, reason));
    }
    let file = dir.join("optimizer.safetensors");
    let moments = moment_files::read(&file, parameters.layout(), adamw.kind)?;
    let optimizer = AdamW::resume(adamw, state.updates, moments);
    Ok(Checkpoint { directory, parameters, optimizer, state })
}

fn remove(dir: &Path) -> Result<(), TrainerError> {
    std::fs::remove_dir_all(dir).map_err(|error| TrainerError::Checkpoint {
        path: dir.to_owned(),
        reason: format!("cannot be removed: {error}; check the permissions"),
    })
}
