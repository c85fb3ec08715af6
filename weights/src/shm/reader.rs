//! The reader of slots, in a sampler. Invariant: weights are returned only while their slot is locked, and complete.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trajectory::PolicyVersion;

use super::slot::{ShmSlot, failed};
use crate::values::WeightMemory;
use crate::{Digest, Dtype, Values, WeightsError};

/// Number of slots that stay mapped: a publisher alternates between two.
const KEPT: usize = 2;

/// Maps slots of one publisher.
#[derive(Debug, Default)]
pub(crate) struct SlotReader {
    kept: Vec<MappedSlot>,
}

#[derive(Debug)]
struct MappedSlot {
    path: PathBuf,
    slot: Arc<ShmSlot>,
}

/// A mapped slot with a shared lock.
#[derive(Debug)]
struct SlotReadGuard {
    slot: Arc<ShmSlot>,
    /// The shared lock. It has its own file handle, because a lock belongs to a handle; closing it releases the lock.
    _lock: File,
}

/// Weights in place.
#[derive(Debug)]
pub(crate) struct MappedWeights {
    pub(crate) values: Values,
    pub(crate) dtype: Dtype,
    /// `None` if the publisher has not computed it yet.
    pub(crate) digest: Option<Digest>,
}

impl WeightMemory for SlotReadGuard {
    #[expect(unsafe_code, reason = "the slot is locked against the publisher")]
    fn values(&self) -> &[f32] {
        // SAFETY: a publisher writes only under an exclusive lock, which it does not get before this is dropped.
        unsafe { self.slot.values() }
    }
}

impl SlotReader {
    /// Maps and locks the slot at `path` if it has `version`; `None` if the publisher has overwritten it.
    ///
    /// # Errors
    /// A file that cannot be opened or mapped, such as one of another host.
    pub(crate) fn pin(
        &mut self,
        path: &Path,
        version: PolicyVersion,
    ) -> Result<Option<MappedWeights>, WeightsError> {
        let index = match self.kept.iter().position(|mapped| mapped.path == path) {
            Some(index) => index,
            None => self.open(path)?,
        };
        let lock = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(path, "open a file of the publisher", &error)),
        };
        match lock.try_lock_shared() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(failed(path, "lock a file", &error)),
        }
        // The header is consistent only under the lock.
        let pin = SlotReadGuard { slot: Arc::clone(&self.kept[index].slot), _lock: lock };
        let Some(described) = pin.slot.described().filter(|it| it.complete() && it.version == version) else {
            return Ok(None);
        };
        let (dtype, digest) = (described.dtype, described.digest);
        Ok(Some(MappedWeights { values: Values::owned_by(Arc::new(pin)), dtype, digest }))
    }

    fn open(&mut self, path: &Path) -> Result<usize, WeightsError> {
        let (slot, _) = ShmSlot::open(path, false)?;
        if self.kept.len() == KEPT {
            self.kept.remove(0);
        }
        self.kept.push(MappedSlot { path: path.to_owned(), slot: Arc::new(slot) });
        Ok(self.kept.len() - 1)
    }
}
