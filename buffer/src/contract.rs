//! The contract between rollout and trainer, for a buffer in this process or behind HTTP. Invariant: all arguments
//! and results are ids and plain data that can be sent over a network; nothing refers into a store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trajectory::{Group, GroupId, PolicyVersion};

use crate::BufferError;

/// Publisher side of the buffer: the samplers.
pub trait Producer: Send + Sync {
    /// Admission control: reserves free slots for a sampler. Ids queued for re-admission come first, lowest first.
    /// Waits up to `wait` while no slot is free. Returns an empty list if none became free, which is not an error:
    /// the trainer is behind, or the sampler has not applied its newest version yet.
    ///
    /// # Errors
    /// [`BufferError::FutureVersion`]; a failed buffer.
    fn admit(&self, request: AdmitRequest, wait: Duration) -> Result<Vec<GroupId>, BufferError>;

    /// Admitted to claimed: the sampler is about to sample the first token from version `served`. That version counts
    /// as the oldest of the group until it is finalized, unless it is older than the version at admission. A repeated
    /// claim is a heartbeat: it only extends the hold.
    ///
    /// # Errors
    /// [`BufferError::WrongState`] if the group is not in flight; [`BufferError::FutureVersion`].
    fn claim(&self, group: GroupId, served: PolicyVersion) -> Result<(), BufferError>;

    /// Claimed to finalized. Returns once the group is as durable as the store makes it. Idempotent by id.
    ///
    /// A group whose hold expired is still accepted if no other sampler generated it meanwhile and a slot is free.
    ///
    /// # Errors
    /// A group that no buffer accepts: it has no trajectories, a version from the future, or was never admitted. A
    /// store that cannot write.
    fn finalize(&self, group: Group) -> Result<Finalized, BufferError>;

    /// Frees the slot of a group in flight. With `retry` the group is queued for re-admission, otherwise it is
    /// evicted permanently. In a journal the eviction is durable from the next lease on; after a crash before that, the
    /// group is admitted again.
    ///
    /// # Errors
    /// [`BufferError::WrongState`] if the group is not in flight.
    fn abort(&self, group: GroupId, retry: bool) -> Result<(), BufferError>;

    /// Revokes all groups in flight of the sampler's process `holder`, which has ended or begins anew, and queues them for
    /// re-admission; their number. Where the number of samplers is limited, the id counts as lost for half a minute.
    ///
    /// # Errors
    /// A failed buffer.
    fn abandon(&self, holder: u64) -> Result<usize, BufferError>;

    /// Stores a group without admission, under an idempotency key of the caller. The buffer ignores the id in `group`
    /// and answers the id that it assigned. The group takes a slot when it arrives.
    ///
    /// # Errors
    /// Those of [`Producer::finalize`]; a key that is empty or too long.
    fn submit(&self, key: &str, group: Group) -> Result<Submitted, BufferError>;
}

/// Subscriber side of the buffer: the trainer.
pub trait Consumer: Send + Sync {
    /// Leases groups for a training step, none over the staleness bound, and waits up to `wait` for them. A consumer
    /// that repeats a named step before its acknowledgement gets the same groups in the same order.
    ///
    /// # Errors
    /// [`BufferError::LeaseTimeout`] with the counts that explain it; [`BufferError::StepPassed`] for a step whose
    /// groups are no longer stored; [`BufferError::FutureVersion`] for a step that cannot have begun.
    fn lease(&self, request: &LeaseRequest, wait: Duration) -> Result<Lease, BufferError>;

    /// Extends a lease to `hold` from now (the consumer's heartbeat).
    ///
    /// # Errors
    /// [`BufferError::LeaseLost`] if it expired and its groups were leased again or became stale;
    /// [`BufferError::LeaseOver`] if it was acknowledged or released.
    fn extend(&self, lease: LeaseId, hold: Duration) -> Result<(), BufferError>;

    /// Acknowledges one lease: uses one use of every group and removes the groups without uses left. Idempotent.
    ///
    /// # Errors
    /// [`BufferError::LeaseLost`]; [`BufferError::LeaseOver`] if it was released; a store that cannot write.
    fn ack(&self, lease: LeaseId) -> Result<(), BufferError>;

    /// Acknowledges what `consumer` leased for steps below `through`, because the checkpoint that contains these
    /// steps is on disk (or the run writes none). Groups stay stored until then, so a trainer must call this
    /// regularly. Idempotent.
    ///
    /// # Errors
    /// [`BufferError::LeaseLost`] for the lowest of those leases that was lost; the others are acknowledged. Every
    /// repetition reports it, a later `through` does not. [`BufferError::FutureVersion`] for steps that cannot have
    /// begun, which changes nothing. A store that cannot write.
    fn ack_through(&self, consumer: &str, through: PolicyVersion) -> Result<(), BufferError>;

    /// Returns a lease untrained: its groups can be leased again. Idempotent.
    ///
    /// # Errors
    /// [`BufferError::LeaseLost`]; [`BufferError::LeaseOver`] if it was acknowledged; a store that cannot write.
    fn release(&self, lease: LeaseId) -> Result<(), BufferError>;

    /// Quarantines a stored group that cannot be trained on, permanently: it leaves all leases, its slot is freed, and
    /// an admitted task is generated again. Returns the sender of the group if it is known. Idempotent.
    ///
    /// # Errors
    /// A store that cannot write.
    fn quarantine(&self, group: GroupId) -> Result<Option<String>, BufferError>;

    /// Sets the policy version of the trainer; steps before it are over. With `rewind` the trainer starts from a
    /// checkpoint of that version, which can be older than its leases or much newer. Groups in flight from later
    /// versions are queued for re-admission.
    ///
    /// # Errors
    /// Without `rewind`: [`BufferError::VersionBehind`], and [`BufferError::VersionJump`] for a version that would
    /// put all groups over the staleness bound.
    fn set_version(&self, version: PolicyVersion, rewind: bool) -> Result<(), BufferError>;

    /// Confirms by a durable write that no other process has taken the buffer over. The trainer calls it before it publishes a
    /// version: one that was deposed while it trained must not. Where no other process can do so there is nothing to confirm; a
    /// served buffer is taken over by another server, which its clients do not notice.
    ///
    /// # Errors
    /// [`BufferError::Deposed`]; a store that cannot write.
    fn confirm(&self) -> Result<(), BufferError> {
        Ok(())
    }

    /// Counts of all states.
    ///
    /// # Errors
    /// A failed buffer.
    fn stats(&self) -> Result<Stats, BufferError>;
}

/// Request of a sampler for slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmitRequest {
    /// The policy version that the sampler serves.
    pub served: PolicyVersion,
    /// Maximum number of slots.
    pub limit: usize,
    /// A group that is neither claimed again nor finalized within this time is queued for re-admission; `None`: no
    /// timeout, for samplers in the buffer's process.
    pub hold: Option<Duration>,
    /// Id of the sampler's process. When that process is known to have ended, all its groups in flight are revoked at
    /// once ([`Producer::abandon`]).
    pub holder: Option<u64>,
}

/// Request of a consumer for groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRequest {
    /// Name of the consumer, 1 to [`LeaseRequest::MAX_CONSUMER`] bytes.
    pub consumer: String,
    /// The version that the step starts from; `None`: the buffer's current version, and always a new lease.
    pub step: Option<PolicyVersion>,
    /// Maximum number of groups; `None`: `batch_groups`, or as `tokens` allows.
    pub groups: Option<usize>,
    /// Minimum number of groups that is leased when the wait is over; `None`: `groups`, or 1 if only `tokens` is
    /// given.
    pub at_least: Option<usize>,
    /// Maximum number of tokens in all trajectories together; at least one group is leased.
    pub tokens: Option<u64>,
    /// A stricter staleness bound than the buffer's, versions.
    pub max_staleness: Option<u64>,
    /// The lease expires if it is neither extended nor acknowledged within this time; `None`: never, for a trainer in
    /// the buffer's process.
    pub hold: Option<Duration>,
}

impl LeaseRequest {
    /// Maximum length of a consumer's name, bytes.
    pub const MAX_CONSUMER: usize = 64;

    /// A whole batch for the step that starts from `step`, leased until it is acknowledged.
    #[must_use]
    pub fn step(consumer: impl Into<String>, step: PolicyVersion) -> Self {
        Self {
            consumer: consumer.into(),
            step: Some(step),
            groups: None,
            at_least: None,
            tokens: None,
            max_staleness: None,
            hold: None,
        }
    }
}

/// Id of a lease, unique over the life of a buffer. It is also the fencing token of the lease: after expiry no call
/// with this id succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease {}", self.0)
    }
}

/// Result of a finalized group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finalized {
    /// The group is stored.
    Accepted,
    /// The group, or with `dedup` every trajectory of it, was stored before. It may have been leased, trained or
    /// evicted since, but not dropped untrained. Nothing changed.
    Duplicate,
    /// The group is already over the staleness bound. If it was admitted, its slot is freed and its task is queued
    /// for re-admission.
    Stale,
    /// Back-pressure: the group has no slot, or one for a later version, and none is free; or the buffer is at its
    /// limit of bytes. The sender can retry later, or drop the group: an admitted group is generated again.
    Full,
}

/// Result of a group that was submitted under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submitted {
    /// What the buffer did with it.
    pub answer: Finalized,
    /// Its id, if the buffer has or had it.
    pub group: Option<GroupId>,
}

/// Groups leased for training.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    /// Id of the lease.
    pub id: LeaseId,
    /// Name of the consumer.
    pub consumer: String,
    /// The version that the step starts from.
    pub step: PolicyVersion,
    /// Ordered by id.
    pub groups: Vec<Arc<Group>>,
    /// The lease expires after this time without a call of the consumer.
    pub hold: Option<Duration>,
    /// Groups dropped as stale since the previous lease.
    pub dropped_stale: u64,
}

/// Counts of all states of the buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The policy version of the trainer, as the buffer knows it.
    pub policy_version: PolicyVersion,
    /// Groups with a slot and no token yet.
    pub admitted: usize,
    /// Groups that are being generated, scored or written.
    pub claimed: usize,
    /// Groups that can be leased.
    pub finalized: usize,
    /// Groups leased and not acknowledged.
    pub leased: usize,
    /// Leases not acknowledged.
    pub leases: usize,
    /// Groups queued for re-admission.
    pub again: usize,
    /// Groups dropped as stale since the buffer was opened.
    pub dropped_stale: u64,
    /// Groups evicted since the buffer was opened: aborted without a retry, removed, or used and then over the bound.
    pub evicted: u64,
    /// Leases and admissions that expired since the buffer was opened.
    pub expired: u64,
    /// Groups quarantined since the buffer was opened: they cannot be trained on.
    pub quarantined: u64,
    /// Versions between the oldest unleased group and the next step; 0 if there is none.
    pub oldest_age: u64,
    /// The oldest groups not yet finalized, with the version that they count from; at most
    /// [`Stats::NAMED_IN_FLIGHT`].
    pub oldest_in_flight: Vec<(GroupId, PolicyVersion)>,
    /// Groups per training step.
    pub batch_groups: usize,
    /// Maximum number of versions between the oldest token of a group and the step that trains on it.
    pub max_staleness: u64,
    /// Number of slots.
    pub slots: usize,
    /// Slots free for a sampler that serves `next_step`.
    pub slots_free: usize,
    /// Bytes of all stored groups.
    pub bytes: u64,
    /// Maximum number of bytes stored.
    pub max_bytes: u64,
    /// The lowest id that was never admitted.
    pub next_id: GroupId,
    /// The step that a full batch would be leased for now.
    pub next_step: PolicyVersion,
}

impl Stats {
    /// Number of groups in flight that [`Stats::oldest_in_flight`] lists.
    pub const NAMED_IN_FLIGHT: usize = 4;
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            admitted, claimed, finalized, again, slots, slots_free, next_step, bytes, max_bytes, ..
        } = self;
        write!(
            f,
            "{finalized} groups finalized, {claimed} claimed, {admitted} admitted, {again} to be done again; \
             {slots_free} of {slots} slots free for a sampler that serves {next_step}"
        )?;
        if bytes >= max_bytes {
            write!(f, "; full: {bytes} bytes of groups, {max_bytes} are allowed")?;
        }
        if self.quarantined > 0 {
            write!(f, "; {} set aside because they cannot be trained on", self.quarantined)?;
        }
        write!(f, "; oldest in flight: ")?;
        if self.oldest_in_flight.is_empty() {
            return write!(f, "none");
        }
        for (n, (group, version)) in self.oldest_in_flight.iter().enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            write!(f, "{comma}{group} since {version}")?;
        }
        Ok(())
    }
}
