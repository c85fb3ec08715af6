//! A run directory from an archive.
//!
//! It takes the lead first, so that nothing is committed that the copy lacks.
//!
//! Invariant: `resolved.toml`, which makes a directory a run, comes last, so an interrupted fetch leaves nothing that looks
//! resumable, and the next one continues it. A checkpoint that is damaged in the archive is fetched as far as it can be: the
//! rules for damaged checkpoints of a run directory apply to it.

use std::path::Path;

use trajectory::PolicyVersion;

use super::bucket::{Bucket, BucketError};
use super::files::{self, CHECKPOINTS, RESOLVED};
use super::lead::{self, ArchiveIndex, ArchiveLead, FoundLead, IndexedFile, LeadCheckpoint};
use super::record::{ArchiveRecord, RECORD};
use super::transfer::{FileTransfer, MeasuredFile};
use super::{ArchiveError, ArchiveRequest};
use crate::failure::Failure;
use crate::run_dir::{RunDir, RunDirError};

/// Where `resolved.toml` is until everything else is there.
const UNRESOLVED: &str = "resolved.toml.fetched";

/// Whether the archive has a checkpoint.
pub(super) fn has_run(request: &ArchiveRequest<'_>) -> Result<bool, ArchiveError> {
    let bucket = Bucket::open(request.url, request.environment)?;
    Ok(lead::read(&bucket)?.is_some_and(|(lead, _)| !lead.checkpoints.is_empty()))
}

/// Makes the run directory `to`: the newest intact checkpoint, those after it as far as they can be fetched, and the recipe,
/// metrics and logs of that time.
pub(super) fn fetch(
    request: &ArchiveRequest<'_>,
    to: &Path,
    notice: &(dyn Fn(&str) + Send + Sync),
) -> Result<(), Failure> {
    let bucket = Bucket::open(request.url, request.environment)?;
    let url = request.url.to_string();
    let found = lead::read(&bucket)?.filter(|(lead, _)| !lead.checkpoints.is_empty());
    let (lead, version) = found.ok_or_else(|| ArchiveError::Empty { url: url.clone() })?;
    let begun = to.join(RECORD).exists();
    let _reserved = RunDir::reserve(to, RECORD)?;
    let mut record = ArchiveRecord::read(to, &url);
    if begun && record.writers.is_empty() {
        return Err(RunDirError::Occupied { path: to.to_owned() }.into());
    }
    // From here on an earlier lead, which may only seem to be dead, commits nothing that the copy would lack.
    let name = lead.name.clone();
    let (lead, _) =
        FoundLead { bucket: &bucket, found: Some((lead, version)), name: &name }.replace(&mut record, to)?;
    let copy =
        RunCopy { bucket: &bucket, transfer: FileTransfer::new(&bucket, request.patience, notice), to };
    copy.run(&lead, request.from, notice)?;
    std::fs::rename(to.join(UNRESOLVED), to.join(RESOLVED)).map_err(|source| ArchiveError::Local {
        verb: "write",
        path: to.join(RESOLVED),
        source,
    })?;
    Ok(())
}

/// A run on its way from an archive into a directory.
struct RunCopy<'a> {
    bucket: &'a Bucket,
    transfer: FileTransfer<'a>,
    to: &'a Path,
}

impl RunCopy<'_> {
    /// Fetches checkpoints, newest first, until one is intact and not after `from`.
    fn run(
        &self,
        lead: &ArchiveLead,
        from: Option<PolicyVersion>,
        notice: &(dyn Fn(&str) + Send + Sync),
    ) -> Result<(), ArchiveError> {
        let (mut reasons, mut intact, mut has_recipe) = (Vec::new(), None, false);
        for checkpoint in lead.checkpoints.iter().rev() {
            let version = checkpoint.version;
            let fetched = self.checkpoint(checkpoint, &mut has_recipe)?;
            match fetched {
                Ok(()) => {
                    intact = Some(version);
                    if from.is_none_or(|from| version <= from) {
                        break;
                    }
                }
                Err(reason) => {
                    notice(&format!(
                        "the checkpoint of step {} in the archive is damaged: {reason}",
                        version.0
                    ));
                    reasons.push(format!("step {}: {reason}", version.0));
                }
            }
        }
        if intact.is_none() || !has_recipe {
            if intact.is_some() {
                reasons.push(format!("{RESOLVED} of no checkpoint is intact"));
            }
            return Err(ArchiveError::NoneIntact { url: self.bucket.url().to_string(), reasons });
        }
        let (url, place) = (self.bucket.url(), self.to.display());
        notice(&format!("the run `{}` was fetched from {url} to {place}", lead.name));
        Ok(())
    }

    /// Fetches a checkpoint, and the files beside it if no newer checkpoint had them; the reason if it is damaged.
    fn checkpoint(
        &self,
        checkpoint: &LeadCheckpoint,
        has_recipe: &mut bool,
    ) -> Result<Result<(), String>, ArchiveError> {
        let directory = trainer::checkpoint::path(&self.to.join(CHECKPOINTS), checkpoint.version);
        // Also a checkpoint of which nothing can be fetched is set aside by the resume, and the buffer goes back with it.
        create(&directory)?;
        let what = format!("read {}", checkpoint.index);
        let index = self.transfer.patiently(&what, || match ArchiveIndex::read(self.bucket, checkpoint) {
            Err(BucketError::Damaged(reason)) => Ok(Err(reason)),
            index => index.map(Ok),
        })?;
        let index = match index {
            Ok(index) => index,
            Err(reason) => return Ok(Err(reason)),
        };
        let (of_checkpoint, beside): (Vec<_>, Vec<_>) = index
            .files
            .iter()
            .filter(|(path, _)| files::is_known(path))
            .partition(|(path, _)| path.starts_with(CHECKPOINTS));
        if !*has_recipe {
            for (path, file) in beside {
                // Metrics and logs of a damaged object are lost, which no step needs.
                let name = if path == RESOLVED { UNRESOLVED } else { path };
                *has_recipe |= self.file(name, file)?.is_ok() && path == RESOLVED;
            }
        }
        let mut damage = Ok(());
        for (path, file) in of_checkpoint {
            damage = damage.and(self.file(path, file)?);
        }
        Ok(damage)
    }

    /// Fetches a file unless it is there already; the reason if its object is damaged.
    fn file(&self, path: &str, file: &IndexedFile) -> Result<Result<(), String>, ArchiveError> {
        let to = files::local(self.to, path);
        if MeasuredFile::measure(&to).is_ok_and(|found| found.equals(file)) {
            return Ok(Ok(()));
        }
        create(to.parent().unwrap_or(self.to))?;
        match self.transfer.download(file, &to) {
            Ok(()) => Ok(Ok(())),
            Err(ArchiveError::Damaged { reason, .. }) => Ok(Err(format!("{}: {reason}", file.object))),
            Err(error) => Err(error),
        }
    }
}

fn create(directory: &Path) -> Result<(), ArchiveError> {
    std::fs::create_dir_all(directory).map_err(|source| ArchiveError::Local {
        verb: "create",
        path: directory.to_owned(),
        source,
    })
}
