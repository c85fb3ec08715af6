//! The Streamable HTTP transport of the Model Context Protocol (revision 2025-06-18): every message is a POST, whose answer
//! is one message as JSON, or several as a stream of events.
//!
//! Invariant: a request has a deadline, an answer a longest length. A request that ran over its time, or whose answer is none,
//! is answered with an error and disturbs no other. A server that cannot be reached, fails (5xx) or knows neither token nor
//! session (401, 404) ends the transport: the calls under way fail with the reason, and the next call opens a session of its own.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use connect::{HttpAgent, Request, RequestBuilder};
use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Longest answer, bytes.
const MAX_ANSWER_BYTES: u64 = 8 << 20;
/// Longest end of a session.
const END_DEADLINE: Duration = Duration::from_secs(5);
/// Idle connections.
const CONNECTIONS: usize = 16;
/// Messages that were received and are not read yet. The requests whose answers have no place wait.
const UNREAD: usize = 64;
/// Code of an error in place of an answer, among those that JSON-RPC leaves to implementations.
const NO_ANSWER: i32 = -32000;

/// A server, and the session with it.
#[derive(Debug)]
pub(super) struct McpHttpServer {
    url: String,
    authorization: Option<String>,
    agent: HttpAgent,
    /// Longest request with its answer.
    limit: Duration,
    session: Mutex<McpSession>,
}

#[derive(Clone, Debug, Default)]
struct McpSession {
    /// What the server calls it; servers without sessions have none.
    id: Option<String>,
    /// The revision of the protocol that was agreed on.
    protocol: Option<String>,
    /// Why the transport ended.
    failure: Option<String>,
}

/// Why a request has no answer.
enum PostFailure {
    /// It alone failed.
    Request(String),
    /// The session cannot go on.
    Session(String),
}

impl McpHttpServer {
    /// The server at `url`, an address with `http://` or `https://`.
    ///
    /// # Errors
    /// Another address.
    pub(super) fn new(url: &str, token: Option<&str>, limit: Duration) -> Result<Self, String> {
        if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
            return Err(format!("is \"{url}\"; name http://HOST:PORT/PATH or https://HOST/PATH"));
        }
        Ok(Self {
            url: url.to_owned(),
            authorization: token.map(|token| format!("Bearer {token}")),
            agent: HttpAgent::new(None, CONNECTIONS, None)?,
            limit,
            session: Mutex::default(),
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// A transport with a new session.
    pub(super) fn transport(self: &Arc<Self>) -> McpHttpTransport {
        *self.session() = McpSession::default();
        let (sender, answers) = channel(UNREAD);
        McpHttpTransport { server: Arc::clone(self), sender, answers }
    }

    /// Why the transport ended.
    pub(super) fn failure(&self) -> Option<String> {
        self.session().failure.clone()
    }

    fn session(&self) -> std::sync::MutexGuard<'_, McpSession> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self, method: &str) -> RequestBuilder {
        let McpSession { id, protocol, .. } = self.session().clone();
        let headers = [
            ("authorization", self.authorization.clone()),
            ("mcp-session-id", id),
            ("mcp-protocol-version", protocol),
        ];
        let request = Request::builder().method(method).uri(&self.url);
        let given = headers.into_iter().filter_map(|(name, value)| Some((name, value?)));
        given.fold(request, |request, (name, value)| request.header(name, value))
    }

    /// Posts a message; the messages of the answer.
    fn post(&self, message: &[u8]) -> Result<Vec<Value>, PostFailure> {
        let said = |what: &dyn std::fmt::Display| format!("{}: {what}", self.url);
        let request = self
            .request("POST")
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream");
        let request = request.body(message).map_err(|error| PostFailure::Session(said(&error)))?;
        let started = Instant::now();
        let lost = |error: &dyn std::fmt::Display| match started.elapsed() < self.limit {
            true => PostFailure::Session(said(error)),
            false => {
                let seconds = self.limit.as_secs_f64();
                PostFailure::Request(said(&format!("it gave no answer within {seconds:.0} s")))
            }
        };
        let mut response = self.agent.send(request, self.limit).map_err(|error| lost(&error))?;
        let header = |name: &str| {
            let value = response.headers().get(name)?.to_str().ok()?;
            Some(value.to_owned())
        };
        let (status, kind) = (response.status(), header("content-type").unwrap_or_default());
        if let Some(id) = header("mcp-session-id") {
            self.session().id = Some(id);
        }
        let body = response.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec();
        if !status.is_success() {
            let body = body.unwrap_or_default();
            let shown: String = String::from_utf8_lossy(&body).chars().take(200).collect();
            let answer = said(&format!("it answers {status} {shown}"));
            let ends = status.is_server_error() || [401, 404].contains(&status.as_u16());
            return Err(if ends { PostFailure::Session(answer) } else { PostFailure::Request(answer) });
        }
        let body = body.map_err(|error| match error {
            connect::BodyError::BodyExceedsLimit(most) => {
                PostFailure::Request(said(&format!("its answer has more than {most} bytes")))
            }
            error => lost(&error),
        })?;
        self.messages(&kind, &String::from_utf8_lossy(&body))
            .map_err(|reason| PostFailure::Request(said(&reason)))
    }

    /// The messages of `body`, whose content type is `kind`.
    fn messages(&self, kind: &str, body: &str) -> Result<Vec<Value>, String> {
        let answers =
            if kind.starts_with("text/event-stream") { events(body) } else { vec![body.to_owned()] };
        let read = |text: &String| {
            serde_json::from_str(text).map_err(|error| format!("it sent no message: {error}"))
        };
        let answers: Vec<Value> =
            answers.iter().filter(|text| !text.trim().is_empty()).map(read).collect::<Result<_, _>>()?;
        let agreed = answers.iter().find_map(|answer| answer["result"]["protocolVersion"].as_str());
        if let Some(agreed) = agreed {
            self.session().protocol = Some(agreed.to_owned());
        }
        Ok(answers)
    }

    /// Posts a message; what the session receives in answer to it.
    fn answers(&self, message: &Value) -> Vec<McpReceived> {
        let failure = match self.post(message.to_string().as_bytes()) {
            Ok(answers) => {
                let read = answers.into_iter().map(|answer| serde_json::from_value(answer).map(Some));
                match read.collect::<Result<_, _>>() {
                    Ok(received) => return received,
                    Err(error) => PostFailure::Request(format!("{}: {error}", self.url)),
                }
            }
            Err(failure) => failure,
        };
        // A notification is not answered.
        let request = message.get("method").and(message.get("id"));
        let (reason, received) = match (failure, request) {
            (PostFailure::Request(_), None) => return Vec::new(),
            (PostFailure::Request(reason), Some(id)) => {
                let error = json!({"code": NO_ANSWER, "message": reason});
                let error = serde_json::from_value(json!({"jsonrpc": "2.0", "id": id, "error": error})).ok();
                (reason, error)
            }
            (PostFailure::Session(reason), _) => (reason, None),
        };
        if received.is_none() {
            self.session().failure = Some(reason);
        }
        vec![received]
    }

    /// Ends the session, if the server has one.
    fn end(&self) {
        if self.session().id.is_none() {
            return;
        }
        if let Ok(request) = self.request("DELETE").body(()) {
            // A server need not support it, and forgets the session by itself.
            let _ = self.agent.send(request, END_DEADLINE);
        }
    }
}

/// The data of the events of a stream.
fn events(stream: &str) -> Vec<String> {
    let mut events = vec![String::new()];
    for line in stream.lines() {
        match (line.is_empty(), line.strip_prefix("data:"), events.last_mut()) {
            (true, _, _) => events.push(String::new()),
            (false, Some(data), Some(event)) => {
                *event += data.strip_prefix(' ').unwrap_or(data);
                event.push('\n');
            }
            _ => {}
        }
    }
    events
}

/// A message of the server; `None` ends the session.
type McpReceived = Option<RxJsonRpcMessage<RoleClient>>;

/// The messages of a session.
#[derive(Debug)]
pub(super) struct McpHttpTransport {
    server: Arc<McpHttpServer>,
    sender: Sender<McpReceived>,
    /// From the requests, each of which has a thread while it waits.
    answers: Receiver<McpReceived>,
}

impl Transport<RoleClient> for McpHttpTransport {
    type Error = std::io::Error;

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        let (server, sender) = (Arc::clone(&self.server), self.sender.clone());
        async move {
            let message = serde_json::to_value(&item)?;
            // The answer comes over the channel, so that a slow call delays no other.
            tokio::task::spawn_blocking(move || {
                for answer in server.answers(&message) {
                    let ended = sender.blocking_send(answer).is_err();
                    if ended {
                        break;
                    }
                }
            });
            Ok(())
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        self.answers.recv().await.flatten()
    }

    async fn close(&mut self) -> Result<(), Self::Error> {
        let server = Arc::clone(&self.server);
        tokio::task::spawn_blocking(move || server.end()).await.map_err(std::io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_with_their_lines() {
        let stream = ": hello\nevent: message\ndata: {\"a\":\ndata: 1}\n\nid: 7\ndata:{}\r\n\r\n";
        let read: Vec<String> = events(stream).into_iter().filter(|event| !event.is_empty()).collect();
        assert_eq!(read, ["{\"a\":\n1}\n", "{}\n"]);
    }

    #[test]
    fn an_address_without_a_scheme_is_refused() {
        let error = McpHttpServer::new("localhost:9", None, END_DEADLINE).unwrap_err();
        assert!(error.contains("http://HOST:PORT/PATH"), "{error}");
    }
}
