//! What routes share, and the bodies of requests: JSON, or protobuf, plain or compressed by zstd.
//!
//! Invariant: a body is read only for a user, within its limits of bytes and of time, and its memory is counted among that of
//! all bodies until it is decoded.

use std::io::Read as _;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http_body_util::LengthLimitError;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::access::{HttpLimits, ServiceAccess};
use super::refusal::HttpRefusal;
use crate::training::{TrainingService, UserId};
use crate::wire::{WireError, protobuf, read_json};

/// Unit of the memory of bodies, bytes.
const KIB: usize = 1 << 10;
/// A body that is announced with at most so many bytes does not wait for memory.
const SHORT_BODY: usize = 64 << 10;
/// A longer body is decoded on a thread for blocking work, bytes.
const DECODE_INLINE: usize = 256 << 10;
/// Most requests at a time whose thread may wait long, which leaves the other threads to other requests.
const WAITS: usize = 16;
/// Largest window of zstd, as a power of two of bytes: RFC 8878 requires it of every decoder.
const ZSTD_WINDOW: u32 = 23;

/// What every route has.
#[derive(Clone, Debug)]
pub(crate) struct ApiState {
    pub(super) service: TrainingService,
    pub(super) access: ServiceAccess,
    /// Permits for the memory of bodies, KiB.
    bodies: Arc<Semaphore>,
    /// Permits for work that may wait long: for the end of an engine, or of a save.
    waits: Arc<Semaphore>,
    /// Permits for archives that are downloaded.
    pub(super) archives: Arc<Semaphore>,
    /// What links of archives are signed with; `None` if the system has no random numbers.
    pub(super) secret: Option<[u8; 32]>,
    /// Whether the server stops, which ends waits.
    pub(super) stopping: watch::Receiver<bool>,
}

/// A body, decompressed.
pub(super) struct SentBody {
    pub(super) bytes: Bytes,
    pub(super) is_protobuf: bool,
    _memory: Option<OwnedSemaphorePermit>,
}

impl ApiState {
    /// Waits end with their own limits.
    pub(crate) fn new(service: TrainingService, access: ServiceAccess) -> Self {
        let (_, stopping) = watch::channel(false);
        Self::with_stop(service, access, stopping)
    }

    /// Waits end when `stopping` becomes true.
    pub(crate) fn with_stop(
        service: TrainingService,
        access: ServiceAccess,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let HttpLimits { max_body_bytes, max_bodies_bytes, max_archives, .. } = access.limits;
        // A compressed body is in memory twice.
        let kib = max_bodies_bytes.max(2 * max_body_bytes).div_ceil(KIB);
        let mut secret = [0; 32];
        let secret = getrandom::fill(&mut secret).is_ok().then_some(secret);
        Self {
            service,
            access,
            bodies: Arc::new(Semaphore::new(kib.min(Semaphore::MAX_PERMITS))),
            waits: Arc::new(Semaphore::new(WAITS)),
            archives: Arc::new(Semaphore::new(max_archives)),
            secret,
            stopping,
        }
    }

    pub(super) fn limits(&self) -> HttpLimits {
        self.access.limits
    }

    /// The user of a request, and its body.
    pub(super) async fn body(&self, request: Request) -> Result<(UserId, SentBody), HttpRefusal> {
        let user = self.access.user(request.headers())?;
        let (parts, body) = request.into_parts();
        Ok((user, self.read(&parts.headers, body).await?))
    }

    /// The user of a request, and its body in JSON.
    pub(super) async fn json<T>(&self, request: Request) -> Result<(UserId, T), HttpRefusal>
    where
        T: DeserializeOwned + Send + 'static,
    {
        let (user, body) = self.body(request).await?;
        Ok((user, body.decode(|body| read_json(&body.bytes)).await?))
    }

    /// What `work` of the service returns, which may wait for the end of an engine or of a save.
    pub(super) async fn waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce(&TrainingService) -> T + Send + 'static,
    ) -> Result<T, HttpRefusal> {
        let service = self.service.clone();
        in_turn(&self.waits, self.limits().retrieve_time, move || work(&service)).await
    }

    async fn read(&self, headers: &HeaderMap, body: Body) -> Result<SentBody, HttpRefusal> {
        let HttpLimits { max_body_bytes: most, body_time, .. } = self.limits();
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let announced = text(CONTENT_LENGTH).and_then(|length| length.parse().ok());
        let is_compressed = match text(CONTENT_ENCODING) {
            None | Some("identity") => false,
            Some("zstd") => true,
            Some(name) => {
                let message =
                    format!("`Content-Encoding: {name}` is not read here; send plain bytes or zstd");
                return Err(HttpRefusal::new(415, message));
            }
        };
        let bytes: usize = announced.unwrap_or(most);
        if bytes > most {
            return Err(too_long(most));
        }
        let bytes = if is_compressed { bytes + most } else { bytes };
        let kib = u32::try_from(bytes.div_ceil(KIB)).unwrap_or(u32::MAX);
        let memory = match bytes <= SHORT_BODY {
            // Connections bound them. A heartbeat waits behind no upload.
            true => None,
            false => {
                let permit = Arc::clone(&self.bodies).acquire_many_owned(kib);
                let Ok(Ok(memory)) = tokio::time::timeout(body_time, permit).await else {
                    return Err(HttpRefusal::new(
                        503,
                        "too many long bodies are being read; try again later",
                    ));
                };
                Some(memory)
            }
        };
        let bytes = received(body, most, body_time).await?;
        let media_type = text(CONTENT_TYPE).and_then(|value| value.split(';').next()).unwrap_or_default();
        let is_protobuf = media_type.trim().eq_ignore_ascii_case(protobuf::MEDIA_TYPE);
        let bytes = match is_compressed {
            false => bytes,
            true => blocking(move || decompress(&bytes, most)).await??,
        };
        Ok(SentBody { bytes, is_protobuf, _memory: memory })
    }
}

impl SentBody {
    /// What `read` makes of it, on another thread if it is long.
    pub(super) async fn decode<T: Send + 'static>(
        self,
        read: impl FnOnce(&Self) -> Result<T, WireError> + Send + 'static,
    ) -> Result<T, HttpRefusal> {
        if self.bytes.len() <= DECODE_INLINE {
            return Ok(read(&self)?);
        }
        Ok(blocking(move || read(&self)).await??)
    }
}

/// The whole of a body.
async fn received(body: Body, most: usize, limit: Duration) -> Result<Bytes, HttpRefusal> {
    let Ok(whole) = tokio::time::timeout(limit, to_bytes(body, most)).await else {
        // The SDK repeats what has this status.
        return Err(HttpRefusal::new(408, format!("no whole body within {} s", limit.as_secs())));
    };
    whole.map_err(|error| {
        let mut source: Option<&dyn std::error::Error> = Some(&error);
        while let Some(inner) = source {
            if inner.is::<LengthLimitError>() {
                return too_long(most);
            }
            source = inner.source();
        }
        HttpRefusal::new(400, format!("the body could not be read: {error}"))
    })
}

fn too_long(most: usize) -> HttpRefusal {
    HttpRefusal::new(
        413,
        format!("the body is longer than {most} bytes, the limit here; send fewer sequences at once"),
    )
}

fn decompress(bytes: &[u8], most: usize) -> Result<Bytes, HttpRefusal> {
    let bad =
        |error: std::io::Error| HttpRefusal::new(400, format!("the body is not compressed by zstd: {error}"));
    let mut decoder = zstd::stream::read::Decoder::with_buffer(bytes).map_err(bad)?;
    decoder.window_log_max(ZSTD_WINDOW).map_err(bad)?;
    let mut whole = Vec::new();
    decoder.take(most as u64 + 1).read_to_end(&mut whole).map_err(bad)?;
    if whole.len() > most { Err(too_long(most)) } else { Ok(whole.into()) }
}

/// What `work` returns, on a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, HttpRefusal> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| HttpRefusal::new(500, "the request failed inside the server"))
}

/// The same as [`blocking`], once one of the permits `turns` is free.
///
/// # Errors
/// 503 if none is within `limit`.
async fn in_turn<T: Send + 'static>(
    turns: &Arc<Semaphore>,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, HttpRefusal> {
    let permit = tokio::time::timeout(limit, Arc::clone(turns).acquire_owned()).await;
    let Ok(Ok(permit)) = permit else {
        return Err(HttpRefusal::new(
            503,
            "too many requests wait for engines to end or for weights to be saved; try again later",
        ));
    };
    blocking(move || {
        // Also of a client that is gone, until the thread is free.
        let _permit = permit;
        work()
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_may_wait_is_bounded_and_repeated_later() {
        let turns = Arc::new(Semaphore::new(1));
        let first = Arc::clone(&turns).acquire_owned().await.unwrap();
        let refused = in_turn(&turns, Duration::ZERO, || ()).await.unwrap_err();
        assert_eq!(refused.status(), 503);
        drop(first);
        assert_eq!(in_turn(&turns, Duration::from_secs(30), || 7).await.unwrap(), 7);
        assert_eq!(turns.available_permits(), 1);
    }

    #[test]
    fn a_body_is_decompressed_up_to_its_limit() {
        let packed = zstd::encode_all(&vec![7_u8; 1 << 20][..], 1).unwrap();
        assert_eq!(decompress(&packed, 1 << 20).unwrap().len(), 1 << 20);
        assert_eq!(decompress(&packed, (1 << 20) - 1).unwrap_err().status(), 413);
        assert_eq!(decompress(b"not zstd", 100).unwrap_err().status(), 400);
    }

    #[tokio::test]
    async fn a_body_that_announces_no_length_is_read_up_to_its_limit() {
        let body = || Body::from(vec![0_u8; 100]);
        let soon = Duration::from_secs(30);
        assert_eq!(received(body(), 100, soon).await.unwrap().len(), 100);
        assert_eq!(received(body(), 99, soon).await.unwrap_err().status(), 413);
    }
}
