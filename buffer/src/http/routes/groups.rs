//! Groups: append, list, show, evict, quarantine.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion};
use utoipa::{IntoParams, ToSchema};

use super::{PathNumber, QueryParameters};
use crate::http::body::{Accept, DecodedBody, NoFields, aside};
use crate::http::problem::{self, Evidence, Problem, ProblemCode};
use crate::http::server::ClientAddress;
use crate::http::state::ServerState;
use crate::http::wire::{
    AppendAnswer, AppendRequest, EntryBody, Evicted, GroupAnswerView, GroupStateBody, GroupView,
    GroupsAnswer, ItemResult, ItemStatus, QuarantinedBody, Rejection, Submission, SubmissionIdentity,
};
use crate::payload::IncomingGroup;
use crate::{Buffer, BufferError, Finalized, GroupFilter, GroupLimits, Submitted, Unfit, WithPayload};

/// Default number of groups on a page.
const PAGE: usize = 100;
/// Maximum number of groups on a page.
const MAX_PAGE: usize = 1000;

/// Store groups. Each is stored or refused independently, and `accepted` means durable. Idempotent by id and by key:
/// a stored group is then a `duplicate`. If all are `full` the answer is 429, with the same meaning.
#[utoipa::path(
    post, path = "/v1/groups", operation_id = "append_groups", tag = "groups", request_body = AppendRequest,
    responses(
        (status = 200, body = AppendAnswer, description = "What became of each group, in the order of the request"),
        (status = 429, body = AppendProblem, content_type = "application/problem+json",
            description = "`full`: none of them can be stored now"),
    )
)]
pub(super) async fn append(
    State(shared): State<Arc<ServerState>>,
    Extension(ClientAddress(peer)): Extension<ClientAddress>,
    accept: Accept,
    body: DecodedBody<AppendRequest>,
) -> Result<Response, Problem> {
    let started = Instant::now();
    let DecodedBody { value: AppendRequest { groups }, reserved } = body;
    let buffer = shared.buffer()?;
    let limits = shared.group_limits()?;
    let mut results = Vec::with_capacity(groups.len());
    let mut incoming = Vec::with_capacity(groups.len());
    for submission in groups {
        match checked(submission, &shared, limits, peer) {
            Ok(group) => {
                incoming.push(group);
                results.push(None);
            }
            Err(rejection) => {
                shared.refused(Some(peer), &rejection);
                results.push(Some(ItemResult::invalid(rejection)));
            }
        }
    }
    let mut answers = buffer.append_async(incoming).await.into_iter();
    drop(reserved);
    for (index, result) in results.iter_mut().enumerate().filter(|(_, result)| result.is_none()) {
        // There is an answer for every group.
        let Some(answer) = answers.next() else { break };
        *result = Some(answered(answer, index, peer, &shared, &buffer)?);
    }
    let results: Vec<ItemResult> = results.into_iter().flatten().collect();
    let answer = AppendAnswer { results, policy_version: buffer.policy_version()?.0 };
    shared.metrics.appended(started);
    let full = |result: &ItemResult| result.status == ItemStatus::Full;
    if !answer.results.is_empty() && answer.results.iter().all(full) {
        return Ok(AppendProblem::new(answer).into_response());
    }
    accept.answer(&answer)
}

/// All groups were refused as full: [`AppendAnswer`] as a problem document.
#[derive(Debug, Serialize, ToSchema)]
struct AppendProblem {
    #[serde(rename = "type")]
    kind: &'static str,
    title: &'static str,
    status: u16,
    code: ProblemCode,
    detail: String,
    results: Vec<ItemResult>,
    policy_version: u64,
}

impl AppendProblem {
    fn new(AppendAnswer { results, policy_version }: AppendAnswer) -> Self {
        let detail = "the buffer is full: wait until the trainer has taken groups, then send the same again"
            .to_owned();
        let (title, status) = (ProblemCode::Full.title(), ProblemCode::Full.status().as_u16());
        Self { kind: "about:blank", title, status, code: ProblemCode::Full, detail, results, policy_version }
    }

    fn into_response(self) -> Response {
        problem::with_problem_headers(&Problem::new(ProblemCode::Full, self.detail.clone()), &self)
    }
}

fn checked(
    submission: Submission,
    shared: &ServerState,
    limits: Option<GroupLimits>,
    peer: IpAddr,
) -> Result<IncomingGroup, Rejection> {
    let (identity, group) = submission.check(shared.item_limits())?;
    if let Some(unfit) = limits.and_then(|limits| limits.check(&group).err()) {
        let (code, detail) = (code_of(&unfit), unfit.to_string());
        return Err(Rejection { code, detail, evidence: Evidence::default() });
    }
    Ok(match identity {
        SubmissionIdentity::Admitted(_) => IncomingGroup::admitted(group).sent_by(peer.to_string()),
        SubmissionIdentity::Key(key) => {
            let sender = format!("{peer} as {key:?}");
            IncomingGroup::keyed(key, group).sent_by(sender)
        }
    })
}

fn code_of(unfit: &Unfit) -> ProblemCode {
    match unfit {
        Unfit::Vocabulary { .. } => ProblemCode::TokenOutOfVocabulary,
        Unfit::Context { .. } => ProblemCode::TooManyTokens,
        Unfit::Size { .. } => ProblemCode::TooManyTrajectories,
        Unfit::Logprob { .. } => ProblemCode::LogprobTooLow,
        Unfit::Temperature { .. } => ProblemCode::BadTemperature,
        Unfit::Reward { .. } => ProblemCode::RewardOutOfRange,
        Unfit::Turn { .. } => ProblemCode::BadTurn,
        Unfit::Experts { .. } | Unfit::Expert { .. } => ProblemCode::BadExperts,
    }
}

/// Result of one group.
///
/// # Errors
/// An error of the buffer. The results of the other groups are then unknown; in a repeated request those that are
/// stored are duplicates.
fn answered(
    answer: Result<Submitted, BufferError>,
    index: usize,
    peer: IpAddr,
    shared: &ServerState,
    buffer: &Buffer,
) -> Result<ItemResult, Problem> {
    match answer {
        Ok(Submitted { answer, group }) => {
            let status = match answer {
                Finalized::Accepted => ItemStatus::Accepted,
                Finalized::Duplicate => ItemStatus::Duplicate,
                Finalized::Stale => ItemStatus::Stale,
                Finalized::Full => ItemStatus::Full,
            };
            Ok(ItemResult::stored(status, group.map(|group| group.0)))
        }
        Err(error) => {
            let problem = shared.problem(buffer, &error);
            let code = match problem.code {
                // Here the id is in the body, not in the path.
                ProblemCode::UnknownGroup => ProblemCode::UnknownId,
                code if code.status().is_client_error() => code,
                _ => return Err(problem.at(index)),
            };
            let evidence = problem.evidence();
            let rejection = Rejection { code, detail: problem.detail, evidence };
            shared.refused(Some(peer), &rejection);
            Ok(ItemResult::invalid(rejection))
        }
    }
}

/// Filter and page of a list of groups.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct GroupsQuery {
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// Maximum number of groups on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<usize>,
    /// With this oldest version.
    policy_version: Option<u64>,
    /// With at least this mean reward.
    min_reward: Option<f64>,
    /// In this state.
    #[param(inline)]
    state: Option<GroupStateBody>,
}

/// List groups without their tokens, ordered by id. A group that arrives between two pages may be missing.
#[utoipa::path(
    get, path = "/v1/groups", operation_id = "list_groups", tag = "groups", params(GroupsQuery),
    responses((status = 200, body = GroupsAnswer, description = "One page"))
)]
pub(super) async fn list(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    QueryParameters(query): QueryParameters<GroupsQuery>,
) -> Result<Response, Problem> {
    let limit = query.limit.unwrap_or(PAGE);
    if !(1..=MAX_PAGE).contains(&limit) {
        return Err(Problem::new(
            ProblemCode::OutOfRange,
            format!("`limit` is {limit}, it must be 1 to {MAX_PAGE}"),
        ));
    }
    let filter = GroupFilter {
        policy_version: query.policy_version.map(PolicyVersion),
        min_reward: query.min_reward,
        state: query.state.map(Into::into),
    };
    let after = query.cursor.as_deref().map(from_cursor).transpose()?;
    let buffer = shared.buffer()?;
    let page = buffer.list(&filter, after, limit).map_err(|error| shared.problem(&buffer, &error))?;
    let groups = page.groups.iter().map(EntryBody::from).collect();
    accept.answer(&GroupsAnswer { groups, next_cursor: page.next.map(cursor) })
}

/// Opaque to clients.
fn cursor(GroupId(id): GroupId) -> String {
    format!("g{id:x}")
}

fn from_cursor(cursor: &str) -> Result<GroupId, Problem> {
    let id = cursor.strip_prefix('g').and_then(|id| u64::from_str_radix(id, 16).ok());
    id.map(GroupId).ok_or_else(|| {
        Problem::new(ProblemCode::BadQuery, format!("`cursor={cursor}` is not from an answer of this route"))
    })
}

/// Show one group with its tokens.
#[utoipa::path(
    get, path = "/v1/groups/{id}", operation_id = "get_group", tag = "groups",
    params(("id" = u64, Path, description = "Its id")),
    responses((status = 200, body = GroupAnswerView, description = "The group"))
)]
pub(super) async fn get(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    PathNumber(id): PathNumber,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    // It may be read from disk.
    let (found, buffer) = aside(move || (buffer.get(GroupId(id)), buffer)).await?;
    let Some(WithPayload { entry, payload }) = found.map_err(|error| shared.problem(&buffer, &error))? else {
        let detail = format!("group {id} is not here: it was never admitted, or was trained on, or evicted");
        return Err(Problem::new(ProblemCode::UnknownGroup, detail));
    };
    let group = payload.as_deref().map(GroupView::from);
    accept.answer(&GroupAnswerView { entry: EntryBody::from(&entry), group })
}

/// Evict one group for good, in any state.
#[utoipa::path(
    delete, path = "/v1/groups/{id}", operation_id = "evict_group", tag = "groups",
    params(("id" = u64, Path, description = "Its id")),
    responses((status = 200, body = Evicted, description = "0 if it is not here, also because it was removed before"))
)]
pub(super) async fn evict(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    PathNumber(id): PathNumber,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    let evicted = buffer.evict_async(GroupId(id)).await.map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&Evicted { evicted: u64::from(evicted) })
}

/// Quarantine a stored group that cannot be trained on: it leaves all leases, and its slot is freed.
#[utoipa::path(
    post, path = "/v1/groups/{id}/quarantine", operation_id = "quarantine", tag = "groups",
    params(("id" = u64, Path, description = "Its id")),
    responses((status = 200, body = QuarantinedBody, description = "It is set aside, durably"))
)]
pub(super) async fn quarantine(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    PathNumber(id): PathNumber,
    _: NoFields,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    // It may be read from disk.
    let (sender, buffer) = aside(move || (buffer.sender(GroupId(id)), buffer)).await?;
    let set_aside = buffer.quarantine_async(GroupId(id)).await;
    let quarantined = set_aside.map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&QuarantinedBody { quarantined, sender })
}

/// Which groups to evict.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EvictQuery {
    /// Groups whose oldest version is lower and that are not leased.
    below_version: u64,
}

/// Evict all old groups for good.
#[utoipa::path(
    delete, path = "/v1/groups", operation_id = "evict_groups", tag = "groups", params(EvictQuery),
    responses((status = 200, body = Evicted, description = "How many are gone"))
)]
pub(super) async fn evict_below(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    QueryParameters(query): QueryParameters<EvictQuery>,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    let below = PolicyVersion(query.below_version);
    let evicted = buffer.evict_below_async(below).await.map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&Evicted { evicted })
}
