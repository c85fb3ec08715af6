//! Leases: lease, extend, acknowledge, release.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use trajectory::PolicyVersion;
use utoipa::IntoParams;

use super::{PathNumber, QueryParameters};
use crate::http::body::{Accept, DecodedBody, NoFields, aside};
use crate::http::problem::{Problem, retry_after};
use crate::http::state::ServerState;
use crate::http::wire::{
    AckThroughRequest, EmptyAnswer, ExtendRequest, LeaseAnswerView, LeaseView, LeasesAnswer, LeasesRequest,
    StatsBody,
};
use crate::{BufferError, Lease, LeaseId};

/// An answer with more tokens is encoded on a thread for blocking work.
const ENCODE_INLINE: usize = 16 << 10;

/// Lease groups for a training step. Without enough groups within `wait_ms` the answer has a reason and no lease. A
/// named step that was leased and not acknowledged gets the same groups in the same order; an unnamed one always gets
/// new ones.
#[utoipa::path(
    post, path = "/v1/leases", operation_id = "lease", tag = "leases", request_body = LeasesRequest,
    responses((status = 200, body = LeaseAnswerView, description = "A lease, or why there is none yet"))
)]
pub(super) async fn lease(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    body: DecodedBody<LeasesRequest>,
) -> Result<Response, Problem> {
    let wait = Duration::from_millis(body.value.wait_ms);
    let request = body.value.check()?;
    let buffer = shared.buffer()?;
    match shared.uninterrupted(buffer.lease_async(&request, wait)).await? {
        Ok(lease) => handed_out(accept, lease).await,
        Err(error) => {
            let BufferError::LeaseTimeout { held_for_slow, stats, .. } = &error else {
                return Err(shared.problem(&buffer, &error));
            };
            let answer = LeaseAnswerView {
                lease: None,
                held_for_slow: Some(*held_for_slow),
                stats: Some(StatsBody::from(&**stats)),
                reason: Some(error.to_string()),
            };
            Ok((retry_after(), accept.answer(&answer)?).into_response())
        }
    }
}

async fn handed_out(accept: Accept, lease: Lease) -> Result<Response, Problem> {
    let trajectories = lease.groups.iter().flat_map(|group| &group.trajectories);
    let samples = trajectories.flat_map(|trajectory| trajectory.samples());
    let tokens: usize = samples.map(|sample| sample.token_ids().len()).sum();
    let answer = move || {
        let lease = Some(LeaseView::from(&lease));
        accept.answer_fast(&LeaseAnswerView { lease, reason: None, held_for_slow: None, stats: None })
    };
    if tokens > ENCODE_INLINE { aside(answer).await? } else { answer() }
}

/// Filter of a list of leases.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LeasesQuery {
    /// Leases of this consumer only.
    consumer: Option<String>,
}

/// List the leases that are not acknowledged.
#[utoipa::path(
    get, path = "/v1/leases", operation_id = "list_leases", tag = "leases", params(LeasesQuery),
    responses((status = 200, body = LeasesAnswer, description = "Ordered by id"))
)]
pub(super) async fn list(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    QueryParameters(query): QueryParameters<LeasesQuery>,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    let leases = buffer.leases(query.consumer.as_deref()).map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&LeasesAnswer { leases: leases.into_iter().map(Into::into).collect() })
}

/// Acknowledge one lease. Idempotent.
#[utoipa::path(
    post, path = "/v1/leases/{id}/ack", operation_id = "ack", tag = "leases",
    params(("id" = u64, Path, description = "Of the lease")),
    responses((status = 200, body = EmptyAnswer, description = "Its groups have one use less, durably"))
)]
pub(super) async fn ack(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    PathNumber(id): PathNumber,
    _: NoFields,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    buffer.ack_async(LeaseId(id)).await.map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&EmptyAnswer {})
}

/// Acknowledge all leases of steps below `through`, because a checkpoint that contains them is on disk. Idempotent: a
/// repetition reports a lost lease again, a later `through` does not.
#[utoipa::path(
    post, path = "/v1/leases/ack", operation_id = "ack_through", tag = "leases", request_body = AckThroughRequest,
    responses((status = 200, body = EmptyAnswer, description = "They are done with, durably"))
)]
pub(super) async fn ack_through(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    body: DecodedBody<AckThroughRequest>,
) -> Result<Response, Problem> {
    let AckThroughRequest { consumer, through } = body.value;
    let buffer = shared.buffer()?;
    let acknowledged = buffer.ack_through_async(&consumer, PolicyVersion(through)).await;
    acknowledged.map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&EmptyAnswer {})
}

/// Release a lease untrained: its groups can be leased again.
#[utoipa::path(
    post, path = "/v1/leases/{id}/release", operation_id = "release", tag = "leases",
    params(("id" = u64, Path, description = "Of the lease")),
    responses((status = 200, body = EmptyAnswer, description = "It is over, durably"))
)]
pub(super) async fn release(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    PathNumber(id): PathNumber,
    _: NoFields,
) -> Result<Response, Problem> {
    let buffer = shared.buffer()?;
    buffer.release_async(LeaseId(id)).await.map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&EmptyAnswer {})
}

/// Extend a lease (heartbeat).
#[utoipa::path(
    post, path = "/v1/leases/{id}/extend", operation_id = "extend", tag = "leases", request_body = ExtendRequest,
    params(("id" = u64, Path, description = "Of the lease")),
    responses((status = 200, body = EmptyAnswer, description = "The lease is extended"))
)]
pub(super) async fn extend(
    State(shared): State<Arc<ServerState>>,
    accept: Accept,
    PathNumber(id): PathNumber,
    body: DecodedBody<ExtendRequest>,
) -> Result<Response, Problem> {
    let hold = body.value.check()?;
    let buffer = shared.buffer()?;
    buffer.extend_async(LeaseId(id), hold).await.map_err(|error| shared.problem(&buffer, &error))?;
    accept.answer(&EmptyAnswer {})
}
