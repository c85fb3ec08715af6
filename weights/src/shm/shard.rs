//! A shard owner: writes a part of the weights, in any process of the publisher's host.
//!
//! ```text
//!   rank 0:    begin(v) -> path ---broadcast---> all ranks: open(path), place(v, offset, shard)
//!   all ranks: barrier
//!   rank 0:    commit(v)
//! ```
//! Invariant: it writes only into a slot that is being written with the version it places, and only within its
//! capacity. The ranks guarantee that the shards do not overlap and are complete before the commit; the digest is
//! computed from what they wrote.

use std::path::{Path, PathBuf};

use trajectory::PolicyVersion;

use super::slot::ShmSlot;
use crate::WeightsError;
use crate::copier::copy_rounded;

/// Writes shards into the slot of a publisher.
#[derive(Debug)]
pub struct ShardOwner {
    path: PathBuf,
    slot: ShmSlot,
    threads: usize,
}

impl ShardOwner {
    /// Maps the file that [`HubPublisher::begin`](crate::HubPublisher::begin) names. The file stays the same for most
    /// versions, so keep the owner. Copies by up to `threads` threads.
    ///
    /// # Errors
    /// A file that cannot be opened, or is not of a publisher.
    pub fn open(path: &Path, threads: usize) -> Result<Self, WeightsError> {
        let (slot, _) = ShmSlot::open(path, true)?;
        Ok(Self { path: path.to_owned(), slot, threads })
    }

    /// The path of its file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `[n]` weights at `offset`, rounded to the publisher's precision.
    ///
    /// # Errors
    /// A slot that is not being written with `version`; weights outside the slot.
    #[expect(unsafe_code, reason = "the slot is locked for the version")]
    pub fn place(&self, version: PolicyVersion, offset: usize, values: &[f32]) -> Result<(), WeightsError> {
        let wrong = |reason: String| WeightsError::Shard { path: self.path.display().to_string(), reason };
        let described = self.slot.described().filter(|it| !it.complete() && it.version == version);
        let Some(described) = described else {
            return Err(wrong(format!(
                "it does not wait for {version}: begin it first, and open the file that names"
            )));
        };
        let end = offset.checked_add(values.len()).filter(|end| *end <= self.slot.len());
        let Some(end) = end else {
            let (len, slot) = (values.len(), self.slot.len());
            return Err(wrong(format!("{len} weights from {offset} on do not fit into {slot}")));
        };
        // SAFETY: rank 0 has locked the slot against readers until all ranks have written their shards, which do not
        // overlap.
        copy_rounded(values, unsafe { self.slot.range_mut(offset..end) }, described.dtype, self.threads);
        Ok(())
    }
}
