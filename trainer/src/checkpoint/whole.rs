//! Whether a checkpoint can be resumed from, and what becomes of those that are not.
//!
//! Invariant: nothing is removed here. A checkpoint that a run does not go on from keeps its files under a name that no
//! run looks for.

use std::path::{Path, PathBuf};

use model::{ModelError, manifest};
use trajectory::PolicyVersion;

use super::{OLDEST_FORMAT, base_path, list, numbers, path};
use crate::TrainerError;

/// What is known of a checkpoint that can be resumed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// Every file has the digest that was written.
    Digested,
    /// It is of format 1, whose files have no digests.
    Undigested,
}

/// Compares the files of the checkpoint in `dir`, and of the frozen model beside it, with their manifests.
///
/// # Errors
/// [`TrainerError::Damaged`] if a file of the checkpoint is missing or not the one that was written: another checkpoint
/// may be whole. Others if no checkpoint could be read.
pub fn check(dir: &Path) -> Result<Whole, TrainerError> {
    let damaged = |reason| TrainerError::Damaged { checkpoint: dir.to_owned(), reason };
    let digested = manifest::check(dir).map_err(|error| damaged(error.to_string()))?;
    let state = numbers(dir)?;
    if let Some(checkpoints) = dir.parent() {
        manifest::check(&base_path(checkpoints))?;
    }
    match (digested, state.format) {
        (true, _) => Ok(Whole::Digested),
        (false, OLDEST_FORMAT) => Ok(Whole::Undigested),
        (false, format) => Err(damaged(format!(
            "{} is missing, and format {format} has one; restore it from a copy, or use an earlier checkpoint",
            manifest::MANIFEST
        ))),
    }
}

/// Renames the checkpoints after `version`, the newest first, so that no run goes on from them: to their name and
/// `.aside`, with a number behind it if there is one already. Returns their versions and new places.
///
/// # Errors
/// If one cannot be renamed.
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
