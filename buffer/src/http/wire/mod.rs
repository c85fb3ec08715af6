//! Requests and answers as they go over the wire, in JSON or MessagePack.
//!
//! Invariant: a field that is not documented is refused, so nothing that a client says is ignored. Shapes are checked
//! here, meaning where a body becomes something of `trajectory`; what the buffer knows is the buffer's business.

mod free;
mod group;
mod reports;
mod schema;
mod verbs;

pub(crate) use group::{GroupView, Identity, ItemLimits, Rejection, Submission};
pub(crate) use reports::{
    EntryBody, EventBody, Evicted, GroupAnswerView, GroupsAnswer, LeasesAnswer, QuarantinedBody, State,
    StatsBody, kind,
};
pub(crate) use verbs::{
    AbortRequest, AckThroughRequest, AdmissionsAnswer, AdmissionsRequest, AppendAnswer, AppendRequest,
    ClaimRequest, Done, ExtendRequest, ItemResult, ItemStatus, LeaseAnswer, LeaseAnswerView, LeaseBody,
    LeaseView, LeasesRequest, MAX_WAIT_MS, Nothing, SubmissionsView, VersionBody, VersionRequest,
    milliseconds,
};
