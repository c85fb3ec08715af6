//! The contract between trainer and samplers, for every transport. Invariant: no call waits longer than its deadline,
//! and a call that gives up names the subscribers that it waited for.

use std::sync::Arc;
use std::time::Duration;

use trajectory::PolicyVersion;

use crate::{
    Digest, OwnedWeights, Snapshot, Values, WeightAdapter, WeightMemory, WeightsError, WritableSlot,
};

/// Publisher side: the trainer.
pub trait Publisher: Send + Sync {
    /// Publishes a version to all subscribers and drops the previous one. A version that was published before is only
    /// compared: a restarted trainer repeats steps exactly.
    ///
    /// # Errors
    /// A version that is not newer than the last and was not published; the same version with other weights; an
    /// earlier mismatch.
    fn publish(&self, snapshot: Snapshot) -> Result<(), WeightsError>;

    /// The same with a copy of `[parameters]` weights, made directly in the memory that subscribers share.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn publish_values(&self, version: PolicyVersion, values: &[f32]) -> Result<(), WeightsError> {
        self.publish(Snapshot::new(version, values.into()))
    }

    /// The same with weights that subscribers may read where they are, if the transport allows it; otherwise with a copy. An
    /// owner that wants to change them copies them first if [`Publisher::drop_taken`] has left other references.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn publish_shared(
        &self,
        version: PolicyVersion,
        owner: Arc<dyn WeightMemory>,
    ) -> Result<(), WeightsError> {
        self.publish_values(version, owner.values())
    }

    /// The same with a copy of what each of `owners` has of the weights, into which `adapter` is merged: no one else has all of them
    /// ([`Values::copied`]).
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    ///
    /// # Panics
    /// If a weight has two owners or none.
    fn publish_owned(
        &self,
        version: PolicyVersion,
        owners: Vec<OwnedWeights<'_>>,
        adapter: Option<Arc<dyn WeightAdapter>>,
    ) -> Result<(), WeightsError> {
        self.publish(Snapshot::new(version, Values::copied(owners)).with_adapter(adapter))
    }

    /// Begins a version of `parameters` weights that their owners write, each its own, also those in other processes of this host
    /// ([`ShardOwner::open`](crate::ShardOwner::open)). No subscriber sees it before [`Publisher::commit`]. `None` if subscribers
    /// read from no memory that other processes can write.
    ///
    /// # Errors
    /// Not enough memory; an earlier mismatch.
    fn begin(&self, version: PolicyVersion, parameters: usize) -> Result<Option<WritableSlot>, WeightsError>;

    /// Publishes the version in progress, into which `adapter` is merged, once all owners have written their weights.
    ///
    /// # Errors
    /// A version that is not in progress; as [`Publisher::publish`].
    fn commit(
        &self,
        version: PolicyVersion,
        adapter: Option<Arc<dyn WeightAdapter>>,
    ) -> Result<(), WeightsError>;

    /// Drops the reference to the newest weights if all subscribers, present and future, need it no more.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    fn drop_taken(&self) -> Result<(), WeightsError> {
        Ok(())
    }

    /// Waits up to `wait` until every live subscriber serves `version` or a newer one.
    ///
    /// # Errors
    /// [`WeightsError::NotApplied`], which names the late subscribers; an earlier mismatch.
    fn wait_applied(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError>;

    /// The served version of every live subscriber, sorted by name.
    ///
    /// # Errors
    /// An earlier mismatch.
    fn lags(&self) -> Result<Vec<Lag>, WeightsError>;
}

/// Subscriber side: one sampler. Dropping it unsubscribes.
pub trait Subscriber: Send + Sync {
    /// The newest snapshot if it is newer than `after` (any for `None`); does not wait.
    ///
    /// # Errors
    /// An earlier mismatch; [`WeightsError::PublisherGone`] if nothing newer will ever come.
    fn newest(&self, after: Option<PolicyVersion>) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        self.wait_newer(after, Duration::ZERO)
    }

    /// The newest snapshot as soon as it is newer than `after`; `None` if none came within `wait`.
    ///
    /// # Errors
    /// As [`Subscriber::newest`].
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<Arc<Snapshot>>, WeightsError>;

    /// Reports with a receipt that this sampler samples from a version. A receipt that arrives before the publisher
    /// has computed the digest is compared later.
    ///
    /// # Errors
    /// [`WeightsError::Mismatch`] if the digest is not that of the version, [`WeightsError::NeverPublished`],
    /// [`WeightsError::WentBack`]. For a sampler in the publisher's process these errors also fail every later call
    /// of the publisher; a sampler in another process is rejected.
    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError>;
}

/// A sampler's report that it serves a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The version that it now samples from.
    pub version: PolicyVersion,
    /// The digest of the weights that it now has, computed from them and not copied from the snapshot.
    pub digest: Digest,
    /// From the first byte received to the first step with the new weights.
    pub took: Duration,
    /// The part of it in which decoding was stopped.
    pub stalled: Duration,
    /// Bytes transferred; 0 where memory is shared.
    pub bytes: u64,
    /// Bytes that the ranks of the sampler took from the version, each its shard, all together; 0 for a sampler of one rank.
    pub taken: u64,
}

/// Lag of a subscriber.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lag {
    /// Its name.
    pub subscriber: String,
    /// Its last receipt; `None` until it applied a version.
    pub receipt: Option<Receipt>,
    /// Number of versions between the newest published and the one it serves; all of them before its first receipt.
    pub versions: u64,
}
