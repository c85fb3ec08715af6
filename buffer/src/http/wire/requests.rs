//! Requests and their answers. Invariant: every number has a stated range, and every omitted field a stated default.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;
use utoipa::ToSchema;

use super::group::{GroupView, Rejection, Submission};
use super::reports::StatsBody;
use crate::http::problem::{Evidence, Problem, ProblemCode};
use crate::{Lease, LeaseRequest};

/// Longest wait of one request, milliseconds; a client repeats the request to wait longer.
pub(crate) const MAX_WAIT_MS: u64 = 30_000;
/// Range of a hold, milliseconds.
const HOLD_MS: std::ops::RangeInclusive<u64> = 100..=86_400_000;

/// Groups to store.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AppendRequest {
    /// Each is stored or refused independently; at most [`AppendRequest::MAX_GROUPS`].
    #[serde(deserialize_with = "at_most::<_, _, { AppendRequest::MAX_GROUPS }>")]
    #[schema(max_items = 1024)]
    pub(crate) groups: Vec<Submission>,
}

impl AppendRequest {
    /// Maximum number of groups in one request.
    pub(crate) const MAX_GROUPS: usize = 1024;
}

/// [`AppendRequest`] as serialized by the client.
#[derive(Debug, Serialize)]
pub(crate) struct SubmissionsView<'a> {
    pub(crate) groups: [GroupView<'a>; 1],
}

/// Fails at the first surplus element, before it takes memory.
fn at_most<'de, D: Deserializer<'de>, T: Deserialize<'de>, const MAX: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    struct BoundedList<T, const MAX: usize>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for BoundedList<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX}")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<T>, A::Error> {
            let mut items = Vec::with_capacity(sequence.size_hint().unwrap_or(0).min(MAX));
            while let Some(item) = sequence.next_element()? {
                if items.len() == MAX {
                    return Err(de::Error::invalid_length(MAX + 1, &self));
                }
                items.push(item);
            }
            Ok(items)
        }
    }
    deserializer.deserialize_seq(BoundedList::<T, MAX>(PhantomData))
}

/// Result of every group, in the order of the request.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct AppendAnswer {
    pub(crate) results: Vec<ItemResult>,
    /// The policy version of the trainer.
    pub(crate) policy_version: u64,
}

/// Result of one group.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ItemResult {
    pub(crate) status: ItemStatus,
    /// The id of the group, if the buffer has or had it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<u64>,
    /// The error code, if it is `invalid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) code: Option<ProblemCode>,
    /// The evidence and the remedy, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
    /// The value in the request: a version, an id, a size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) found: Option<u64>,
    /// The value that it is compared with: the known version, the next id, the maximum size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bound: Option<u64>,
}

impl ItemResult {
    /// Result of a valid group.
    pub(crate) fn stored(status: ItemStatus, id: Option<u64>) -> Self {
        Self { status, id, code: None, detail: None, found: None, bound: None }
    }

    /// Result of an invalid group.
    pub(crate) fn invalid(rejection: Rejection) -> Self {
        let Rejection { code, detail, evidence: Evidence { found, bound } } = rejection;
        Self { status: ItemStatus::Invalid, id: None, code: Some(code), detail: Some(detail), found, bound }
    }
}

/// Result of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ItemStatus {
    /// It is stored, as durably as the buffer stores anything.
    Accepted,
    /// It was stored before.
    Duplicate,
    /// It already exceeds the staleness bound.
    Stale,
    /// Back-pressure: it cannot be stored now; retry later.
    Full,
    /// It is invalid; the code says why.
    Invalid,
}

/// Request for slots (admission control).
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdmissionsRequest {
    /// The version that the sampler serves.
    pub(crate) served_version: u64,
    /// Maximum number of groups.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 1024, default = 1)]
    pub(crate) limit: usize,
    /// How long to wait for a free slot.
    #[serde(default)]
    #[schema(maximum = 30_000)]
    pub(crate) wait_ms: u64,
    /// A group that is neither claimed again nor stored within this time is queued for re-admission.
    #[serde(default = "AdmissionsRequest::default_hold")]
    #[schema(minimum = 100, maximum = 86_400_000, default = 3_600_000)]
    pub(crate) hold_ms: u64,
    /// Id of the sampler's process, whose groups in flight are revoked when it is known to have ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) holder: Option<u64>,
}

impl AdmissionsRequest {
    /// Maximum number of slots in one request.
    pub(crate) const MAX_GROUPS: usize = 1024;

    /// One hour, the longest expected time of a group.
    pub(crate) fn default_hold() -> u64 {
        3_600_000
    }

    pub(crate) fn check(&self) -> Result<(), Problem> {
        in_range("limit", &self.limit, &(1..=Self::MAX_GROUPS))?;
        in_range("wait_ms", &self.wait_ms, &(0..=MAX_WAIT_MS))?;
        in_range("hold_ms", &self.hold_ms, &HOLD_MS)
    }
}

/// Ids of admitted groups.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct AdmissionsAnswer {
    /// Empty if there is no free slot.
    pub(crate) ids: Vec<u64>,
    /// The policy version of the trainer.
    pub(crate) policy_version: u64,
}

/// Sampling begins; repeated, a heartbeat.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClaimRequest {
    /// The version that the sampler serves.
    pub(crate) served_version: u64,
}

/// The sampler gives the group up.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AbortRequest {
    /// Whether the group is generated again.
    #[serde(default = "yes")]
    #[schema(default = true)]
    pub(crate) retry: bool,
}

/// A sampler's process has ended, or begins anew.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AbandonRequest {
    /// Its id, as in its admissions.
    pub(crate) holder: u64,
}

/// What a process had in flight.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct AbandonedBody {
    /// Number of groups, which are admitted again.
    pub(crate) groups: usize,
}

/// Request for a lease.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeasesRequest {
    /// Name of the consumer.
    #[schema(min_length = 1, max_length = 64)]
    pub(crate) consumer: String,
    /// The version that the step starts from. A repeated request before the acknowledgement gets the same groups.
    /// Without it the lease is for the buffer's current version, and always a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) step: Option<u64>,
    /// Maximum number of groups; without it a whole batch, or as `tokens` allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub(crate) groups: Option<usize>,
    /// Minimum number of groups when the wait is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub(crate) at_least: Option<usize>,
    /// Maximum number of tokens in all; at least one group is leased.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub(crate) tokens: Option<u64>,
    /// A stricter staleness bound than the buffer's, versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_staleness: Option<u64>,
    /// How long to wait for groups.
    #[serde(default)]
    #[schema(maximum = 30_000)]
    pub(crate) wait_ms: u64,
    /// The lease expires if it is neither extended nor acknowledged within this time.
    #[serde(default = "LeasesRequest::default_hold")]
    #[schema(minimum = 100, maximum = 86_400_000, default = 60_000)]
    pub(crate) hold_ms: u64,
}

impl LeasesRequest {
    /// One minute: long enough for a restart, short enough to wait for.
    fn default_hold() -> u64 {
        60_000
    }

    pub(crate) fn check(self) -> Result<LeaseRequest, Problem> {
        let most = LeaseRequest::MAX_CONSUMER;
        if !(1..=most).contains(&self.consumer.len()) {
            let detail = format!("`consumer` has {} bytes, a name has 1 to {most}", self.consumer.len());
            return Err(Problem::new(ProblemCode::BadConsumer, detail));
        }
        for (name, value) in [("groups", self.groups), ("at_least", self.at_least)] {
            value.map_or(Ok(()), |value| in_range(name, &value, &(1..=usize::MAX)))?;
        }
        self.tokens.map_or(Ok(()), |tokens| in_range("tokens", &tokens, &(1..=u64::MAX)))?;
        in_range("wait_ms", &self.wait_ms, &(0..=MAX_WAIT_MS))?;
        in_range("hold_ms", &self.hold_ms, &HOLD_MS)?;
        Ok(LeaseRequest {
            consumer: self.consumer,
            step: self.step.map(PolicyVersion),
            groups: self.groups,
            at_least: self.at_least,
            tokens: self.tokens,
            max_staleness: self.max_staleness,
            hold: Some(Duration::from_millis(self.hold_ms)),
        })
    }
}

/// A lease, or the reason why there is none yet.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LeaseAnswer)]
pub(crate) struct LeaseAnswerView<'a> {
    pub(crate) lease: Option<LeaseView<'a>>,
    /// The missing groups, if there is no lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// Whether enough groups are finalized, but the lease waits for slow ones to keep them within the bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) held_for_slow: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stats: Option<StatsBody>,
}

/// Groups leased to a consumer.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Lease)]
pub(crate) struct LeaseView<'a> {
    /// Its id, for `ack`, `release` and `extend`.
    id: u64,
    consumer: &'a str,
    /// The version that the step starts from.
    step: u64,
    /// The lease expires after this time without a heartbeat; none: never.
    hold_ms: Option<u64>,
    /// Groups dropped as stale since the previous lease.
    dropped_stale: u64,
    /// Ordered by id.
    groups: Vec<GroupView<'a>>,
}

impl<'a> From<&'a Lease> for LeaseView<'a> {
    fn from(lease: &'a Lease) -> Self {
        Self {
            id: lease.id.0,
            consumer: &lease.consumer,
            step: lease.step.0,
            hold_ms: lease.hold.map(milliseconds),
            dropped_stale: lease.dropped_stale,
            groups: lease.groups.iter().map(|group| GroupView::from(&**group)).collect(),
        }
    }
}

/// [`LeaseAnswerView`] as read by the client.
#[derive(Debug, Deserialize)]
pub(crate) struct LeaseAnswer {
    pub(crate) lease: Option<LeaseBody>,
    #[serde(default)]
    pub(crate) held_for_slow: bool,
    pub(crate) stats: Option<StatsBody>,
}

/// [`LeaseView`] as read by the client.
#[derive(Debug, Deserialize)]
pub(crate) struct LeaseBody {
    pub(crate) id: u64,
    pub(crate) consumer: String,
    pub(crate) step: u64,
    pub(crate) dropped_stale: u64,
    pub(crate) groups: Vec<Submission>,
}

/// A request without fields.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EmptyRequest {}

/// An answer without fields: success.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct EmptyAnswer {}

/// Extends a lease.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExtendRequest {
    /// Its hold from now on.
    #[schema(minimum = 100, maximum = 86_400_000)]
    pub(crate) hold_ms: u64,
}

impl ExtendRequest {
    pub(crate) fn check(&self) -> Result<Duration, Problem> {
        in_range("hold_ms", &self.hold_ms, &HOLD_MS)?;
        Ok(Duration::from_millis(self.hold_ms))
    }
}

/// Acknowledges steps, because their checkpoint is on disk.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AckThroughRequest {
    /// Name of the consumer.
    #[schema(min_length = 1, max_length = 64)]
    pub(crate) consumer: String,
    /// The checkpoint contains every step below.
    pub(crate) through: u64,
}

/// Sets the policy version of the trainer.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct VersionRequest {
    /// The newest version.
    pub(crate) version: u64,
    /// Whether it may be any version: the trainer starts from another checkpoint.
    #[serde(default)]
    pub(crate) rewind: bool,
}

/// The policy version of the trainer.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct VersionBody {
    pub(crate) version: u64,
}

fn in_range<T: PartialOrd + fmt::Display>(
    name: &str,
    value: &T,
    range: &std::ops::RangeInclusive<T>,
) -> Result<(), Problem> {
    if range.contains(value) {
        return Ok(());
    }
    let detail = format!("`{name}` is {value}, it must be {} to {}", range.start(), range.end());
    Err(Problem::new(ProblemCode::OutOfRange, detail))
}

/// Saturating.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn one() -> usize {
    1
}

fn yes() -> bool {
    true
}
