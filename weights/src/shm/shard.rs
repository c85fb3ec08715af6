//! A shard owner: writes a part of the weights, in any process of the publisher's host.
//!
//! ```text
//!   rank 0:    begin(v) -> place ---broadcast---> all ranks: open(place), write(v, offset, shard)
//!   all ranks: barrier
//!   rank 0:    commit(v)
//! ```
//! Invariant: it writes only into a slot that is being written with its version, and only within its
//! capacity. The ranks guarantee that the shards do not overlap and are complete before the commit; the digest is
//! computed from what they wrote.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use super::slot::ShmSlot;
use crate::WeightsError;
use crate::copier::copy_rounded;

/// Where the owners of a version write their weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WritableSlot {
    /// The file of the slot.
    path: PathBuf,
    /// The boot of its host, where the system numbers them. A file system of several hosts may show the file elsewhere.
    boot: Option<String>,
}

/// Writes shards into the slot of a publisher.
#[derive(Debug)]
pub struct ShardOwner {
    path: PathBuf,
    slot: ShmSlot,
    threads: usize,
}

impl WritableSlot {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, boot: boot() }
    }
}

impl ShardOwner {
    /// Maps the file that [`Publisher::begin`](crate::Publisher::begin) names. Copies by up to `threads` threads.
    ///
    /// # Errors
    /// A file that cannot be opened, is of another host, or is not of a publisher.
    pub fn open(place: &WritableSlot, threads: usize) -> Result<Self, WeightsError> {
        let WritableSlot { path, boot: of_publisher } = place;
        if *of_publisher != boot() {
            let reason = "it is the memory of another host".to_owned();
            return Err(WeightsError::Shard { path: path.display().to_string(), reason });
        }
        let (slot, _) = ShmSlot::open(path, true)?;
        Ok(Self { path: path.clone(), slot, threads })
    }

    /// Writes `[n]` weights at `offset`, rounded to the publisher's precision.
    ///
    /// # Errors
    /// A slot that is not being written with `version`; weights outside the slot.
    #[expect(unsafe_code, reason = "the slot is locked for the version")]
    pub fn write(&self, version: PolicyVersion, offset: usize, values: &[f32]) -> Result<(), WeightsError> {
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

/// The number of the running system; `None` where it has none.
fn boot() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()
}
