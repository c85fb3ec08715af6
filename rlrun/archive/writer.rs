//! Stores the checkpoints of a run: uploads their files, then the index, then replaces `lead.json`.
//!
//! Invariant: only the lead commits. Objects are removed after the commit that no longer names them, and only those of its own
//! and of earlier epochs, so a lead that was superseded removes nothing of its successor: what the successor names is either
//! of a later epoch or in the last commit of this one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use object_store::UpdateVersion;
use trainer::TrainerError;
use trainer::checkpoint::{CheckpointArchive, Retention, base_path};
use trajectory::PolicyVersion;

use super::bucket::{Bucket, BucketError, PARALLEL};
use super::files::{self, CHECKPOINTS};
use super::lead::{self, ArchiveIndex, ArchiveLead, FoundLead, IndexedFile, LEAD, LeadCheckpoint, epoch_of};
use super::record::ArchiveRecord;
use super::transfer::{FileTransfer, MeasuredFile};
use super::{ArchiveError, ArchiveSetup, RunArchive, probe};
use crate::report::Report;

/// How often a commit is begun again because a log was replaced while it was stored.
const ATTEMPTS: usize = 3;

/// The archive of a run whose lead this process is.
#[derive(Debug)]
pub(super) struct ObjectArchive {
    bucket: Bucket,
    run_dir: PathBuf,
    retention: Retention,
    /// How long the archive may make no progress.
    patience: Duration,
    report: Arc<Report>,
    /// Name of the run.
    name: String,
    /// `None` until this process is the lead.
    state: Mutex<Option<ArchiveState>>,
}

#[derive(Debug)]
struct ArchiveState {
    lead: ArchiveLead,
    /// Which version of `lead.json` that is.
    version: UpdateVersion,
    /// The indexes that `lead` names, by name; `None` for one that cannot be read.
    indexes: BTreeMap<String, Option<ArchiveIndex>>,
    record: ArchiveRecord,
    /// Files beside checkpoints as they were measured last, with the time of their change then.
    measured: BTreeMap<String, (SystemTime, MeasuredFile)>,
    /// Whether what earlier leads have left behind is removed.
    is_clean: bool,
}

/// The files of a commit to be.
#[derive(Debug, Default)]
struct CommitFiles {
    /// Stored already.
    stored: BTreeMap<String, IndexedFile>,
    /// To be stored, in this order, by path in the run directory.
    missing: Vec<(String, MeasuredFile)>,
}

impl ObjectArchive {
    /// Opens the archive and checks that the run may continue there.
    ///
    /// # Errors
    /// An archive that cannot be used, has another run, or has steps of this run that its directory lacks.
    pub(super) fn open(setup: &ArchiveSetup<'_>) -> Result<Self, ArchiveError> {
        let archive = Self {
            bucket: Bucket::open(setup.url, setup.environment)?,
            run_dir: setup.run_dir.to_owned(),
            retention: setup.retention,
            patience: setup.patience,
            report: Arc::clone(setup.report),
            name: setup.name.to_owned(),
            state: Mutex::default(),
        };
        archive.found_lead()?;
        probe::conditional_put(&archive.bucket)?;
        Ok(archive)
    }

    /// The lead in the archive with its version, and the record of the run directory, which has all that the lead committed.
    fn found_lead(&self) -> Result<(Option<(ArchiveLead, UpdateVersion)>, ArchiveRecord), ArchiveError> {
        let found = lead::read(&self.bucket)?;
        let mut record = ArchiveRecord::read(&self.run_dir, &self.url());
        let Some((lead, _)) = found.as_ref().filter(|(lead, _)| !record.is_of(lead)) else {
            return Ok((found, record));
        };
        let (url, name, host, epoch, step) =
            (self.url(), lead.name.clone(), lead.host.clone(), lead.epoch, lead.step());
        match (lead.checkpoints.is_empty(), record.writers.is_empty()) {
            // A run that ended before its first checkpoint starts again.
            (true, _) => {
                record.stored.clear();
                Ok((found, record))
            }
            (false, true) => Err(ArchiveError::Occupied { url, name, step }),
            (false, false) => {
                Err(ArchiveError::Stale { url, host, epoch, step, run_dir: self.run_dir.clone() })
            }
        }
    }

    fn url(&self) -> String {
        self.bucket.url().to_string()
    }

    /// Replaces the lead in the archive by this process, with the next epoch.
    fn replace_found_lead(&self) -> Result<ArchiveState, ArchiveError> {
        let (found, mut record) = self.found_lead()?;
        let lead = FoundLead { bucket: &self.bucket, found, name: &self.name };
        let (next, version) = lead.replace(&mut record, &self.run_dir)?;
        let epoch = next.epoch;
        let indexes = self.indexes(&next)?;
        self.report.note(&format!(
            "checkpoints are archived in {}; this process is the lead of epoch {epoch}",
            self.url()
        ));
        Ok(ArchiveState { lead: next, version, indexes, record, measured: BTreeMap::new(), is_clean: false })
    }

    /// The indexes that `lead` names.
    fn indexes(&self, lead: &ArchiveLead) -> Result<BTreeMap<String, Option<ArchiveIndex>>, ArchiveError> {
        let mut indexes = BTreeMap::new();
        for checkpoint in lead.checkpoints.iter().chain(&lead.aside) {
            let index = match ArchiveIndex::read(&self.bucket, checkpoint) {
                Ok(index) => Some(index),
                Err(BucketError::Damaged(reason)) => {
                    let step = checkpoint.version.0;
                    self.report.note(&format!(
                        "the checkpoint of step {step} in the archive cannot be used: {reason}"
                    ));
                    None
                }
                Err(error) => {
                    return Err(error.into_error(self.bucket.url(), "read the checkpoints of the run"));
                }
            };
            indexes.insert(checkpoint.index.clone(), index);
        }
        Ok(indexes)
    }

    /// Stores `checkpoint`, or else what the run wrote after the newest one, and commits it.
    fn commit(&self, checkpoint: Option<(&Path, PolicyVersion)>) -> Result<(), ArchiveError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.leading(&mut state)?;
        let newest = state.lead.checkpoints.last().map(|checkpoint| checkpoint.version);
        let version = match (checkpoint, newest) {
            (Some((_, version)), Some(newest)) if version == newest && state.newest_index().is_some() => {
                return Ok(());
            }
            (Some((_, version)), _) => version,
            (None, Some(newest)) if state.newest_index().is_some() => newest,
            (None, _) => return Ok(()),
        };
        let directory = checkpoint.map(|(directory, _)| directory);
        for attempt in 1.. {
            let is_log = |path: &Path| !path.starts_with(self.run_dir.join(CHECKPOINTS));
            match self.try_commit(state, directory, version) {
                Err(ArchiveError::Changed { path, .. }) if is_log(&path) && attempt < ATTEMPTS => {}
                result => return result,
            }
        }
        Ok(())
    }

    /// The state of the lead, which this process becomes if it is not.
    fn leading<'a>(&self, state: &'a mut Option<ArchiveState>) -> Result<&'a mut ArchiveState, ArchiveError> {
        match state {
            Some(state) => Ok(state),
            None => Ok(state.insert(self.replace_found_lead()?)),
        }
    }

    fn try_commit(
        &self,
        state: &mut ArchiveState,
        directory: Option<&Path>,
        version: PolicyVersion,
    ) -> Result<(), ArchiveError> {
        let say = |text: &str| self.report.note(text);
        let transfer = FileTransfer::new(&self.bucket, self.patience, &say);
        let files = self.files(state, &transfer, directory)?;
        let newest = state.newest_index();
        if files.missing.is_empty() && newest.is_some_and(|newest| newest.files == files.stored) {
            return Ok(());
        }
        let target = state.lead.directory(state.lead.commit + 1);
        let stored = self.upload(state, &transfer, files, &target)?;
        fail::fail_point!("archive-upload");
        let index = ArchiveIndex::new(stored);
        let (name, bytes) = (format!("{target}/index.json"), index.to_bytes());
        transfer.patiently(&format!("store {name}"), || self.bucket.put(&name, bytes.clone()))?;
        let blake3 = blake3::hash(&bytes).to_hex().to_string();
        let next = self.next(&state.lead, LeadCheckpoint { version, index: name.clone(), blake3 });
        fail::fail_point!("archive-commit");
        state.version = self.replace_lead(&transfer, state, &next)?;
        state.lead = next;
        state.indexes.insert(name, Some(index));
        state.record.stored.clear();
        state.record.write(&self.run_dir)?;
        self.clean(state);
        Ok(())
    }

    /// The files of the checkpoint in `directory`, or else of the newest one in the archive, and those beside checkpoints.
    fn files(
        &self,
        state: &mut ArchiveState,
        transfer: &FileTransfer<'_>,
        directory: Option<&Path>,
    ) -> Result<CommitFiles, ArchiveError> {
        let local = |error: BucketError| error.into_error(self.bucket.url(), "read the run directory");
        let mut files = CommitFiles::default();
        let mut paths = files::beside_checkpoints(&self.run_dir).map_err(local)?;
        match directory {
            Some(directory) => {
                let base = base_path(directory.parent().unwrap_or(directory));
                paths.extend(files::under(&self.run_dir, &base).map_err(local)?);
                paths.extend(files::under(&self.run_dir, directory).map_err(local)?);
            }
            None => {
                let of_checkpoint = state.newest_index().into_iter().flat_map(|newest| &newest.files);
                let of_checkpoint = of_checkpoint.filter(|(path, _)| path.starts_with(CHECKPOINTS));
                files.stored.extend(of_checkpoint.map(|(path, file)| (path.clone(), file.clone())));
            }
        }
        for path in paths {
            let Some(file) = self.measure(state, &path).map_err(local)? else { continue };
            let committed = state.committed(&path, &file);
            let before =
                state.record.stored.iter().find(|(stored, object)| *stored == path && file.equals(object));
            let stored = match (committed, before) {
                (Some(object), _) => Some(object),
                // Not committed, so it may have been removed.
                (None, Some((_, object))) => {
                    let what = format!("look for {}", object.object);
                    let size = transfer.patiently(&what, || self.bucket.size(&object.object))?;
                    (size == Some(object.bytes)).then_some(object)
                }
                (None, None) => None,
            };
            match stored {
                Some(object) => drop(files.stored.insert(path, object.clone())),
                None => files.missing.push((path, file)),
            }
        }
        Ok(files)
    }

    /// Measures a file unless it is as it was; `None` for a log that was removed meanwhile.
    fn measure(&self, state: &mut ArchiveState, path: &str) -> Result<Option<MeasuredFile>, BucketError> {
        let place = files::local(&self.run_dir, path);
        if path.starts_with(CHECKPOINTS) {
            return MeasuredFile::measure(&place).map(Some);
        }
        let found = std::fs::metadata(&place).and_then(|found| Ok((found.modified()?, found.len())));
        let (changed, bytes) = match found {
            Ok(found) => found,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(BucketError::Local("read", place, source)),
        };
        if let Some((then, file)) = state.measured.get(path)
            && (*then, file.bytes) == (changed, bytes)
        {
            return Ok(Some(file.clone()));
        }
        let file = MeasuredFile::measure(&place)?;
        state.measured.insert(path.to_owned(), (changed, file.clone()));
        Ok(Some(file))
    }

    /// Stores the missing files under `target`, small ones together and the manifest of the checkpoint last.
    fn upload(
        &self,
        state: &mut ArchiveState,
        transfer: &FileTransfer<'_>,
        files: CommitFiles,
        target: &str,
    ) -> Result<BTreeMap<String, IndexedFile>, ArchiveError> {
        let CommitFiles { mut stored, mut missing } = files;
        let is_manifest =
            |path: &str| path.starts_with(CHECKPOINTS) && path.ends_with(model::manifest::MANIFEST);
        let manifest = missing.pop_if(|(path, _)| is_manifest(path));
        let (large, small): (Vec<_>, Vec<_>) =
            missing.into_iter().partition(|(_, file)| FileTransfer::is_large(file));
        let batches = small.chunks(PARALLEL).chain(large.chunks(1)).chain(manifest.as_slice().chunks(1));
        for batch in batches {
            let named: Vec<(String, MeasuredFile)> = batch
                .iter()
                .map(|(path, file)| (format!("{target}/{}", files::object_name(path)), file.clone()))
                .collect();
            transfer.upload(&named)?;
            for ((object, file), (path, _)) in named.into_iter().zip(batch) {
                let indexed = IndexedFile { object, bytes: file.bytes, blake3: file.blake3 };
                state.record.stored.retain(|(stored, _)| stored != path);
                state.record.stored.push((path.clone(), indexed.clone()));
                stored.insert(path.clone(), indexed);
            }
            // A process that is killed here does not store them again.
            state.record.write(&self.run_dir)?;
        }
        Ok(stored)
    }

    /// `lead` with a new checkpoint: later ones are set aside, and those that are not kept are gone.
    fn next(&self, lead: &ArchiveLead, checkpoint: LeadCheckpoint) -> ArchiveLead {
        let mut next = ArchiveLead { commit: lead.commit + 1, ..lead.clone() };
        let version = checkpoint.version;
        next.aside.extend(next.checkpoints.extract_if(.., |found| found.version > version));
        next.checkpoints.retain(|found| found.version < version);
        next.checkpoints.push(checkpoint);
        let versions: Vec<PolicyVersion> = next.checkpoints.iter().map(|found| found.version).collect();
        let gone = self.retention.superseded(&versions);
        next.checkpoints.retain(|found| !gone.contains(&found.version));
        next
    }

    /// Commits: replaces the lead of `state` by `next` unless another process is the lead.
    fn replace_lead(
        &self,
        transfer: &FileTransfer<'_>,
        state: &ArchiveState,
        next: &ArchiveLead,
    ) -> Result<UpdateVersion, ArchiveError> {
        let what = format!("commit the checkpoint of step {}", next.step());
        let replaced = transfer.patiently(&what, || {
            let failure = match self.bucket.put_if(LEAD, next.to_bytes(), Some(&state.version)) {
                Err(error @ (BucketError::Conflict | BucketError::Unavailable(_))) => error,
                result => return result.map(Ok),
            };
            // The answer to an earlier attempt may have been lost.
            let found = ArchiveLead::read(&self.bucket)?;
            let Some((found, version)) = found else {
                return Err(BucketError::Damaged(format!("{LEAD} was removed")));
            };
            match failure {
                _ if found == *next => Ok(Ok(version)),
                _ if found.writer != next.writer => Ok(Err(found)),
                BucketError::Conflict => {
                    Err(BucketError::Damaged(format!("{LEAD} was changed by another program")))
                }
                failure => Err(failure),
            }
        })?;
        replaced.map_err(|found| lead::fenced(&self.bucket, found, next.epoch))
    }

    /// Removes the objects that no commit names any more; after the first commit also what earlier leads have left behind.
    /// What cannot be removed now is removed after the next start.
    fn clean(&self, state: &mut ArchiveState) {
        let ArchiveState { lead, indexes, is_clean, .. } = state;
        let named: BTreeSet<&str> =
            lead.checkpoints.iter().chain(&lead.aside).map(|checkpoint| &checkpoint.index[..]).collect();
        let mut kept: BTreeSet<String> = named.iter().map(|name| (*name).to_owned()).collect();
        let mut unknown = Vec::new();
        let mut gone = BTreeSet::new();
        for (name, index) in &*indexes {
            let objects = index.iter().flat_map(ArchiveIndex::objects).map(str::to_owned);
            match named.contains(&name[..]) {
                true => kept.extend(objects),
                false => gone.extend(objects.chain([name.clone()])),
            }
            if index.is_none() {
                unknown.push(name.trim_end_matches("index.json").to_owned());
            }
        }
        let found = if *is_clean { Ok(Vec::new()) } else { self.bucket.list() };
        let listed = found.map(|names| gone.extend(names));
        let is_gone = |name: &&String| {
            epoch_of(name).is_some_and(|epoch| epoch <= lead.epoch)
                && !kept.contains(*name)
                && !unknown.iter().any(|directory| name.starts_with(directory))
        };
        let removed = gone.iter().filter(is_gone).try_for_each(|name| self.bucket.delete(name));
        match listed.and(removed) {
            Ok(()) => {
                *is_clean = true;
                let lost: Vec<String> =
                    indexes.keys().filter(|name| !named.contains(&name[..])).cloned().collect();
                lost.iter().for_each(|name| drop(indexes.remove(name)));
            }
            Err(error) => {
                *is_clean = false;
                let error = error.into_error(self.bucket.url(), "remove what is no longer needed");
                self.report.note(&format!("{error}; the run continues"));
            }
        }
    }
}

impl ArchiveState {
    /// The index of the newest checkpoint, if it can be read.
    fn newest_index(&self) -> Option<&ArchiveIndex> {
        self.indexes.get(&self.lead.checkpoints.last()?.index)?.as_ref()
    }

    /// The object that a commit has for a path in the run directory, if it has the bytes of `file`.
    fn committed(&self, path: &str, file: &MeasuredFile) -> Option<&IndexedFile> {
        let mut names = self.lead.checkpoints.iter().rev().map(|checkpoint| &checkpoint.index);
        names.find_map(|name| {
            let object = self.indexes.get(name)?.as_ref()?.files.get(path)?;
            file.equals(object).then_some(object)
        })
    }
}

impl CheckpointArchive for ObjectArchive {
    fn store(&self, directory: &Path, version: PolicyVersion) -> Result<(), TrainerError> {
        Ok(self.commit(Some((directory, version)))?)
    }
}

impl RunArchive for ObjectArchive {
    fn take_lead(&self) -> Result<(), ArchiveError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.leading(&mut state).map(drop)
    }

    fn finish(&self) -> Result<(), ArchiveError> {
        self.commit(None)
    }
}
