//! Results of requests: `retrieve_future` and `cancel_future`.
//!
//! Invariant: a request for a result is answered within [`super::HttpLimits::retrieve_time`], or at once when the server stops. The
//! id of a request that is not known is answered with 410, on which the SDK sends the original request again.

use axum::extract::{Request, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::body::{ApiState, blocking};
use super::refusal::{HttpRefusal, JsonReply};
use crate::outcome::{FutureState, WaitState};
use crate::wire::{
    RequestBody, ResultBody, ResultEncoding, RetrieveBody, encode_failure, encode_outcome, encode_pending,
    protobuf,
};

pub(super) async fn retrieve(State(api): State<ApiState>, request: Request) -> Result<Response, HttpRefusal> {
    let encoding = accepted(request.headers());
    let (user, body) = api.json::<RetrieveBody>(request).await?;
    let mut stopping = api.stopping.clone();
    let limits = api.limits();
    let state = tokio::select! {
        state = api.service.retrieve(user, &body.request_id, limits.retrieve_time) => {
            state.map_err(|refusal| gone(refusal.into()))?
        }
        // Without a server nothing stops: its sender is gone.
        Ok(_) = stopping.wait_for(|stopping| *stopping) => {
            FutureState::Pending { queue: WaitState::Active, reason: "the server stops".to_owned() }
        }
    };
    let whole = if body.allow_metadata_only { limits.inline_result_bytes } else { usize::MAX };
    let result = match state {
        FutureState::Pending { queue, reason } => encode_pending(&body.request_id, queue, &reason),
        FutureState::Failed(failure) => encode_failure(&failure),
        FutureState::Done(outcome) => blocking(move || encode_outcome(&outcome, encoding)).await?,
    };
    Ok(sent(result, whole))
}

pub(super) async fn cancel(State(api): State<ApiState>, request: Request) -> Result<Response, HttpRefusal> {
    let (user, body) = api.json::<RequestBody>(request).await?;
    api.service.cancel(user, &body.request_id)?;
    Ok(JsonReply(json!({})).into_response())
}

/// The encoding that a client wants: newer SDKs accept protobuf alone, older ones name both.
fn accepted(headers: &HeaderMap) -> ResultEncoding {
    let mut names = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if names.any(|names| names.contains(protobuf::MEDIA_TYPE)) {
        ResultEncoding::Protobuf
    } else {
        ResultEncoding::Json
    }
}

/// What is not found can be made again.
fn gone(refusal: HttpRefusal) -> HttpRefusal {
    if refusal.status() == 404 { refusal.with_status(410) } else { refusal }
}

/// A result, or its size if that is above `whole` bytes.
fn sent(result: ResultBody, whole: usize) -> Response {
    let bytes = result.bytes.len();
    if bytes > whole {
        let size = json!({"status": "complete_metadata", "response_payload_size": bytes});
        return JsonReply(size).into_response();
    }
    let media_type = HeaderValue::from_static(result.media_type);
    ([(CONTENT_TYPE, media_type)], result.bytes).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_the_one_that_is_accepted() {
        for (accept, encoding) in [
            ("application/json", ResultEncoding::Json),
            ("application/x-protobuf", ResultEncoding::Protobuf),
            ("application/x-protobuf, application/json", ResultEncoding::Protobuf),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, accept.parse().unwrap());
            assert_eq!(accepted(&headers), encoding, "{accept}");
        }
        assert_eq!(accepted(&HeaderMap::new()), ResultEncoding::Json);
    }

    #[tokio::test]
    async fn a_large_result_is_announced_once() {
        let result = || encode_pending("req-1", WaitState::PausedCapacity, "2 models are in front");
        let text = async |response: Response| {
            let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
            serde_json::from_slice::<serde_json::Value>(&bytes).unwrap()
        };
        let whole = text(sent(result(), usize::MAX)).await;
        assert_eq!(whole["queue_state"], "paused_capacity");
        assert_eq!(whole["queue_state_reason"], "2 models are in front");
        let size = text(sent(result(), 10)).await;
        assert_eq!(size["status"], "complete_metadata");
        assert_eq!(size["response_payload_size"], result().bytes.len());
    }

    #[test]
    fn an_unknown_id_is_gone() {
        assert_eq!(gone(HttpRefusal::new(404, "x")).status(), 410);
        assert_eq!(gone(HttpRefusal::new(401, "x")).status(), 401);
    }
}
