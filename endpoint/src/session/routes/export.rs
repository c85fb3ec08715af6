//! Sessions as data: interactions, rows and calls, in the forms of several frameworks.
//!
//! Invariant: an export shows the tokens as they were sampled, and says of each what it is for.

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use serde::Deserialize;
use serde_json::{Value, json};
use trajectory::{SampleError, VersionRun};

use super::{JsonAnswer, SessionControl, body};
use crate::ApiError;
use crate::session::{AgentSession, Interaction, InteractionRole, SessionPurpose, SessionRow, credit};

#[derive(Debug, Deserialize)]
#[serde(default)]
struct ExportBody {
    session_id: Option<String>,
    discount: f64,
    style: String,
    drop_retry_orphans: bool,
}

impl Default for ExportBody {
    fn default() -> Self {
        Self { session_id: None, discount: 1.0, style: "individual".to_owned(), drop_retry_orphans: true }
    }
}

/// Takes an ended session.
pub(super) async fn trajectories(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<JsonAnswer, ApiError> {
    control.admin(&headers)?;
    let ExportBody { session_id, discount, style, drop_retry_orphans } = body(&bytes)?;
    let Some(name) = session_id else { return Err(ApiError::missing("session_id")) };
    if !(0.0..=1.0).contains(&discount) {
        return Err(ApiError::invalid(
            "discount",
            format!("`discount` is {discount}; it must be from 0 to 1"),
        ));
    }
    if !["individual", "concat"].contains(&&style[..]) {
        let message = format!("`style` is \"{style}\"; there are individual and concat");
        return Err(ApiError::invalid("style", message));
    }
    let id = control.named(&name)?;
    // The episode of a run belongs to the run, which trains on it.
    let (open, of_run) =
        control.store.with(&id, |session| (!session.has_ended(), session.sampler.is_some()))?;
    if open || of_run {
        let why = if open { "it has not ended: call /rl/end_session first" } else { "the run trains on it" };
        return Err(ApiError::invalid("session_id", format!("session {id} cannot be exported: {why}")));
    }
    let session = control.store.take(&id)?;
    let trajectories = match &style[..] {
        "concat" => rows_of(&session)?,
        _ => individual(&session, discount, drop_retry_orphans),
    };
    Ok(JsonAnswer(json!({
        "session_id": session.id, "task_id": session.task_id, "metadata": session.metadata, "style": style,
        "trajectories": trajectories,
    })))
}

/// Every interaction by itself, with its reward.
fn individual(session: &AgentSession, discount: f64, drop_orphans: bool) -> Vec<Value> {
    let (roles, rewards) = (session.roles(), credit::discounted(session.interactions(), discount));
    let all = session.interactions().iter().zip(&roles).zip(rewards);
    let kept = all.filter(|((_, role), _)| !drop_orphans || **role != InteractionRole::Discarded);
    kept.map(|((interaction, role), reward)| {
        let versions = per_token(&interaction.versions).map(|version| json!(version));
        let asked = std::iter::repeat_n(json!(-1), interaction.prompt_ids.len());
        json!({
            "interaction_id": interaction.id, "input_tokens": interaction.prompt_ids,
            "output_tokens": interaction.sampled_ids, "output_logprobs": interaction.logprobs,
            "output_versions": asked.chain(versions).collect::<Vec<_>>(), "stop_reason": interaction.stop,
            "reward": reward, "role": role, "continues": interaction.continuation.interaction(),
        })
    })
    .collect()
}

fn per_token(versions: &[VersionRun]) -> impl Iterator<Item = u64> {
    versions.iter().flat_map(|run| std::iter::repeat_n(run.version.0, run.len as usize))
}

fn broken(error: &SampleError) -> ApiError {
    ApiError::internal(format!("the tokens of the session are no sample: {error}"))
}

fn rows_of(session: &AgentSession) -> Result<Vec<Value>, ApiError> {
    let rows = session.rows().map_err(|error| broken(&error))?;
    Ok(rows.iter().map(row).collect())
}

fn row(row: &SessionRow) -> Value {
    let sample = &row.sample;
    let mut shown = json!({
        "token_ids": sample.token_ids(), "loss_mask": sample.loss_mask(),
        "behavior_logprobs": sample.behavior_logprobs(), "versions": sample.versions(),
        "temperature": sample.temperature(), "prompt_length": row.prompt_length,
        "turns": row.turns, "interactions": row.interactions, "branch": row.branch,
    });
    if let Some(experts) = sample.experts() {
        shown["experts"] = json!(experts);
    }
    shown
}

/// The rows of a session as the document of OpenEnv's capture.
pub(super) async fn rollout(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<JsonAnswer, ApiError> {
    let id = control.managed(&headers, &name)?;
    let document = control.store.with(&id, |session| {
        let rows = session.rows().map_err(|error| broken(&error))?;
        let trainable = session.purpose == SessionPurpose::Train;
        let agents = rows.iter().map(|row| sequence(row, trainable));
        let roles = session.roles();
        let others =
            session.interactions().iter().zip(&roles).filter(|(_, role)| **role != InteractionRole::Agent);
        let others = others.map(|(interaction, role)| untrained(interaction, *role));
        Ok::<_, ApiError>(json!({
            "session_id": session.id, "metadata": session.metadata, "capture_level": "tokens",
            "sequences": agents.chain(others).collect::<Vec<_>>(), "turns": calls(session),
        }))
    })??;
    Ok(JsonAnswer(document))
}

fn sequence(row: &SessionRow, trainable: bool) -> Value {
    let mask: Vec<u8> = row.sample.loss_mask().iter().map(|trained| u8::from(*trained)).collect();
    json!({
        "input_ids": row.sample.token_ids(), "loss_mask": mask, "logprobs": row.sample.behavior_logprobs(),
        "prompt_len": row.prompt_length, "n_turns": row.turns.len(),
        "turn_lengths": row.turns.iter().map(|turn| turn.completion.len()).collect::<Vec<_>>(),
        "role": InteractionRole::Agent, "trainable": trainable, "validation": [],
    })
}

fn untrained(interaction: &Interaction, role: InteractionRole) -> Value {
    let tokens = interaction.token_ids();
    let asked = interaction.prompt_ids.len();
    let logprobs = std::iter::repeat_n(0.0, asked).chain(interaction.logprobs.iter().copied());
    json!({
        "input_ids": tokens, "loss_mask": vec![0; tokens.len()], "logprobs": logprobs.collect::<Vec<f32>>(),
        "prompt_len": asked, "n_turns": 1, "turn_lengths": [interaction.sampled_ids.len()], "role": role,
        "trainable": false, "validation": [],
    })
}

/// What was asked for and what was used, for every call.
fn calls(session: &AgentSession) -> Vec<Value> {
    let roles = session.roles();
    let all = session.interactions().iter().zip(session.requested()).zip(&roles);
    all.map(|((interaction, requested), role)| {
        json!({
            "node_id": interaction.id, "requested_sampling_params": requested,
            "sampling_params": {"temperature": interaction.temperature},
            "discarded": *role == InteractionRole::Discarded, "role": role, "reward": interaction.reward,
            "finish_reason": interaction.stop, "prompt_tokens": interaction.prompt_ids.len(),
            "completion_tokens": interaction.sampled_ids.len(),
            "continues": interaction.continuation.interaction(),
        })
    })
    .collect()
}

/// The calls of a session.
pub(super) async fn trace_entries(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<JsonAnswer, ApiError> {
    let id = control.managed(&headers, &name)?;
    let entries = control.store.with(&id, |session| calls(session))?;
    Ok(JsonAnswer(json!({ "session_id": id, "entries": entries })))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SamplesBody {
    max_seq_len: Option<usize>,
    metadata: Value,
}

/// The rows of a session in the form of miles; those that are too long are left out, and counted.
pub(super) async fn samples(
    State(control): State<SessionControl>,
    headers: HeaderMap,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Result<JsonAnswer, ApiError> {
    let id = control.managed(&headers, &name)?;
    let SamplesBody { max_seq_len, metadata } = body(&bytes)?;
    let rows = control.store.with(&id, |session| session.rows())?.map_err(|error| broken(&error))?;
    let (fit, long): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| row.sample.token_ids().len() <= max_seq_len.unwrap_or(usize::MAX));
    let sample = |row: &&SessionRow| {
        let asked = row.prompt_length;
        let mask = row.sample.loss_mask()[asked..].iter().map(|trained| u8::from(*trained));
        json!({
            "tokens": row.sample.token_ids(), "response_length": row.sample.token_ids().len() - asked,
            "loss_mask": mask.collect::<Vec<_>>(), "rollout_log_probs": &row.sample.behavior_logprobs()[asked..],
            "weight_versions": per_token(row.sample.versions()).skip(asked).collect::<Vec<_>>(),
            "status": "completed", "rollout_id": id, "metadata": metadata,
            "reward": row.turns.iter().filter_map(|turn| turn.reward).sum::<f64>(),
        })
    };
    let samples: Vec<Value> = fit.iter().map(sample).collect();
    Ok(JsonAnswer(json!({ "session_id": id, "samples": samples, "too_long": long.len() })))
}
