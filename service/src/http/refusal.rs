//! Errors over HTTP, in the form `{"detail": ".."}`.
//!
//! Invariant: 429 and 503 say when to repeat the request, and 429 of a sampling request has the header that says so to the SDK.

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::outcome::Refusal;
use crate::wire::WireError;

/// Header of a sampling request that is to be repeated later.
const BACK_PRESSURE: HeaderName = HeaderName::from_static("x-tinker-sampling-backpressure");

/// An answer in JSON.
pub(super) struct JsonReply(pub(super) Value);

impl IntoResponse for JsonReply {
    fn into_response(self) -> Response {
        let media_type = HeaderValue::from_static("application/json");
        ([(CONTENT_TYPE, media_type)], self.0.to_string()).into_response()
    }
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HttpRefusal {
    refusal: Refusal,
    sampling: bool,
}

impl HttpRefusal {
    pub(super) fn new(status: u16, message: impl Into<String>) -> Self {
        Self { refusal: Refusal { status, message: message.into() }, sampling: false }
    }

    /// Of a sampling request.
    pub(super) fn of_sampling(self) -> Self {
        Self { sampling: true, ..self }
    }

    pub(super) fn status(&self) -> u16 {
        self.refusal.status
    }

    /// The same with another status.
    pub(super) fn with_status(mut self, status: u16) -> Self {
        self.refusal.status = status;
        self
    }
}

impl From<Refusal> for HttpRefusal {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, sampling: false }
    }
}

impl From<WireError> for HttpRefusal {
    fn from(error: WireError) -> Self {
        Self::new(400, error.0)
    }
}

impl From<PathRejection> for HttpRefusal {
    fn from(rejection: PathRejection) -> Self {
        Self::new(rejection.status().as_u16(), rejection.body_text())
    }
}

impl From<QueryRejection> for HttpRefusal {
    fn from(rejection: QueryRejection) -> Self {
        Self::new(rejection.status().as_u16(), rejection.body_text())
    }
}

impl IntoResponse for HttpRefusal {
    fn into_response(self) -> Response {
        let Refusal { status, message } = self.refusal;
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, JsonReply(json!({"detail": message}))).into_response();
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.sampling && status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(BACK_PRESSURE, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sampling_request_that_is_to_wait_has_the_header() {
        for (status, sampling, expected) in
            [(429, true, true), (429, false, false), (400, true, false), (503, true, false)]
        {
            let refusal = HttpRefusal::new(status, "later");
            let response = if sampling { refusal.of_sampling() } else { refusal }.into_response();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers().contains_key(BACK_PRESSURE), expected, "{status} {sampling}");
            assert_eq!(response.headers().contains_key(RETRY_AFTER), status != 400);
        }
        assert_eq!(HttpRefusal::new(7, "x").into_response().status(), 500);
    }
}
