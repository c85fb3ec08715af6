//! Routes of sessions, models and their requests.
//!
//! Invariant: a request of a model is answered with the ticket of the service, whose outcome is retrieved later.

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::body::{ApiState, SentBody};
use super::refusal::{HttpRefusal, JsonReply};
use crate::outcome::{FailedRequest, Refusal, Ticket};
use crate::training::{ModelInfo, TrainingService, UserId};
use crate::wire::{
    CreateModelBody, HeartbeatBody, LoadCall, ModelBody, ModelRequest, OptimStepBody, SamplerSaveBody,
    SaveWeightsBody, WireError, forward_from_json, load_from_json, pass_from_json, pass_from_protobuf,
    read_request,
};

/// Status of what is over.
const GONE: u16 = 410;

/// What a route answers, or why it does not.
type RouteAnswer = Result<Response, HttpRefusal>;

/// The answer to a request that was accepted.
fn ticket(ticket: Ticket) -> Response {
    let mut body = json!({"request_id": ticket.request_id});
    if let Some(model_id) = ticket.model_id {
        body["model_id"] = model_id.into();
    }
    JsonReply(body).into_response()
}

/// The answer to a request of a model: its ticket, also where its content is refused, which ends its future.
fn accepted<T>(
    api: &ApiState,
    user: UserId,
    request: ModelRequest<T>,
    accept: impl FnOnce(&TrainingService, UserId, &str, u64, T) -> Result<Ticket, Refusal>,
) -> RouteAnswer {
    let ModelRequest { model_id, seq_id, content } = request;
    let service = &api.service;
    let accepted = match content {
        Ok(content) => accept(service, user, &model_id, seq_id, content)?,
        Err(error) => service.reject(user, &model_id, seq_id, FailedRequest::user(error.to_string()))?,
    };
    Ok(ticket(accepted))
}

/// Reads a request of a model, and accepts it.
async fn requested<T: Send + 'static>(
    api: &ApiState,
    request: Request,
    read: impl FnOnce(&SentBody) -> Result<ModelRequest<T>, WireError> + Send + 'static,
    accept: impl FnOnce(&TrainingService, UserId, &str, u64, T) -> Result<Ticket, Refusal>,
) -> RouteAnswer {
    let (user, body) = api.body(request).await?;
    accepted(api, user, body.decode(read).await?, accept)
}

pub(super) async fn capabilities(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    api.access.user(request.headers())?;
    let model = |base: crate::training::BaseInfo| {
        json!({
            "model_name": base.name, "max_context_length": base.max_context, "trainable": true, "sampleable": true,
        })
    };
    let models: Vec<Value> = api.service.bases().into_iter().map(model).collect();
    Ok(JsonReply(json!({"supported_models": models})).into_response())
}

/// No flag: the defaults of the SDK are what this server serves.
pub(super) async fn client_config(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    api.body(request).await?;
    Ok(JsonReply(json!({})).into_response())
}

/// The SDK keeps its defaults after a 404.
pub(super) async fn dynamic_config(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    api.body(request).await?;
    Err(HttpRefusal::new(404, "the configuration of clients does not change here"))
}

/// Reports of the SDK about itself are not kept.
pub(super) async fn telemetry(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    api.body(request).await?;
    Ok(JsonReply(json!({"status": "accepted"})).into_response())
}

/// What a client says of itself changes nothing.
pub(super) async fn create_session(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let (user, _) = api.body(request).await?;
    let session_id = api.service.create_session(user)?;
    Ok(JsonReply(json!({"session_id": session_id, "type": "create_session"})).into_response())
}

pub(super) async fn heartbeat(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let (user, body) = api.json::<HeartbeatBody>(request).await?;
    api.service.heartbeat(user, &body.session_id)?;
    Ok(JsonReply(json!({"type": "session_heartbeat"})).into_response())
}

/// Its models are unloaded at once. A session that is over may be finished too.
pub(super) async fn finish_session(
    State(api): State<ApiState>,
    Path(session_id): Path<String>,
    request: Request,
) -> RouteAnswer {
    let (user, _) = api.body(request).await?;
    // Engines that end with it are waited for.
    match api.waiting(move |service| service.end_session(user, &session_id)).await? {
        Err(refusal) if refusal.status != GONE => Err(refusal.into()),
        _ => Ok(JsonReply(json!({})).into_response()),
    }
}

pub(super) async fn create_model(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let (user, body) = api.json::<CreateModelBody>(request).await?;
    Ok(ticket(api.service.create_model(user, body.into_new()?)?))
}

pub(super) async fn info(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let (user, body) = api.json::<ModelBody>(request).await?;
    let model = api.service.model(user, &body.model_id)?;
    Ok(JsonReply(model_info(&model, api.access.remote)).into_response())
}

/// The tokenizer is the directory of the base model; for clients that may be on other machines it is its name.
fn model_info(model: &ModelInfo, remote: bool) -> Value {
    let base = &model.base;
    let tokenizer = if remote { base.name.clone() } else { base.path.to_string_lossy().into_owned() };
    json!({
        "type": "get_info",
        "model_id": model.model_id,
        "model_name": base.name,
        "model_data": {"model_name": base.name, "tokenizer_id": tokenizer, "arch": base.architecture},
        "is_lora": model.lora.is_some(),
        "lora_rank": model.lora.map(|lora| lora.rank),
    })
}

pub(super) async fn forward_backward(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let read = |body: &SentBody| match body.is_protobuf {
        true => pass_from_protobuf(&body.bytes),
        false => pass_from_json(&body.bytes),
    };
    requested(&api, request, read, TrainingService::pass).await
}

pub(super) async fn forward(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let read = |body: &SentBody| forward_from_json(&body.bytes);
    requested(&api, request, read, TrainingService::pass).await
}

pub(super) async fn optim_step(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let read = |body: &SentBody| read_request(&body.bytes, OptimStepBody::into_step);
    requested(&api, request, read, TrainingService::optim_step).await
}

pub(super) async fn save_weights(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let read = |body: &SentBody| read_request(&body.bytes, SaveWeightsBody::into_save);
    requested(&api, request, read, TrainingService::save_weights).await
}

pub(super) async fn load_weights(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let (user, body) = api.body(request).await?;
    match body.decode(|body| load_from_json(&body.bytes)).await? {
        LoadCall::Load { into, path, optimizer } => {
            Ok(ticket(api.service.load_weights(user, &into, &path, optimizer)?))
        }
        LoadCall::Refused(refused) => accepted(&api, user, refused, |_, _, _, _, never| match never {}),
    }
}

pub(super) async fn save_for_sampler(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let read = |body: &SentBody| read_request(&body.bytes, SamplerSaveBody::into_save);
    requested(&api, request, read, TrainingService::save_for_sampler).await
}

pub(super) async fn unload(State(api): State<ApiState>, request: Request) -> RouteAnswer {
    let (user, body) = api.json::<ModelBody>(request).await?;
    Ok(ticket(api.service.unload(user, &body.model_id)?))
}

#[cfg(test)]
mod tests {
    use crate::training::{BaseInfo, LoraRequest};

    use super::*;

    #[test]
    fn a_tokenizer_is_a_directory_only_for_clients_of_this_machine() {
        let lora =
            LoraRequest { rank: 8, seed: None, train_unembed: true, train_mlp: true, train_attn: true };
        let model = ModelInfo {
            model_id: "s1:train:0".to_owned(),
            base: BaseInfo {
                name: "owner/tiny".to_owned(),
                path: "/models/tiny".into(),
                architecture: "qwen2".to_owned(),
                max_context: 512,
            },
            lora: Some(lora),
            last_request: 0,
            loaded: true,
        };
        let local = model_info(&model, false);
        assert_eq!(local["model_data"]["tokenizer_id"], "/models/tiny");
        assert_eq!((&local["is_lora"], &local["lora_rank"]), (&json!(true), &json!(8)));
        assert_eq!(model_info(&model, true)["model_data"]["tokenizer_id"], "owner/tiny");
    }
}
