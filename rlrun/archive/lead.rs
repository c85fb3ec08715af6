//! The object that names the lead and the complete checkpoints of an archive, and the index of a commit.
//!
//! ```text
//! lead.json                            the current lead, and the index of every checkpoint that is kept
//! e000003/000007/index.json            the files of a commit: commit 7 of the lead with epoch 3
//! e000003/000007/checkpoints/...       files that this commit was the first to store, by their path in the run directory
//! ```
//!
//! Invariant: `lead.json` has one writer per epoch. A start replaces it with the next epoch, under the condition that no other
//! start did meanwhile; commits replace it under the same condition.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use object_store::UpdateVersion;
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use super::ArchiveError;
use super::bucket::{Bucket, BucketError};
use super::record::ArchiveRecord;
use crate::credentials;

/// Name of the object.
pub(super) const LEAD: &str = "lead.json";
/// Version of both layouts.
const FORMAT: u64 = 1;
/// Longest `lead.json`, bytes.
const MAX_LEAD_BYTES: u64 = 4 << 20;
/// Attempts to take the lead from one that commits, or of a store that loses answers.
const ATTEMPTS: usize = 10;
/// What a start does.
const TAKE: &str = "take the lead of the run";
/// Longest index, bytes.
const MAX_INDEX_BYTES: u64 = 16 << 20;

/// The content of `lead.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArchiveLead {
    /// Format of the layout.
    pub(super) rlrun_lead: u64,
    /// Name of the run.
    pub(super) name: String,
    /// Number of starts that have taken the lead.
    pub(super) epoch: u64,
    /// Commits of this epoch.
    pub(super) commit: u64,
    /// Random name of the process that is the lead.
    pub(super) writer: String,
    /// Its machine.
    pub(super) host: String,
    /// The complete checkpoints, ascending; the last is resumed from.
    pub(super) checkpoints: Vec<LeadCheckpoint>,
    /// Checkpoints that a run went back behind. They are kept, and nothing resumes from them.
    pub(super) aside: Vec<LeadCheckpoint>,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeadCheckpoint {
    pub(super) version: PolicyVersion,
    /// Name of the index of its files.
    pub(super) index: String,
    /// Digest of the index.
    pub(super) blake3: String,
}

/// The files of a commit: those of a checkpoint, and the other files of the run at that time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArchiveIndex {
    /// Format of the layout.
    rlrun_index: u64,
    /// By path in the run directory, with slashes.
    pub(super) files: BTreeMap<String, IndexedFile>,
}

/// A file and the object that has its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct IndexedFile {
    /// Name of the object in the archive.
    pub(super) object: String,
    pub(super) bytes: u64,
    pub(super) blake3: String,
}

/// The lead that a start has found.
pub(super) struct FoundLead<'a> {
    pub(super) bucket: &'a Bucket,
    pub(super) found: Option<(ArchiveLead, UpdateVersion)>,
    /// Name of the run.
    pub(super) name: &'a str,
}

impl FoundLead<'_> {
    /// Replaces it by this process, with the next epoch, under the condition that no other start did.
    ///
    /// # Errors
    /// [`ArchiveError::Fenced`] if another start did; an archive or a run directory that cannot be used.
    pub(super) fn replace(
        self,
        record: &mut ArchiveRecord,
        run_dir: &Path,
    ) -> Result<(ArchiveLead, UpdateVersion), ArchiveError> {
        let Self { bucket, found, name } = self;
        let (mut lead, mut expected) = match found {
            Some((lead, version)) => (lead, Some(version)),
            None => (ArchiveLead::new(name), None),
        };
        let local = |source| ArchiveError::Local { verb: "read", path: "/dev/urandom".into(), source };
        let writer = credentials::random_name().map_err(local)?;
        record.add_writer(&writer);
        record.write(run_dir)?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mut attempt = 0;
        loop {
            attempt += 1;
            let epoch = lead.epoch + 1;
            let next = ArchiveLead {
                name: name.to_owned(),
                epoch,
                commit: 0,
                writer: writer.clone(),
                host: host.clone(),
                ..lead.clone()
            };
            let error = match bucket.put_if(LEAD, next.to_bytes(), expected.as_ref()) {
                Ok(version) => return Ok((next, version)),
                Err(error @ (BucketError::Conflict | BucketError::Unavailable(_))) => error,
                Err(error) => return Err(error.into_error(bucket.url(), TAKE)),
            };
            match read(bucket)? {
                // The answer was lost.
                Some((found, version)) if found == next => return Ok((next, version)),
                Some((found, _)) if found.writer != lead.writer => return Err(fenced(bucket, found, epoch)),
                _ if attempt == ATTEMPTS => return Err(error.into_error(bucket.url(), TAKE)),
                // Nothing has happened, or the lead has committed a checkpoint meanwhile.
                Some((found, version)) => (lead, expected) = (found, Some(version)),
                None => {}
            }
        }
    }
}

/// Reads `lead.json`; `None` if there is none.
///
/// # Errors
/// An archive that cannot be used.
pub(super) fn read(bucket: &Bucket) -> Result<Option<(ArchiveLead, UpdateVersion)>, ArchiveError> {
    ArchiveLead::read(bucket).map_err(|error| error.into_error(bucket.url(), &format!("read {LEAD}")))
}

/// The error of a process of epoch `own` that finds the lead `found`.
pub(super) fn fenced(bucket: &Bucket, found: ArchiveLead, own: u64) -> ArchiveError {
    ArchiveError::Fenced { url: bucket.url().to_string(), host: found.host, epoch: found.epoch, own }
}

impl ArchiveLead {
    /// The first lead of an archive, before its start.
    pub(super) fn new(name: &str) -> Self {
        Self {
            rlrun_lead: FORMAT,
            name: name.to_owned(),
            epoch: 0,
            commit: 0,
            writer: String::new(),
            host: String::new(),
            checkpoints: Vec::new(),
            aside: Vec::new(),
        }
    }

    /// Reads `lead.json`; `None` if there is none.
    pub(super) fn read(bucket: &Bucket) -> Result<Option<(Self, UpdateVersion)>, BucketError> {
        let Some((bytes, version)) = bucket.get(LEAD, MAX_LEAD_BYTES)? else { return Ok(None) };
        let lead: Self = serde_json::from_slice(&bytes)
            .map_err(|error| BucketError::Damaged(format!("{LEAD} is not valid: {error}")))?;
        if lead.rlrun_lead != FORMAT {
            let format = lead.rlrun_lead;
            let reason = format!(
                "{LEAD} has format {format}, and this rlrun reads {FORMAT}; use the rlrun that wrote it"
            );
            return Err(BucketError::Damaged(reason));
        }
        Ok(Some((lead, version)))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Step of the newest checkpoint; 0 if there is none.
    pub(super) fn step(&self) -> u64 {
        self.checkpoints.last().map_or(0, |checkpoint| checkpoint.version.0)
    }

    /// Directory of commit `commit` of this epoch.
    pub(super) fn directory(&self, commit: u64) -> String {
        format!("e{:06}/{commit:06}", self.epoch)
    }
}

/// The epoch of the lead that wrote an object; `None` for objects that no commit has written.
pub(super) fn epoch_of(object: &str) -> Option<u64> {
    object.split('/').next()?.strip_prefix('e')?.parse().ok()
}

impl ArchiveIndex {
    pub(super) fn new(files: BTreeMap<String, IndexedFile>) -> Self {
        Self { rlrun_index: FORMAT, files }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Reads the index of `checkpoint` and compares it with its digest.
    pub(super) fn read(bucket: &Bucket, checkpoint: &LeadCheckpoint) -> Result<Self, BucketError> {
        let name = &checkpoint.index;
        let damaged = |reason: String| BucketError::Damaged(format!("{name}: {reason}"));
        let Some((bytes, _)) = bucket.get(name, MAX_INDEX_BYTES)? else {
            return Err(damaged("it is missing".to_owned()));
        };
        let found = blake3::hash(&bytes).to_hex().to_string();
        if found != checkpoint.blake3 {
            return Err(damaged(format!(
                "its blake3 digest is {found}, and {} was written",
                checkpoint.blake3
            )));
        }
        let index: Self =
            serde_json::from_slice(&bytes).map_err(|error| damaged(format!("not valid: {error}")))?;
        if index.rlrun_index != FORMAT {
            return Err(damaged(format!(
                "it has format {}, and this rlrun reads {FORMAT}",
                index.rlrun_index
            )));
        }
        let inside = |path: &str| {
            !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
        };
        if let Some((path, _)) =
            index.files.iter().find(|(path, file)| !inside(path) || !inside(&file.object))
        {
            return Err(damaged(format!("it names `{path}`, which is not in a run directory")));
        }
        Ok(index)
    }

    /// Names of all objects that the index needs.
    pub(super) fn objects(&self) -> impl Iterator<Item = &str> {
        self.files.values().map(|file| file.object.as_str())
    }
}
