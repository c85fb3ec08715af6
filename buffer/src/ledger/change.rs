//! What the ledger has a store write: narrow rows beside the payloads, leases, and a mark. Invariant: a [`LedgerChange`] is
//! written as a whole or not at all, in the order in which the ledger made it.

use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion, TaskId};

use crate::LeaseId;

/// What the buffer knows of a finalized group without its payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct GroupRow {
    pub(crate) id: GroupId,
    /// The oldest version in the group.
    pub(crate) oldest: PolicyVersion,
    pub(crate) task: TaskId,
    /// Tokens of all its samples.
    pub(crate) tokens: u64,
    /// Size of the payload.
    pub(crate) bytes: u64,
    /// Mean over the trajectories that have a reward.
    pub(crate) reward: Option<f64>,
    /// How often it was leased and acknowledged.
    pub(crate) uses: u32,
    /// With `dedup`: a digest of task and tokens for every trajectory.
    pub(crate) contents: Vec<u128>,
}

/// A lease as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseRow {
    pub(crate) consumer: String,
    pub(crate) step: PolicyVersion,
    /// Whether the consumer named the step, and gets the same groups when it asks again.
    pub(crate) named: bool,
    /// Ordered by id.
    pub(crate) groups: Vec<GroupId>,
    pub(crate) hold_ms: Option<u64>,
    pub(crate) state: LeaseState,
    /// Once it is lost: the latest version of the acknowledgement that was answered with this loss first.
    #[serde(default)]
    pub(crate) named_through: Option<PolicyVersion>,
}

/// Where a lease that is not acknowledged is in its life. A new state needs a new format of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LeaseState {
    Open,
    /// Over its hold: its groups can go to others, and until they do it can be taken up again.
    Expired,
    /// Others have its groups; kept, without them, so that it does not count as acknowledged.
    Lost,
    /// Given back; kept, without its groups, so that it does not count as acknowledged.
    Released,
}

/// What rows cannot say: the ids and steps that left no row. Written with every change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Watermarks {
    /// The lowest id that was never admitted.
    pub(crate) next_id: u64,
    /// The lowest id that no group with a key has had.
    pub(crate) next_keyed: u64,
    /// Ids below `next_id` without a finalized group that are still to be trained on, as first ids and counts.
    pub(crate) pending: Vec<(u64, u64)>,
    pub(crate) next_lease: u64,
    /// The step that leases are for.
    pub(crate) step: PolicyVersion,
    /// Groups that were leased for `step`.
    pub(crate) taken: usize,
    /// The latest version that anybody can have.
    pub(crate) known: PolicyVersion,
    /// How the leases below ended is not remembered.
    #[serde(default)]
    pub(crate) forgotten_leases: u64,
}

impl Watermarks {
    /// `ids` ascending.
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

/// A change of what a store keeps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LedgerChange {
    /// Rows that are different now.
    pub(crate) rows: Vec<GroupRow>,
    /// Groups to forget, payload and row, with their oldest versions.
    pub(crate) forget: Vec<(PolicyVersion, GroupId)>,
    /// Leases that are new or different, or gone.
    pub(crate) leases: Vec<(LeaseId, Option<LeaseRow>)>,
    /// Groups whose keys are forgotten, so that their sender can send them again.
    pub(crate) keys: Vec<GroupId>,
    /// Keys of groups below are forgotten.
    pub(crate) keys_below: Option<GroupId>,
    pub(crate) mark: Watermarks,
}
