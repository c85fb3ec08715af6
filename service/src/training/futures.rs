//! Outcomes of requests, which clients retrieve later.
//!
//! Invariant: a request ends once. Its outcome stays for [`ServiceLimits::outcome`] after it ended, also if it was retrieved: an
//! answer may be lost on its way. Above [`ServiceLimits::outcome_bytes`] of a user outcomes that were retrieved
//! [`ServiceLimits::retrieved`] ago or longer make place for new requests, and without enough of them no request of the user begins.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::{ServiceLimits, UserId};
use crate::outcome::{FailedRequest, Refusal, RequestOutcome};

/// What a request ended in.
pub(super) type Ended = Result<Arc<RequestOutcome>, FailedRequest>;

/// A request.
#[derive(Debug)]
pub(super) struct RetrievableRequest {
    pub(super) user: UserId,
    /// The model that it is for.
    pub(super) model: Option<String>,
    /// The session that a sampling request belongs to.
    session: Option<String>,
    pub(super) ended: Option<(Ended, Instant)>,
    /// When its client was last answered with what it ended in.
    retrieved: Option<Instant>,
    /// Notified when it ends.
    pub(super) changed: Arc<Notify>,
    /// Ends its task; `None` for a request of a model.
    task: Option<AbortHandle>,
}

/// All requests whose outcome can be retrieved.
#[derive(Debug, Default)]
pub(super) struct FutureTable {
    requests: HashMap<String, RetrievableRequest>,
    /// Of users with requests.
    used: HashMap<UserId, UsedFutures>,
}

/// What the requests of a user take.
#[derive(Clone, Copy, Debug, Default)]
struct UsedFutures {
    requests: usize,
    /// Requests that have not ended.
    open: usize,
    /// Of all outcomes.
    bytes: usize,
    /// Of those that were retrieved.
    retrieved_bytes: usize,
}

/// What a request takes beside the numbers of its outcome, bytes.
const REQUEST_BYTES: usize = 512;

impl FutureTable {
    /// Adds a request.
    pub(super) fn begin(&mut self, id: &str, user: UserId, model: Option<&str>, session: Option<&str>) {
        let (model, session) = (model.map(str::to_owned), session.map(str::to_owned));
        let request = RetrievableRequest {
            user,
            model,
            session,
            ended: None,
            retrieved: None,
            changed: Arc::default(),
            task: None,
        };
        self.requests.insert(id.to_owned(), request);
        let used = self.used.entry(user).or_default();
        used.requests += 1;
        used.open += 1;
    }

    /// Whether a request of `user` may begin. Outcomes that were retrieved make place for it, the longest ago first.
    ///
    /// # Errors
    /// 429 if too many requests have not ended, or outcomes that were not retrieved take too much memory.
    pub(super) fn admit(&mut self, user: UserId, limits: &ServiceLimits) -> Result<(), Refusal> {
        let used = self.used.get(&user).copied().unwrap_or_default();
        if used.open >= limits.open {
            let open = used.open;
            return Err(Refusal::new(
                429,
                format!("{open} of your requests are in progress, which is the limit; wait for some"),
            ));
        }
        let most = limits.outcome_bytes;
        if used.bytes > most && used.bytes - used.retrieved_bytes <= most {
            self.forget_retrieved(user, most / 2, limits.retrieved);
        }
        match self.used.get(&user).map_or(0, |used| used.bytes) {
            bytes if bytes > most => Err(Refusal::new(
                429,
                format!("outcomes of {bytes} bytes wait for you, and the limit is {most}; retrieve some"),
            )),
            _ => Ok(()),
        }
    }

    /// Forgets outcomes of `user` that were retrieved `age` ago or longer, the longest ago first, until all others take at most `bytes`.
    fn forget_retrieved(&mut self, user: UserId, bytes: usize, age: Duration) {
        let mut retrieved: Vec<(Instant, String)> = self
            .requests
            .iter()
            .filter(|(_, request)| request.user == user)
            .filter_map(|(id, request)| {
                Some((request.retrieved.filter(|at| at.elapsed() >= age)?, id.clone()))
            })
            .collect();
        retrieved.sort_unstable();
        for (_, id) in retrieved {
            if self.used.get(&user).is_none_or(|used| used.bytes <= bytes) {
                break;
            }
            self.forget(&id);
        }
    }

    /// Notes that the outcome of a request was sent to its client.
    pub(super) fn retrieved(&mut self, id: &str) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let Some((ended, _)) = &request.ended else { return };
        let bytes = bytes_of(ended);
        if request.retrieved.replace(Instant::now()).is_none()
            && let Some(used) = self.used.get_mut(&request.user)
        {
            used.retrieved_bytes += bytes;
        }
    }

    /// Sets the task that carries a request out.
    pub(super) fn carried_out_by(&mut self, id: &str, task: AbortHandle) {
        if let Some(request) = self.requests.get_mut(id) {
            request.task = Some(task);
        }
    }

    /// Ends a request with `failure` and its task. False if a task of its own does not carry it out.
    pub(super) fn cancel(&mut self, id: &str, failure: FailedRequest) -> bool {
        let Some(task) = self.requests.get_mut(id).and_then(|request| request.task.take()) else {
            return false;
        };
        task.abort();
        self.end(id, Err(failure));
        true
    }

    /// Ends the sampling requests of a session with `failure`, and their tasks.
    pub(super) fn cancel_session(&mut self, session: &str, failure: &FailedRequest) {
        let of_session =
            self.requests.iter().filter(|(_, request)| request.session.as_deref() == Some(session));
        let ids: Vec<String> = of_session.map(|(id, _)| id.clone()).collect();
        for id in ids {
            self.cancel(&id, failure.clone());
        }
    }

    /// Requests that have not ended.
    pub(super) fn open(&self) -> usize {
        self.used.values().map(|used| used.open).sum()
    }

    /// Memory of the outcomes that are kept, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.used.values().map(|used| used.bytes).sum()
    }

    /// The request, if it is one of `user`.
    pub(super) fn get(&self, id: &str, user: UserId) -> Option<&RetrievableRequest> {
        self.requests.get(id).filter(|request| request.user == user)
    }

    /// Ends a request, unless it has ended.
    pub(super) fn end(&mut self, id: &str, ended: Ended) {
        let Some(request) = self.requests.get_mut(id).filter(|request| request.ended.is_none()) else {
            return;
        };
        let bytes = bytes_of(&ended);
        request.ended = Some((ended, Instant::now()));
        request.changed.notify_waiters();
        if let Some(used) = self.used.get_mut(&request.user) {
            used.open -= 1;
            used.bytes += bytes;
        }
    }

    /// Whether the request can still be retrieved.
    pub(super) fn has(&self, id: &str) -> bool {
        self.requests.contains_key(id)
    }

    /// Whether the request has not ended.
    pub(super) fn is_open(&self, id: &str) -> bool {
        self.requests.get(id).is_some_and(|request| request.ended.is_none())
    }

    /// Forgets what ended longer ago than `keep`.
    pub(super) fn expire(&mut self, keep: Duration) {
        let is_over =
            |request: &RetrievableRequest| request.ended.as_ref().is_some_and(|(_, at)| at.elapsed() >= keep);
        let over: Vec<String> =
            self.requests.iter().filter(|(_, request)| is_over(request)).map(|(id, _)| id.clone()).collect();
        over.iter().for_each(|id| self.forget(id));
    }

    /// Forgets a request that has ended.
    fn forget(&mut self, id: &str) {
        let Some(RetrievableRequest { user, ended: Some((ended, _)), retrieved, .. }) =
            self.requests.remove(id)
        else {
            return;
        };
        if let Some(used) = self.used.get_mut(&user) {
            let bytes = bytes_of(&ended);
            used.requests -= 1;
            used.bytes -= bytes;
            if retrieved.is_some() {
                used.retrieved_bytes -= bytes;
            }
            if used.requests == 0 {
                self.used.remove(&user);
            }
        }
    }
}

/// Memory of a request with what it ended in, bytes.
fn bytes_of(ended: &Ended) -> usize {
    REQUEST_BYTES
        + match ended {
            Ok(outcome) => outcome.bytes(),
            Err(failure) => failure.message.len(),
        }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::data::PassOutput;

    const ADA: UserId = UserId([1; 16]);
    const BOB: UserId = UserId([2; 16]);

    /// The outcome of a pass over `tokens` tokens.
    fn passed(tokens: usize) -> Ended {
        let outputs = vec![BTreeMap::from([("logprobs".to_owned(), vec![0.0; tokens])])];
        Ok(Arc::new(RequestOutcome::Passed(PassOutput { outputs, metrics: BTreeMap::new() })))
    }

    #[test]
    fn outcomes_that_were_retrieved_make_place() {
        let limits =
            ServiceLimits { outcome_bytes: 11_000, retrieved: Duration::ZERO, ..ServiceLimits::default() };
        let mut table = FutureTable::default();
        for id in ["a", "b", "c"] {
            table.admit(ADA, &limits).unwrap();
            table.begin(id, ADA, None, None);
            table.end(id, passed(1000));
        }
        let refusal = table.admit(ADA, &limits).unwrap_err();
        assert!(refusal.status == 429 && refusal.message.contains("retrieve some"), "{refusal}");
        table.admit(BOB, &limits).unwrap();
        assert!(["a", "b", "c"].iter().all(|id| table.has(id)));
        table.retrieved("b");
        // The answer may be on its way.
        let later = ServiceLimits { retrieved: Duration::from_secs(60), ..limits };
        assert_eq!(table.admit(ADA, &later).unwrap_err().status, 429);
        table.admit(ADA, &limits).unwrap();
        assert_eq!(["a", "b", "c"].map(|id| table.has(id)), [true, false, true]);
        table.expire(Duration::ZERO);
        assert_eq!((table.bytes(), table.open(), table.used.len()), (0, 0, 0));
    }

    #[test]
    fn requests_in_progress_are_bounded_by_user() {
        let limits = ServiceLimits { open: 1, ..ServiceLimits::default() };
        let mut table = FutureTable::default();
        table.begin("a", ADA, None, None);
        assert_eq!(table.admit(ADA, &limits).unwrap_err().status, 429);
        table.admit(BOB, &limits).unwrap();
        table.expire(Duration::ZERO);
        assert!(table.has("a"));
        table.end("a", Err(FailedRequest::user("x")));
        table.admit(ADA, &limits).unwrap();
    }
}
