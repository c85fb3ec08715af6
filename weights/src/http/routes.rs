//! The routes of a hub, and those of them that a relay serves. Invariant: the bytes sent for a version are those of its digest.

use std::io;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};
use trajectory::PolicyVersion;

use super::MAX_WAIT;
use super::client::longest_download;
use super::wire::{
    Acknowledged, DeltaQuery, FallbackBody, FullQuery, LagBody, NewestAnswer, NewestQuery, ReceiptAndPoll,
    ReceiptBody, RelayBody, RelayNotice, SubscribeAnswer, SubscribeRequest, UnsubscribeQuery, VersionNotice,
    WeightsProblem,
};
use crate::delta::put_word;
use crate::frame::FrameHeader;
use crate::hub::{Announcement, Availability, Hub, MAX_RELAY_WAIT};
use crate::{Digest, Dtype, Receipt, RelayFallback, Values, WeightsError};

/// Largest body of a request, bytes.
const MAX_BODY: usize = 16 << 10;
/// Weights per chunk.
const CHUNK: usize = 1 << 18;

/// The routes of `hub`, from `/v1/weights` on.
pub fn router(hub: Hub) -> Router {
    Router::new()
        .route("/v1/weights/subscribers", post(join).delete(leave))
        .route("/v1/weights/newest", get(newest).post(applied_and_newest))
        .route("/v1/weights/receipts", post(applied))
        .route("/v1/weights/relays", post(relays))
        .route("/v1/weights/fallbacks", post(fell_back))
        .route("/v1/weights/lags", get(lags))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(hub.clone())
        .merge(frames(hub))
}

/// The routes of the weights themselves, for hubs and relays.
pub(super) fn frames(hub: Hub) -> Router {
    let routes = Router::new().route("/v1/weights/full", get(full)).route("/v1/weights/delta", get(delta));
    routes.with_state(hub)
}

type QueryResult<T> = Result<Query<T>, QueryRejection>;
type RouteResult = Result<Response, WeightsProblem>;

async fn join(State(hub): State<Hub>, body: Bytes) -> RouteResult {
    let SubscribeRequest { name } = read(&body)?;
    let caller = hub.connect(name, true)?;
    Ok(json(&SubscribeAnswer { connection: caller.connection, hold_ms: hub.hold().as_millis() as u64 }))
}

async fn leave(State(hub): State<Hub>, asked: QueryResult<UnsubscribeQuery>) -> RouteResult {
    let UnsubscribeQuery { name, connection } = query(asked)?;
    hub.leave(&hub.remote_caller(name, connection)?);
    Ok(json(&Acknowledged {}))
}

async fn newest(State(hub): State<Hub>, asked: QueryResult<NewestQuery>) -> RouteResult {
    poll(&hub, query(asked)?).await
}

async fn applied_and_newest(State(hub): State<Hub>, body: Bytes) -> RouteResult {
    let ReceiptAndPoll { receipt, newest } = read(&body)?;
    accept(&hub, receipt)?;
    poll(&hub, newest).await
}

async fn poll(hub: &Hub, ask: NewestQuery) -> RouteResult {
    let after = ask.known();
    let caller = hub.remote_caller(ask.name, ask.connection)?;
    let deadline = Instant::now() + Duration::from_millis(ask.wait_ms).min(MAX_WAIT);
    loop {
        let changed = hub.changed_async();
        tokio::pin!(changed);
        // Registered before the check, so that no change is missed between check and wait.
        changed.as_mut().enable();
        let at_once =
            |it: &Announcement| ask.shm && it.newest.place().is_some() || it.newest.direct().is_some();
        let useful = |it: &Announcement| it.digest.is_some() || at_once(it);
        let news = hub.newest(&caller, after)?.filter(useful).map(|it| news(it, hub.dtype()));
        if news.is_some() || Instant::now() >= deadline {
            let served = hub.served(&caller)?.map(|version| version.0);
            let relays = hub.is_relay(&caller)?;
            return Ok(json(&NewestAnswer { life: hub.life(), served, relays, news }));
        }
        // The next check sees a timeout.
        let _ = timeout_at(deadline, changed).await;
    }
}

async fn full(State(hub): State<Hub>, asked: QueryResult<FullQuery>) -> RouteResult {
    let FullQuery { version, wait_ms } = query(asked)?;
    let version = PolicyVersion(version);
    let Some(snapshot) = available(&hub, wait_ms, || hub.full(version)).await? else {
        return Err(version_gone(format!("{version} is not the newest any more: ask for that")));
    };
    let (dtype, values) = (hub.dtype(), snapshot.values.clone());
    let header = FrameHeader::full(version, snapshot.digest(), values.len(), dtype).encode();
    let length = header.len() + values.len() * dtype.bytes();
    let chunks = values.len().div_ceil(CHUNK);
    // Little-endian f32 weights are sent from memory in place.
    let in_place = (dtype == Dtype::F32 && cfg!(target_endian = "little"))
        .then(|| Bytes::from_owner(ValuesBytes(values.clone())));
    let chunk = move |index: usize| {
        let range = index * CHUNK..((index + 1) * CHUNK).min(values.len());
        match &in_place {
            Some(bytes) => bytes.slice(range.start * 4..range.end * 4),
            None => {
                let mut bytes = Vec::with_capacity(range.len() * dtype.bytes());
                values[range].iter().for_each(|value| put_word(&mut bytes, *value, dtype));
                bytes.into()
            }
        }
    };
    let head = Bytes::copy_from_slice(&header);
    let parts = std::iter::once(head).chain((0..chunks).map(chunk));
    let counted = parts.inspect(move |part| hub.sent(part.len() as u64));
    let deadline = Instant::now() + longest_download(length as u64);
    let body = Body::from_stream(stream::iter(counted.map(move |part| in_time(deadline, part))));
    Ok(weights(body, length))
}

/// `part`, or an error after `deadline`: the subscriber no longer waits then, and a slow reader would keep the memory of an old
/// version in use.
pub(super) fn in_time(deadline: Instant, part: Bytes) -> io::Result<Bytes> {
    if Instant::now() < deadline { Ok(part) } else { Err(io::ErrorKind::TimedOut.into()) }
}

async fn delta(State(hub): State<Hub>, asked: QueryResult<DeltaQuery>) -> RouteResult {
    let DeltaQuery { from, wait_ms } = query(asked)?;
    let from = PolicyVersion(from);
    let Some(frame) = available(&hub, wait_ms, || hub.delta(from)).await? else {
        return Err(version_gone(format!(
            "there is no delta from {from}, or it is no gain: take the newest in full"
        )));
    };
    let bytes = frame.bytes().clone();
    hub.sent(bytes.len() as u64);
    let length = bytes.len();
    Ok(weights(Body::from(bytes), length))
}

/// What `look` finds once it is there, for up to `wait_ms`; `None` if it never will be.
async fn available<T>(
    hub: &Hub,
    wait_ms: u64,
    look: impl Fn() -> Result<Availability<T>, WeightsError>,
) -> Result<Option<T>, WeightsProblem> {
    let deadline = Instant::now() + Duration::from_millis(wait_ms).min(MAX_RELAY_WAIT);
    loop {
        let changed = hub.changed_async();
        tokio::pin!(changed);
        // Registered before the look, so that no change is missed between look and wait.
        changed.as_mut().enable();
        match look()? {
            Availability::Ready(found) => return Ok(Some(found)),
            Availability::Gone => return Ok(None),
            // A subscriber that does not wait has been replaced, or is ahead of a hub that was started again.
            Availability::NotYet if wait_ms == 0 => return Ok(None),
            Availability::NotYet if Instant::now() >= deadline => {
                let detail = "the version has not arrived here in time: fetch it from the hub".to_owned();
                return Err(WeightsProblem::new(503, WeightsProblem::NOT_YET, detail));
            }
            // The next look sees a timeout.
            Availability::NotYet => drop(timeout_at(deadline, changed).await),
        }
    }
}

async fn relays(State(hub): State<Hub>, body: Bytes) -> RouteResult {
    let RelayBody { name, connection, address } = read(&body)?;
    hub.register_relay(&hub.remote_caller(name, connection)?, address)?;
    Ok(json(&Acknowledged {}))
}

async fn fell_back(State(hub): State<Hub>, body: Bytes) -> RouteResult {
    let FallbackBody { name, connection, relay, version, reason, detail } = read(&body)?;
    let caller = hub.remote_caller(name, connection)?;
    let (subscriber, version) = (caller.name.clone(), PolicyVersion(version));
    hub.fall_back(&caller, RelayFallback { subscriber, relay, version, reason, detail })?;
    Ok(json(&Acknowledged {}))
}

async fn applied(State(hub): State<Hub>, body: Bytes) -> RouteResult {
    accept(&hub, read(&body)?)?;
    Ok(json(&Acknowledged {}))
}

fn accept(hub: &Hub, receipt: ReceiptBody) -> Result<(), WeightsProblem> {
    let ReceiptBody { name, connection, life, version, digest, took_us, stalled_us, bytes, taken } = receipt;
    let digest: Digest = digest.parse().map_err(|error| WeightsProblem::new(400, "bad_request", error))?;
    let (took, stalled) = (Duration::from_micros(took_us), Duration::from_micros(stalled_us));
    let receipt = Receipt { version: PolicyVersion(version), digest, took, stalled, bytes, taken };
    Ok(hub.accept(&hub.remote_caller(name, connection)?, life, receipt)?)
}

async fn lags(State(hub): State<Hub>) -> RouteResult {
    let lags: Vec<LagBody> = hub.lags()?.iter().map(LagBody::from).collect();
    Ok(json(&lags))
}

/// Weights as bytes with an owner.
struct ValuesBytes(Values);

impl AsRef<[u8]> for ValuesBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

fn news(announced: Announcement, dtype: Dtype) -> VersionNotice {
    VersionNotice {
        version: announced.newest.version().0,
        digest: announced.digest.map(|digest| digest.to_string()),
        parameters: announced.newest.parameters() as u64,
        dtype: dtype.as_str().to_owned(),
        shm: announced.newest.place().and_then(|path| path.to_str()).map(str::to_owned),
        direct: announced.newest.direct().cloned(),
        relay: announced.relay.map(RelayNotice::from),
    }
}

fn version_gone(detail: String) -> WeightsProblem {
    WeightsProblem::new(410, WeightsProblem::VERSION_GONE, detail)
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, WeightsProblem> {
    serde_json::from_slice(body).map_err(|error| WeightsProblem::new(400, "bad_request", error.to_string()))
}

fn query<T>(asked: QueryResult<T>) -> Result<T, WeightsProblem> {
    let Query(asked) = asked.map_err(|error| WeightsProblem::new(400, "bad_request", error.to_string()))?;
    Ok(asked)
}

fn json(body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => ([(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(error) => WeightsProblem::new(500, "failed", error.to_string()).into_response(),
    }
}

fn weights(body: Body, length: usize) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, length.to_string()),
    ];
    (headers, body).into_response()
}

impl IntoResponse for WeightsProblem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self).unwrap_or_default();
        (status, [(header::CONTENT_TYPE, Self::TYPE)], body).into_response()
    }
}
