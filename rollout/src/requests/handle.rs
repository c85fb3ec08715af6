//! The side of the clients: submit a request, await what is sampled.
//!
//! Invariant: submitting never waits; a full queue is an error.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, TrySendError};
use trajectory::GroupId;

use super::queue::SubmittedRequest;
use super::{
    ClientRequestError, FIRST_GROUP, MailboxContent, QueueState, QueueStatus, RequestBounds, RequestEvent,
    RequestMailbox,
};
use crate::sampler::SampleRequest;

/// Submits requests; clones submit to the same queue.
#[derive(Clone, Debug)]
pub struct RequestHandle {
    sender: Sender<SubmittedRequest>,
    shared: Arc<QueueState>,
}

impl RequestHandle {
    pub(super) fn new(sender: Sender<SubmittedRequest>, shared: Arc<QueueState>) -> Self {
        Self { sender, shared }
    }

    /// Submits `request`, whose group is replaced by one that no other request has.
    ///
    /// # Errors
    /// [`ClientRequestError::Busy`] if as many requests as allowed have not ended, [`ClientRequestError::Closed`] without a sampler.
    pub fn submit(&self, mut request: SampleRequest) -> Result<PendingRequest, ClientRequestError> {
        let closed = || ClientRequestError::Closed { reason: "the sampler has stopped".to_owned() };
        if self.shared.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        let mailbox = Arc::new(RequestMailbox::new(request.sequences()));
        let open = self.shared.open.fetch_add(1, Ordering::AcqRel);
        let place = OpenPlace { shared: Arc::clone(&self.shared), mailbox: Arc::clone(&mailbox) };
        if open >= self.shared.bounds.max_open {
            return Err(ClientRequestError::Busy { open });
        }
        let group = GroupId(FIRST_GROUP.0 + self.shared.submitted.fetch_add(1, Ordering::Relaxed));
        request.group = group;
        let submission = SubmittedRequest { request, mailbox: Arc::clone(&mailbox), place };
        match self.sender.try_send(submission) {
            Ok(()) => Ok(PendingRequest { group, mailbox, shared: Arc::clone(&self.shared), ended: false }),
            Err(TrySendError::Full(_)) => Err(ClientRequestError::Busy { open }),
            Err(TrySendError::Disconnected(_)) => Err(closed()),
        }
    }

    /// What queue and sampler do at the moment.
    #[must_use]
    pub fn status(&self) -> QueueStatus {
        *self.shared.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that have not ended.
    #[must_use]
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::Acquire)
    }

    /// The bounds of the queue.
    #[must_use]
    pub fn bounds(&self) -> RequestBounds {
        self.shared.bounds
    }

    /// Whether no sampler serves the queue any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }
}

/// Counts a request as open until it is dropped; one that has not ended then fails.
#[derive(Debug)]
pub(super) struct OpenPlace {
    shared: Arc<QueueState>,
    mailbox: Arc<RequestMailbox>,
}

impl Drop for OpenPlace {
    fn drop(&mut self) {
        self.shared.open.fetch_sub(1, Ordering::AcqRel);
        self.mailbox.fail(ClientRequestError::Closed { reason: "the sampler has stopped".to_owned() });
    }
}

/// A request that was submitted. Dropping it aborts what has not ended.
#[derive(Debug)]
pub struct PendingRequest {
    group: GroupId,
    mailbox: Arc<RequestMailbox>,
    shared: Arc<QueueState>,
    /// Whether nothing follows.
    ended: bool,
}

impl PendingRequest {
    /// The next event; `None` after the last completion or a failure. Cancel safe.
    pub async fn next(&mut self) -> Option<RequestEvent> {
        while !self.ended {
            let arrived = self.mailbox.arrived.notified();
            if let Some(event) = self.mailbox.take() {
                self.ended = match &event {
                    RequestEvent::Failed(_) => true,
                    RequestEvent::Completed(_) => self.mailbox.lock().is_finished(),
                    RequestEvent::Partial(_) => false,
                };
                return Some(event);
            }
            arrived.await;
        }
        None
    }

    /// The group of its completions.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// How long it waited for the sampler; `None` while it waits.
    #[must_use]
    pub fn queued(&self) -> Option<Duration> {
        self.mailbox.lock().queued
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        if !self.ended && !self.mailbox.lock().is_over() {
            self.shared.cancelled.lock().unwrap_or_else(PoisonError::into_inner).push(self.group);
        }
    }
}

impl RequestMailbox {
    fn new(sequences: usize) -> Self {
        let content = MailboxContent {
            partials: Vec::new(),
            completions: Vec::new(),
            failed: None,
            left: sequences,
            submitted: Instant::now(),
            queued: None,
        };
        Self { content: std::sync::Mutex::new(content), arrived: tokio::sync::Notify::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, MailboxContent> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The oldest event; the tokens of a completion before its end.
    fn take(&self) -> Option<RequestEvent> {
        let mut content = self.lock();
        if !content.partials.is_empty() {
            return Some(RequestEvent::Partial(content.partials.remove(0)));
        }
        if !content.completions.is_empty() {
            return Some(RequestEvent::Completed(Box::new(content.completions.remove(0))));
        }
        content.failed.clone().map(RequestEvent::Failed)
    }
}

impl MailboxContent {
    /// Whether every completion has ended, or none follows.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0 || self.failed.is_some()
    }

    /// Whether all of it was taken.
    fn is_finished(&self) -> bool {
        self.left == 0 && self.completions.is_empty() && self.partials.is_empty()
    }
}
