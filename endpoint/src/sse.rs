//! Streams of server-sent events.
//!
//! Invariant: a stream is driven by its connection: when the client leaves, the answer is dropped, which aborts it. A stream
//! without tokens for a while gets a comment, so that proxies and clients do not close it.

use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde_json::Value;

use crate::answer::RunningAnswer;
use crate::protocol::AnswerWriter;
use crate::replay::{AnswerInProgress, FinishedAnswer};

/// Media type of a stream.
pub(crate) const MEDIA_TYPE: &str = "text/event-stream; charset=utf-8";
/// A comment, which clients ignore.
const KEEP_ALIVE: &str = ": keep-alive\n\n";
/// Longest stream that can be asked for again, bytes.
const MAX_REPLAYED: usize = 1 << 20;

/// One event of a stream, as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SseEvent(String);

impl SseEvent {
    /// An event without a name.
    pub(crate) fn data(value: &Value) -> Self {
        Self(format!("data: {value}\n\n"))
    }

    /// An event with a name.
    pub(crate) fn named(name: &str, value: &Value) -> Self {
        Self(format!("event: {name}\ndata: {value}\n\n"))
    }

    /// The last event of OpenAI's streams.
    pub(crate) fn done() -> Self {
        Self("data: [DONE]\n\n".to_owned())
    }
}

/// A stream in progress.
struct EventStream {
    answer: RunningAnswer,
    writer: Box<dyn AnswerWriter>,
    /// `None` once the stream has ended.
    progress: Option<AnswerInProgress>,
    /// Everything that was sent but comments; `None` if it is too long to be kept.
    sent: Option<String>,
    keep_alive: Duration,
    begun: bool,
}

/// The stream of `answer`, as `writer` writes it.
pub(crate) fn respond(
    answer: RunningAnswer,
    writer: Box<dyn AnswerWriter>,
    progress: AnswerInProgress,
) -> Response {
    let keep_alive = answer.keep_alive();
    let stream = EventStream {
        answer,
        writer,
        progress: Some(progress),
        sent: Some(String::new()),
        keep_alive,
        begun: false,
    };
    let pieces = unfold(stream, |mut stream| async move {
        let piece = stream.next().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(Bytes::from(piece)), stream))
    });
    let headers = [(header::CONTENT_TYPE, MEDIA_TYPE), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(pieces)).into_response()
}

impl EventStream {
    /// What is sent next; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        self.progress.as_ref()?;
        if !self.begun {
            self.begun = true;
            let events = self.writer.begin(self.answer.prompts());
            if !events.is_empty() {
                return Some(self.send(&events));
            }
        }
        loop {
            let Ok(next) = tokio::time::timeout(self.keep_alive, self.answer.next()).await else {
                return Some(KEEP_ALIVE.to_owned());
            };
            let events = match next {
                Some(Ok(delta)) => self.writer.delta(&delta),
                Some(Err(error)) => {
                    // A failed answer is not asked for again: it is made again.
                    self.progress = None;
                    return Some(self.writer.failed(&error).0);
                }
                None => {
                    let events = self.writer.end(self.answer.usage());
                    let piece = self.send(&events);
                    if let (Some(progress), Some(sent)) = (self.progress.take(), self.sent.take()) {
                        let answer = FinishedAnswer { content_type: MEDIA_TYPE, body: sent.into() };
                        progress.finish(answer, Instant::now());
                    }
                    return Some(piece);
                }
            };
            if !events.is_empty() {
                return Some(self.send(&events));
            }
        }
    }

    fn send(&mut self, events: &[SseEvent]) -> String {
        let piece: String = events.iter().map(|event| event.0.as_str()).collect();
        self.sent = self
            .sent
            .take()
            .filter(|sent| sent.len() + piece.len() <= MAX_REPLAYED)
            .map(|sent| sent + &piece);
        piece
    }
}
