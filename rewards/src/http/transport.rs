//! One request with a JSON body and its JSON answer, repeated where nobody or a busy server was found.
//!
//! Invariant: all attempts together end at their deadline. Redirects are not followed, no variable of the process is read, an
//! answer is never longer than its limit, and what came is shown where it cannot be used. The token is in no message.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use ureq::http::{HeaderValue, Request, Uri};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::DefaultConnector;
use ureq::{Agent, Timeout};

use super::allow::{AllowList, Checked};
use crate::{RewardContext, RewardError, RewardSpec};

const RETRIES: u32 = 4;
const ANSWER_KIB: u64 = 1024;
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// Servers close idle connections after a few seconds; one that may be just about to is not used.
const MAX_IDLE: Duration = Duration::from_secs(4);
/// The first pause before a repetition; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause that we choose ourselves.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// How much of an unusable answer is shown, characters.
const SHOWN: usize = 200;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CallError {
    /// The deadline passed while one was waited for.
    Timeout,
    /// Anything else; what happened and what to do.
    Failed(String),
}

/// A server that is asked by POST.
pub(crate) struct Transport {
    agent: Agent,
    url: String,
    authorization: Option<HeaderValue>,
    retries: u32,
    max_answer: u64,
}

/// How one attempt ended without an answer.
enum Lost {
    /// It may be tried again, not before so long.
    Again(String, Duration),
    /// It would end in the same way.
    Never(String),
    /// There is no time left.
    Late,
}

impl Transport {
    /// Where `spec` says; `path` is appended to its URL by `complete`.
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
        let uri: Uri = url.parse().map_err(|error| wrong(&format!("is no URL: {error}")))?;
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
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // A variable of the environment decides nothing here.
            .proxy(None)
            .timeout_connect(Some(CONNECT))
            .max_idle_age(MAX_IDLE)
            .max_idle_connections(spec.concurrency)
            .max_idle_connections_per_host(spec.concurrency)
            .build();
        let resolver = Checked { allow, inner: DefaultResolver::default() };
        Ok(Self {
            agent: Agent::with_parts(config, DefaultConnector::default(), resolver),
            url,
            authorization: authorization(spec, context)?,
            retries: spec.retries.unwrap_or(RETRIES),
            max_answer: spec.max_answer_kib.unwrap_or(ANSWER_KIB).saturating_mul(1 << 10),
        })
    }

    /// Where it asks.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The answer to `body` within `limit`. Pauses depend on `seed` alone, so that many callers do not come back at once and
    /// the same call always does the same.
    pub(crate) async fn post(
        self: &Arc<Self>,
        body: &Value,
        seed: u64,
        limit: Duration,
    ) -> Result<Value, CallError> {
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
                Ok(Err(Lost::Never(reason))) => return Err(CallError::Failed(reason)),
                Ok(Err(Lost::Late)) => return Err(last.map_or(CallError::Timeout, CallError::Failed)),
                Ok(Err(Lost::Again(reason, wanted))) => (reason, wanted),
                Err(_) => {
                    return Err(CallError::Failed(
                        "the request panicked; its message stands in the log".to_owned(),
                    ));
                }
            };
            let pause = pause(seed, attempt).max(wanted);
            let said = format!("{} after {} attempts: {reason}", self.url, attempt + 1);
            if attempt == self.retries || pause >= left() {
                return Err(CallError::Failed(said));
            }
            last = Some(said);
            tokio::time::sleep(pause).await;
        }
        Err(CallError::Timeout)
    }

    /// What stands there, asked once, on a thread that may wait.
    pub(crate) fn get(&self, limit: Duration) -> Result<Value, CallError> {
        self.send("GET", &[], limit).map_err(|lost| match lost {
            Lost::Again(reason, _) => CallError::Failed(format!("{}: {reason}", self.url)),
            Lost::Never(reason) => CallError::Failed(reason),
            Lost::Late => CallError::Timeout,
        })
    }

    fn attempt(&self, body: &[u8], limit: Duration) -> Result<Value, Lost> {
        if limit.is_zero() {
            return Err(Lost::Late);
        }
        self.send("POST", body, limit)
    }

    fn send(&self, method: &str, body: &[u8], limit: Duration) -> Result<Value, Lost> {
        let mut request = Request::builder().method(method).uri(&self.url);
        request = request.header("content-type", "application/json").header("accept", "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        let request = request.body(body).map_err(|error| Lost::Never(error.to_string()))?;
        let limit = Some(limit).filter(|limit| *limit < Duration::MAX);
        let request = self.agent.configure_request(request).timeout_global(limit).build();
        let mut response = self.agent.run(request).map_err(|error| self.lost(&error))?;
        let status = response.status();
        let text = |name: &str| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
        let (wanted, elsewhere) = (text("retry-after"), text("location"));
        let wanted = wanted
            .and_then(|seconds| seconds.trim().parse().ok())
            .map_or(Duration::ZERO, Duration::from_secs);
        let body = response.body_mut().with_config().limit(self.max_answer).read_to_vec();
        if matches!(status.as_u16(), 429 | 502..=504) {
            let said = body.map(|body| shown(&body)).unwrap_or_default();
            return Err(Lost::Again(format!("status {status}: {said}"), wanted));
        }
        let body = body.map_err(|error| self.lost(&error))?;
        if status.is_redirection() {
            let elsewhere = elsewhere.unwrap_or_else(|| "nowhere".to_owned());
            let advice = "redirects are not followed; write the address itself into `url`";
            return Err(Lost::Never(format!("{} leads to {}; {advice}", self.url, cut(&elsewhere))));
        }
        if !status.is_success() {
            return Err(Lost::Never(format!("{} answered with status {status}: {}", self.url, shown(&body))));
        }
        serde_json::from_slice(&body).map_err(|error| {
            Lost::Never(format!("the answer of {} is not JSON ({error}): {}", self.url, shown(&body)))
        })
    }

    fn lost(&self, error: &ureq::Error) -> Lost {
        let reason = error.to_string();
        match error {
            ureq::Error::Timeout(Timeout::Global | Timeout::PerCall) => Lost::Late,
            ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::Io(_)
            | ureq::Error::Timeout(_)
            | ureq::Error::BodyStalled => Lost::Again(reason, Duration::ZERO),
            // A connection that ends in the middle of an answer is one of these.
            ureq::Error::Protocol(_) => Lost::Again(reason, Duration::ZERO),
            ureq::Error::BodyExceedsLimit(_) => Lost::Never(format!(
                "the answer of {} is longer than {} KiB; raise `max_answer_kib` if it may be",
                self.url,
                self.max_answer >> 10
            )),
            _ => Lost::Never(reason),
        }
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("url", &self.url).finish_non_exhaustive()
    }
}

impl CallError {
    /// As an error of the reward `spec` says the name and the time limit of.
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
        .map_err(|_| wrong("whose value cannot stand in a header"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// Between half and one and a half of a time that doubles.
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
            |spec: &RewardSpec| Transport::new(spec, &context, str::to_owned).unwrap_err().to_string();
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
