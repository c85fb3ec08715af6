//! The side of the sampler: admit requests between two decode steps, deliver what was sampled.
//!
//! Invariant: requests are admitted in the order in which they came, so that a long one is never overtaken for ever.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crossbeam::channel::Receiver;
use trajectory::GroupId;

use super::handle::OpenPlace;
use super::{ClientRequestError, QueueState, QueueStatus, RequestMailbox};
use crate::RolloutError;
use crate::sampler::{AppliedWeights, Completion, SampleRequest, Sampler};

/// A request on its way to the sampler.
#[derive(Debug)]
pub(super) struct SubmittedRequest {
    pub(super) request: SampleRequest,
    pub(super) mailbox: Arc<RequestMailbox>,
    /// Counts it as open until it is dropped.
    pub(super) place: OpenPlace,
}

/// A request that the sampler has.
#[derive(Debug)]
struct RunningRequest {
    mailbox: Arc<RequestMailbox>,
    /// Sequences that have not ended.
    left: usize,
    _place: OpenPlace,
}

/// Takes requests to a sampler.
#[derive(Debug)]
pub struct ClientQueue {
    receiver: Receiver<SubmittedRequest>,
    shared: Arc<QueueState>,
    waiting: VecDeque<SubmittedRequest>,
    running: HashMap<GroupId, RunningRequest>,
    /// Sequences of `running` that have not ended.
    sequences: usize,
    status: QueueStatus,
    /// What ended the sampler, for clients.
    reason: String,
}

impl ClientQueue {
    pub(super) fn new(receiver: Receiver<SubmittedRequest>, shared: Arc<QueueState>) -> Self {
        Self {
            receiver,
            shared,
            waiting: VecDeque::new(),
            running: HashMap::new(),
            sequences: 0,
            status: QueueStatus::default(),
            reason: "the sampler has stopped".to_owned(),
        }
    }

    /// Whether no request has come that has not ended.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.receiver.is_empty()
    }

    /// Whether a request waits that should be admitted before anything else.
    #[must_use]
    pub fn wants_capacity(&self) -> bool {
        let first = self.waiting.front().map(|submission| submission.request.sequences());
        first.is_some_and(|sequences| self.may_run(sequences))
    }

    /// Waits up to `wait` for a request.
    pub(super) fn wait(&mut self, wait: Duration) {
        if let Ok(submission) = self.receiver.recv_timeout(wait) {
            self.waiting.push_back(submission);
        }
    }

    /// Aborts requests whose client is gone and submits waiting ones as far as `sampler` has capacity.
    ///
    /// # Errors
    /// A sampler that failed. A request that it can never serve fails by itself.
    pub fn admit(&mut self, sampler: &mut dyn Sampler) -> Result<(), RolloutError> {
        // Every request in this list was submitted before it was read.
        let cancelled =
            std::mem::take(&mut *self.shared.cancelled.lock().unwrap_or_else(PoisonError::into_inner));
        self.waiting.extend(self.receiver.try_iter());
        for group in cancelled {
            if let Some(request) = self.running.remove(&group) {
                self.sequences -= request.left;
                sampler.abort(group)?;
            }
            self.waiting.retain(|submission| submission.request.group != group);
        }
        while let Some(next) = self.waiting.front() {
            if !self.may_run(next.request.sequences()) || !sampler.has_capacity_for(&next.request) {
                break;
            }
            let Some(SubmittedRequest { request, mailbox, place }) = self.waiting.pop_front() else { break };
            let (group, left) = (request.group, request.sequences());
            match sampler.submit(request) {
                Ok(()) => {
                    mailbox.admitted();
                    self.sequences += left;
                    self.running.insert(group, RunningRequest { mailbox, left, _place: place });
                }
                Err(error) if is_of_the_request(&error) => {
                    mailbox.fail(ClientRequestError::Refused { reason: error.to_string() });
                    drop(place);
                }
                Err(error) => {
                    mailbox.fail(ClientRequestError::Closed { reason: error.to_string() });
                    drop(place);
                    return Err(error);
                }
            }
        }
        self.publish(sampler);
        Ok(())
    }

    /// Delivers what `sampler` has sampled. Returns the completions that are not of this queue.
    pub fn deliver(&mut self, sampler: &mut dyn Sampler, completions: Vec<Completion>) -> Vec<Completion> {
        for partial in sampler.partials() {
            if let Some(request) = self.running.get(&partial.group) {
                request.mailbox.push_partial(partial);
            }
        }
        let mut others = Vec::new();
        for completion in completions {
            let group = completion.group;
            let Some(request) = self.running.get_mut(&group) else {
                // A request that was aborted in this step is no group of a run.
                if group < super::FIRST_GROUP {
                    others.push(completion);
                }
                continue;
            };
            request.left -= 1;
            self.sequences -= 1;
            let ended = if request.left == 0 { self.running.remove(&group) } else { None };
            match ended {
                Some(ended) => ended.mailbox.push(completion),
                None => {
                    if let Some(request) = self.running.get(&group) {
                        request.mailbox.push(completion);
                    }
                }
            }
        }
        self.publish(sampler);
        others
    }

    /// Counts an update of the weights.
    pub(super) fn updated(&mut self, applied: AppliedWeights) {
        self.status.weight_updates += 1;
        self.status.weight_updates_s += applied.stalled.as_secs_f64();
    }

    /// What clients read if the queue is dropped with requests in it.
    pub(super) fn failed(&mut self, reason: String) {
        self.reason = reason;
    }

    /// Whether `sequences` more are within the share of requests; one request alone always is.
    fn may_run(&self, sequences: usize) -> bool {
        self.running.is_empty() || self.sequences + sequences <= self.shared.bounds.max_running
    }

    /// Shows clients what queue and sampler do.
    pub(super) fn publish(&mut self, sampler: &dyn Sampler) {
        self.status.version = sampler.version();
        self.status.running = self.running.len();
        self.status.waiting = self.waiting.len();
        self.status.counts = sampler.counts();
        self.status.cache_usage = sampler.cache_usage().unwrap_or(0.0);
        *self.shared.status.lock().unwrap_or_else(PoisonError::into_inner) = self.status;
    }
}

impl Drop for ClientQueue {
    /// Fails everything that has not ended.
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        let error = ClientRequestError::Closed { reason: std::mem::take(&mut self.reason) };
        for (_, request) in self.running.drain() {
            request.mailbox.fail(error.clone());
        }
        self.waiting.extend(self.receiver.try_iter());
        for submission in self.waiting.drain(..) {
            submission.mailbox.fail(error.clone());
        }
    }
}

/// Whether the request is at fault, so that the sampler can serve others.
fn is_of_the_request(error: &RolloutError) -> bool {
    matches!(
        error,
        RolloutError::EmptyPrompt { .. }
            | RolloutError::PromptTooLong { .. }
            | RolloutError::CacheTooSmall { .. }
            | RolloutError::NoAlternatives
            | RolloutError::UnknownAdapter { .. }
    )
}

impl RequestMailbox {
    fn admitted(&self) {
        let mut content = self.lock();
        content.queued = Some(content.submitted.elapsed());
    }

    fn push_partial(&self, partial: crate::sampler::PartialCompletion) {
        let mut content = self.lock();
        match content.partials.iter_mut().find(|waiting| waiting.index == partial.index) {
            None => content.partials.push(partial),
            Some(waiting) => {
                waiting.token_ids.extend(partial.token_ids);
                waiting.logprobs.extend(partial.logprobs);
                waiting.alternatives.extend(partial.alternatives);
            }
        }
        drop(content);
        self.arrived.notify_one();
    }

    fn push(&self, completion: Completion) {
        let mut content = self.lock();
        content.left -= 1;
        content.completions.push(completion);
        drop(content);
        self.arrived.notify_one();
    }

    /// Ends it without what is missing; nothing if it has ended.
    pub(super) fn fail(&self, error: ClientRequestError) {
        let mut content = self.lock();
        if !content.is_over() {
            content.failed = Some(error);
        }
        drop(content);
        self.arrived.notify_one();
    }
}
