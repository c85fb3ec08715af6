//! Routes that do not sample: models, tokens, health and metrics.
//!
//! Invariant: none of them waits for the sampler.

use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use model::SpecialTokens;
use serde_json::{Value, json};

use super::chat::take_conversation;
use super::messages;
use crate::ApiError;
use crate::fields::Fields;
use crate::metrics::EndpointMetrics;
use crate::protocol::{Call, JSON};
use crate::service::Service;
use crate::tools::{Toolbox, openai_tool};

/// `GET /v1/models`.
pub(crate) async fn models(State(service): State<Service>, headers: HeaderMap) -> Result<Response, ApiError> {
    service.check_key(&headers)?;
    let adapters = (0..service.policy().adapters.len()).map(Some);
    let all: Vec<Value> = [None].into_iter().chain(adapters).map(|of| description(&service, of)).collect();
    Ok(json_response(&json!({"object": "list", "data": all})))
}

/// `GET /v1/models/NAME`.
pub(crate) async fn model(
    State(service): State<Service>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    service.check_key(&headers)?;
    let adapter = service.adapter(Some(&name))?;
    Ok(json_response(&description(&service, adapter)))
}

/// The model with an adapter, or without one.
fn description(service: &Service, adapter: Option<usize>) -> Value {
    let policy = service.policy();
    let adapter = adapter.and_then(|index| policy.adapters.get(index));
    json!({
        "id": adapter.map_or(&policy.name, |adapter| &adapter.name),
        "object": "model", "created": service.created(), "owned_by": "rlrun",
        "root": adapter.map_or(&policy.root, |adapter| &adapter.root),
        "parent": adapter.map(|_| &policy.name), "max_model_len": policy.max_context,
        // What log-probabilities are of: the distribution that tokens are drawn from.
        "logprobs_mode": "processed_logprobs",
        "policy_version": service.queue().status().version.0,
        "permission": [],
    })
}

/// `POST /tokenize`.
pub(crate) async fn tokenize(State(service): State<Service>, request: Request) -> Result<Response, ApiError> {
    let read = |call: &mut Call| {
        call.take_model()?;
        let format = call.service.renderer().format();
        let fields = &mut call.fields;
        let strings = fields.flag("return_token_strs")?.unwrap_or(false);
        let prompt = fields.text("prompt")?;
        let special = fields.flag("add_special_tokens")?;
        let tools = Toolbox::take(fields, format, openai_tool)?;
        let conversation = take_conversation(fields, &tools, prompt.is_none())?;
        let tokenizer = call.service.directory().tokenizer().clone();
        let tokens = match (prompt, conversation) {
            (Some(prompt), _) => {
                let special = if special.unwrap_or(true) { SpecialTokens::Add } else { SpecialTokens::Omit };
                let encoded = tokenizer.encode(&prompt, special);
                encoded.map_err(|error| ApiError::invalid("prompt", error.to_string()))?
            }
            (None, Some(conversation)) => call.service.renderer().encode(conversation)?,
            (None, None) => return Err(ApiError::missing("prompt")),
        };
        let strings = strings.then(|| {
            let spelled = |id: &u32| tokenizer.token(*id).unwrap_or_default();
            tokens.iter().map(spelled).collect::<Vec<_>>()
        });
        let max_model_len = call.service.policy().max_context;
        Ok(
            json!({"count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings}),
        )
    };
    answer(service, request, read).await
}

/// `POST /detokenize`.
pub(crate) async fn detokenize(
    State(service): State<Service>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |call: &mut Call| {
        call.take_model()?;
        let tokens = call.fields.token_ids("tokens")?;
        let tokens = call.fields.required("tokens", tokens)?;
        call.service.check_tokens(&tokens, "tokens")?;
        let skip_special = call.fields.flag("skip_special_tokens")?.unwrap_or(false);
        let tokenizer = call.service.directory().tokenizer();
        let text = if skip_special { tokenizer.decode(&tokens) } else { tokenizer.decode_special(&tokens) };
        let text = text.map_err(|error| ApiError::invalid("tokens", error.to_string()))?;
        Ok(json!({"prompt": text, "text": text}))
    };
    answer(service, request, read).await
}

/// `POST /v1/messages/count_tokens`.
pub(crate) async fn count_tokens(State(service): State<Service>, request: Request) -> Response {
    match answer(service, request, messages::count).await {
        Ok(response) => response,
        Err(error) => error.respond(&error.anthropic_body()),
    }
}

/// `GET /health`, `/ping`: whether a sampler serves.
pub(crate) async fn health(State(service): State<Service>) -> Response {
    let status = if service.queue().is_closed() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    status.into_response()
}

/// `GET /version`.
pub(crate) async fn version() -> Response {
    json_response(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /load`.
pub(crate) async fn load(State(service): State<Service>) -> Response {
    json_response(&json!({"server_load": service.open_answers()}))
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(service): State<Service>) -> Response {
    ([(header::CONTENT_TYPE, EndpointMetrics::MEDIA_TYPE)], service.metrics_text()).into_response()
}

/// A route that does not exist.
pub(crate) async fn unknown(request: Request) -> ApiError {
    let message = format!("there is no route {} {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, "NotFoundError", message)
}

/// The answer that `read` makes of the fields of a body, on a thread that may block.
async fn answer(
    service: Service,
    request: Request,
    read: impl FnOnce(&mut Call) -> Result<Value, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    service.check_key(&parts.headers)?;
    let fields = service.bodies().read(&parts.headers, body, Fields::parse).await?;
    let mut call = Call { service, fields, turn: None, adapter: None };
    let answered = tokio::task::spawn_blocking(move || -> Result<Value, ApiError> {
        let value = read(&mut call)?;
        call.fields.finish()?;
        Ok(value)
    });
    let value = answered.await.map_err(|_| ApiError::internal("reading the request failed"))??;
    Ok(json_response(&value))
}

fn json_response(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, JSON)], value.to_string()).into_response()
}
