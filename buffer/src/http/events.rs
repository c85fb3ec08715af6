//! The event stream, as server-sent events.
//!
//! Invariant: a subscriber sees every event after the one that it named, once and in order, or receives a gap. A slow
//! subscriber delays nothing: it reads the ring buffer at its own rate, and misses events in the end.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::problem::{Problem, ProblemCode};
use super::routes::QueryParameters;
use super::state::ServerState;
use super::wire::{EventBody, kind};
use crate::{Event, Replay};

/// Events per read of the ring buffer.
const CHUNK: usize = 256;

/// The header with which a browser resumes.
const LAST_EVENT_ID: &str = "last-event-id";

/// Start of the stream.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventsQuery {
    /// Resume after the event with this id; without it, only new events.
    after: Option<u64>,
}

/// Some events are no longer stored. The subscriber's state is out of date; `/v1/groups` has the current one.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Gap)]
struct EventGap {
    /// Events continue after this id.
    after: u64,
}

/// Subscribe to events. Every event has an id, a kind and JSON. The header `Last-Event-ID` or `after` resumes after
/// an event. An event `gap` says that some were missed; read `/v1/groups` again then.
#[utoipa::path(
    get, path = "/v1/events", tag = "buffer", params(EventsQuery),
    responses((status = 200, content_type = "text/event-stream", body = EventBody,
        description = "`id:`, `event:` and `data:` with an Event as JSON"))
)]
pub(super) async fn events(
    State(shared): State<Arc<ServerState>>,
    headers: HeaderMap,
    QueryParameters(query): QueryParameters<EventsQuery>,
) -> Result<Response, Problem> {
    let seen = match headers.get(LAST_EVENT_ID) {
        None => query.after,
        Some(value) => {
            let id = value.to_str().ok().and_then(|text| text.trim().parse().ok());
            Some(id.ok_or_else(|| {
                Problem::new(ProblemCode::BadQuery, "`Last-Event-ID` is not an id of an event")
            })?)
        }
    };
    // An unavailable buffer is reported now rather than within the stream.
    shared.buffer()?;
    let watcher = EventSubscriber { shared, seen, ready: VecDeque::new() };
    Ok(Sse::new(watcher.stream()).keep_alive(KeepAlive::default()).into_response())
}

struct EventSubscriber {
    shared: Arc<ServerState>,
    /// The last event sent; `None`: only new events.
    seen: Option<u64>,
    ready: VecDeque<Message>,
}

impl EventSubscriber {
    /// Ends when the server stops or the storage fails; the subscriber reconnects and resumes.
    fn stream(self) -> impl Stream<Item = Result<Message, Infallible>> {
        stream::unfold(self, |mut watcher| async move {
            let message = watcher.next().await?;
            Some((Ok(message), watcher))
        })
    }

    async fn next(&mut self) -> Option<Message> {
        while self.ready.is_empty() {
            let buffer = self.shared.buffer().ok()?;
            let changed = buffer.events().changed();
            match buffer.events().after(self.seen, CHUNK) {
                Replay::Events(events) if events.is_empty() => {
                    self.shared.uninterrupted(changed).await.ok()?;
                }
                Replay::Events(events) => {
                    self.seen = events.last().map(|event| event.id);
                    self.ready.extend(events.iter().map(message));
                }
                Replay::Gap(after) => {
                    if self.seen.is_some() {
                        self.ready.push_back(named(after, "gap", &EventGap { after }));
                    }
                    self.seen = Some(after);
                }
            }
        }
        self.ready.pop_front()
    }
}

fn message(event: &Event) -> Message {
    named(event.id, kind(event.kind), &EventBody::from(event))
}

fn named(id: u64, name: &str, data: &impl Serialize) -> Message {
    // Plain data with string keys always encodes, and JSON has no line breaks.
    let data = serde_json::to_string(data).unwrap_or_default();
    Message::default().id(id.to_string()).event(name).data(data)
}
