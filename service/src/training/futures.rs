//! Outcomes of requests, which clients retrieve later.
//!
//! Invariant: a request ends once. Its outcome stays for [`ServiceLimits::outcome`](super::ServiceLimits::outcome) after it ended,
//! also if it was retrieved: an answer may be lost on its way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::UserId;
use crate::outcome::{FailedRequest, RequestOutcome};

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
    /// Notified when it ends.
    pub(super) changed: Arc<Notify>,
    /// Ends its task; `None` for a request of a model.
    task: Option<AbortHandle>,
}

/// All requests whose outcome can be retrieved.
#[derive(Debug, Default)]
pub(super) struct FutureTable {
    requests: HashMap<String, RetrievableRequest>,
    /// Requests that have not ended, by user.
    open: HashMap<UserId, usize>,
}

impl FutureTable {
    /// Adds a request.
    pub(super) fn begin(&mut self, id: &str, user: UserId, model: Option<&str>, session: Option<&str>) {
        let (model, session) = (model.map(str::to_owned), session.map(str::to_owned));
        let request =
            RetrievableRequest { user, model, session, ended: None, changed: Arc::default(), task: None };
        self.requests.insert(id.to_owned(), request);
        *self.open.entry(user).or_default() += 1;
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

    /// Requests of `user` that have not ended.
    pub(super) fn open_of(&self, user: UserId) -> usize {
        self.open.get(&user).copied().unwrap_or(0)
    }

    /// Requests that have not ended.
    pub(super) fn open(&self) -> usize {
        self.open.values().sum()
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
        request.ended = Some((ended, Instant::now()));
        request.changed.notify_waiters();
        if let Some(open) = self.open.get_mut(&request.user) {
            *open -= 1;
            if *open == 0 {
                self.open.remove(&request.user);
            }
        }
    }

    /// Whether the request can still be retrieved.
    pub(super) fn has(&self, id: &str) -> bool {
        self.requests.contains_key(id)
    }

    /// Forgets what ended longer ago than `keep`.
    pub(super) fn expire(&mut self, keep: Duration) {
        self.requests.retain(|_, request| request.ended.as_ref().is_none_or(|(_, at)| at.elapsed() < keep));
    }
}
