//! Requests to one engine.
//!
//! Invariant: every request has a deadline, and every answer a limit. What an engine says is quoted in an error, shortened.

use std::path::Path;
use std::time::Duration;

use connect::{HttpClient, SendError, ServerAddress};
use serde_json::Value;

use super::protocol::EngineCall;

/// Largest answer, bytes: some hundred long completions with their log-probabilities.
const MAX_ANSWER: u64 = 256 << 20;
/// Most characters of an answer that an error quotes.
const QUOTED: usize = 300;

/// Why an engine did not answer a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EngineFailure {
    /// It is gone or out of order: another engine can do its work.
    Gone(String),
    /// It refuses the request, as another one would.
    Refused(String),
}

impl EngineFailure {
    /// The same, when it was to load the directory `path`.
    pub(super) fn about(self, path: &Path) -> Self {
        let about = |what: String| {
            format!(
                "{what} (it has to load {}, and to see it under this path: `rollout.weights_dir`)",
                path.display()
            )
        };
        match self {
            Self::Gone(what) => Self::Gone(about(what)),
            Self::Refused(what) => Self::Refused(about(what)),
        }
    }
}

/// The connection to an engine.
#[derive(Debug)]
pub(super) struct EngineClient {
    http: HttpClient,
}

impl EngineClient {
    /// Connects with the first request.
    ///
    /// # Errors
    /// Certificates of the system that cannot be read.
    pub(super) fn new(url: &str) -> Result<Self, String> {
        Ok(Self { http: HttpClient::new(ServerAddress { url, token: None, roots: None })? })
    }

    pub(super) fn url(&self) -> &str {
        self.http.url()
    }

    /// Makes `call`; the answer as JSON, null if it is none.
    pub(super) fn call(&self, call: &EngineCall, deadline: Duration) -> Result<Value, EngineFailure> {
        let body = call.body.as_ref().map(Value::to_string).unwrap_or_default();
        self.send("POST", call.path, body, deadline).map(|answer| json(&answer))
    }

    /// Reads `path`.
    pub(super) fn get(&self, path: &str, deadline: Duration) -> Result<Value, EngineFailure> {
        self.send("GET", path, String::new(), deadline).map(|answer| json(&answer))
    }

    /// Reads `path` as text.
    pub(super) fn text(&self, path: &str, deadline: Duration) -> Result<String, EngineFailure> {
        let answer = self.send("GET", path, String::new(), deadline)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        body: String,
        deadline: Duration,
    ) -> Result<Vec<u8>, EngineFailure> {
        let gone =
            |error: &dyn std::fmt::Display| EngineFailure::Gone(format!("does not answer {path}: {error}"));
        let request = self.http.request(method, path);
        let sent = if body.is_empty() {
            let request = request.body(()).map_err(|error| gone(&error))?;
            self.http.send(request, deadline)
        } else {
            let request = request.header("content-type", "application/json").body(body);
            self.http.send(request.map_err(|error| gone(&error))?, deadline)
        };
        let mut response = sent.map_err(|error| match error {
            SendError::NotSent(reason) | SendError::Unclear(reason) => gone(&reason),
            SendError::Permanent(reason) => {
                EngineFailure::Refused(format!("cannot be asked {path}: {reason}"))
            }
        })?;
        let status = response.status().as_u16();
        let read = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let answer = read.map_err(|error| gone(&error))?;
        match status {
            200..=299 => Ok(answer),
            // The engine starts, is overloaded, or has failed.
            408 | 429 | 500.. => Err(gone(&format!("status {status}: {}", quoted(&answer)))),
            _ => Err(EngineFailure::Refused(format!(
                "answers {path} with status {status}: {}",
                quoted(&answer)
            ))),
        }
    }
}

fn json(answer: &[u8]) -> Value {
    serde_json::from_slice(answer).unwrap_or(Value::Null)
}

fn quoted(answer: &[u8]) -> String {
    String::from_utf8_lossy(answer)
        .chars()
        .take(QUOTED)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}
