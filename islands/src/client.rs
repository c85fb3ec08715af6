//! The coordinator as an island sees it: requests that are repeated until their deadline.
//!
//! Invariant: every request is idempotent, so it is repeated when its answer is lost. Bytes of all bodies are counted as they are
//! sent and received, repetitions too.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use connect::{HttpClient, SendError, ServerAddress};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::IslandError;
use crate::coordinator::{ContributionOutcome, IslandJoin, JoinAnswer, JoinedState};
use crate::frame::{FRAME_HEAD, RoundMessage, to_bytes};
use crate::server::MAX_JSON;
use crate::terms::IslandTerms;

/// Pause before a request is repeated.
const AGAIN: Duration = Duration::from_millis(200);
/// Longest wait for the answer to an island that leaves, which changes only how long the others wait.
const LEAVE: Duration = Duration::from_secs(5);
/// Shortest time for the answer of a request.
const LEAST: Duration = Duration::from_secs(1);

/// The address of the coordinator, and the island that sends requests to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorAddress {
    /// Such as `http://127.0.0.1:8703`.
    pub url: String,
    /// Its token, if it wants one.
    pub token: Option<String>,
    /// PEM file with the TLS roots to trust instead of those of browsers.
    pub roots: Option<PathBuf>,
    /// Name of the island.
    pub island: String,
    /// Id of its run.
    pub run: String,
    /// Longest wait for an answer.
    pub wait: Duration,
}

/// A client of a coordinator.
#[derive(Debug)]
pub struct CoordinatorClient {
    http: HttpClient,
    address: CoordinatorAddress,
    sent: AtomicU64,
    received: AtomicU64,
}

/// Bytes of bodies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyBytes {
    /// To the coordinator.
    pub sent: u64,
    /// From the coordinator.
    pub received: u64,
}

/// An answer that is not an error to repeat.
struct ClientAnswer {
    status: u16,
    body: Vec<u8>,
}

impl CoordinatorClient {
    /// Connects with the first request.
    ///
    /// # Errors
    /// Certificates that cannot be read.
    pub fn new(address: CoordinatorAddress) -> Result<Self, IslandError> {
        let CoordinatorAddress { url, token, roots, .. } = &address;
        let server = ServerAddress { url, token: token.as_deref(), roots: roots.as_deref() };
        let http =
            HttpClient::new(server).map_err(|reason| IslandError::Connection { url: url.clone(), reason })?;
        Ok(Self { http, address, sent: AtomicU64::new(0), received: AtomicU64::new(0) })
    }

    /// Name of the island.
    #[must_use]
    pub fn island(&self) -> &str {
        &self.address.island
    }

    /// Id of its run.
    #[must_use]
    pub fn run(&self) -> &str {
        &self.address.run
    }

    /// Longest wait for an answer.
    #[must_use]
    pub fn wait(&self) -> Duration {
        self.address.wait
    }

    /// Bytes of bodies so far.
    #[must_use]
    pub fn bytes(&self) -> BodyBytes {
        let [sent, received] = [&self.sent, &self.received].map(|count| count.load(Ordering::Relaxed));
        BodyBytes { sent, received }
    }

    /// Joins with `terms`, and with `state` if the island has been here before.
    ///
    /// # Errors
    /// A refusal, or no answer before the deadline.
    pub fn join(&self, terms: &IslandTerms, state: Option<JoinedState>) -> Result<JoinAnswer, IslandError> {
        let (name, run) = (self.address.island.clone(), self.address.run.clone());
        let request = IslandJoin { name, run, terms: terms.clone(), state };
        let body = serde_json::to_vec(&request).unwrap_or_default();
        let answer = self.ask("join", "POST", "/v1/islands/join", &body, MAX_JSON)?;
        self.parsed(&self.accepted(answer)?)
    }

    /// Offers `values`, `[trained values]`, as the first outer weights. Whether they are; else another island was first.
    ///
    /// # Errors
    /// A refusal, or no answer before the deadline.
    pub fn begin(&self, terms: &IslandTerms, values: &[f32]) -> Result<bool, IslandError> {
        let terms = serde_json::to_vec(terms).unwrap_or_default();
        let payload = [&(terms.len() as u64).to_le_bytes()[..], &terms, &to_bytes(values)].concat();
        let path = self.own_path("weights");
        let body = RoundMessage { round: 0, islands: 1, payload }.to_frame();
        let answer = self.ask("the first outer weights", "PUT", &path, &body, MAX_JSON)?;
        if answer.status == 412 {
            return Ok(false);
        }
        self.accepted(answer).map(|_| true)
    }

    /// The newest outer weights, `[values]`, as a message of the open round.
    ///
    /// # Errors
    /// A refusal, or no answer before the deadline.
    pub fn weights(&self, values: usize) -> Result<RoundMessage, IslandError> {
        let limit = FRAME_HEAD + 4 * values;
        let answer = self.ask("the outer weights", "GET", "/v1/islands/weights", &[], limit)?;
        RoundMessage::from_frame(self.accepted(answer)?)
    }

    /// Sends the outer gradient `message`.
    ///
    /// # Errors
    /// A refusal, or no answer before the deadline.
    pub fn contribute(&self, message: &RoundMessage) -> Result<ContributionOutcome, IslandError> {
        let path = self.own_path("contributions");
        let answer = self.ask("an outer gradient", "PUT", &path, &message.to_frame(), MAX_JSON)?;
        self.parsed(&self.accepted(answer)?)
    }

    /// Waits for the outer update of round `round`, of at most `payload` bytes; `None` if it is kept no more.
    ///
    /// # Errors
    /// A refusal, or a round that is still open at the deadline.
    pub fn round(&self, round: u64, payload: usize) -> Result<Option<RoundMessage>, IslandError> {
        let begun = Instant::now();
        let (what, path) = (format!("the end of round {round}"), format!("/v1/islands/rounds/{round}"));
        while begun.elapsed() < self.address.wait {
            let answer = self.ask(&what, "GET", &path, &[], FRAME_HEAD + payload)?;
            match answer.status {
                202 => {}
                410 => return Ok(None),
                _ => return RoundMessage::from_frame(self.accepted(answer)?).map(Some),
            }
        }
        Err(self.late(&what, self.address.wait, "the round is open".to_owned()))
    }

    /// Leaves. The other islands no longer wait for this one.
    ///
    /// # Errors
    /// A refusal, or no answer before the deadline.
    pub fn leave(&self) -> Result<(), IslandError> {
        let body = json!({ "name": self.address.island, "run": self.address.run }).to_string();
        let wait = LEAVE.min(self.address.wait);
        let answer = self.repeated(wait, "the answer to its leaving", |left| {
            self.ask_once("POST", "/v1/islands/leave", body.as_bytes(), MAX_JSON, left)
        });
        self.accepted(answer?).map(drop)
    }

    fn own_path(&self, what: &str) -> String {
        format!("/v1/islands/{what}/{}/{}", self.address.island, self.address.run)
    }

    fn late(&self, what: &str, waited: Duration, reason: String) -> IslandError {
        let CoordinatorAddress { url, island, .. } = &self.address;
        let (island, url, what) = (island.clone(), url.clone(), what.to_owned());
        IslandError::Deadline { island, what, url, waited, reason }
    }

    fn refused(&self, reason: String) -> IslandError {
        let CoordinatorAddress { url, island, .. } = &self.address;
        IslandError::Refused { url: url.clone(), island: island.clone(), reason }
    }

    /// The body of an answer with success.
    fn accepted(&self, ClientAnswer { status, body }: ClientAnswer) -> Result<Vec<u8>, IslandError> {
        if (200..300).contains(&status) {
            return Ok(body);
        }
        let detail = serde_json::from_slice::<serde_json::Value>(&body).ok();
        let detail = detail.and_then(|body| Some(body.get("detail")?.as_str()?.to_owned()));
        Err(self
            .refused(detail.unwrap_or_else(|| format!("status {status}; is it a coordinator of islands?"))))
    }

    fn parsed<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, IslandError> {
        serde_json::from_slice(body)
            .map_err(|error| self.refused(format!("its answer is not valid: {error}")))
    }

    fn ask(
        &self,
        what: &str,
        method: &str,
        path: &str,
        body: &[u8],
        limit: usize,
    ) -> Result<ClientAnswer, IslandError> {
        self.repeated(self.address.wait, what, |left| self.ask_once(method, path, body, limit, left))
    }

    /// Sends a request with `ask` until it is answered with another status than one of 5xx.
    fn repeated(
        &self,
        wait: Duration,
        what: &str,
        ask: impl Fn(Duration) -> Result<ClientAnswer, SendError>,
    ) -> Result<ClientAnswer, IslandError> {
        let begun = Instant::now();
        loop {
            let left = wait.saturating_sub(begun.elapsed());
            let reason = match ask(left.max(LEAST)) {
                Ok(answer) if answer.status < 500 => return Ok(answer),
                Ok(ClientAnswer { status, body }) => {
                    format!("status {status}: {}", String::from_utf8_lossy(&body).trim_end())
                }
                Err(SendError::Permanent(reason)) => {
                    let url = self.address.url.clone();
                    return Err(IslandError::Connection { url, reason });
                }
                Err(error) => error.to_string(),
            };
            if begun.elapsed() + AGAIN >= wait {
                return Err(self.late(what, wait, reason));
            }
            std::thread::sleep(AGAIN);
        }
    }

    fn ask_once(
        &self,
        method: &str,
        path: &str,
        body: &[u8],
        limit: usize,
        left: Duration,
    ) -> Result<ClientAnswer, SendError> {
        let request = self.http.request(method, path);
        let permanent = |error: connect::RequestError| SendError::Permanent(error.to_string());
        let mut response = if body.is_empty() {
            self.http.send(request.body(()).map_err(permanent)?, left)?
        } else {
            let response = self.http.send(request.body(body).map_err(permanent)?, left)?;
            self.sent.fetch_add(body.len() as u64, Ordering::Relaxed);
            response
        };
        // An error document may be longer than the values.
        let limit = limit.max(MAX_JSON) as u64;
        let read = response.body_mut().with_config().limit(limit + 1).read_to_vec();
        let body = read.map_err(|error| SendError::Unclear(error.to_string()))?;
        self.received.fetch_add(body.len() as u64, Ordering::Relaxed);
        Ok(ClientAnswer { status: response.status().as_u16(), body })
    }
}
