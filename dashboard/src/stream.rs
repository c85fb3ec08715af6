//! `/api/events`: revisions of the runs as server-sent events.
//!
//! Invariant: a stream has no queue: it sends the newest revisions when its connection is ready. It ends with the server.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, watch};

use crate::routes::PageState;

/// Most open streams.
pub(crate) const MAX_STREAMS: usize = 512;
/// A comment is sent after so long without a change, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// A stream in progress.
struct RevisionStream {
    revisions: watch::Receiver<Map<String, Value>>,
    begun: bool,
    _permit: OwnedSemaphorePermit,
}

/// The stream of a tab.
pub(crate) async fn revisions(State(state): State<PageState>) -> Response {
    let Ok(permit) = Arc::clone(&state.streams).try_acquire_owned() else {
        let why = format!("{MAX_STREAMS} pages are connected already; close some");
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    };
    let stream = RevisionStream { revisions: state.revisions.clone(), begun: false, _permit: permit };
    let events = unfold(stream, |mut stream| async move {
        let data = stream.next().await?;
        Some((Ok::<Event, Infallible>(Event::default().data(data)), stream))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

impl RevisionStream {
    /// The revisions, at once and then after every change; `None` once the server stops.
    async fn next(&mut self) -> Option<String> {
        if std::mem::replace(&mut self.begun, true) {
            self.revisions.changed().await.ok()?;
        }
        let revisions = self.revisions.borrow_and_update();
        serde_json::to_string(&*revisions).ok()
    }
}
