//! An owner of a part of the weights, in any process of the publisher's host.
//!
//! ```text
//!   rank 0:    begin(v) -> path ---broadcast---> all ranks: open(path), place(v, offset, shard)
//!   all ranks: barrier
//!   rank 0:    commit(v)
//! ```
//! Invariant: it writes only into a slot that waits for the version it places, and only inside it. That the shards do
//! not overlap and all are there before the commit is up to the ranks; the digest is taken from what they wrote.

use std::path::{Path, PathBuf};

use trajectory::PolicyVersion;

use super::slot::ShmSlot;
use crate::WeightsError;
use crate::copier::copy_rounded;

/// Places shards into the slot of a publisher.
#[derive(Debug)]
pub struct ShardOwner {
    path: PathBuf,
    slot: ShmSlot,
    threads: usize,
}

impl ShardOwner {
    /// Maps the file that [`HubPublisher::begin`](crate::HubPublisher::begin) names; it stays the same for most versions
    /// of a kind, so that an owner is worth keeping. Copies by up to `threads` threads.
    ///
    /// # Errors
    /// A file that cannot be opened, or is not a publisher's.
    pub fn open(path: &Path, threads: usize) -> Result<Self, WeightsError> {
        let (slot, _) = ShmSlot::open(path, true)?;
        Ok(Self { path: path.to_owned(), slot, threads })
    }

    /// The file that it writes to.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts `[n]` weights at `offset`, rounded as the publisher wants them.
    ///
    /// # Errors
    /// A slot that does not wait for `version`; weights that lie outside it.
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
            let (len, room) = (values.len(), self.slot.len());
            return Err(wrong(format!("{len} weights from {offset} on do not fit into {room}")));
        };
        // SAFETY: rank 0 holds the slot locked against readers until all ranks have placed their shards, which do not overlap.
        copy_rounded(values, unsafe { self.slot.range_mut(offset..end) }, described.dtype, self.threads);
        Ok(())
    }
}
