//! Limits of requests: bodies, open answers, answers per key.
//!
//! Invariant: a request that exceeds a limit is refused at once with the limit; none waits but for the memory of its body,
//! and that wait has a deadline.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, StatusCode, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::ApiError;
use crate::auth::KeyDigest;

/// Unit of the memory of bodies, bytes.
const KIB: usize = 1 << 10;

/// Limits of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointLimits {
    /// Longest body, bytes.
    pub max_body_bytes: usize,
    /// All bodies in memory, bytes; more wait.
    pub max_bodies_bytes: usize,
    /// Longest time to receive a body.
    pub body_time: Duration,
    /// Most answers that are open at the same time, streams and others.
    pub max_open: usize,
    /// Most open answers of one key.
    pub max_open_per_key: usize,
    /// Most completions per prompt.
    pub max_samples: usize,
    /// Most prompts of one request.
    pub max_prompts: usize,
    /// Most stop strings, and stop tokens, of one request.
    pub max_stops: usize,
    /// Longest stop string, bytes.
    pub max_stop_bytes: usize,
    /// Time without an event after which a stream gets a comment.
    pub keep_alive: Duration,
    /// Most connections.
    pub max_connections: usize,
    /// Longest time to finish open answers at a stop.
    pub stop: Duration,
}

impl Default for EndpointLimits {
    fn default() -> Self {
        Self {
            max_body_bytes: 64 << 20,
            max_bodies_bytes: 512 << 20,
            body_time: Duration::from_secs(60),
            max_open: 1024,
            max_open_per_key: 1024,
            max_samples: 128,
            max_prompts: 128,
            max_stops: 64,
            max_stop_bytes: 1024,
            keep_alive: Duration::from_secs(5),
            max_connections: 4096,
            stop: Duration::from_secs(30),
        }
    }
}

/// Reads bodies within their limits.
#[derive(Debug)]
pub(crate) struct LimitedBodies {
    limits: EndpointLimits,
    /// Permits for the memory of bodies, KiB.
    memory: Semaphore,
}

impl LimitedBodies {
    pub(crate) fn new(limits: EndpointLimits) -> Self {
        let kib = limits.max_bodies_bytes.max(limits.max_body_bytes).div_ceil(KIB);
        Self { limits, memory: Semaphore::new(kib.min(Semaphore::MAX_PERMITS)) }
    }

    /// The whole body. Its memory is counted until `read` has made something else of it.
    pub(crate) async fn read<T>(
        &self,
        headers: &HeaderMap,
        body: Body,
        read: impl FnOnce(&[u8]) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let EndpointLimits { max_body_bytes: most, body_time, .. } = self.limits;
        let long = || {
            ApiError::too_large(format!("the body is longer than {most} bytes, the limit of this endpoint"))
        };
        let announced =
            headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let bytes: usize = announced.unwrap_or(most);
        if bytes > most {
            return Err(long());
        }
        let kib = u32::try_from(bytes.div_ceil(KIB)).unwrap_or(u32::MAX);
        let permit = tokio::time::timeout(body_time, self.memory.acquire_many(kib)).await;
        let Ok(Ok(_permit)) = permit else {
            return Err(ApiError::busy("too many long bodies are being read; try again later"));
        };
        let whole = tokio::time::timeout(body_time, to_bytes(body, most)).await;
        let late = |_| {
            let message = format!("no whole body within {} s", body_time.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "RequestTimeoutError", message)
        };
        let whole = whole.map_err(late)?.map_err(|error| {
            let mut source: Option<&dyn std::error::Error> = Some(&error);
            while let Some(inner) = source {
                if inner.is::<http_body_util::LengthLimitError>() {
                    return long();
                }
                source = inner.source();
            }
            ApiError::malformed(format!("the body could not be read: {error}"))
        })?;
        read(&whole)
    }
}

/// Counts open answers.
#[derive(Debug)]
pub(crate) struct OpenAnswers {
    limits: EndpointLimits,
    all: Arc<Semaphore>,
    /// Open answers by key; only keys with some.
    keys: Arc<Mutex<HashMap<KeyDigest, usize>>>,
}

/// Counts one answer as open until it is dropped.
#[derive(Debug)]
pub(crate) struct AnswerPermit {
    key: KeyDigest,
    keys: Arc<Mutex<HashMap<KeyDigest, usize>>>,
    _all: OwnedSemaphorePermit,
}

impl OpenAnswers {
    pub(crate) fn new(limits: EndpointLimits) -> Self {
        Self { limits, all: Arc::new(Semaphore::new(limits.max_open)), keys: Arc::default() }
    }

    /// Counts an answer to `key`.
    pub(crate) fn open(&self, key: KeyDigest) -> Result<AnswerPermit, ApiError> {
        let EndpointLimits { max_open, max_open_per_key, .. } = self.limits;
        let all = Arc::clone(&self.all).try_acquire_owned().map_err(|_| {
            ApiError::busy(format!(
                "{max_open} answers are open, the limit of this endpoint; try again later"
            ))
        })?;
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let of_key = keys.entry(key).or_default();
        if *of_key >= max_open_per_key {
            return Err(ApiError::busy(format!(
                "{max_open_per_key} answers to this key are open, its limit; try again later"
            )));
        }
        *of_key += 1;
        drop(keys);
        Ok(AnswerPermit { key, keys: Arc::clone(&self.keys), _all: all })
    }

    /// Answers that are open.
    pub(crate) fn count(&self) -> usize {
        self.limits.max_open - self.all.available_permits()
    }
}

impl Drop for AnswerPermit {
    fn drop(&mut self) {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_key) = keys.get_mut(&self.key) {
            *of_key -= 1;
            if *of_key == 0 {
                keys.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_bounded_for_all_and_per_key() {
        let limits = EndpointLimits { max_open: 3, max_open_per_key: 2, ..EndpointLimits::default() };
        let answers = OpenAnswers::new(limits);
        let key = |name: &str| KeyDigest::of(name);
        let first = answers.open(key("a")).unwrap();
        let _second = answers.open(key("a")).unwrap();
        let refused = answers.open(key("a")).unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.retry_after_s), (429, Some(1)));
        assert!(refused.message.contains("this key"), "{refused}");
        let _third = answers.open(key("b")).unwrap();
        assert!(answers.open(key("c")).unwrap_err().message.contains("3 answers are open"));
        assert_eq!(answers.count(), 3);
        drop(first);
        assert_eq!((answers.count(), answers.keys.lock().unwrap()[&key("a")]), (2, 1));
        answers.open(key("c")).unwrap();
        assert_eq!(answers.keys.lock().unwrap().len(), 2, "a key without answers has no entry");
    }

    #[tokio::test]
    async fn bodies_are_bounded() {
        let limits = EndpointLimits { max_body_bytes: 10, ..EndpointLimits::default() };
        let reader = LimitedBodies::new(limits);
        let read = async |body: &'static str, headers: &HeaderMap| {
            reader.read(headers, Body::from(body), |bytes| Ok(bytes.len())).await
        };
        let mut headers = HeaderMap::new();
        assert_eq!(read("0123456789", &headers).await, Ok(10));
        assert_eq!(read("0123456789x", &headers).await.unwrap_err().status.as_u16(), 413);
        headers.insert(header::CONTENT_LENGTH, 11.into());
        assert_eq!(read("0", &headers).await.unwrap_err().status.as_u16(), 413);
    }
}
