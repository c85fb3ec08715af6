//! Errors of the endpoint, in the forms of both protocols.
//!
//! Invariant: what is wrong with a request has a status below 429, which no client of OpenAI or Anthropic repeats; what may
//! go away by itself has 429 or 5xx, which they repeat.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rollout::ClientRequestError;
use serde_json::{Value, json};

/// Why a request is refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Status of HTTP.
    pub status: StatusCode,
    /// Type in the form of OpenAI, as vLLM names it.
    pub kind: &'static str,
    /// The field of the request that is at fault, if one is.
    pub param: Option<String>,
    /// The evidence, and what to do.
    pub message: String,
    /// When it may be repeated, seconds.
    pub retry_after_s: Option<u64>,
}

impl ApiError {
    /// An error without a field.
    #[must_use]
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, param: None, message: message.into(), retry_after_s: None }
    }

    /// A field with a value that cannot be served: 400.
    #[must_use]
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "BadRequestError", message);
        Self { param: Some(param.into()), ..error }
    }

    /// A field that is missing: 400.
    #[must_use]
    pub fn missing(name: &str) -> Self {
        let error =
            Self::new(StatusCode::BAD_REQUEST, "Bad Request", format!("the field `{name}` is required"));
        Self { param: Some(format!("body.{name}")), ..error }
    }

    /// A body that is no JSON object: 400.
    #[must_use]
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Bad Request", message)
    }

    /// A model that is not served: 404.
    #[must_use]
    pub fn unknown_model<'a>(asked: &str, served: impl IntoIterator<Item = &'a str>) -> Self {
        let served: Vec<String> = served.into_iter().map(|name| format!("`{name}`")).collect();
        let message =
            format!("the model `{asked}` does not exist; this endpoint serves {}", served.join(", "));
        Self { param: Some("model".to_owned()), ..Self::new(StatusCode::NOT_FOUND, "NotFoundError", message) }
    }

    /// A key that is missing or wrong: 401.
    #[must_use]
    pub fn unauthorized() -> Self {
        let message =
            "send the key of this endpoint as `Authorization: Bearer KEY`, `x-api-key` or `x-goog-api-key`";
        Self::new(StatusCode::UNAUTHORIZED, "AuthenticationError", message)
    }

    /// A body that is too long: 413.
    #[must_use]
    pub fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", message)
    }

    /// A limit that other requests have reached: 429, to be repeated.
    #[must_use]
    pub fn busy(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequestsError", message);
        Self { retry_after_s: Some(1), ..error }
    }

    /// A failure of the server: 500.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", message)
    }

    /// The body in the form of OpenAI and vLLM.
    #[must_use]
    pub fn openai_body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status.as_u16(),
        }})
    }

    /// The body in the form of Anthropic.
    #[must_use]
    pub fn anthropic_body(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            400..=499 => "invalid_request_error",
            _ => "api_error",
        };
        let message = match &self.param {
            Some(param) if !self.message.contains(param.trim_start_matches("body.")) => {
                format!("{param}: {}", self.message)
            }
            _ => self.message.clone(),
        };
        json!({"type": "error", "error": {"type": kind, "message": message}})
    }

    /// The answer with `body`, which one of the forms above made.
    #[must_use]
    pub fn respond(&self, body: &Value) -> Response {
        let json = [(header::CONTENT_TYPE, "application/json")];
        let mut response = (self.status, json, body.to_string()).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond(&self.openai_body())
    }
}

impl From<ClientRequestError> for ApiError {
    fn from(error: ClientRequestError) -> Self {
        match error {
            ClientRequestError::Busy { .. } => Self::busy(error.to_string()),
            ClientRequestError::Refused { reason } => Self::invalid("max_tokens", reason),
            other => Self {
                retry_after_s: Some(1),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError", other.to_string())
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_form_of_their_protocol() {
        let error = ApiError::unknown_model("a", ["b"]);
        let expected = json!({"error": {"message": "the model `a` does not exist; this endpoint serves `b`",
            "type": "NotFoundError", "param": "model", "code": 404}});
        assert_eq!(error.openai_body(), expected);
        let error = ApiError::missing("messages");
        assert_eq!((error.kind, error.param.as_deref()), ("Bad Request", Some("body.messages")));
        let body = error.anthropic_body();
        assert_eq!(
            (&body["type"], &body["error"]["type"]),
            (&json!("error"), &json!("invalid_request_error"))
        );
        let named = ApiError::invalid("top_k", "too many").anthropic_body();
        assert_eq!(named["error"]["message"], "top_k: too many");
        for (status, kind) in [(401, "authentication_error"), (429, "rate_limit_error"), (500, "api_error")] {
            let error = ApiError::new(StatusCode::from_u16(status).unwrap(), "", "");
            assert_eq!(error.anthropic_body()["error"]["type"], kind);
        }
    }

    #[test]
    fn only_what_may_go_away_is_repeated() {
        let busy: ApiError = ClientRequestError::Busy { open: 3 }.into();
        assert_eq!((busy.status.as_u16(), busy.retry_after_s), (429, Some(1)));
        let response = busy.into_response();
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        let refused: ApiError = ClientRequestError::Refused { reason: "too long".to_owned() }.into();
        assert_eq!((refused.status.as_u16(), refused.retry_after_s), (400, None));
        let closed: ApiError = ClientRequestError::Closed { reason: "ended".to_owned() }.into();
        assert_eq!((closed.status.as_u16(), closed.retry_after_s), (503, Some(1)));
    }
}
