//! Checkpoints: everything that a later process needs to go on as if nothing had happened.
//!
//! ```text
//! checkpoints/step_000120/
//!   model/                  Hugging Face directory: config, tokenizer, weights as f32
//!   optimizer.safetensors   m.<name> and v.<name>, the moments of every weight
//!   trainer.json            version, updates, tokens
//! ```
//!
//! Invariant: a checkpoint appears whole or not at all, so whatever has a name can be resumed from. Random streams are
//! counted from seed and group, and groups come from the buffer's journal, so neither has a state to save.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use model::{Layout, ModelDirectory, Parameters, atomic};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use crate::TrainerError;
use crate::adamw::{AdamW, AdamWConfig};
use crate::learner::Learner;

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
        std::fs::write(&optimizer, moments_to_bytes(learner)).map_err(write_error(optimizer.clone()))?;
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
/// If a file is missing or broken, or the layout is of a newer rlrun.
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
    let bytes = std::fs::read(&file).map_err(|e| broken(&file, format!("cannot be read: {e}")))?;
    let moments = moments_from_bytes(&bytes, parameters.layout())
        .map_err(|reason| broken(&file, format!("{reason}; resume from an earlier checkpoint")))?;
    let optimizer = AdamW::resume(adamw, state.updates, moments);
    Ok(Checkpoint { directory, parameters, optimizer, state })
}

fn remove(dir: &Path) -> Result<(), TrainerError> {
    std::fs::remove_dir_all(dir).map_err(|error| TrainerError::Checkpoint {
        path: dir.to_owned(),
        reason: format!("cannot be removed: {error}; check the permissions"),
    })
}

fn moments_to_bytes(learner: &Learner) -> Vec<u8> {
    let (first, second) = learner.optimizer().moments();
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let mut data = Vec::new();
    for spec in learner.parameters().layout().specs() {
        for (prefix, moments) in [("m", first), ("v", second)] {
            data.push((format!("{prefix}.{}", spec.name), spec.shape.clone(), bytes(&moments[spec.range()])));
        }
    }
    let views = data.iter().filter_map(|(name, shape, bytes)| {
        Some((name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).ok()?))
    });
    safetensors::serialize(views, None).unwrap_or_default()
}

fn moments_from_bytes(bytes: &[u8], layout: &Layout) -> Result<(Vec<f32>, Vec<f32>), String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| format!("is not a safetensors file: {e}"))?;
    let by_name: HashMap<String, TensorView<'_>> = tensors.tensors().into_iter().collect();
    let mut moments = [vec![0.0; layout.len()], vec![0.0; layout.len()]];
    for spec in layout.specs() {
        for (prefix, values) in ["m", "v"].into_iter().zip(&mut moments) {
            let name = format!("{prefix}.{}", spec.name);
            let view = by_name.get(&name).ok_or_else(|| format!("has no tensor {name}"))?;
            if view.shape() != spec.shape || view.dtype() != Dtype::F32 {
                return Err(format!(
                    "{name} is {:?} {:?}, expected F32 {:?}",
                    view.dtype(),
                    view.shape(),
                    spec.shape
                ));
            }
            for (value, bytes) in values[spec.range()].iter_mut().zip(view.data().chunks_exact(4)) {
                *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
    }
    let [first, second] = moments;
    Ok((first, second))
}
