//! Requests and answers, in JSON or MessagePack.
//!
//! Invariant: an undocumented field is refused, so nothing in a request is ignored. Shapes are validated here,
//! content where a body becomes a type of `trajectory`, and states by the buffer.

mod branch;
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
    AbandonRequest, AbandonedBody, AbortRequest, AckThroughRequest, AdmissionsAnswer, AdmissionsRequest,
    AppendAnswer, AppendRequest, ClaimRequest, EmptyAnswer, EmptyRequest, ExtendRequest, ItemResult,
    ItemStatus, LeaseAnswer, LeaseAnswerView, LeaseBody, LeaseView, LeasesRequest, MAX_WAIT_MS,
    SubmissionsView, VersionBody, VersionRequest, milliseconds,
};
