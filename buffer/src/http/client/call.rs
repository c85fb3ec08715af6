//! One request and its answer, repeated where that is safe.
//!
//! Invariant: what is not known to have been left undone is only done again if the buffer takes it as the same.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Timeout};

use super::ClientConfig;
use crate::http::body::WireFormat;
use crate::http::problem::{Evidence, Problem, ProblemCode};
use crate::{BufferError, LeaseId};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an answer may take beside what the request waits: a write to a slow disk, a large batch over a slow network.
const ANSWER: Duration = Duration::from_secs(120);
/// Largest answer, bytes: a lease of very many long trajectories.
const MAX_ANSWER: u64 = 8 << 30;
/// Servers close connections that are idle for ten seconds; one that may be just about to is not used.
const MAX_IDLE: Duration = Duration::from_secs(5);
/// Connections that are kept, one for each thread that is likely to call at the same time.
const KEPT_CONNECTIONS: usize = 64;
/// The first pause before a repetition; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// When a request may be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryPolicy {
    /// The buffer takes it as the same.
    Always,
    /// Only if the server cannot have seen it, or said that it did nothing.
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
        match WireFormat::MessagePack.encode(body) {
            Ok(body) => Ok(Self { body: Some(body), method, ..Self::get(path) }),
            Err(problem) => Err(BufferError::Client { url: path, reason: problem.detail }),
        }
    }

    /// It waits for so long at the server.
    pub(super) fn waiting(self, wait_ms: u64) -> Self {
        Self { waits: Duration::from_millis(wait_ms), ..self }
    }

    pub(super) fn repeat(self, repeat: RetryPolicy) -> Self {
        Self { repeat, ..self }
    }
}

/// An answer, whatever it says.
#[derive(Debug)]
pub(super) struct ClientResponse {
    status: u16,
    retry_after: Option<Duration>,
    body: Vec<u8>,
}

impl ClientResponse {
    pub(super) const OK: u16 = 200;
}

/// How an attempt without an answer ended.
#[derive(Debug)]
enum CallFailure {
    /// The server has not seen it.
    NotSent(String),
    /// Nobody knows.
    Unclear(String),
    /// It will never work.
    Hopeless(String),
}

/// A problem as a client reads it: of a newer server it may have a code that is not known here.
#[derive(Debug, Deserialize)]
struct ProblemBody {
    code: String,
    detail: String,
    found: Option<u64>,
    bound: Option<u64>,
}

/// The connections to a server.
pub(super) struct ClientCore {
    agent: Agent,
    /// Without a slash at the end.
    url: String,
    authorization: Option<String>,
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
        let tls = TlsConfig::builder();
        let tls = match &roots {
            None => tls,
            Some(path) => tls.root_certs(RootCerts::Specific(Arc::new(certificates(path).map_err(failed)?))),
        };
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // A variable of the environment decides nothing here.
            .proxy(None)
            .timeout_connect(Some(CONNECT))
            .max_idle_age(MAX_IDLE)
            .max_idle_connections(KEPT_CONNECTIONS)
            .max_idle_connections_per_host(KEPT_CONNECTIONS)
            .tls_config(tls.build())
            .build()
            .new_agent();
        let authorization = token.map(|token| format!("Bearer {token}"));
        Ok(Self { agent, url: url.trim_end_matches('/').to_owned(), authorization, patience, give_up })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// The answer to `call`.
    pub(super) fn ask<T: DeserializeOwned>(&self, call: &ClientCall) -> Result<T, BufferError> {
        let answer = self.send(call)?;
        if answer.status == ClientResponse::OK {
            self.decode(call, &answer)
        } else {
            Err(self.problem_error(call, &answer))
        }
    }

    /// The answer to `call`, also if it says that there is no room for any group.
    pub(super) fn ask_or_full<T: DeserializeOwned>(&self, call: &ClientCall) -> Result<T, BufferError> {
        let answer = self.send(call)?;
        match answer.status {
            ClientResponse::OK => self.decode(call, &answer),
            429 => {
                WireFormat::Json.decode(&answer.body).map_err(|problem| self.bad_answer(call, problem.detail))
            }
            _ => Err(self.problem_error(call, &answer)),
        }
    }

    /// One attempt, for so long.
    pub(super) fn ask_once<T: DeserializeOwned>(
        &self,
        call: &ClientCall,
        limit: Duration,
    ) -> Result<T, BufferError> {
        match self.attempt(call, limit) {
            Ok(answer) if answer.status == ClientResponse::OK => self.decode(call, &answer),
            Ok(answer) => Err(self.problem_error(call, &answer)),
            Err(
                CallFailure::NotSent(reason) | CallFailure::Unclear(reason) | CallFailure::Hopeless(reason),
            ) => {
                Err(BufferError::Unreachable { request: self.name(call), attempts: 1, waited: limit, reason })
            }
        }
    }

    pub(super) fn bad_answer(&self, call: &ClientCall, reason: impl Into<String>) -> BufferError {
        BufferError::BadAnswer { request: self.name(call), reason: reason.into() }
    }

    /// The error that the buffer itself would have given, as far as the answer has what it needs.
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

    /// Asks until there is an answer that is meant to last.
    fn send(&self, call: &ClientCall) -> Result<ClientResponse, BufferError> {
        let started = Instant::now();
        let deadline = started + call.waits + self.patience;
        let (mut attempts, mut pause) = (0, FIRST_PAUSE);
        loop {
            attempts += 1;
            let (reason, wanted_pause) = match self.attempt(call, call.waits + ANSWER) {
                Ok(answer) if answer.status == 503 => {
                    let problem: Result<ProblemBody, Problem> = WireFormat::Json.decode(&answer.body);
                    (
                        problem.map_or_else(|_| "status 503".to_owned(), |problem| problem.detail),
                        answer.retry_after,
                    )
                }
                Ok(answer) => return Ok(answer),
                Err(CallFailure::NotSent(reason)) => (reason, None),
                Err(CallFailure::Unclear(reason)) if call.repeat == RetryPolicy::Always => (reason, None),
                Err(CallFailure::Unclear(reason)) => {
                    return Err(BufferError::Unclear { request: self.name(call), reason });
                }
                Err(CallFailure::Hopeless(reason)) => {
                    return Err(BufferError::Client { url: self.url.clone(), reason });
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

    fn attempt(&self, call: &ClientCall, limit: Duration) -> Result<ClientResponse, CallFailure> {
        let mut request = ureq::http::Request::builder()
            .method(call.method)
            .uri(format!("{}{}", self.url, call.path))
            .header("accept", WireFormat::MESSAGE_PACK);
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        if call.body.is_some() {
            request = request.header("content-type", WireFormat::MESSAGE_PACK);
        }
        let hopeless = |error: ureq::http::Error| CallFailure::Hopeless(error.to_string());
        let sent = match &call.body {
            Some(body) => {
                let request = request.body(&body[..]).map_err(hopeless)?;
                self.agent.run(self.agent.configure_request(request).timeout_global(Some(limit)).build())
            }
            None => {
                let request = request.body(()).map_err(hopeless)?;
                self.agent.run(self.agent.configure_request(request).timeout_global(Some(limit)).build())
            }
        };
        let mut response = sent.map_err(call_failure)?;
        let retry_after = response.headers().get("retry-after");
        let retry_after =
            retry_after.and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_secs);
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let body = body.map_err(|error| CallFailure::Unclear(error.to_string()))?;
        Ok(ClientResponse { status: response.status().as_u16(), retry_after, body })
    }

    fn decode<T: DeserializeOwned>(
        &self,
        call: &ClientCall,
        answer: &ClientResponse,
    ) -> Result<T, BufferError> {
        WireFormat::MessagePack.decode(&answer.body).map_err(|problem| self.bad_answer(call, problem.detail))
    }

    fn problem_error(&self, call: &ClientCall, answer: &ClientResponse) -> BufferError {
        match WireFormat::Json.decode::<ProblemBody>(&answer.body) {
            Ok(ProblemBody { code, detail, found, bound }) => {
                self.refused(call, answer.status, code, detail, Evidence { found, bound })
            }
            Err(_) => self.bad_answer(call, format!("status {} without a problem", answer.status)),
        }
    }

    fn name(&self, call: &ClientCall) -> String {
        format!("{} {}{}", call.method, self.url, call.path)
    }
}

impl fmt::Debug for ClientCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCore").field("url", &self.url).finish_non_exhaustive()
    }
}

fn call_failure(error: ureq::Error) -> CallFailure {
    let reason = error.to_string();
    match error {
        ureq::Error::HostNotFound
        | ureq::Error::ConnectionFailed
        | ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => CallFailure::NotSent(reason),
        ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            CallFailure::NotSent(reason)
        }
        ureq::Error::Io(_)
        | ureq::Error::Timeout(_)
        | ureq::Error::Protocol(_)
        | ureq::Error::BodyStalled => CallFailure::Unclear(reason),
        _ => CallFailure::Hopeless(reason),
    }
}

/// Where a group is and would have to be, by what the server says of it.
fn out_of_turn(detail: &str) -> (&'static str, &'static str) {
    let is = BufferError::STATES.into_iter().find(|state| detail.contains(&format!(" is {state},")));
    let needs = BufferError::NEEDS.into_iter().find(|needs| detail.contains(&format!("must be {needs}:")));
    (is.unwrap_or("in another state"), needs.unwrap_or("in flight"))
}

/// The certificates in a PEM file; at least one.
fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, String> {
    let failed = |reason: String| format!("{}: {reason}; name a PEM file with certificates", path.display());
    let pem = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let mut found = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| failed(error.to_string()))? {
            found.push(certificate);
        }
    }
    if found.is_empty() { Err(failed("it has no certificate".to_owned())) } else { Ok(found) }
}
