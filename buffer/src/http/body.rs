//! Bodies: JSON or MessagePack, plain or compressed, within their limits.
//!
//! Invariant: no body makes the server panic, take more memory than [`ServerLimits`] allows, or take longer. The
//! decoded size of a body is computed, and its memory reserved, before it is decoded. A body that cannot be decoded
//! is answered with the position of the error. The limits of tower-http and axum are not used here: they count
//! compressed bytes, reserve no memory, and answer without a problem document.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use erased_serde::{Deserializer as ErasedDeserializer, Serialize as ErasedSerialize};
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use rmp_serde::decode::ReadReader;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_path_to_error::{Deserializer as PathDeserializer, Track};
use tokio::sync::OwnedSemaphorePermit;

use super::cost::DecodeCost;
use super::limits::ServerLimits;
use super::problem::{Problem, ProblemCode};
use super::state::ServerState;
use super::wire::EmptyRequest;

/// A larger body is decoded on a thread for blocking work.
const DECODE_INLINE: usize = 256 << 10;
/// Maximum nesting of a MessagePack body; JSON has the same built-in limit.
const MAX_DEPTH: usize = 128;
/// Maximum window of zstd in bytes, as a power of two: RFC 8878 requires it of every decoder.
const ZSTD_WINDOW: u32 = 23;

/// Reads one value of a body.
type BodyReader<'a> = dyn FnMut(&mut dyn ErasedDeserializer<'_>) -> Result<(), erased_serde::Error> + 'a;

/// Encoding of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WireFormat {
    Json,
    MessagePack,
}

impl WireFormat {
    pub(crate) const JSON: &'static str = "application/json";
    pub(crate) const MESSAGE_PACK: &'static str = "application/msgpack";

    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Self::Json => Self::JSON,
            Self::MessagePack => Self::MESSAGE_PACK,
        }
    }

    /// The encoding of a media type without parameters.
    fn named(media_type: &str) -> Option<Self> {
        let is = |names: &[&str]| names.iter().any(|name| media_type.eq_ignore_ascii_case(name));
        if is(&[Self::JSON]) {
            Some(Self::Json)
        } else if is(&[Self::MESSAGE_PACK, "application/x-msgpack", "application/vnd.msgpack"]) {
            Some(Self::MessagePack)
        } else {
            None
        }
    }

    /// Decoded bytes of a body, at most `limit`.
    fn cost(self, bytes: &[u8], limit: usize) -> Result<usize, Problem> {
        let cost = DecodeCost::at_most(limit);
        let counted = self.count(bytes, &cost);
        if cost.is_over() {
            let detail = format!(
                "the body has {} bytes and takes more than {limit} decoded; send fewer groups, columns or values at once",
                bytes.len()
            );
            return Err(Problem::new(ProblemCode::DecodedTooLarge, detail));
        }
        counted
            .or_else(|_| self.read(bytes, &mut |body| DecodeCost::at_most(limit).count(body)).map(drop))?;
        Ok(cost.bytes())
    }

    /// Adds a whole body to `cost`.
    fn count(self, bytes: &[u8], cost: &DecodeCost) -> Result<(), String> {
        match self {
            Self::Json => {
                let mut json = serde_json::Deserializer::from_slice(bytes);
                cost.count(&mut json).and_then(|()| json.end()).map_err(|error| error.to_string())
            }
            Self::MessagePack => {
                let mut rest = bytes;
                cost.count(&mut message_pack(&mut rest)).map_err(|error| error.to_string())
            }
        }
    }

    /// Decodes a whole body. Fast: its decoder is compiled for `T`.
    pub(crate) fn decode<T: DeserializeOwned>(self, bytes: &[u8]) -> Result<T, Problem> {
        match self {
            Self::Json => serde_json::from_slice(bytes).or_else(|_| self.decode_slowly(bytes)),
            Self::MessagePack => decode_message_pack(bytes),
        }
    }

    /// The same, for rare and small bodies and for those with an error, whose path it finds: only the decoder of the
    /// encoding is compiled, once for all types.
    pub(crate) fn decode_slowly<T: DeserializeOwned>(self, bytes: &[u8]) -> Result<T, Problem> {
        let mut value = None;
        let left = self.read(bytes, &mut |body| {
            value = Some(T::deserialize(body)?);
            Ok(())
        })?;
        value.filter(|_| left == 0).ok_or_else(|| trailing(left))
    }

    /// Gives a whole body to `work`; the number of bytes that follow the value. An error begins with its path.
    fn read(self, bytes: &[u8], work: &mut BodyReader<'_>) -> Result<usize, Problem> {
        let (mut track, mut rest) = (Track::new(), bytes);
        let read = match self {
            Self::Json => {
                let mut json = serde_json::Deserializer::from_slice(bytes);
                let body = PathDeserializer::new(&mut json, &mut track);
                let read =
                    work(&mut <dyn ErasedDeserializer<'_>>::erase(body)).map_err(|error| error.to_string());
                read.and_then(|()| json.end().map_err(|error| error.to_string())).map(|()| 0)
            }
            Self::MessagePack => {
                let mut pack = message_pack(&mut rest);
                let body = PathDeserializer::new(&mut pack, &mut track);
                let read =
                    work(&mut <dyn ErasedDeserializer<'_>>::erase(body)).map_err(|error| error.to_string());
                read.map(|()| rest.len())
            }
        };
        read.map_err(|reason| match track.path().to_string() {
            path if path == "." => Problem::new(ProblemCode::BadBody, reason),
            path => Problem::new(ProblemCode::BadBody, format!("{path}: {reason}")),
        })
    }

    /// Encodes a whole body.
    fn encode(self, value: &(impl Serialize + ?Sized)) -> Result<Vec<u8>, Problem> {
        let encoded = match self {
            Self::Json => serde_json::to_vec(value).map_err(|error| error.to_string()),
            Self::MessagePack => rmp_serde::to_vec_named(value).map_err(|error| error.to_string()),
        };
        encoded.map_err(|error| {
            Problem::new(ProblemCode::Internal, format!("the answer cannot be encoded: {error}"))
        })
    }
}

/// Decodes a whole MessagePack body. Fast, as [`WireFormat::decode`].
pub(crate) fn decode_message_pack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let mut rest = bytes;
    match T::deserialize(&mut message_pack(&mut rest)) {
        Ok(_) if !rest.is_empty() => Err(trailing(rest.len())),
        Ok(value) => Ok(value),
        Err(_) => WireFormat::MessagePack.decode_slowly(bytes),
    }
}

fn message_pack<'a, 'b>(rest: &'a mut &'b [u8]) -> rmp_serde::Deserializer<ReadReader<&'a mut &'b [u8]>> {
    let mut pack = rmp_serde::Deserializer::new(rest);
    pack.set_max_depth(MAX_DEPTH);
    pack
}

fn trailing(bytes: usize) -> Problem {
    Problem::new(ProblemCode::BadBody, format!("{bytes} bytes follow the value"))
}

/// The encoding that the client accepts, known before the request is processed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accept(WireFormat);

impl Accept {
    /// An answer without streams of numbers: only the encoders are compiled, once for all types.
    pub(crate) fn answer(self, value: &dyn ErasedSerialize) -> Result<Response, Problem> {
        self.answer_fast(value)
    }

    /// An answer with streams of numbers: the encoders are compiled for its type.
    pub(crate) fn answer_fast(self, value: &(impl Serialize + ?Sized)) -> Result<Response, Problem> {
        let body = self.0.encode(value)?;
        Ok(([(CONTENT_TYPE, HeaderValue::from_static(self.0.media_type()))], body).into_response())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Accept {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let wanted: Vec<&str> =
            parts.headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
        accepted(&wanted.join(",")).map(Self)
    }
}

/// The preferred encoding of an `Accept` header; the first of equals.
fn accepted(header: &str) -> Result<WireFormat, Problem> {
    if header.trim().is_empty() {
        return Ok(WireFormat::Json);
    }
    let mut best: Option<(f32, WireFormat)> = None;
    for range in header.split(',') {
        let mut parts = range.split(';').map(str::trim);
        let format = match parts.next().unwrap_or_default() {
            "*/*" | "application/*" => Some(WireFormat::Json),
            name => WireFormat::named(name),
        };
        let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok()).unwrap_or(1.0);
        if let Some(format) =
            format.filter(|_| weight > 0.0 && best.is_none_or(|(before, _)| weight > before))
        {
            best = Some((weight, format));
        }
    }
    best.map(|(_, format)| format).ok_or_else(|| {
        let detail =
            format!("`Accept: {header}` names neither {} nor {}", WireFormat::JSON, WireFormat::MESSAGE_PACK);
        Problem::new(ProblemCode::NotAcceptable, detail)
    })
}

/// A decoded body with the memory reserved for it.
#[derive(Debug)]
pub(crate) struct DecodedBody<T> {
    pub(crate) value: T,
    pub(crate) reserved: Option<OwnedSemaphorePermit>,
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<Arc<ServerState>> for DecodedBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, shared: &Arc<ServerState>) -> Result<Self, Problem> {
        let format = format_of(request.headers())?;
        let (bytes, mut reserved) = read(request, shared).await?;
        let (length, limit) = (bytes.len(), shared.limits.decoded_bytes);
        let cost = if length <= DECODE_INLINE {
            format.cost(&bytes, limit)?
        } else {
            let bytes = bytes.clone();
            aside(move || format.cost(&bytes, limit)).await??
        };
        if cost > ServerLimits::SMALL_BODY {
            enlarge(shared, &mut reserved, length.saturating_add(cost))?;
        }
        let value = if length <= DECODE_INLINE {
            format.decode(&bytes)?
        } else {
            aside(move || format.decode(&bytes)).await??
        };
        Ok(Self { value, reserved })
    }
}

/// No body, or one without fields.
#[derive(Debug)]
pub(crate) struct NoFields;

impl FromRequest<Arc<ServerState>> for NoFields {
    type Rejection = Problem;

    async fn from_request(request: Request, shared: &Arc<ServerState>) -> Result<Self, Problem> {
        let format = format_of(request.headers());
        let (bytes, _) = read(request, shared).await?;
        if !bytes.is_empty() {
            format?.decode_slowly::<EmptyRequest>(&bytes)?;
        }
        Ok(Self)
    }
}

/// Runs blocking work on another thread.
pub(crate) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Problem::new(ProblemCode::Internal, format!("a request failed: {error}")))
}

fn header<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    // A header that is no text matches no known name.
    headers.get(name).map(|value| value.to_str().unwrap_or("?").trim())
}

fn format_of(headers: &HeaderMap) -> Result<WireFormat, Problem> {
    let Some(media_type) = header(headers, &CONTENT_TYPE) else { return Ok(WireFormat::Json) };
    let name = media_type.split(';').next().unwrap_or_default().trim();
    WireFormat::named(name).ok_or_else(|| {
        let (json, pack) = (WireFormat::JSON, WireFormat::MESSAGE_PACK);
        let detail = format!("`Content-Type: {media_type}` is not read here; send {json} or {pack}");
        Problem::new(ProblemCode::UnsupportedMediaType, detail)
    })
}

/// Compression of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Plain,
    Gzip,
    Zstd,
}

fn encoding_of(headers: &HeaderMap) -> Result<Encoding, Problem> {
    let name = header(headers, &CONTENT_ENCODING).unwrap_or("identity");
    match &*name.to_ascii_lowercase() {
        "identity" => Ok(Encoding::Plain),
        "gzip" | "x-gzip" => Ok(Encoding::Gzip),
        "zstd" => Ok(Encoding::Zstd),
        _ => {
            let detail =
                format!("`Content-Encoding: {name}` is not read here; send plain bytes, gzip or zstd");
            Err(Problem::new(ProblemCode::UnsupportedEncoding, detail))
        }
    }
}

/// Reads and decompresses the whole body.
async fn read(
    request: Request,
    shared: &ServerState,
) -> Result<(Bytes, Option<OwnedSemaphorePermit>), Problem> {
    let encoding = encoding_of(request.headers())?;
    let length = header(request.headers(), &CONTENT_LENGTH).and_then(|length| length.parse().ok());
    let limits = shared.limits;
    let arrival = tokio::time::timeout(limits.body_read, arrive(request, length, shared));
    let (bytes, mut reserved) = arrival.await.map_err(|_| took_too_long(limits.body_read))??;
    if encoding == Encoding::Plain {
        return Ok((bytes, reserved));
    }
    match decompress(encoding, &bytes, ServerLimits::SMALL_BODY.min(limits.body_bytes)) {
        Err(problem)
            if problem.code == ProblemCode::BodyTooLarge && ServerLimits::SMALL_BODY < limits.body_bytes =>
        {
            // The reservation of the compressed body is returned first.
            drop(reserved.take());
            let reserved = reserve(shared, limits.body_bytes).await?;
            let bytes = aside(move || decompress(encoding, &bytes, limits.body_bytes)).await??;
            Ok((bytes, Some(reserved)))
        }
        small => Ok((small?, reserved)),
    }
}

/// Reads the whole body as sent, with memory reserved if it is large.
async fn arrive(
    request: Request,
    length: Option<usize>,
    shared: &ServerState,
) -> Result<(Bytes, Option<OwnedSemaphorePermit>), Problem> {
    let limit = shared.limits.body_bytes;
    if length.is_some_and(|length| length > limit) {
        return Err(too_large(limit));
    }
    let mut body = request.into_body();
    let mut whole = Vec::new();
    let mut first = Bytes::new();
    let mut reserved = None;
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|error| Problem::new(ProblemCode::Incomplete, format!("the body broke off: {error}")))?;
        let Ok(bytes) = frame.into_data() else { continue };
        let total = first.len() + whole.len() + bytes.len();
        if total > limit {
            return Err(too_large(limit));
        }
        if total > ServerLimits::SMALL_BODY && reserved.is_none() {
            reserved = Some(reserve(shared, length.unwrap_or(limit)).await?);
        }
        // A body in one piece is not copied.
        if first.is_empty() && whole.is_empty() {
            first = bytes;
            continue;
        }
        if whole.is_empty() {
            whole.reserve(length.unwrap_or(total));
            whole.extend_from_slice(&std::mem::take(&mut first));
        }
        whole.extend_from_slice(&bytes);
    }
    Ok((if whole.is_empty() { first } else { whole.into() }, reserved))
}

fn took_too_long(limit: Duration) -> Problem {
    Problem::new(ProblemCode::BodyTimeout, format!("the body took longer than {} s", limit.as_secs()))
}

/// Middleware of routes that read their bodies themselves, in pieces: the deadline of all bodies holds for theirs too.
pub(super) async fn arrives_in_time(
    State(shared): State<Arc<ServerState>>,
    request: Request,
    next: Next,
) -> Response {
    let limit = shared.limits.body_read;
    let deadline = tokio::time::Instant::now() + limit;
    let late = Arc::new(AtomicBool::new(false));
    let is_late = Arc::clone(&late);
    let request = request.map(|body| {
        Body::from_stream(stream::unfold(body.into_data_stream(), move |mut pieces| {
            let late = Arc::clone(&late);
            async move {
                let piece = tokio::time::timeout_at(deadline, pieces.next()).await.unwrap_or_else(|_| {
                    late.store(true, Ordering::Relaxed);
                    Some(Err(axum::Error::new(std::io::Error::from(std::io::ErrorKind::TimedOut))))
                });
                Some((piece?, pieces))
            }
        }))
    });
    let response = next.run(request).await;
    if is_late.load(Ordering::Relaxed) { took_too_long(limit).into_response() } else { response }
}

fn too_large(limit: usize) -> Problem {
    Problem::new(
        ProblemCode::BodyTooLarge,
        format!("the body has more than {limit} bytes; send less at once"),
    )
}

/// Reserves memory for a large body. Waits for other bodies.
async fn reserve(shared: &ServerState, bytes: usize) -> Result<OwnedSemaphorePermit, Problem> {
    let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
    let permits = Arc::clone(&shared.bodies).acquire_many_owned(kib);
    match tokio::time::timeout(shared.limits.body_read, permits).await {
        Ok(Ok(reserved)) => Ok(reserved),
        _ => Err(Problem::new(
            ProblemCode::Busy,
            "other large bodies take all the memory: try again later, or send less at once",
        )),
    }
}

/// Grows a reservation to the decoded size, `bytes`. It does not wait: the body already has a reservation, and
/// several such waits would deadlock.
fn enlarge(
    shared: &ServerState,
    reserved: &mut Option<OwnedSemaphorePermit>,
    bytes: usize,
) -> Result<(), Problem> {
    let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
    let has = reserved.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
    let more = kib.saturating_sub(u32::try_from(has).unwrap_or(u32::MAX));
    let Ok(more) = Arc::clone(&shared.bodies).try_acquire_many_owned(more) else {
        return Err(Problem::new(
            ProblemCode::Busy,
            "other large bodies take all the memory: try again later, or send less at once",
        ));
    };
    match reserved {
        Some(reserved) => reserved.merge(more),
        None => *reserved = Some(more),
    }
    Ok(())
}

fn decompress(encoding: Encoding, bytes: &[u8], limit: usize) -> Result<Bytes, Problem> {
    let bad = |error: std::io::Error| {
        Problem::new(ProblemCode::BadEncoding, format!("the body is not what its encoding says: {error}"))
    };
    let mut whole = Vec::new();
    let mut take = |reader: &mut dyn Read| reader.take(limit as u64 + 1).read_to_end(&mut whole).map_err(bad);
    match encoding {
        Encoding::Gzip => take(&mut flate2::read::MultiGzDecoder::new(bytes))?,
        Encoding::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(bytes).map_err(bad)?;
            decoder.window_log_max(ZSTD_WINDOW).map_err(bad)?;
            take(&mut decoder)?
        }
        Encoding::Plain => take(&mut &*bytes)?,
    };
    if whole.len() > limit {
        return Err(too_large(limit));
    }
    Ok(whole.into())
}
