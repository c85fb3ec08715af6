//! Integrity of checkpoints: comparison with the manifest, and renaming of those that a run must not resume from.
//!
//! Invariant: nothing is deleted here. A checkpoint that a run skips keeps its files under a name that no run loads.

use std::path::{Path, PathBuf};

use model::{ModelError, manifest};
use trajectory::PolicyVersion;

use super::{OLDEST_FORMAT, base_path, list, numbers, path};
use crate::TrainerError;

/// How the integrity of a checkpoint was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointIntegrity {
    /// Every file has the digest of the manifest.
    Digested,
    /// The checkpoint has format 1, without digests.
    Undigested,
}

/// Compares the files of the checkpoint in `dir`, and of the frozen model next to it, with their manifests.
///
/// # Errors
/// [`TrainerError::Damaged`] if a file of the checkpoint is missing or changed: another checkpoint may be intact. Other
/// errors apply to all checkpoints.
pub fn check(dir: &Path) -> Result<CheckpointIntegrity, TrainerError> {
    let damaged = |reason| TrainerError::Damaged { checkpoint: dir.to_owned(), reason };
    let digested = manifest::check(dir).map_err(|error| damaged(error.to_string()))?;
    let state = numbers(dir)?;
    if let Some(checkpoints) = dir.parent() {
        manifest::check(&base_path(checkpoints))?;
    }
    match (digested, state.format) {
        (true, _) => Ok(CheckpointIntegrity::Digested),
        (false, OLDEST_FORMAT) => Ok(CheckpointIntegrity::Undigested),
        (false, format) => Err(damaged(format!(
            "{} is missing, and format {format} has one; restore it from a copy, or use an earlier checkpoint",
            manifest::MANIFEST
        ))),
    }
}

/// Renames the checkpoints after `version`, newest first, so that no run resumes from them: appends `.aside` to the
/// name, and a number if that exists. Returns their versions and new paths.
///
/// # Errors
/// If a directory cannot be renamed.
pub fn set_aside_after(
    checkpoints: &Path,
    version: Option<PolicyVersion>,
) -> Result<Vec<(PolicyVersion, PathBuf)>, TrainerError> {
    let later = list(checkpoints).into_iter().rev().filter(|found| version.is_none_or(|last| *found > last));
    later
        .map(|found| {
            let from = path(checkpoints, found);
            let name = |number: usize| {
                let mut name = from.as_os_str().to_owned();
                name.push(if number == 0 { ".aside".to_owned() } else { format!(".aside{number}") });
                PathBuf::from(name)
            };
            let to = (0..).map(name).find(|to| !to.exists()).unwrap_or_else(|| name(0));
            let renamed = std::fs::rename(&from, &to);
            renamed.map_err(|source| ModelError::Write { path: to.clone(), source })?;
            Ok((found, to))
        })
        .collect()
}
