//! The bodies of the verbs. Invariant: every number has its range beside it, and what is left out has a stated default.

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

/// Longest that one request may wait, milliseconds; whoever wants to wait longer asks again.
pub(crate) const MAX_WAIT_MS: u64 = 30_000;
/// Range of a hold, milliseconds.
const HOLD_MS: std::ops::RangeInclusive<u64> = 100..=86_400_000;

/// Groups to store.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AppendRequest {
    /// Each is stored or refused by itself; at most [`AppendRequest::MAX_GROUPS`].
    #[serde(deserialize_with = "at_most::<_, _, { AppendRequest::MAX_GROUPS }>")]
    #[schema(max_items = 1024)]
    pub(crate) groups: Vec<Submission>,
}

impl AppendRequest {
    /// Groups in one request.
    pub(crate) const MAX_GROUPS: usize = 1024;
}

/// [`AppendRequest`] as a client writes it.
#[derive(Debug, Serialize)]
pub(crate) struct SubmissionsView<'a> {
    pub(crate) groups: [GroupView<'a>; 1],
}

/// Stops at the first element too many, before it takes memory.
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

/// What became of every group, in the order of the request.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct AppendAnswer {
    pub(crate) results: Vec<ItemResult>,
    /// The version that the trainer has.
    pub(crate) policy_version: u64,
}

/// What became of one group.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ItemResult {
    pub(crate) status: ItemStatus,
    /// The id of the group, if the buffer has or had it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<u64>,
    /// Why it is not stored, if it is `invalid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) code: Option<ProblemCode>,
    /// What was found and what to do about it, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
    /// What was named: a version, an id, a size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) found: Option<u64>,
    /// What it is measured against: the version known, the next id, the largest size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bound: Option<u64>,
}

impl ItemResult {
    /// What became of a group that can be stored.
    pub(crate) fn stored(status: ItemStatus, id: Option<u64>) -> Self {
        Self { status, id, code: None, detail: None, found: None, bound: None }
    }

    /// Of a group that cannot.
    pub(crate) fn invalid(rejection: Rejection) -> Self {
        let Rejection { code, detail, evidence: Evidence { found, bound } } = rejection;
        Self { status: ItemStatus::Invalid, id: None, code: Some(code), detail: Some(detail), found, bound }
    }
}

/// What became of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ItemStatus {
    /// It is stored, as durably as the buffer stores anything.
    Accepted,
    /// It was stored before.
    Duplicate,
    /// It is over the staleness bound already.
    Stale,
    /// There is no room now; try again later.
    Full,
    /// It cannot be stored as it is; the code says why.
    Invalid,
}

/// May I start so many groups?
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdmissionsRequest {
    /// The version that the sampler serves.
    pub(crate) served_version: u64,
    /// Most groups.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 1024, default = 1)]
    pub(crate) limit: usize,
    /// How long to wait while there is no slot.
    #[serde(default)]
    #[schema(maximum = 30_000)]
    pub(crate) wait_ms: u64,
    /// Groups that are neither claimed again nor stored for so long are given to others.
    #[serde(default = "AdmissionsRequest::default_hold")]
    #[schema(minimum = 100, maximum = 86_400_000, default = 3_600_000)]
    pub(crate) hold_ms: u64,
    /// A number of the sampler's, by which a run gives others what it held as soon as it is known to be gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) holder: Option<u64>,
}

impl AdmissionsRequest {
    /// Slots in one request.
    pub(crate) const MAX_GROUPS: usize = 1024;

    /// An hour, the longest that one group should take.
    pub(crate) fn default_hold() -> u64 {
        3_600_000
    }

    pub(crate) fn check(&self) -> Result<(), Problem> {
        in_range("limit", &self.limit, &(1..=Self::MAX_GROUPS))?;
        in_range("wait_ms", &self.wait_ms, &(0..=MAX_WAIT_MS))?;
        in_range("hold_ms", &self.hold_ms, &HOLD_MS)
    }
}

/// Ids to sample for.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct AdmissionsAnswer {
    /// None while there is no slot.
    pub(crate) ids: Vec<u64>,
    /// The version that the trainer has.
    pub(crate) policy_version: u64,
}

/// Sampling begins, or goes on.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClaimRequest {
    /// The version that the sampler serves.
    pub(crate) served_version: u64,
}

/// The group will not come from here.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AbortRequest {
    /// Whether somebody else shall generate it.
    #[serde(default = "yes")]
    #[schema(default = true)]
    pub(crate) retry: bool,
}

/// A consumer asks for groups to train on.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeasesRequest {
    /// Who trains.
    #[schema(min_length = 1, max_length = 64)]
    pub(crate) consumer: String,
    /// The version that the step starts from. Asked for again before it is acknowledged, a step gets the same groups.
    /// Without it the lease is for the version that the buffer knows, and always a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) step: Option<u64>,
    /// Most groups; without it a whole batch, or what `tokens` allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub(crate) groups: Option<usize>,
    /// When the wait is over, so many are enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub(crate) at_least: Option<usize>,
    /// Most tokens in all, though at least one group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub(crate) tokens: Option<u64>,
    /// A stricter bound than the buffer's, versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_staleness: Option<u64>,
    /// How long to wait for groups.
    #[serde(default)]
    #[schema(maximum = 30_000)]
    pub(crate) wait_ms: u64,
    /// The groups go to others if the lease is not extended or acknowledged for so long.
    #[serde(default = "LeasesRequest::default_hold")]
    #[schema(minimum = 100, maximum = 86_400_000, default = 60_000)]
    pub(crate) hold_ms: u64,
}

impl LeasesRequest {
    /// A minute: long enough to come back after a restart, short enough to wait for.
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

/// A lease, or why there is none yet.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LeaseAnswer)]
pub(crate) struct LeaseAnswerView<'a> {
    pub(crate) lease: Option<LeaseView<'a>>,
    /// Who waits for whom, if there is no lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// Whether enough groups are there, but held back so that slow ones stay within the bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) held_for_slow: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stats: Option<StatsBody>,
}

/// Groups that a consumer has to itself.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Lease)]
pub(crate) struct LeaseView<'a> {
    /// Its name, for `ack`, `release` and `extend`.
    id: u64,
    consumer: &'a str,
    /// The version that the step starts from.
    step: u64,
    /// How long it is held without a sign of the consumer; none: for ever.
    hold_ms: Option<u64>,
    /// Groups over the bound that were dropped since the lease before.
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

/// [`LeaseAnswerView`] as a client reads it.
#[derive(Debug, Deserialize)]
pub(crate) struct LeaseAnswer {
    pub(crate) lease: Option<LeaseBody>,
    #[serde(default)]
    pub(crate) held_for_slow: bool,
    pub(crate) stats: Option<StatsBody>,
}

/// [`LeaseView`] as a client reads it.
#[derive(Debug, Deserialize)]
pub(crate) struct LeaseBody {
    pub(crate) id: u64,
    pub(crate) consumer: String,
    pub(crate) step: u64,
    pub(crate) dropped_stale: u64,
    pub(crate) groups: Vec<Submission>,
}

/// A body without fields.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EmptyRequest {}

/// It is done.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct EmptyAnswer {}

/// Hold a lease from now on.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExtendRequest {
    /// For so long.
    #[schema(minimum = 100, maximum = 86_400_000)]
    pub(crate) hold_ms: u64,
}

impl ExtendRequest {
    pub(crate) fn check(&self) -> Result<Duration, Problem> {
        in_range("hold_ms", &self.hold_ms, &HOLD_MS)?;
        Ok(Duration::from_millis(self.hold_ms))
    }
}

/// A checkpoint is on disk.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AckThroughRequest {
    /// Who trains.
    #[schema(min_length = 1, max_length = 64)]
    pub(crate) consumer: String,
    /// It contains every step below.
    pub(crate) through: u64,
}

/// What the trainer has made.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct VersionRequest {
    /// The newest version.
    pub(crate) version: u64,
    /// Whether it may be any other than the next: a trainer starts from another checkpoint.
    #[serde(default)]
    pub(crate) rewind: bool,
}

/// What the trainer has made.
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

/// Saturating: no hold is that long.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn one() -> usize {
    1
}

fn yes() -> bool {
    true
}
