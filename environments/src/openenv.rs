//! `openenv`: environments of an OpenEnv server, one session of its WebSocket per episode.
//!
//! ```text
//! -> {"type": "reset", "data": {"seed": 5, ...}}       <- {"type": "observation", "data": {"observation", "reward", "done"}}
//! -> {"type": "step", "data": ACTION}                  <- the same, or {"type": "error", "data": {"message", "code"}}
//! -> {"type": "close"}
//! ```
//!
//! Invariant: an action that the server refuses (`VALIDATION_ERROR`) is answered to the model; every other error of the server
//! fails the episode. A server without a free session (`CAPACITY_REACHED`), which says so in place of an answer to `reset`, is
//! asked again while the episode waits for a free environment.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Message as Frame, Utf8Bytes};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async_with_config};
use trajectory::{Message, Task};

use crate::{
    Action, BoxFuture, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits, EnvironmentSpec,
    EnvironmentSpecError, Observation,
};

/// Name of the environment.
const NAME: &str = "openenv";
/// Longest message of the server, bytes.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// First pause before a server that had no free session is asked again; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Counts actions that the server refused.
const BAD_ACTIONS: &str = "bad_actions";
/// Field of the action that has the text of the model, if nothing else is said.
const ACTION: &str = "message";
/// Fields of an observation that are its text, in this order.
const TEXTS: [&str; 4] = ["text", "message", "prompt", "content"];

/// Makes sessions of a server.
#[derive(Clone, Debug)]
pub struct OpenEnv {
    shared: Arc<OpenEnvServer>,
}

#[derive(Debug)]
struct OpenEnvServer {
    /// `ws://HOST:PORT/ws`, with TLS `wss://HOST:PORT/ws`.
    url: String,
    /// Field of the action that has the text.
    action: String,
    /// Further fields of `reset`.
    parameters: Map<String, Value>,
    limits: EnvironmentLimits,
}

/// One episode.
#[derive(Debug)]
struct OpenEnvSession {
    server: Arc<OpenEnvServer>,
    /// `None` before the session.
    socket: Option<Box<WebSocketStream<MaybeTlsStream<TcpStream>>>>,
    /// What the session opened with, until `reset` takes it.
    opened: Option<Vec<Message>>,
}

/// A message of the server.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", content = "data", rename_all = "snake_case")]
enum ServerReply {
    Observation(StepReply),
    Error(ErrorReply),
}

#[derive(Debug, Deserialize)]
struct StepReply {
    observation: Value,
    #[serde(default)]
    reward: Option<f64>,
    #[serde(default)]
    done: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ErrorReply {
    message: String,
    code: String,
}

/// Why a request has no observation.
enum RequestFailure {
    /// The server refused the action.
    Refused(String),
    /// The server has no free session.
    Full(String),
    /// Anything else.
    Failed(String),
}

impl OpenEnv {
    /// Sessions of the server that `spec` names.
    ///
    /// # Errors
    /// No address, or one that is no WebSocket or HTTP address.
    pub(crate) fn new(spec: &EnvironmentSpec) -> Result<Self, EnvironmentSpecError> {
        let wrong = |reason: String| EnvironmentSpecError::Value { key: "url".to_owned(), reason };
        let given =
            spec.url.as_deref().ok_or_else(|| wrong("is missing; name http://HOST:PORT".to_owned()))?;
        let schemes = [("http://", "ws"), ("ws://", "ws"), ("https://", "wss"), ("wss://", "wss")];
        let found = schemes.iter().find_map(|(scheme, socket)| Some((socket, given.strip_prefix(scheme)?)));
        let Some((socket, rest)) = found.filter(|(_, rest)| !rest.is_empty()) else {
            return Err(wrong(format!("is \"{given}\"; name http://HOST:PORT or ws://HOST:PORT/ws")));
        };
        let path = if rest.contains('/') { "" } else { "/ws" };
        let server = OpenEnvServer {
            url: format!("{socket}://{rest}{path}"),
            action: spec.action.clone().unwrap_or_else(|| ACTION.to_owned()),
            parameters: spec.parameters.clone(),
            limits: spec.limits(),
        };
        Ok(Self { shared: Arc::new(server) })
    }
}

impl EnvironmentFactory for OpenEnv {
    fn name(&self) -> &str {
        NAME
    }

    fn limits(&self) -> EnvironmentLimits {
        self.shared.limits
    }

    fn about(&self) -> Option<String> {
        let OpenEnvServer { url, action, limits, .. } = &*self.shared;
        Some(format!(
            "`{NAME}`: {url}; a completion that is no JSON object is the field `{action}` of the action; at most {} turns",
            limits.max_turns
        ))
    }

    fn counts(&self) -> &'static [&'static str] {
        &[BAD_ACTIONS]
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(OpenEnvSession { server: Arc::clone(&self.shared), socket: None, opened: None })
    }
}

impl OpenEnvSession {
    /// Opens a session and resets its environment, as often as the server has no free session.
    async fn occupy(&mut self, task: &Task) -> Result<(), EnvironmentError> {
        let mut data = self.server.parameters.clone();
        for (name, value) in &task.columns {
            data.entry(name.clone()).or_insert_with(|| value.clone());
        }
        data.entry("seed").or_insert_with(|| json!(task.id.0));
        let reset = json!({"type": "reset", "data": data});
        let limit = self.server.limits.step_timeout;
        let late = |_| EnvironmentError::TimedOut {
            environment: NAME.to_owned(),
            turn: 0,
            seconds: limit.as_secs_f64(),
        };
        let mut pause = FIRST_PAUSE;
        while self.opened.is_none() {
            self.opened = tokio::time::timeout(limit, self.begin(&reset)).await.map_err(late)??;
            if self.opened.is_none() {
                self.socket = None;
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        Ok(())
    }

    /// Connects and sends `reset`; `None` if the server has no free session.
    async fn begin(&mut self, reset: &Value) -> Result<Option<Vec<Message>>, EnvironmentError> {
        let config = WebSocketConfig::default()
            .max_message_size(Some(MAX_MESSAGE_BYTES))
            .max_frame_size(Some(MAX_MESSAGE_BYTES));
        let connected = connect_async_with_config(&self.server.url, Some(config), false).await;
        let (socket, _) =
            connected.map_err(|error| failed(0, format!("{} does not answer: {error}", self.server.url)))?;
        self.socket = Some(Box::new(socket));
        match self.request(reset).await {
            Ok(StepReply { observation, .. }) => Ok(Some(messages(&observation))),
            Err(RequestFailure::Full(_)) => Ok(None),
            Err(RequestFailure::Refused(reason) | RequestFailure::Failed(reason)) => Err(failed(0, reason)),
        }
    }

    async fn open(&mut self, task: &Task) -> Result<Vec<Message>, EnvironmentError> {
        self.occupy(task).await?;
        Ok(self.opened.take().unwrap_or_default())
    }

    async fn advance(&mut self, action: Action<'_>) -> Result<Observation, EnvironmentError> {
        let data = match serde_json::from_str(action.text) {
            Ok(Value::Object(data)) => Value::Object(data),
            _ => Value::Object(Map::from_iter([(self.server.action.clone(), Value::from(action.text))])),
        };
        let mut observed = Observation::default();
        match self.request(&json!({"type": "step", "data": data})).await {
            Ok(StepReply { observation, reward, done }) => {
                (observed.messages, observed.reward, observed.done) = (messages(&observation), reward, done);
            }
            Err(RequestFailure::Refused(reason)) => {
                observed.count(BAD_ACTIONS);
                observed.messages = vec![Message::new("user", format!("error: {reason}"))];
            }
            Err(RequestFailure::Full(reason) | RequestFailure::Failed(reason)) => {
                return Err(failed(action.turn, reason));
            }
        }
        if observed.done
            && let Some(mut socket) = self.socket.take()
        {
            // The server may have closed it already.
            let _ = socket.send(text(&json!({"type": "close"}))).await;
        }
        Ok(observed)
    }

    async fn request(&mut self, request: &Value) -> Result<StepReply, RequestFailure> {
        let lost = |what: &str| RequestFailure::Failed(format!("{} {what}", self.server.url));
        let Some(socket) = self.socket.as_mut() else { return Err(lost("has closed the session")) };
        // A server without capacity says so before it reads anything, and closes.
        let sent = socket.send(text(request)).await;
        loop {
            let frame = match socket.next().await {
                Some(Ok(Frame::Text(frame))) => frame,
                Some(Ok(Frame::Ping(_) | Frame::Pong(_))) => continue,
                Some(Ok(Frame::Close(_))) | None => return Err(lost("closed the session")),
                Some(Ok(_)) => return Err(lost("sent a message that is no text")),
                Some(Err(error)) => return Err(lost(&format!("failed: {error}"))),
            };
            drop(sent);
            return match serde_json::from_str(&frame) {
                Ok(ServerReply::Observation(reply)) => Ok(reply),
                Ok(ServerReply::Error(ErrorReply { message, code })) => Err(match &code[..] {
                    "VALIDATION_ERROR" => RequestFailure::Refused(message),
                    "CAPACITY_REACHED" => RequestFailure::Full(message),
                    _ => RequestFailure::Failed(format!("the server answers {code}: {message}")),
                }),
                Err(error) => Err(lost(&format!("sent a message that is no observation: {error}"))),
            };
        }
    }
}

fn failed(turn: usize, evidence: String) -> EnvironmentError {
    EnvironmentError::Failed { environment: NAME.to_owned(), turn, evidence }
}

fn text(message: &Value) -> Frame {
    Frame::Text(Utf8Bytes::from(message.to_string()))
}

/// The observation as a message: its text, or all of it as JSON.
fn messages(observation: &Value) -> Vec<Message> {
    let named = TEXTS.iter().find_map(|name| observation.get(*name)?.as_str());
    let content = match (observation, named) {
        (Value::String(text), _) => text.clone(),
        (_, Some(text)) => text.to_owned(),
        (Value::Null, None) => String::new(),
        (other, None) => other.to_string(),
    };
    if content.is_empty() { Vec::new() } else { vec![Message::new("user", content)] }
}

impl Environment for OpenEnvSession {
    fn acquire<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<(), EnvironmentError>> {
        Box::pin(self.occupy(task))
    }

    fn reset<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(self.open(task))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        Box::pin(self.advance(action))
    }
}
