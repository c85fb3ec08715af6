//! Repeated requests get the answer that was made for the first one, instead of a second completion.
//!
//! The clients of OpenAI and Anthropic repeat a POST whose answer was lost. A request with `X-Stainless-Retry-Count` above 0
//! or an `Idempotency-Key` is such a repetition if the key of its client, its path and its body (or its idempotency key) are
//! those of an earlier one: it gets the finished answer, or waits for the one in flight. Requests that are not repetitions
//! never share an answer, however equal they are: each wants a sample of its own.
//!
//! Invariant: what is kept is bounded in number, bytes and age.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use tokio::sync::watch;

use crate::auth::KeyDigest;

/// Most finished answers that are kept.
const MAX_ANSWERS: usize = 64;
/// Most bytes of finished answers.
const MAX_BYTES: usize = 32 << 20;
/// How long a finished answer is kept.
const MAX_AGE: Duration = Duration::from_secs(600);

/// What makes two requests the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RequestDigest([u8; 32]);

/// A finished answer, as it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FinishedAnswer {
    pub(crate) content_type: &'static str,
    pub(crate) body: Arc<str>,
}

/// What a repeated request is.
#[derive(Debug)]
pub(crate) enum Repetition {
    /// Of none that is known: it is answered like a first one.
    None,
    /// Of a finished one.
    Finished(FinishedAnswer),
    /// Of one in flight.
    InFlight(InFlightAnswer),
}

/// An answer that another connection is waiting for.
#[derive(Debug)]
pub(crate) struct InFlightAnswer(watch::Receiver<Option<FinishedAnswer>>);

impl InFlightAnswer {
    /// The answer; `None` if it ended without one, because its client left or it failed.
    pub(crate) async fn wait(mut self) -> Option<FinishedAnswer> {
        self.0.wait_for(Option::is_some).await.ok().and_then(|answer| answer.clone())
    }
}

/// The answers that may be asked for again.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplayCache(Arc<Mutex<ReplayState>>);

#[derive(Debug, Default)]
struct ReplayState {
    /// One sender per answer in flight; of equal requests, that of the newest.
    in_flight: HashMap<RequestDigest, (u64, watch::Sender<Option<FinishedAnswer>>)>,
    /// Oldest first.
    finished: VecDeque<(RequestDigest, Instant, FinishedAnswer)>,
    bytes: usize,
    begun: u64,
}

/// An answer that is being made. Dropping it ends it without an answer.
#[derive(Debug)]
pub(crate) struct AnswerInProgress {
    cache: ReplayCache,
    digest: RequestDigest,
    number: u64,
}

impl RequestDigest {
    pub(crate) fn of(key: KeyDigest, path: &str, headers: &HeaderMap, body: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{key:?} {path}\n").as_bytes());
        match headers.get("idempotency-key") {
            Some(key) => hasher.update(b"key ").update(key.as_bytes()),
            None => hasher.update(b"body ").update(body),
        };
        Self(*hasher.finalize().as_bytes())
    }
}

/// Whether a client says that it repeats a request.
pub(crate) fn is_repeated(headers: &HeaderMap) -> bool {
    let count = headers.get("x-stainless-retry-count").and_then(|value| value.to_str().ok());
    count.and_then(|count| count.parse::<u64>().ok()).is_some_and(|count| count > 0)
        || headers.contains_key("idempotency-key")
}

impl ReplayCache {
    /// What a repeated request is.
    pub(crate) fn find(&self, digest: RequestDigest, now: Instant) -> Repetition {
        let mut state = self.lock();
        state.expire(now);
        let finished = state.finished.iter().rev().find(|(of, ..)| *of == digest);
        if let Some((_, _, answer)) = finished {
            return Repetition::Finished(answer.clone());
        }
        match state.in_flight.get(&digest) {
            Some((_, sender)) => Repetition::InFlight(InFlightAnswer(sender.subscribe())),
            None => Repetition::None,
        }
    }

    /// An answer begins.
    pub(crate) fn begin(&self, digest: RequestDigest) -> AnswerInProgress {
        let mut state = self.lock();
        state.begun += 1;
        let number = state.begun;
        state.in_flight.insert(digest, (number, watch::Sender::new(None)));
        AnswerInProgress { cache: self.clone(), digest, number }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ReplayState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReplayState {
    fn expire(&mut self, now: Instant) {
        while let Some((_, ended, _)) = self.finished.front()
            && (now.duration_since(*ended) > MAX_AGE
                || self.finished.len() > MAX_ANSWERS
                || self.bytes > MAX_BYTES)
            && let Some((_, _, answer)) = self.finished.pop_front()
        {
            self.bytes -= answer.body.len();
        }
    }
}

impl AnswerInProgress {
    /// The answer is whole: it can be asked for again.
    pub(crate) fn finish(self, answer: FinishedAnswer, now: Instant) {
        let mut state = self.cache.lock();
        if let Some((number, sender)) = state.in_flight.get(&self.digest)
            && *number == self.number
        {
            sender.send_replace(Some(answer.clone()));
        }
        state.bytes += answer.body.len();
        state.finished.push_back((self.digest, now, answer));
        state.expire(now);
    }
}

impl Drop for AnswerInProgress {
    fn drop(&mut self) {
        let mut state = self.cache.lock();
        if state.in_flight.get(&self.digest).is_some_and(|(number, _)| *number == self.number) {
            state.in_flight.remove(&self.digest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u8) -> RequestDigest {
        RequestDigest([n; 32])
    }

    fn answer(body: &str) -> FinishedAnswer {
        FinishedAnswer { content_type: "application/json", body: body.into() }
    }

    #[tokio::test]
    async fn a_repetition_gets_the_answer_or_waits_for_it() {
        let (cache, now) = (ReplayCache::default(), Instant::now());
        assert!(matches!(cache.find(digest(1), now), Repetition::None));
        let progress = cache.begin(digest(1));
        let Repetition::InFlight(waiting) = cache.find(digest(1), now) else { panic!("it is in flight") };
        progress.finish(answer("a"), now);
        assert_eq!(waiting.wait().await, Some(answer("a")));
        let Repetition::Finished(found) = cache.find(digest(1), now) else { panic!("it is kept") };
        assert_eq!(found, answer("a"));
        let later = now + MAX_AGE + Duration::from_secs(1);
        assert!(matches!(cache.find(digest(1), later), Repetition::None));
        assert_eq!(cache.lock().bytes, 0);
    }

    #[tokio::test]
    async fn an_answer_whose_client_left_is_made_again() {
        let (cache, now) = (ReplayCache::default(), Instant::now());
        let progress = cache.begin(digest(1));
        let Repetition::InFlight(waiting) = cache.find(digest(1), now) else { panic!("it is in flight") };
        drop(progress);
        assert_eq!(waiting.wait().await, None);
        assert!(matches!(cache.find(digest(1), now), Repetition::None));
        assert!(cache.lock().in_flight.is_empty());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let (cache, now) = (ReplayCache::default(), Instant::now());
        for n in 0..=MAX_ANSWERS as u8 {
            cache.begin(digest(n)).finish(answer("x"), now);
        }
        assert!(matches!(cache.find(digest(0), now), Repetition::None));
        let kept = cache.lock().finished.len();
        assert_eq!((kept, cache.lock().bytes), (MAX_ANSWERS, MAX_ANSWERS));
        let long = "y".repeat(MAX_BYTES / 2 + 1);
        cache.begin(digest(201)).finish(answer(&long), now);
        cache.begin(digest(202)).finish(answer(&long), now);
        assert!(matches!(cache.find(digest(201), now), Repetition::None));
        assert!(matches!(cache.find(digest(202), now), Repetition::Finished(_)));
    }

    #[test]
    fn only_repetitions_are_looked_up() {
        let headers = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            headers
        };
        assert!(!is_repeated(&HeaderMap::new()) && !is_repeated(&headers("x-stainless-retry-count", "0")));
        assert!(is_repeated(&headers("x-stainless-retry-count", "1")));
        let keyed = headers("idempotency-key", "k");
        assert!(is_repeated(&keyed));
        let of = |headers: &HeaderMap, body: &[u8]| RequestDigest::of(KeyDigest::of(""), "/p", headers, body);
        assert_eq!(of(&keyed, b"a"), of(&keyed, b"b"));
        assert_ne!(of(&HeaderMap::new(), b"a"), of(&HeaderMap::new(), b"b"));
        let other = RequestDigest::of(KeyDigest::of("other"), "/p", &HeaderMap::new(), b"a");
        assert_ne!(of(&HeaderMap::new(), b"a"), other, "answers are not shared between keys");
    }
}
