//! Views of groups and leases for inspection. Invariant: plain data, no payloads.

use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion, TaskId};

use crate::LeaseId;

/// State of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupState {
    /// It has a slot and no token yet.
    Admitted,
    /// It is being generated, scored or written.
    Claimed,
    /// It can be leased.
    Finalized,
    /// It is in an open lease.
    Leased,
}

/// A group without its payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupEntry {
    /// Its id.
    pub id: GroupId,
    /// Its state.
    pub state: GroupState,
    /// Its oldest version; while it is in flight, the version that counts as the oldest.
    pub policy_version: PolicyVersion,
    /// Its task; `None` while it is in flight.
    pub task: Option<TaskId>,
    /// Tokens of all its samples; 0 while it is in flight.
    pub tokens: u64,
    /// Bytes of the encoded payload; 0 until it is written.
    pub bytes: u64,
    /// Mean over the trajectories that have a reward.
    pub reward: Option<f64>,
    /// Number of acknowledged leases.
    pub uses: u32,
    /// Whether it came under an idempotency key instead of an admission.
    pub keyed: bool,
    /// Milliseconds since it got its slot; for a group of an earlier process, since the buffer was opened.
    pub age_ms: u64,
}

/// Filter of a list; a `None` field matches all groups.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupFilter {
    /// With this oldest version.
    pub policy_version: Option<PolicyVersion>,
    /// With at least this mean reward.
    pub min_reward: Option<f64>,
    /// In this state.
    pub state: Option<GroupState>,
}

/// A page of a list of groups.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupPage {
    /// Ascending by id.
    pub groups: Vec<GroupEntry>,
    /// Cursor of the next page; `None` at the end. A page without groups can have a next page.
    pub next: Option<GroupId>,
}

/// A lease that is not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseEntry {
    /// Its id.
    pub id: LeaseId,
    /// Name of the consumer.
    pub consumer: String,
    /// The version that the step starts from.
    pub step: PolicyVersion,
    /// Ordered by id.
    pub groups: Vec<GroupId>,
    /// Milliseconds until it expires; `None` without a hold, or once it has expired.
    pub expires_in_ms: Option<u64>,
    /// Whether it has expired. An expired lease can be extended until its groups are leased again.
    pub expired: bool,
}
