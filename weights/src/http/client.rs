//! Requests of a subscriber to a hub. Invariant: every request has a deadline, and every answer a limit of bytes.

use std::fmt;
use std::time::{Duration, Instant};

use connect::{Body, BodyReader, HttpClient, RequestBuilder, Response, SendError, ServerAddress};
use serde::Serialize;
use serde::de::DeserializeOwned;
use trajectory::PolicyVersion;

use super::wire::WeightsProblem;
use crate::WeightsError;

/// Time for an answer, in addition to the time that the server may wait.
const ANSWER: Duration = Duration::from_secs(30);
/// The slowest network that weights are sent over, bytes per second.
const SLOWEST: u64 = 1 << 20;
/// Shortest time for an answer of a relay.
const LEAST_WAIT: Duration = Duration::from_millis(1);
/// Largest answer except weights, bytes.
const MAX_ANSWER: u64 = 64 << 10;

/// Longest time to receive `bytes` bytes of weights from a hub.
pub(super) fn longest_download(bytes: u64) -> Duration {
    ANSWER + Duration::from_secs(bytes / SLOWEST)
}

/// Why a request has no usable answer.
#[derive(Debug)]
pub(super) enum FetchError {
    /// The server did not answer; it may come back.
    Unreachable(String),
    /// The version is no longer available.
    VersionGone,
    /// A relay did not receive the version in time.
    NotYet,
    /// It sent something else than the weights of the version.
    Corrupt(String),
    /// It refused; a repetition will not succeed.
    Refused(WeightsError),
}

/// The connections of one subscriber to a hub.
pub(super) struct HubClient {
    http: HttpClient,
    /// Name of the subscriber, for errors.
    name: String,
}

impl HubClient {
    pub(super) fn new(server: ServerAddress<'_>, name: &str) -> Result<Self, WeightsError> {
        let refused = |detail| Self::refused(server.url, name, "bad_certificates", detail);
        Ok(Self { http: HttpClient::new(server).map_err(refused)?, name: name.to_owned() })
    }

    pub(super) fn url(&self) -> &str {
        self.http.url()
    }

    /// `GET` with the fields of `query`. The server may wait for `wait`.
    pub(super) fn get<T: DeserializeOwned>(
        &self,
        route: &str,
        query: &impl Serialize,
        wait: Duration,
    ) -> Result<T, FetchError> {
        self.answer(self.send("GET", route, query, wait + ANSWER)?)
    }

    /// `DELETE` with the fields of `query`, within `limit`.
    pub(super) fn delete(
        &self,
        route: &str,
        query: &impl Serialize,
        limit: Duration,
    ) -> Result<(), FetchError> {
        self.send("DELETE", route, query, limit).map(drop)
    }

    pub(super) fn post<T: DeserializeOwned>(
        &self,
        route: &str,
        body: &impl Serialize,
        limit: Duration,
    ) -> Result<T, FetchError> {
        let body = serde_json::to_vec(body).map_err(|error| self.permanent(&error))?;
        let request = self.request("POST", route, &())?.header("content-type", "application/json");
        let request = request.body(&body[..]).map_err(|error| self.permanent(&error))?;
        self.answer(self.http.send(request, limit).map_err(|error| self.failed(&error))?)
    }

    /// Weights, of at most `limit` bytes, until `deadline`; `None`: a time for this many bytes.
    pub(super) fn weights(
        &self,
        route: &str,
        query: &impl Serialize,
        limit: u64,
        deadline: Option<Instant>,
    ) -> Result<BodyReader<'static>, FetchError> {
        let wait = match deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()).max(LEAST_WAIT),
            None => longest_download(limit),
        };
        let mut response = self.send("GET", route, query, wait)?;
        if response.status() != 200 {
            return Err(self.problem_error(&mut response));
        }
        Ok(response.into_body().into_with_config().limit(limit + 1).reader())
    }

    /// Sends a request without a body.
    fn send(
        &self,
        method: &str,
        route: &str,
        query: &impl Serialize,
        limit: Duration,
    ) -> Result<Response<Body>, FetchError> {
        let request = self.request(method, route, query)?.body(());
        let request = request.map_err(|error| self.permanent(&error))?;
        self.http.send(request, limit).map_err(|error| self.failed(&error))
    }

    fn request(
        &self,
        method: &str,
        route: &str,
        query: &impl Serialize,
    ) -> Result<RequestBuilder, FetchError> {
        let fields = serde_json::to_value(query).map_err(|error| self.permanent(&error))?;
        let fields = fields.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        // Names contain no character but spaces that needs an escape, and numbers none.
        let text = |value: &serde_json::Value| match value.as_str() {
            Some(text) => text.replace(' ', "%20"),
            None => value.to_string(),
        };
        let query: Vec<String> = fields.map(|(name, value)| format!("{name}={}", text(value))).collect();
        let mark = if query.is_empty() { "" } else { "?" };
        Ok(self.http.request(method, &format!("/v1/weights/{route}{mark}{}", query.join("&"))))
    }

    fn answer<T: DeserializeOwned>(&self, mut response: Response<Body>) -> Result<T, FetchError> {
        if response.status() != 200 {
            return Err(self.problem_error(&mut response));
        }
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let body = body.map_err(|error| FetchError::Unreachable(error.to_string()))?;
        serde_json::from_slice(&body).map_err(|error| {
            FetchError::Refused(self.refuse("bad_answer", format!("it cannot be decoded: {error}")))
        })
    }

    /// The error of an answer with another status than 200.
    fn problem_error(&self, response: &mut Response<Body>) -> FetchError {
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let body = match body {
            Ok(body) => body,
            Err(error) => return FetchError::Unreachable(error.to_string()),
        };
        let Ok(problem) = serde_json::from_slice::<WeightsProblem>(&body) else {
            // A proxy, or a server that starts or stops.
            return if status >= 500 {
                FetchError::Unreachable(format!("status {status}"))
            } else {
                FetchError::Refused(self.refuse("bad_answer", format!("status {status} without a reason")))
            };
        };
        match &problem.code[..] {
            WeightsProblem::VERSION_GONE => FetchError::VersionGone,
            WeightsProblem::NOT_YET => FetchError::NotYet,
            WeightsProblem::PUBLISHER_GONE => {
                FetchError::Refused(WeightsError::PublisherGone { newest: problem.newest.map(PolicyVersion) })
            }
            WeightsProblem::TAKEN_OVER => {
                FetchError::Refused(WeightsError::TakenOver { name: self.name.clone() })
            }
            _ if status == 503 => FetchError::Unreachable(problem.detail),
            _ => FetchError::Refused(self.refuse(&problem.code, problem.detail)),
        }
    }

    fn failed(&self, error: &SendError) -> FetchError {
        match error {
            SendError::NotSent(reason) | SendError::Unclear(reason) => {
                FetchError::Unreachable(reason.clone())
            }
            SendError::Permanent(reason) => self.permanent(reason),
        }
    }

    fn permanent(&self, error: &dyn fmt::Display) -> FetchError {
        FetchError::Refused(self.refuse("bad_request", error.to_string()))
    }

    fn refuse(&self, code: &str, detail: String) -> WeightsError {
        Self::refused(self.url(), &self.name, code, detail)
    }

    fn refused(url: &str, name: &str, code: &str, detail: String) -> WeightsError {
        WeightsError::Refused { name: name.to_owned(), url: url.to_owned(), code: code.to_owned(), detail }
    }
}

impl fmt::Debug for HubClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubClient")
            .field("url", &self.url())
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
