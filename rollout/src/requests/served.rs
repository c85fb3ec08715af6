//! A sampler with a queue of requests in front: it samples groups of a run and completions of clients in the same steps.
//!
//! Invariant: to the worker it is the sampler behind it. Completions of clients never reach the worker, and clients' requests
//! that wait are admitted before new groups of the run, within their share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use trajectory::{GroupId, PolicyVersion};

use super::{ClientQueue, RequestHandle};
use crate::RolloutError;
use crate::activity::LimitChange;
use crate::sampler::{
    AppliedWeights, Completion, EngineCounts, OnUpdate, PartialCompletion, SampleRequest, Sampler,
};

/// Longest wait for a request before the loop looks for newer weights and for a stop.
const LOOK_UP: Duration = Duration::from_millis(20);

/// A sampler that also serves a queue of requests.
#[derive(Debug)]
pub struct ServedSampler {
    inner: Box<dyn Sampler>,
    queue: ClientQueue,
    /// For episodes of agents, which it hands on.
    requests: Option<RequestHandle>,
}

impl ServedSampler {
    /// `inner`, which also serves `queue`.
    #[must_use]
    pub fn new(inner: Box<dyn Sampler>, mut queue: ClientQueue) -> Self {
        // Clients may ask for the version before the first request.
        queue.publish(&*inner);
        Self { inner, queue, requests: None }
    }

    /// The same, which gives `requests`, a handle of its queue, to the episodes of agents.
    #[must_use]
    pub fn for_agents(self, requests: RequestHandle) -> Self {
        Self { requests: Some(requests), ..self }
    }

    /// Serves the queue alone until `stop` is set; requests that have not ended then fail.
    ///
    /// # Errors
    /// The sampler or its weights fail. Clients get the reason.
    pub fn serve(mut self, on_update: OnUpdate, stop: &AtomicBool) -> Result<(), RolloutError> {
        let served = self.serve_until(on_update, stop);
        if let Err(error) = &served {
            self.queue.failed(error.to_string());
        }
        served
    }

    fn serve_until(&mut self, on_update: OnUpdate, stop: &AtomicBool) -> Result<(), RolloutError> {
        while !stop.load(Ordering::Relaxed) {
            if self.inner.newer_weights(Duration::ZERO)?.is_some() {
                self.apply_weights(on_update)?;
            }
            if self.inner.is_idle() && self.queue.is_idle() {
                self.queue.wait(LOOK_UP);
                // Clients may be gone, and metrics change.
                self.queue.admit(&mut *self.inner)?;
            } else {
                self.poll(LOOK_UP)?;
            }
        }
        Ok(())
    }
}

impl Sampler for ServedSampler {
    fn version(&self) -> PolicyVersion {
        self.inner.version()
    }

    fn has_capacity(&self, completions: usize) -> bool {
        !self.queue.wants_capacity() && self.inner.has_capacity(completions)
    }

    fn has_capacity_for(&self, request: &SampleRequest) -> bool {
        // A later turn of an open episode: it holds pages and is not made to wait for clients.
        self.inner.has_capacity_for(request)
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn is_idle(&self) -> bool {
        self.inner.is_idle() && self.queue.is_idle()
    }

    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError> {
        self.inner.submit(request)
    }

    fn poll(&mut self, wait: Duration) -> Result<Vec<Completion>, RolloutError> {
        self.queue.admit(&mut *self.inner)?;
        let completions = self.inner.poll(wait)?;
        Ok(self.queue.deliver(&mut *self.inner, completions))
    }

    fn partials(&mut self) -> Vec<PartialCompletion> {
        Vec::new()
    }

    fn requests(&self) -> Option<RequestHandle> {
        self.requests.clone()
    }

    fn cache_usage(&self) -> Option<f64> {
        self.inner.cache_usage()
    }

    fn abort(&mut self, group: GroupId) -> Result<usize, RolloutError> {
        self.inner.abort(group)
    }

    fn end_episode(&mut self, group: GroupId, index: u32) {
        self.inner.end_episode(group, index);
    }

    /// While the run has nothing in flight, the wait serves requests.
    fn newer_weights(&mut self, wait: Duration) -> Result<Option<PolicyVersion>, RolloutError> {
        if wait.is_zero() || self.inner.is_asleep() || self.is_idle() {
            return self.inner.newer_weights(wait);
        }
        // No group of the run is in flight when its worker waits, so no completion of it is lost.
        self.poll(wait)?;
        self.inner.newer_weights(Duration::ZERO)
    }

    fn apply_weights(&mut self, on_update: OnUpdate) -> Result<Option<AppliedWeights>, RolloutError> {
        let applied = self.inner.apply_weights(on_update)?;
        if let Some(applied) = applied {
            self.queue.updated(applied);
        }
        Ok(applied)
    }

    fn sleep(&mut self) -> Result<u64, RolloutError> {
        self.inner.sleep()
    }

    fn is_asleep(&self) -> bool {
        self.inner.is_asleep()
    }

    fn counts(&self) -> EngineCounts {
        self.inner.counts()
    }

    fn running_limit(&self) -> Option<usize> {
        self.inner.running_limit()
    }

    fn take_limit_changes(&mut self) -> Vec<LimitChange> {
        self.inner.take_limit_changes()
    }
}
