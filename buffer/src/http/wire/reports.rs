//! Answers about the state of the buffer. Invariant: field names are stable when the internal names change.

use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion};
use utoipa::ToSchema;

use super::group::GroupView;
use crate::{Event, EventKind, GroupEntry, GroupState, LeaseEntry, Stats};

/// State of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = State)]
pub(crate) enum GroupStateBody {
    Admitted,
    Claimed,
    Finalized,
    Leased,
}

impl From<GroupState> for GroupStateBody {
    fn from(state: GroupState) -> Self {
        match state {
            GroupState::Admitted => Self::Admitted,
            GroupState::Claimed => Self::Claimed,
            GroupState::Finalized => Self::Finalized,
            GroupState::Leased => Self::Leased,
        }
    }
}

impl From<GroupStateBody> for GroupState {
    fn from(state: GroupStateBody) -> Self {
        match state {
            GroupStateBody::Admitted => Self::Admitted,
            GroupStateBody::Claimed => Self::Claimed,
            GroupStateBody::Finalized => Self::Finalized,
            GroupStateBody::Leased => Self::Leased,
        }
    }
}

/// A group without its tokens.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = GroupEntry)]
pub(crate) struct EntryBody {
    id: u64,
    state: GroupStateBody,
    /// Its oldest version; before it is stored, the version that counts as the oldest.
    policy_version: u64,
    /// Row number in the dataset; none before it is stored.
    task: Option<u64>,
    /// Tokens of all trajectories; 0 before it is stored.
    tokens: u64,
    /// Stored bytes; 0 before it is stored.
    bytes: u64,
    /// Mean reward over the trajectories that have one.
    reward: Option<f64>,
    /// Number of acknowledged leases.
    uses: u32,
    /// Whether it was submitted under an idempotency key.
    keyed: bool,
    /// Milliseconds since it got its slot; for a group of an earlier process, since the buffer was opened.
    age_ms: u64,
}

impl From<&GroupEntry> for EntryBody {
    fn from(entry: &GroupEntry) -> Self {
        Self {
            id: entry.id.0,
            state: entry.state.into(),
            policy_version: entry.policy_version.0,
            task: entry.task.map(|task| task.0),
            tokens: entry.tokens,
            bytes: entry.bytes,
            reward: entry.reward,
            uses: entry.uses,
            keyed: entry.keyed,
            age_ms: entry.age_ms,
        }
    }
}

/// One page of groups, ordered by id.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupsAnswer {
    pub(crate) groups: Vec<EntryBody>,
    /// Cursor of the next page; none: this is the last page.
    pub(crate) next_cursor: Option<String>,
}

/// One group.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = GroupAnswer)]
pub(crate) struct GroupAnswerView<'a> {
    pub(crate) entry: EntryBody,
    /// Its tokens, once it is stored.
    pub(crate) group: Option<GroupView<'a>>,
}

/// Number of evicted groups.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Evicted {
    pub(crate) evicted: u64,
}

/// A quarantined group.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Quarantined)]
pub(crate) struct QuarantinedBody {
    /// False if it is not stored, for example because it was quarantined before.
    pub(crate) quarantined: bool,
    /// Its sender, if it is known.
    pub(crate) sender: Option<String>,
}

/// A lease that is not acknowledged.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LeaseEntry)]
pub(crate) struct LeaseEntryBody {
    id: u64,
    consumer: String,
    /// The version that the step starts from.
    step: u64,
    groups: Vec<u64>,
    /// None: it never expires.
    expires_in_ms: Option<u64>,
    /// Whether it has expired; it can be resumed until its groups are leased again.
    expired: bool,
}

impl From<LeaseEntry> for LeaseEntryBody {
    fn from(entry: LeaseEntry) -> Self {
        Self {
            id: entry.id.0,
            consumer: entry.consumer,
            step: entry.step.0,
            groups: ids(&entry.groups),
            expires_in_ms: entry.expires_in_ms,
            expired: entry.expired,
        }
    }
}

/// Leases that are not acknowledged, ordered by id.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LeasesAnswer {
    pub(crate) leases: Vec<LeaseEntryBody>,
}

/// Counts of all states.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Stats)]
pub(crate) struct StatsBody {
    /// The policy version of the trainer.
    policy_version: u64,
    /// Groups with a slot and no token yet.
    admitted: usize,
    /// Groups that are being generated, scored or written.
    claimed: usize,
    /// Groups that can be leased.
    finalized: usize,
    /// Groups leased and not acknowledged.
    leased: usize,
    /// Leases not acknowledged.
    leases: usize,
    /// Groups queued for re-admission.
    again: usize,
    /// Groups dropped as stale since the buffer was opened.
    dropped_stale: u64,
    /// Groups aborted for good or evicted since the buffer was opened.
    evicted: u64,
    /// Leases and admissions that expired since the buffer was opened.
    expired: u64,
    /// Groups quarantined since the buffer was opened: they cannot be trained on.
    #[serde(default)]
    quarantined: u64,
    /// Versions between the oldest unleased group and the next step.
    oldest_age: u64,
    /// The oldest groups not yet stored, with the version that they count from; at most 4.
    oldest_in_flight: Vec<InFlightBody>,
    /// Groups per training step.
    batch_groups: usize,
    /// Maximum number of versions between the oldest token of a group and the step that trains on it.
    max_staleness: u64,
    /// Number of slots.
    slots: usize,
    /// Slots free for a sampler that serves `next_step`.
    slots_free: usize,
    /// Bytes of all stored groups.
    bytes: u64,
    /// Maximum number of bytes stored.
    max_bytes: u64,
    /// The lowest id that was never admitted.
    next_id: u64,
    /// The step that a full batch would be leased for now.
    next_step: u64,
}

/// A group not yet stored.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = InFlight)]
struct InFlightBody {
    id: u64,
    /// The version that it counts from.
    since: u64,
}

impl From<&Stats> for StatsBody {
    fn from(stats: &Stats) -> Self {
        let in_flight = |(id, since): &(GroupId, PolicyVersion)| InFlightBody { id: id.0, since: since.0 };
        Self {
            policy_version: stats.policy_version.0,
            admitted: stats.admitted,
            claimed: stats.claimed,
            finalized: stats.finalized,
            leased: stats.leased,
            leases: stats.leases,
            again: stats.again,
            dropped_stale: stats.dropped_stale,
            evicted: stats.evicted,
            expired: stats.expired,
            quarantined: stats.quarantined,
            oldest_age: stats.oldest_age,
            oldest_in_flight: stats.oldest_in_flight.iter().map(in_flight).collect(),
            batch_groups: stats.batch_groups,
            max_staleness: stats.max_staleness,
            slots: stats.slots,
            slots_free: stats.slots_free,
            bytes: stats.bytes,
            max_bytes: stats.max_bytes,
            next_id: stats.next_id.0,
            next_step: stats.next_step.0,
        }
    }
}

impl From<StatsBody> for Stats {
    fn from(stats: StatsBody) -> Self {
        let in_flight = |group: &InFlightBody| (GroupId(group.id), PolicyVersion(group.since));
        Self {
            policy_version: PolicyVersion(stats.policy_version),
            admitted: stats.admitted,
            claimed: stats.claimed,
            finalized: stats.finalized,
            leased: stats.leased,
            leases: stats.leases,
            again: stats.again,
            dropped_stale: stats.dropped_stale,
            evicted: stats.evicted,
            expired: stats.expired,
            quarantined: stats.quarantined,
            oldest_age: stats.oldest_age,
            oldest_in_flight: stats.oldest_in_flight.iter().map(in_flight).collect(),
            batch_groups: stats.batch_groups,
            max_staleness: stats.max_staleness,
            slots: stats.slots,
            slots_free: stats.slots_free,
            bytes: stats.bytes,
            max_bytes: stats.max_bytes,
            next_id: GroupId(stats.next_id),
            next_step: PolicyVersion(stats.next_step),
        }
    }
}

/// An event of the buffer.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Event)]
pub(crate) struct EventBody {
    /// Ascending.
    id: u64,
    kind: &'static str,
    groups: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<u64>,
    /// The step of a lease, or the new version.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u64>,
}

impl From<&Event> for EventBody {
    fn from(event: &Event) -> Self {
        Self {
            id: event.id,
            kind: kind(event.kind),
            groups: ids(&event.groups),
            lease: event.lease.map(|lease| lease.0),
            version: event.version.map(|version| version.0),
        }
    }
}

/// The name of an event on the wire.
pub(crate) fn kind(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Finalized => "finalized",
        EventKind::Leased => "leased",
        EventKind::Acked => "acked",
        EventKind::Released => "released",
        EventKind::Expired => "expired",
        EventKind::Dropped => "dropped",
        EventKind::Evicted => "evicted",
        EventKind::Quarantined => "quarantined",
        EventKind::Version => "version",
    }
}

fn ids(groups: &[GroupId]) -> Vec<u64> {
    groups.iter().map(|group| group.0).collect()
}
