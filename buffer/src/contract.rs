//! What rollout and trainer may ask of a buffer, wherever it runs. Invariant: everything here is ids and plain data
//! that could go over a wire; nothing refers into a store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trajectory::{Group, GroupId, PolicyVersion};

use crate::BufferError;

/// The side of the samplers.
pub trait Producer: Send + Sync {
    /// Takes free slots for a sampler; ids that are to be generated again come first, lowest first. Waits up to `wait`
    /// while no slot is free; empty if none became free, which is not an error: the trainer is behind, or the sampler
    /// has yet to apply its newest version.
    ///
    /// # Errors
    /// [`BufferError::FutureVersion`]; a buffer that has failed.
    fn admit(&self, request: AdmitRequest, wait: Duration) -> Result<Vec<GroupId>, BufferError>;

    /// Admitted to claimed: `served` is about to sample the first token. It counts as the oldest version of the
    /// group until that is finalized, unless it is older than at admission. Claimed again, the group is only held anew.
    ///
    /// # Errors
    /// [`BufferError::WrongState`] if the group is not in flight; [`BufferError::FutureVersion`].
    fn claim(&self, group: GroupId, served: PolicyVersion) -> Result<(), BufferError>;

    /// Claimed to finalized; returns when the group is as durable as the store makes it. Idempotent by id.
    ///
    /// A group whose hold is over is still taken, if nobody generated it meanwhile and a slot is free.
    ///
    /// # Errors
    /// A group that no buffer can take, because it has no trajectories, comes from the future or was never admitted; a
    /// store that cannot write.
    fn finalize(&self, group: Group) -> Result<Finalized, BufferError>;

    /// Gives the slot of a group in flight back. With `retry` the group goes first in line again, otherwise it is
    /// evicted for good; in a journal an eviction lasts from the next lease on, and a crash before repeats it.
    ///
    /// # Errors
    /// [`BufferError::WrongState`] if the group is not in flight.
    fn abort(&self, group: GroupId, retry: bool) -> Result<(), BufferError>;

    /// Stores a group that nobody admitted under a key of the caller's; idempotent by key. The id in `group` is
    /// ignored, the answer has the one that the buffer gave it. The group takes a slot when it arrives.
    ///
    /// # Errors
    /// Those of [`Producer::finalize`]; a key that is empty or too long.
    fn submit(&self, key: &str, group: Group) -> Result<Submitted, BufferError>;
}

/// The side of the trainer.
pub trait Consumer: Send + Sync {
    /// Hands out groups for a training step, none over the bound, and waits up to `wait` for them. A named step that the
    /// consumer has leased and not acknowledged gets the same groups in the same order.
    ///
    /// # Errors
    /// [`BufferError::LeaseTimeout`], which says who waits for whom; [`BufferError::StepPassed`] for a step whose
    /// groups are gone; [`BufferError::FutureVersion`] for one that cannot have begun.
    fn lease(&self, request: &LeaseRequest, wait: Duration) -> Result<Lease, BufferError>;

    /// Holds a lease for `hold` from now on.
    ///
    /// # Errors
    /// [`BufferError::LeaseLost`] if it is over and its groups have gone to others or out of the bound;
    /// [`BufferError::LeaseOver`] if it was acknowledged or released.
    fn extend(&self, lease: LeaseId, hold: Duration) -> Result<(), BufferError>;

    /// Done with one lease: every group has one use less, and is forgotten after its last. Idempotent.
    ///
    /// # Errors
    /// [`BufferError::LeaseLost`]; [`BufferError::LeaseOver`] if it was released; a store that cannot write.
    fn ack(&self, lease: LeaseId) -> Result<(), BufferError>;

    /// The checkpoint that contains every step below `through` is on disk (or the run keeps none): acknowledges what
    /// `consumer` leased for those steps. Until then it is kept, so whoever trains has to call this now and then.
    /// Idempotent.
    ///
    /// # Errors
    /// [`BufferError::LeaseLost`] for the lowest of those leases that was lost, the others being acknowledged; for every
    /// repetition, but not for a later `through`. [`BufferError::FutureVersion`] for steps that cannot have begun, which
    /// changes nothing; a store that cannot write.
    fn ack_through(&self, consumer: &str, through: PolicyVersion) -> Result<(), BufferError>;

    /// Gives a lease back untrained: its groups can be leased again. Idempotent.
    ///
    /// # Errors
    /// [`BufferError::LeaseLost`]; [`BufferError::LeaseOver`] if it was acknowledged; a store that cannot write.
    fn release(&self, lease: LeaseId) -> Result<(), BufferError>;

    /// Sets a stored group aside that cannot be trained on, for good: no lease has it any more, its slot is free, and its
    /// task is generated again if it was admitted. Returns who sent it, as far as that is known. Idempotent.
    ///
    /// # Errors
    /// A store that cannot write.
    fn quarantine(&self, group: GroupId) -> Result<Option<String>, BufferError>;

    /// The trainer has made `version`: steps before it are over. With `rewind` it starts from a checkpoint of that version,
    /// which can be an older one than its leases or a much later one; what is in flight from later versions goes first in
    /// line again.
    ///
    /// # Errors
    /// Without `rewind`, [`BufferError::VersionBehind`], and [`BufferError::VersionJump`] for a version that would put all
    /// groups over the bound.
    fn set_version(&self, version: PolicyVersion, rewind: bool) -> Result<(), BufferError>;

    /// Counts of everything in the buffer.
    ///
    /// # Errors
    /// Only if the buffer itself has failed.
    fn stats(&self) -> Result<Stats, BufferError>;
}

/// A sampler asks for slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmitRequest {
    /// The version that the sampler serves.
    pub served: PolicyVersion,
    /// Most slots.
    pub limit: usize,
    /// A group that is neither claimed again nor finalized for so long goes first in line again; `None`: never, for
    /// samplers that end with the buffer.
    pub hold: Option<Duration>,
    /// Who asks: what it has in flight can be taken from it at once when it is known to be gone
    /// ([`Buffer::abandon`](crate::Buffer::abandon)).
    pub holder: Option<u64>,
}

/// A consumer asks for groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRequest {
    /// Who trains, 1 to [`LeaseRequest::MAX_CONSUMER`] bytes.
    pub consumer: String,
    /// The version that the step starts from; `None`: the version that the buffer knows of, and always a new lease.
    pub step: Option<PolicyVersion>,
    /// Most groups; `None`: `batch_groups`, or what `tokens` allows.
    pub groups: Option<usize>,
    /// Fewer groups than asked for are handed out when the wait is over, but not fewer than this; `None`: `groups`, or
    /// 1 if only `tokens` is given.
    pub at_least: Option<usize>,
    /// Most tokens in all trajectories together, though at least one group.
    pub tokens: Option<u64>,
    /// A stricter bound than the buffer's, versions.
    pub max_staleness: Option<u64>,
    /// The groups go back if the lease is not extended or acknowledged for so long; `None`: never, for a trainer that
    /// ends with the buffer.
    pub hold: Option<Duration>,
}

impl LeaseRequest {
    /// Longest name of a consumer, bytes.
    pub const MAX_CONSUMER: usize = 64;

    /// A whole batch for the step that starts from `step`, held until it is acknowledged.
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

/// Name of a lease, unique in a buffer for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease {}", self.0)
    }
}

/// What became of a group that was finalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finalized {
    /// It is stored.
    Accepted,
    /// It, or with `dedup` every trajectory of it, was stored before (and perhaps leased, trained or evicted since, but not
    /// dropped untrained); nothing changed.
    Duplicate,
    /// It is over the bound already. If it was admitted, its slot is free and its task first in line again.
    Stale,
    /// There is no room: it holds no slot, or one for a later version, and none is free, or the buffer holds as many bytes as it may. It can be tried
    /// again later, or thrown away: an admitted group is generated again.
    Full,
}

/// A group that came with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submitted {
    /// What became of it.
    pub answer: Finalized,
    /// Its id, if the buffer has or had it.
    pub group: Option<GroupId>,
}

/// Groups that a consumer trains on.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    /// Its name.
    pub id: LeaseId,
    /// Who trains.
    pub consumer: String,
    /// The version that the step starts from.
    pub step: PolicyVersion,
    /// Ordered by id.
    pub groups: Vec<Arc<Group>>,
    /// How long it is held without a sign of the consumer.
    pub hold: Option<Duration>,
    /// Groups over the bound that were dropped since the lease before.
    pub dropped_stale: u64,
}

/// What is in the buffer, and who waits for whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The version that the buffer knows the trainer to have.
    pub policy_version: PolicyVersion,
    /// Groups that have a slot but no token.
    pub admitted: usize,
    /// Groups that are being generated, scored or written.
    pub claimed: usize,
    /// Groups that can be leased.
    pub finalized: usize,
    /// Groups leased and not acknowledged.
    pub leased: usize,
    /// Leases not acknowledged.
    pub leases: usize,
    /// Groups first in line to be generated again.
    pub again: usize,
    /// Groups dropped because they were over the bound, since the buffer was opened.
    pub dropped_stale: u64,
    /// Groups evicted since the buffer was opened: aborted for good, removed, or used and then over the bound.
    pub evicted: u64,
    /// Leases and admissions whose hold was over, since the buffer was opened.
    pub expired: u64,
    /// Groups set aside because they cannot be trained on, since the buffer was opened.
    pub quarantined: u64,
    /// Versions between the oldest group that is not leased and the next step; 0 if there is none.
    pub oldest_age: u64,
    /// The oldest groups not yet finalized with the version that they count from; at most
    /// [`Stats::NAMED_IN_FLIGHT`].
    pub oldest_in_flight: Vec<(GroupId, PolicyVersion)>,
    /// Groups per training step.
    pub batch_groups: usize,
    /// Most versions between the oldest token of a group and the step that trains on it.
    pub max_staleness: u64,
    /// Slots in all.
    pub slots: usize,
    /// Slots free for a sampler that serves `next_step`.
    pub slots_free: usize,
    /// Bytes of all groups that are kept.
    pub bytes: u64,
    /// Most bytes that may be kept.
    pub max_bytes: u64,
    /// The lowest id that was never admitted.
    pub next_id: GroupId,
    /// The step that a full batch would be leased for now.
    pub next_step: PolicyVersion,
}

impl Stats {
    /// How many groups in flight are named.
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
