//! What the buffer shows of its groups and leases. Invariant: plain data, no payloads.

use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion, TaskId};

use crate::LeaseId;

/// Where a group is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupState {
    /// It has a slot, but no token.
    Admitted,
    /// It is being generated, scored or written.
    Claimed,
    /// It can be leased.
    Finalized,
    /// It is leased.
    Leased,
}

/// A group without its payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupEntry {
    /// Its id.
    pub id: GroupId,
    /// Where it is in its life.
    pub state: GroupState,
    /// Its oldest version, or what counts as that while it is in flight.
    pub policy_version: PolicyVersion,
    /// Its task; `None` while it is in flight.
    pub task: Option<TaskId>,
    /// Tokens of all its samples; 0 while it is in flight.
    pub tokens: u64,
    /// Size as it is kept; 0 until it is written.
    pub bytes: u64,
    /// Mean over the trajectories that have a reward.
    pub reward: Option<f64>,
    /// How often it was leased and acknowledged.
    pub uses: u32,
    /// Whether it came with a key rather than by admission.
    pub keyed: bool,
}

/// Which groups to list; what is `None` lets all pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupFilter {
    /// With this oldest version.
    pub policy_version: Option<PolicyVersion>,
    /// With at least this mean reward.
    pub min_reward: Option<f64>,
    /// In this state.
    pub state: Option<GroupState>,
}

/// Some groups of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupPage {
    /// Ascending by id.
    pub groups: Vec<GroupEntry>,
    /// Where to go on; `None` if there are no more. Also a page without groups can have more behind it.
    pub next: Option<GroupId>,
}

/// A lease that is not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseEntry {
    /// Its name.
    pub id: LeaseId,
    /// Who trains.
    pub consumer: String,
    /// The version that the step starts from.
    pub step: PolicyVersion,
    /// Ordered by id.
    pub groups: Vec<GroupId>,
    /// Milliseconds until its hold is over; `None` if it has no hold, or is over.
    pub expires_in_ms: Option<u64>,
    /// Whether its hold is over; it can be taken up again until others have its groups.
    pub expired: bool,
}
