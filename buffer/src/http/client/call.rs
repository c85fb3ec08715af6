//! One request and its answer, with retries.
//!
//! Invariant: a request that the server may have processed is repeated only if it is idempotent.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use connect::{HttpClient, SendError, ServerAddress};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion};

use super::ClientConfig;
use crate::http::body::{WireFormat, decode_message_pack};
use crate::http::problem::{Evidence, Problem, ProblemCode};
use crate::{BufferError, LeaseId};

/// Time for an answer, beside the time that the server may wait: a write to a slow disk, a large batch over a slow
/// network.
const ANSWER: Duration = Duration::from_secs(120);
/// Largest answer, bytes: a lease of very many long trajectories.
const MAX_ANSWER: u64 = 8 << 30;
/// First pause between attempts; each following pause doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// When a request may be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryPolicy {
    /// It is idempotent.
    Always,
    /// Only if the server has not seen it, or answered that it did nothing.
    IfNotSent,
}

/// A request.
#[derive(Debug)]
pub(super) struct ClientCall {
    method: &'static str,
    path: String,
    body: Option<Vec<u8>>,
    waits: Duration,
    repeat: RetryPolicy,
}

impl ClientCall {
    pub(super) fn get(path: String) -> Self {
        Self { method: "GET", path, body: None, waits: Duration::ZERO, repeat: RetryPolicy::Always }
    }

    pub(super) fn post(path: String, body: &impl Serialize) -> Result<Self, BufferError> {
        Self::with_body("POST", path, body)
    }

    pub(super) fn put(path: String, body: &impl Serialize) -> Result<Self, BufferError> {
        Self::with_body("PUT", path, body)
    }

    fn with_body(method: &'static str, path: String, body: &impl Serialize) -> Result<Self, BufferError> {
        match rmp_serde::to_vec_named(body) {
            Ok(body) => Ok(Self { body: Some(body), method, ..Self::get(path) }),
            Err(error) => {
                let reason = format!("the answer cannot be encoded: {error}");
                Err(BufferError::Client { url: path, reason })
            }
        }
    }

    /// The time that the server may wait.
    pub(super) fn waiting(self, wait_ms: u64) -> Self {
        Self { waits: Duration::from_millis(wait_ms), ..self }
    }

    pub(super) fn repeat(self, repeat: RetryPolicy) -> Self {
        Self { repeat, ..self }
    }
}

/// An answer of any status.
#[derive(Debug)]
pub(super) struct ClientResponse {
    status: u16,
    retry_after: Option<Duration>,
    body: Vec<u8>,
}

impl ClientResponse {
    pub(super) const OK: u16 = 200;
}

/// A problem document. A newer server can send an unknown code.
#[derive(Debug, Deserialize)]
struct ProblemBody {
    code: String,
    detail: String,
    found: Option<u64>,
    bound: Option<u64>,
}

/// The connection to a server.
pub(super) struct ClientCore {
    http: HttpClient,
    patience: Duration,
    give_up: Option<Arc<AtomicBool>>,
}

impl ClientCore {
    pub(super) fn new(config: ClientConfig) -> Result<Self, BufferError> {
        let ClientConfig { url, token, roots, patience, hold: _, give_up } = config;
        let failed = |reason: String| BufferError::Client { url: url.clone(), reason };
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(failed("write it as http://HOST:PORT or https://HOST:PORT".to_owned()));
        }
        let server = ServerAddress { url: &url, token: token.as_deref(), roots: roots.as_deref() };
        Ok(Self { http: HttpClient::new(server).map_err(failed)?, patience, give_up })
    }

    pub(super) fn url(&self) -> &str {
        self.http.url()
    }

    /// Sends `call` and decodes its answer.
    pub(super) fn ask<T: DeserializeOwned>(&self, call: &ClientCall) -> Result<T, BufferError> {
        let answer = self.send(call)?;
        if answer.status == ClientResponse::OK {
            self.decode(call, &answer)
        } else {
            Err(self.problem_error(call, &answer))
        }
    }

    /// Sends `call` and decodes its answer, also if that is `429` (full).
    pub(super) fn ask_or_full<T: DeserializeOwned>(&self, call: &ClientCall) -> Result<T, BufferError> {
        let answer = self.send(call)?;
        match answer.status {
            ClientResponse::OK => self.decode(call, &answer),
            429 => WireFormat::Json
                .decode_slowly(&answer.body)
                .map_err(|problem| self.bad_answer(call, problem.detail)),
            _ => Err(self.problem_error(call, &answer)),
        }
    }

    /// One attempt, within `limit`.
    pub(super) fn ask_once<T: DeserializeOwned>(
        &self,
        call: &ClientCall,
        limit: Duration,
    ) -> Result<T, BufferError> {
        match self.attempt(call, limit) {
            Ok(answer) if answer.status == ClientResponse::OK => self.decode(call, &answer),
            Ok(answer) => Err(self.problem_error(call, &answer)),
            Err(SendError::NotSent(reason) | SendError::Unclear(reason) | SendError::Permanent(reason)) => {
                Err(BufferError::Unreachable { request: self.name(call), attempts: 1, waited: limit, reason })
            }
        }
    }

    pub(super) fn bad_answer(&self, call: &ClientCall, reason: impl Into<String>) -> BufferError {
        BufferError::BadAnswer { request: self.name(call), reason: reason.into() }
    }

    /// The error that the buffer itself would have returned, if the answer has its evidence.
    pub(super) fn refused(
        &self,
        call: &ClientCall,
        status: u16,
        code: String,
        detail: String,
        evidence: Evidence,
    ) -> BufferError {
        let Evidence { found, bound } = evidence;
        let is = |known: ProblemCode| known.as_str() == code;
        match (found, bound) {
            (Some(lease), _) if is(ProblemCode::LeaseLost) => {
                BufferError::LeaseLost { lease: LeaseId(lease) }
            }
            (Some(lease), _) if is(ProblemCode::LeaseOver) => {
                let how = if detail.contains("released") { "released" } else { "acknowledged" };
                BufferError::LeaseOver { lease: LeaseId(lease), how }
            }
            (Some(lease), Some(next)) if is(ProblemCode::UnknownLease) => {
                BufferError::UnknownLease { lease: LeaseId(lease), next: LeaseId(next) }
            }
            (Some(group), _) if is(ProblemCode::WrongState) => {
                let (is, needs) = out_of_turn(&detail);
                BufferError::WrongState { group: GroupId(group), is, needs }
            }
            (Some(version), Some(known)) if is(ProblemCode::FutureVersion) => {
                BufferError::FutureVersion { version: PolicyVersion(version), known: PolicyVersion(known) }
            }
            (Some(version), Some(known)) if is(ProblemCode::VersionJump) => {
                BufferError::VersionJump { version: PolicyVersion(version), known: PolicyVersion(known) }
            }
            (Some(version), Some(known)) if is(ProblemCode::VersionBehind) => {
                BufferError::VersionBehind { version: PolicyVersion(version), known: PolicyVersion(known) }
            }
            (Some(step), Some(next)) if is(ProblemCode::StepPassed) => {
                BufferError::StepPassed { step: PolicyVersion(step), next: PolicyVersion(next) }
            }
            (Some(group), Some(next)) if is(ProblemCode::UnknownGroup) || is(ProblemCode::UnknownId) => {
                BufferError::UnknownGroup { group: GroupId(group), next: GroupId(next) }
            }
            (Some(bytes), Some(limit)) if is(ProblemCode::GroupTooLarge) => {
                BufferError::GroupTooLarge { bytes, limit }
            }
            _ => BufferError::Refused { request: self.name(call), status, code, detail },
        }
    }

    /// Repeats `call` until an answer other than 503, or the deadline.
    fn send(&self, call: &ClientCall) -> Result<ClientResponse, BufferError> {
        let started = Instant::now();
        let deadline = started + call.waits + self.patience;
        let (mut attempts, mut pause) = (0, FIRST_PAUSE);
        loop {
            attempts += 1;
            let (reason, wanted_pause) = match self.attempt(call, call.waits + ANSWER) {
                Ok(answer) if answer.status == 503 => {
                    let problem: Result<ProblemBody, Problem> = WireFormat::Json.decode_slowly(&answer.body);
                    (
                        problem.map_or_else(|_| "status 503".to_owned(), |problem| problem.detail),
                        answer.retry_after,
                    )
                }
                Ok(answer) => return Ok(answer),
                Err(SendError::NotSent(reason)) => (reason, None),
                Err(SendError::Unclear(reason)) if call.repeat == RetryPolicy::Always => (reason, None),
                Err(SendError::Unclear(reason)) => {
                    return Err(BufferError::Unclear { request: self.name(call), reason });
                }
                Err(SendError::Permanent(reason)) => {
                    return Err(BufferError::Client { url: self.url().to_owned(), reason });
                }
            };
            let left = deadline.saturating_duration_since(Instant::now());
            let gives_up = self.give_up.as_ref().is_some_and(|give_up| give_up.load(Ordering::Relaxed));
            if left.is_zero() || gives_up {
                let (request, waited) = (self.name(call), started.elapsed());
                return Err(BufferError::Unreachable { request, attempts, waited, reason });
            }
            std::thread::sleep(wanted_pause.unwrap_or(pause).min(LONGEST_PAUSE).min(left));
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    fn attempt(&self, call: &ClientCall, limit: Duration) -> Result<ClientResponse, SendError> {
        let request = self.http.request(call.method, &call.path).header("accept", WireFormat::MESSAGE_PACK);
        let invalid = |error: connect::RequestError| SendError::Permanent(error.to_string());
        let mut response = match &call.body {
            Some(body) => {
                let request = request.header("content-type", WireFormat::MESSAGE_PACK).body(&body[..]);
                self.http.send(request.map_err(invalid)?, limit)?
            }
            None => self.http.send(request.body(()).map_err(invalid)?, limit)?,
        };
        let retry_after = response.headers().get("retry-after");
        let retry_after =
            retry_after.and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_secs);
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let body = body.map_err(|error| SendError::Unclear(error.to_string()))?;
        Ok(ClientResponse { status: response.status().as_u16(), retry_after, body })
    }

    fn decode<T: DeserializeOwned>(
        &self,
        call: &ClientCall,
        answer: &ClientResponse,
    ) -> Result<T, BufferError> {
        decode_message_pack(&answer.body).map_err(|problem| self.bad_answer(call, problem.detail))
    }

    fn problem_error(&self, call: &ClientCall, answer: &ClientResponse) -> BufferError {
        match WireFormat::Json.decode_slowly::<ProblemBody>(&answer.body) {
            Ok(ProblemBody { code, detail, found, bound }) => {
                self.refused(call, answer.status, code, detail, Evidence { found, bound })
            }
            Err(_) => self.bad_answer(call, format!("status {} without a problem", answer.status)),
        }
    }

    fn name(&self, call: &ClientCall) -> String {
        format!("{} {}{}", call.method, self.url(), call.path)
    }
}

impl fmt::Debug for ClientCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCore").field("url", &self.url()).finish_non_exhaustive()
    }
}

/// The current and the needed state of a group, from the text of the server.
fn out_of_turn(detail: &str) -> (&'static str, &'static str) {
    let is = BufferError::STATES.into_iter().find(|state| detail.contains(&format!(" is {state},")));
    let needs = BufferError::NEEDS.into_iter().find(|needs| detail.contains(&format!("must be {needs}:")));
    (is.unwrap_or("in another state"), needs.unwrap_or("in flight"))
}
