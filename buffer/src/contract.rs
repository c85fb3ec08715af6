//! What rollout and trainer may ask of a buffer, wherever it runs. Invariant: everything here is ids and plain data
//! that could go over a wire; nothing refers into a store.

use std::sync::Arc;
use std::time::Duration;

use trajectory::{Group, GroupId, PolicyVersion};

use crate::BufferError;

/// The side of the samplers.
pub trait Producer: Send + Sync {
    /// Takes up to `limit` slots for a sampler that serves `served`; ids that are to be generated again come first,
    /// lowest first. Waits up to `wait` while no slot is free; empty if none became free, which is not an error: the
    /// trainer is behind, or the sampler has yet to apply its newest version.
    ///
    /// # Errors
    /// Only if the buffer itself has failed.
    fn admit(&self, served: PolicyVersion, limit: usize, wait: Duration)
    -> Result<Vec<GroupId>, BufferError>;

    /// Admitted to claimed: `served` is about to sample the first token. It counts as the oldest version of the
    /// group until that is finalized.
    ///
    /// # Errors
    /// [`BufferError::WrongState`] if the group is not admitted.
    fn claim(&self, group: GroupId, served: PolicyVersion) -> Result<(), BufferError>;

    /// Claimed to finalized; returns when the group is as durable as the store makes it. Idempotent by id.
    ///
    /// # Errors
    /// A group without trajectories; a store that cannot write.
    fn finalize(&self, group: Group) -> Result<Finalized, BufferError>;

    /// Gives the slot of a group in flight back. With `retry` the group goes first in line again, otherwise it is
    /// evicted for good; in a journal an eviction lasts from the next lease on, and a crash before repeats it.
    ///
    /// # Errors
    /// [`BufferError::WrongState`] if the group is not in flight.
    fn abort(&self, group: GroupId, retry: bool) -> Result<(), BufferError>;
}

/// The side of the trainer.
pub trait Consumer: Send + Sync {
    /// The batch for the training step that starts from version `step`: the same groups in the same order if the step
    /// was leased before, otherwise `batch_groups` finalized ones, oldest first, none over the bound. Waits up to
    /// `wait`.
    ///
    /// Leasing the step `v` says that all steps before are done. A resumed trainer first acknowledges the version
    /// of its checkpoint.
    ///
    /// # Errors
    /// [`BufferError::LeaseTimeout`], which says who waits for whom; [`BufferError::StepPassed`] for a step whose
    /// groups are gone.
    fn lease(&self, step: PolicyVersion, wait: Duration) -> Result<Lease, BufferError>;

    /// The checkpoint that contains every step below `through` is on disk (or the run keeps none): forgets their
    /// groups. Until then they are kept, so whoever trains has to call this now and then. Idempotent.
    ///
    /// # Errors
    /// A store that cannot write.
    fn ack(&self, through: PolicyVersion) -> Result<(), BufferError>;

    /// Gives the newest lease back untrained: its groups are finalized again.
    ///
    /// # Errors
    /// [`BufferError::NotNewestLease`] for any other step.
    fn release(&self, step: PolicyVersion) -> Result<(), BufferError>;

    /// Counts of everything in the buffer.
    ///
    /// # Errors
    /// Only if the buffer itself has failed.
    fn stats(&self) -> Result<Stats, BufferError>;
}

/// What became of a group that was finalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finalized {
    /// It is stored.
    Accepted,
    /// It was stored before (and perhaps leased, trained or evicted since); nothing changed.
    Duplicate,
    /// It holds no slot: it was aborted, dropped or in flight over a restart of the buffer, and will be admitted
    /// again. Discard it.
    Refused,
}

/// The batch of one training step.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    /// The step: it starts from this version.
    pub step: PolicyVersion,
    /// Ordered by id.
    pub groups: Vec<Arc<Group>>,
    /// Groups over the bound that were dropped while the batch was put together.
    pub dropped_stale: u64,
}

/// What is in the buffer, and who waits for whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Groups that have a slot but no token.
    pub admitted: usize,
    /// Groups that are being generated, scored or written.
    pub claimed: usize,
    /// Groups that can be leased.
    pub finalized: usize,
    /// Groups leased and not acknowledged.
    pub leased: usize,
    /// Groups first in line to be generated again.
    pub again: usize,
    /// Groups dropped because they were over the bound, since the buffer was opened.
    pub dropped_stale: u64,
    /// Groups aborted for good since the buffer was opened.
    pub evicted: u64,
    /// Versions between the oldest group that is not leased and the next step; 0 if there is none.
    pub oldest_age: u64,
    /// The oldest groups not yet finalized with the version that they count from; at most
    /// [`Stats::NAMED_IN_FLIGHT`].
    pub oldest_in_flight: Vec<(GroupId, PolicyVersion)>,
    /// Slots in all.
    pub slots: usize,
    /// Slots free for a sampler that serves `next_step`.
    pub slots_free: usize,
    /// The lowest id that was never admitted.
    pub next_id: GroupId,
    /// The lowest step that was never leased.
    pub next_step: PolicyVersion,
}

impl Stats {
    /// How many groups in flight are named.
    pub const NAMED_IN_FLIGHT: usize = 4;
}

impl std::fmt::Display for Stats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { admitted, claimed, finalized, again, slots, slots_free, next_step, .. } = self;
        write!(
            f,
            "{finalized} groups finalized, {claimed} claimed, {admitted} admitted, {again} to be done again; \
             {slots_free} of {slots} slots free for a sampler that serves {next_step}; oldest in flight: "
        )?;
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
