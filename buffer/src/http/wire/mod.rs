//! Requests and answers as they go over the wire, in JSON or MessagePack.
//!
//! Invariant: a field that is not documented is refused, so nothing that a client says is ignored. Shapes are checked
//! here, meaning where a body becomes something of `trajectory`; what the buffer knows is the buffer's business.

mod free;
mod group;
mod reports;
mod requests;
mod schema;

pub(crate) use group::{GroupView, ItemLimits, Rejection, Submission, SubmissionIdentity};
pub(crate) use reports::{
    EntryBody, EventBody, Evicted, GroupAnswerView, GroupStateBody, GroupsAnswer, LeasesAnswer,
    QuarantinedBody, StatsBody, kind,
};
pub(crate) use requests::{
    AbortRequest, AckThroughRequest, AdmissionsAnswer, AdmissionsRequest, AppendAnswer, AppendRequest,
    ClaimRequest, EmptyAnswer, EmptyRequest, ExtendRequest, ItemResult, ItemStatus, LeaseAnswer,
    LeaseAnswerView, LeaseBody, LeaseView, LeasesRequest, MAX_WAIT_MS, SubmissionsView, VersionBody,
    VersionRequest, milliseconds,
};
