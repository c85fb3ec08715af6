//! The records that a store keeps beside the payloads: rows, leases, watermarks. Invariant: a [`LedgerChange`] is written as a
//! whole or not at all, in the order in which the ledger made it.

use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion, TaskId};

use crate::LeaseId;

/// The record of a finalized group, without its payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupRow {
    /// Its id.
    pub id: GroupId,
    /// The oldest version in the group.
    pub oldest: PolicyVersion,
    /// Its task.
    pub task: TaskId,
    /// Number of tokens of all its samples.
    pub tokens: u64,
    /// Bytes of the payload.
    pub bytes: u64,
    /// Mean reward over the trajectories that have one.
    pub reward: Option<f64>,
    /// Number of acknowledged leases.
    pub uses: u32,
    /// With `dedup`: a digest of task and tokens of every trajectory.
    pub contents: Vec<u128>,
}

/// The record of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRow {
    /// Name of the consumer.
    pub consumer: String,
    /// The version that the step starts from.
    pub step: PolicyVersion,
    /// Whether the consumer named the step: a repeated request then gets the same groups.
    pub named: bool,
    /// Sorted by id.
    pub groups: Vec<GroupId>,
    /// It expires after this time without a call of the consumer, milliseconds; `None`: never.
    pub hold_ms: Option<u64>,
    /// Its state.
    pub state: LeaseState,
    /// Once it is lost: the version of the first acknowledgement that reported the loss.
    #[serde(default)]
    pub named_through: Option<PolicyVersion>,
}

/// State of a lease that is not acknowledged. A new state needs a new format of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseState {
    /// Leased.
    Open,
    /// Its hold expired: its groups can be leased again, and until they are it can be extended.
    Expired,
    /// Its groups were leased again. The record stays, without groups, because the lease was not acknowledged.
    Lost,
    /// Returned untrained. The record stays, without groups, because the lease was not acknowledged.
    Released,
}

/// High-water marks of ids and steps, which no row contains. Written with every change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watermarks {
    /// The lowest id that was never admitted.
    pub next_id: u64,
    /// The lowest id that was not yet assigned to a group with an idempotency key.
    pub next_keyed: u64,
    /// Ids below `next_id` that are still to be generated, as (first id, count).
    pub pending: Vec<(u64, u64)>,
    /// The lowest lease id that was not yet issued.
    pub next_lease: u64,
    /// The step that leases are for.
    pub step: PolicyVersion,
    /// Number of groups leased for `step`.
    pub taken: usize,
    /// The newest version that can exist.
    pub known: PolicyVersion,
    /// Lease ids below have no record any more; they count as lost.
    #[serde(default)]
    pub forgotten_leases: u64,
}

impl Watermarks {
    /// Ascending `ids` as ranges.
    pub(crate) fn ranges(ids: impl Iterator<Item = GroupId>) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for GroupId(id) in ids {
            match ranges.last_mut() {
                Some((first, count)) if *first + *count == id => *count += 1,
                _ => ranges.push((id, 1)),
            }
        }
        ranges
    }

    pub(crate) fn pending(&self) -> impl Iterator<Item = GroupId> + '_ {
        self.pending.iter().flat_map(|&(first, count)| first..first.saturating_add(count)).map(GroupId)
    }
}

/// One atomic change of the records of a store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LedgerChange {
    /// Rows that changed; their payloads stay.
    pub rows: Vec<GroupRow>,
    /// Groups to remove, payload and row, with their oldest versions.
    pub forget: Vec<(PolicyVersion, GroupId)>,
    /// Leases that are new or changed, or `None` for one to remove.
    pub leases: Vec<(LeaseId, Option<LeaseRow>)>,
    /// Groups whose idempotency keys are removed, so that their sender can submit them again.
    pub keys: Vec<GroupId>,
    /// Keys of all groups with a lower id are removed.
    pub keys_below: Option<GroupId>,
    /// The watermarks after this change.
    pub watermarks: Watermarks,
}
