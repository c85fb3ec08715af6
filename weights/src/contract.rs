//! What trainer and samplers may ask of a transport, whatever carries the weights. Invariant: no call waits longer than it
//! was told, and one that gives up says for whom it waited.

use std::sync::Arc;
use std::time::Duration;

use trajectory::PolicyVersion;

use crate::{Digest, Snapshot, WeightsError};

/// The side of the trainer.
pub trait Publisher: Send + Sync {
    /// Makes a version visible to all subscribers; the one before is forgotten. A version that was published before is
    /// only compared: a trainer that starts again repeats steps, and repeats them exactly.
    ///
    /// # Errors
    /// A version that is not newer than the last and was not published; the same version with other weights; an
    /// earlier mismatch.
    fn publish(&self, snapshot: Snapshot) -> Result<(), WeightsError>;

    /// The same with a copy of `[parameters]` weights, made straight into the memory that subscribers share.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn publish_values(&self, version: PolicyVersion, values: &[f32]) -> Result<(), WeightsError> {
        self.publish(Snapshot::new(version, values.into()))
    }

    /// Waits up to `wait` until every subscriber that is still there serves `version` or a newer one.
    ///
    /// # Errors
    /// [`WeightsError::NotApplied`], which names who is behind; an earlier mismatch.
    fn wait_applied(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError>;

    /// What every subscriber that is still there serves, in the order of their names.
    ///
    /// # Errors
    /// An earlier mismatch.
    fn lags(&self) -> Result<Vec<Lag>, WeightsError>;
}

/// The side of one sampler. Dropping it unsubscribes.
pub trait Subscriber: Send + Sync {
    /// The newest snapshot if it is newer than `after` (any for `None`); does not wait.
    ///
    /// # Errors
    /// An earlier mismatch; [`WeightsError::PublisherGone`] if nothing newer will ever come.
    fn newest(&self, after: Option<PolicyVersion>) -> Result<Option<Arc<Snapshot>>, WeightsError>;

    /// The newest snapshot as soon as it is newer than `after`; `None` if none came within `wait`.
    ///
    /// # Errors
    /// As [`Subscriber::newest`].
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<Arc<Snapshot>>, WeightsError>;

    /// Reports that this sampler now samples from a version. A receipt that comes before the publisher has digested what
    /// it published is compared later.
    ///
    /// # Errors
    /// [`WeightsError::Mismatch`] if the digest is not that of the version, [`WeightsError::NeverPublished`],
    /// [`WeightsError::WentBack`]; of a sampler in the publisher's process all of them also fail every later call of the
    /// publisher, one in another process is left out.
    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError>;
}

/// A sampler's word that it serves a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The version that it now samples from.
    pub version: PolicyVersion,
    /// The digest of the weights that it now holds, taken from them and not from the snapshot.
    pub digest: Digest,
    /// From the first byte received to the first step with the new weights.
    pub took: Duration,
    /// The part of it in which decoding stood still.
    pub stalled: Duration,
    /// Bytes that were moved to get it there; 0 where memory is shared.
    pub bytes: u64,
}

/// How far a subscriber is behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lag {
    /// Its name.
    pub subscriber: String,
    /// Its last receipt; `None` until it applied a version.
    pub receipt: Option<Receipt>,
    /// Versions between the newest published and the one it serves; all of them before its first receipt.
    pub versions: u64,
}
