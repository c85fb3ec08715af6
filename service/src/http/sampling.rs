//! Routes of samplers and completions.
//!
//! Invariant: an accepted request for `n` completions is answered with `n` names of sequences, which the SDK needs.

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::body::{ApiState, blocking};
use super::refusal::{HttpRefusal, JsonReply};
use crate::outcome::Ticket;
use crate::wire::{SampleCall, SamplingSessionBody, sample_from_json};

pub(super) async fn create_session(
    State(api): State<ApiState>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let (user, body) = api.json::<SamplingSessionBody>(request).await?;
    let (session_id, number, from) = body.into_session()?;
    // The engine of a sampling session that makes place may be waited for.
    let id =
        blocking(move || api.service.create_sampling_session(user, &session_id, number, &from)).await??;
    Ok(JsonReply(json!({"sampling_session_id": id, "type": "create_sampling_session"})).into_response())
}

pub(super) async fn sampler(
    State(api): State<ApiState>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let user = api.access.user(request.headers())?;
    let sampler = api.service.sampler(user, &id)?;
    let body = json!({
        "sampler_id": sampler.sampling_session_id, "base_model": sampler.base.name, "model_path": sampler.path,
    });
    Ok(JsonReply(body).into_response())
}

pub(super) async fn sample(State(api): State<ApiState>, request: Request) -> Result<Response, HttpRefusal> {
    let (user, body) = api.body(request).await?;
    let call = body.decode(|body| sample_from_json(&body.bytes)).await?;
    let SampleCall { sampling_session_id, seq_id, request } = call;
    let ticket = api.service.sample(user, &sampling_session_id, seq_id, request);
    let ticket = ticket.map_err(|refusal| HttpRefusal::from(refusal).of_sampling())?;
    let Ticket { request_id, sequence_ids, .. } = ticket;
    Ok(JsonReply(json!({"request_id": request_id, "sample_sequence_ids": sequence_ids})).into_response())
}
