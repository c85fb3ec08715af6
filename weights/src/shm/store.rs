//! The writer of slots, in the publisher. Invariant: neither the slot of the newest version nor a slot with a reader
//! is written.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trajectory::PolicyVersion;

use super::directory::PublisherDirectory;
use super::slot::{ShmSlot, failed};
use crate::copier::copy_rounded;
use crate::values::WeightMemory;
use crate::{Digest, Dtype, Values, WeightsError};

/// Two slots of shared memory (double buffering).
#[derive(Debug)]
pub(crate) struct SlotWriter {
    directory: PublisherDirectory,
    slots: [Option<OwnedSlot>; 2],
    /// Index of the slot with the newest version.
    current: Option<usize>,
    begun: Option<VersionInProgress>,
    /// Number of files made so far.
    made: u64,
}

#[derive(Debug)]
struct OwnedSlot {
    path: PathBuf,
    /// Locked while it is written.
    file: File,
    slot: Arc<ShmSlot>,
}

#[derive(Clone, Copy, Debug)]
struct VersionInProgress {
    index: usize,
    version: PolicyVersion,
    dtype: Dtype,
}

/// Weights in a slot of this process; the slot is not written before they are dropped.
struct OwnSlotWeights(Arc<ShmSlot>);

impl WeightMemory for OwnSlotWeights {
    #[expect(unsafe_code, reason = "the slot is not written while it is referenced")]
    fn values(&self) -> &[f32] {
        // SAFETY: `SlotWriter::begin` writes no slot that is referenced.
        unsafe { self.0.values() }
    }
}

impl SlotWriter {
    /// Makes a directory in `directory`, and removes those of killed publishers there.
    pub(crate) fn create(directory: &Path) -> Result<Self, WeightsError> {
        let directory = PublisherDirectory::create(directory)?;
        Ok(Self { directory, slots: [None, None], current: None, begun: None, made: 0 })
    }

    /// Chooses the slot to write `version` to; the path of its file.
    pub(crate) fn begin(
        &mut self,
        version: PolicyVersion,
        len: usize,
        dtype: Dtype,
    ) -> Result<PathBuf, WeightsError> {
        let given_up = self.begun.take().is_some();
        let index = 1 - self.current.unwrap_or(1);
        // An owner that was late may still write to the file of a version that was given up.
        let free = !given_up
            && self.slots[index].as_mut().is_some_and(|owned| owned.slot.len() == len && owned.lock());
        if !free {
            self.replace(index, len)?;
        }
        let owned = self.owned(index)?;
        owned.slot.write(version, dtype);
        let path = owned.path.clone();
        self.begun = Some(VersionInProgress { index, version, dtype });
        Ok(path)
    }

    /// Writes `[n]` weights of the version in progress, from the number `first` on.
    ///
    /// # Panics
    /// If the slot is shorter.
    #[expect(unsafe_code, reason = "the slot is locked against readers")]
    pub(crate) fn place(&mut self, first: usize, values: &[f32], threads: usize) -> Result<(), WeightsError> {
        let Some(VersionInProgress { index, dtype, .. }) = self.begun else { return Err(self.not_begun()) };
        let slot = &self.owned(index)?.slot;
        assert!(first + values.len() <= slot.len(), "the slot was made for all weights");
        // SAFETY: the slot is locked and not referenced within this process, and the caller has begun a version that
        // it writes alone; the range is in the slot.
        copy_rounded(values, unsafe { slot.range_mut(first..first + values.len()) }, dtype, threads);
        Ok(())
    }

    /// The weights of the version in progress, still invisible to readers; for a comparison.
    pub(crate) fn begun(&self, version: PolicyVersion) -> Result<Values, WeightsError> {
        match self.begun {
            Some(begun) if begun.version == version => {
                Ok(Values::owned_by(Arc::new(OwnSlotWeights(Arc::clone(&self.owned(begun.index)?.slot)))))
            }
            _ => Err(self.not_begun()),
        }
    }

    /// Publishes the version in progress to readers: its weights, and the path of its file.
    pub(crate) fn commit(&mut self, version: PolicyVersion) -> Result<(Values, PathBuf), WeightsError> {
        let values = self.begun(version)?;
        let Some(VersionInProgress { index, .. }) = self.begun.take() else { return Err(self.not_begun()) };
        let owned = self.owned(index)?;
        owned.slot.complete();
        owned.file.unlock().map_err(|error| failed(&owned.path, "unlock a file", &error))?;
        let path = owned.path.clone();
        self.current = Some(index);
        Ok((values, path))
    }

    /// Writes the digest of the newest version into its header.
    pub(crate) fn digested(&self, version: PolicyVersion, digest: Digest) {
        let slot = self.current.and_then(|index| self.slots[index].as_ref()).map(|owned| &owned.slot);
        if let Some(slot) = slot.filter(|slot| slot.described().is_some_and(|it| it.version == version)) {
            slot.digested(digest);
        }
    }

    /// Leaves a slot to its readers and makes a new one.
    fn replace(&mut self, index: usize, len: usize) -> Result<(), WeightsError> {
        if let Some(old) = self.slots[index].take() {
            let removed = std::fs::remove_file(&old.path);
            removed.map_err(|error| failed(&old.path, "remove a file", &error))?;
        }
        let path = self.directory.path().join(format!("slot-{}", self.made));
        self.made += 1;
        let (slot, file) = ShmSlot::create(&path, len)?;
        let mut owned = OwnedSlot { path, file, slot: Arc::new(slot) };
        if !owned.lock() {
            let error = io::Error::other("another process has locked it already");
            return Err(failed(&owned.path, "lock a new file", &error));
        }
        self.slots[index] = Some(owned);
        Ok(())
    }

    fn owned(&self, index: usize) -> Result<&OwnedSlot, WeightsError> {
        self.slots[index].as_ref().ok_or_else(|| self.not_begun())
    }

    fn not_begun(&self) -> WeightsError {
        WeightsError::Shard {
            path: self.directory.path().display().to_string(),
            reason: "this version was not begun, or another was begun since: begin, place all shards, commit"
                .to_owned(),
        }
    }
}

impl OwnedSlot {
    /// Locks the slot for writing, if it has no reader.
    fn lock(&mut self) -> bool {
        Arc::get_mut(&mut self.slot).is_some() && self.file.try_lock().is_ok()
    }
}
