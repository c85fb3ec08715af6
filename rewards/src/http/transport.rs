//! One request with a JSON body and its JSON response, repeated if the connection fails or the server is busy.
//!
//! Invariant: all attempts together end at their deadline. Redirects are not followed, no variable of the process is read, a
//! response is never longer than its limit, and an unusable response is shown. The token is in no message.

use std::fmt;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use connect::{BodyReader, HeaderValue, HttpAgent, Request, SendError, Uri};
use serde_json::Value;

use super::allow::AllowList;
use crate::{RewardContext, RewardError, RewardSpec};

const RETRIES: u32 = 4;
const ANSWER_KIB: u64 = 1024;
/// The first pause before a repetition; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause, unless the server asks for more.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// Longest part of an unusable response that is shown, characters.
const SHOWN: usize = 200;

/// Why a request has no response.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RequestError {
    /// The deadline passed.
    Timeout,
    /// Another failure; the reason and the remedy.
    Failed(String),
}

/// The HTTP client of one server, which connects to allowed addresses only.
pub(crate) struct HttpTransport {
    agent: HttpAgent,
    url: String,
    authorization: Option<HeaderValue>,
    retries: u32,
    max_answer: u64,
}

/// Why one attempt has no response.
enum AttemptError {
    /// It may be repeated after this pause.
    Retry(String, Duration),
    /// A repetition would fail in the same way.
    Permanent(String),
    /// The deadline has passed.
    Deadline,
}

impl HttpTransport {
    /// A client for the URL of `spec`; `complete` appends the path.
    ///
    /// # Errors
    /// A URL, a list or a token that cannot be used.
    pub(crate) fn new(
        spec: &RewardSpec,
        context: &RewardContext,
        complete: impl FnOnce(&str) -> String,
    ) -> Result<Self, RewardError> {
        let url = complete(&spec.required("url", spec.url.clone())?);
        let wrong = |reason: &str| spec.wrong("url", reason);
        let uri: Uri = url.parse().map_err(|error| wrong(&format!("is not a URL: {error}")))?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| wrong("names no host"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(wrong("must begin with `http://` or `https://`"));
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(wrong(
                "holds a name or password; put a token into a variable and name that in `token_env`",
            ));
        }
        let allow =
            AllowList::new(host, spec.allow.as_deref()).map_err(|reason| spec.wrong("allow", &reason))?;
        let filter = Box::new(move |host: &str, address| allow.check(host, address));
        let agent = HttpAgent::new(None, spec.concurrency, Some(filter)).map_err(|reason| wrong(&reason))?;
        let agent = agent.with_pauses();
        Ok(Self {
            agent,
            url,
            authorization: authorization(spec, context)?,
            retries: spec.retries.unwrap_or(RETRIES),
            max_answer: spec.max_answer_kib.unwrap_or(ANSWER_KIB).saturating_mul(1 << 10),
        })
    }

    /// The URL of the server.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The response to `body` within `limit`. Pauses depend on `seed` alone, so that callers do not retry all at once and the
    /// same call always behaves the same.
    pub(crate) async fn post(
        self: &Arc<Self>,
        body: &Value,
        seed: u64,
        limit: Duration,
    ) -> Result<Value, RequestError> {
        let deadline = Instant::now().checked_add(limit);
        let left =
            || deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
        let body: Arc<[u8]> = body.to_string().into_bytes().into();
        let mut last = None;
        for attempt in 0..=self.retries {
            let (transport, body, limit) = (Arc::clone(self), Arc::clone(&body), left());
            let asked = tokio::task::spawn_blocking(move || transport.attempt(&body, limit));
            let (reason, wanted) = match asked.await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(AttemptError::Permanent(reason))) => return Err(RequestError::Failed(reason)),
                Ok(Err(AttemptError::Deadline)) => {
                    return Err(last.map_or(RequestError::Timeout, RequestError::Failed));
                }
                Ok(Err(AttemptError::Retry(reason, wanted))) => (reason, wanted),
                Err(_) => {
                    return Err(RequestError::Failed(
                        "the request panicked; its message is in the log".to_owned(),
                    ));
                }
            };
            let pause = pause(seed, attempt).max(wanted);
            let message = format!("{} after {} attempts: {reason}", self.url, attempt + 1);
            if attempt == self.retries || pause >= left() {
                return Err(RequestError::Failed(message));
            }
            last = Some(message);
            tokio::time::sleep(pause).await;
        }
        Err(RequestError::Timeout)
    }

    /// The response to one GET request; blocks.
    pub(crate) fn get(&self, limit: Duration) -> Result<Value, RequestError> {
        self.send("GET", &[], limit).map_err(|lost| match lost {
            AttemptError::Retry(reason, _) => RequestError::Failed(format!("{}: {reason}", self.url)),
            AttemptError::Permanent(reason) => RequestError::Failed(reason),
            AttemptError::Deadline => RequestError::Timeout,
        })
    }

    fn attempt(&self, body: &[u8], limit: Duration) -> Result<Value, AttemptError> {
        if limit.is_zero() {
            return Err(AttemptError::Deadline);
        }
        self.send("POST", body, limit)
    }

    fn send(&self, method: &str, body: &[u8], limit: Duration) -> Result<Value, AttemptError> {
        let mut request = Request::builder().method(method).uri(&self.url);
        request = request.header("content-type", "application/json").header("accept", "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        let request = request.body(body).map_err(|error| AttemptError::Permanent(error.to_string()))?;
        let deadline = Instant::now().checked_add(limit);
        let response = self.agent.send(request, limit).map_err(|error| lost(error, deadline))?;
        let status = response.status();
        let text = |name: &str| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
        let (wanted, elsewhere) = (text("retry-after"), text("location"));
        let wanted = wanted
            .and_then(|seconds| seconds.trim().parse().ok())
            .map_or(Duration::ZERO, Duration::from_secs);
        let body = self.read(response.into_body().into_reader(), deadline);
        if matches!(status.as_u16(), 429 | 502..=504) {
            let said = body.map(|body| shown(&body)).unwrap_or_default();
            return Err(AttemptError::Retry(format!("status {status}: {said}"), wanted));
        }
        let body = body?;
        if status.is_redirection() {
            let elsewhere = elsewhere.unwrap_or_else(|| "nowhere".to_owned());
            let advice = "redirects are not followed; write the address itself into `url`";
            return Err(AttemptError::Permanent(format!(
                "{} leads to {}; {advice}",
                self.url,
                cut(&elsewhere)
            )));
        }
        if !status.is_success() {
            return Err(AttemptError::Permanent(format!(
                "{} answered with status {status}: {}",
                self.url,
                shown(&body)
            )));
        }
        serde_json::from_slice(&body).map_err(|error| {
            AttemptError::Permanent(format!(
                "the answer of {} is not JSON ({error}): {}",
                self.url,
                shown(&body)
            ))
        })
    }

    /// The body of a response, if it is not too long.
    fn read(&self, body: BodyReader<'_>, deadline: Option<Instant>) -> Result<Vec<u8>, AttemptError> {
        let mut bytes = Vec::new();
        let read = body.take(self.max_answer.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| lost(SendError::Unclear(error.to_string()), deadline))?;
        if bytes.len() as u64 > self.max_answer {
            return Err(AttemptError::Permanent(format!(
                "the answer of {} is longer than {} KiB; raise `max_answer_kib` if it may be",
                self.url,
                self.max_answer >> 10
            )));
        }
        Ok(bytes)
    }
}

/// What a failure means for the next attempt. A request can be repeated even if the server has seen it.
fn lost(error: SendError, deadline: Option<Instant>) -> AttemptError {
    match error {
        SendError::NotSent(_) | SendError::Unclear(_)
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) =>
        {
            AttemptError::Deadline
        }
        SendError::NotSent(reason) | SendError::Unclear(reason) => {
            AttemptError::Retry(reason, Duration::ZERO)
        }
        SendError::Permanent(reason) => AttemptError::Permanent(reason),
    }
}

impl fmt::Debug for HttpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpTransport").field("url", &self.url).finish_non_exhaustive()
    }
}

impl RequestError {
    /// The error of the reward `reward` with its time limit.
    pub(crate) fn of(self, reward: &str, limit: Duration, trajectory: crate::TrajectoryRef) -> RewardError {
        match self {
            Self::Timeout => trajectory.timed_out(reward, limit),
            Self::Failed(reason) => trajectory.failed(reward, reason),
        }
    }
}

fn authorization(spec: &RewardSpec, context: &RewardContext) -> Result<Option<HeaderValue>, RewardError> {
    let Some(name) = &spec.token_env else { return Ok(None) };
    let wrong = |reason: &str| spec.wrong("token_env", &format!("names the variable `{name}`, {reason}"));
    let token = context.environment.get(name).map(|token| token.trim()).filter(|token| !token.is_empty());
    let token = token.ok_or_else(|| wrong("which is not set"))?;
    let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
        .map_err(|_| wrong("whose value is not valid in a header"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// Exponential backoff with jitter: between half and one and a half of a time that doubles.
fn pause(seed: u64, attempt: u32) -> Duration {
    let base = FIRST_PAUSE.saturating_mul(1 << attempt.min(16)).min(LONGEST_PAUSE);
    // One step of splitmix64.
    let mut word = seed.wrapping_add(u64::from(attempt + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let share = ((word ^ (word >> 31)) >> 32) as u32;
    base / 2 + base.mul_f64(f64::from(share) / f64::from(u32::MAX))
}

/// The seed of the pauses of one trajectory.
pub(crate) fn seed(trajectory: crate::TrajectoryRef) -> u64 {
    trajectory.task.0.rotate_left(32) ^ u64::from(trajectory.index)
}

fn shown(bytes: &[u8]) -> String {
    cut(&String::from_utf8_lossy(&bytes[..bytes.len().min(4 * SHOWN)]))
}

/// The beginning of a text.
pub(crate) fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_differ_and_repeat() {
        for seed in 0..100 {
            for attempt in 0..8 {
                let base = FIRST_PAUSE.saturating_mul(1 << attempt).min(LONGEST_PAUSE);
                let found = pause(seed, attempt);
                assert!(found >= base / 2 && found <= base + base / 2, "{found:?}");
                assert_eq!(found, pause(seed, attempt));
            }
        }
        assert_ne!(pause(1, 0), pause(2, 0));
    }

    #[test]
    fn urls_and_tokens_that_cannot_be_used_are_refused() {
        let context = RewardContext {
            environment: Arc::new([("BROKEN".to_owned(), "a\nb".to_owned())].into()),
            ..RewardContext::default()
        };
        let spec = |url: &str| RewardSpec { url: Some(url.to_owned()), ..RewardSpec::new("http") };
        let failed =
            |spec: &RewardSpec| HttpTransport::new(spec, &context, str::to_owned).unwrap_err().to_string();
        for url in
            ["rm", "ftp://rm/", "http://", "http://a:b@rm/", "http://169.254.169.254/latest", "http://rm/ x"]
        {
            let message = failed(&spec(url));
            assert!(message.contains("`http`") && !message.contains("a:b"), "{url}: {message}");
        }
        for name in ["BROKEN", "MISSING"] {
            let message = failed(&RewardSpec { token_env: Some(name.to_owned()), ..spec("http://rm") });
            assert!(message.contains(name), "{message}");
        }
    }
}
