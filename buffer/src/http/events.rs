//! What happens, as a stream of server-sent events.
//!
//! Invariant: a watcher sees every event after the one that it named, once and in order, or is told that some are gone. A
//! slow one holds nothing up: it reads from the ring of the buffer at its own pace, and falls out of it in the end.

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

/// Events that are taken out of the ring at once.
const CHUNK: usize = 256;

/// The header with which a browser goes on where it was.
const LAST_EVENT_ID: &str = "last-event-id";

/// Where to begin.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventsQuery {
    /// Go on after the event with this id; without it, with what happens from now on.
    after: Option<u64>,
}

/// Some events are gone: what the watcher knows of groups is out of date, and `/v1/groups` tells what there is.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Gap)]
struct EventGap {
    /// Events go on after this id.
    after: u64,
}

/// Watch what happens. Every event has an id, a kind and JSON; the header `Last-Event-ID` or `after` goes on after one that
/// was seen. An event `gap` says that some in between are gone; read `/v1/groups` again then.
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
    // Refused now rather than in the middle of the stream.
    shared.buffer()?;
    let watcher = EventSubscriber { shared, seen, ready: VecDeque::new() };
    Ok(Sse::new(watcher.stream()).keep_alive(KeepAlive::default()).into_response())
}

struct EventSubscriber {
    shared: Arc<ServerState>,
    /// The last event that it has; `None`: it wants what comes.
    seen: Option<u64>,
    ready: VecDeque<Message>,
}

impl EventSubscriber {
    /// Ends when the server stops or the storage fails; the watcher comes back and goes on where it was.
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
    // Plain data with string keys: it always has a text, and JSON has no line breaks.
    let data = serde_json::to_string(data).unwrap_or_default();
    Message::default().id(id.to_string()).event(name).data(data)
}
