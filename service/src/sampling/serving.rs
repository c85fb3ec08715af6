//! The thread of an engine: requests in turn of their users to the engine, completions to their clients.
//!
//! Invariant: at most one request that was taken from the queue waits for capacity, so that the turns of users are those of the
//! engine. When the thread ends, whatever is in progress fails.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rollout::{Completion, EngineCounts, LocalSampler, OnUpdate, RolloutError, SampleRequest, Sampler};
use tokio::sync::oneshot;
use trajectory::{GroupId, PolicyVersion};

use super::checked::{CheckedRequest, server_failure, user_failure};
use super::waiting::{Abandonable, WaitingRequests};
use crate::outcome::FailedRequest;

/// Longest wait for a request before the thread looks for changes of adapters.
const LOOK_UP: Duration = Duration::from_millis(20);

/// What a request reads whose adapter is gone.
const FREED: &str = "the weights of this sampler were freed while the request waited; publish them again";

/// Completions of one prompt that are sampled together: all of a request, or some if it wants many.
#[derive(Debug)]
pub(super) struct SamplingPart {
    pub(super) request: Arc<CheckedRequest>,
    /// As the engine knows it.
    pub(super) adapter: Option<usize>,
    /// Index in the request of the first.
    pub(super) first_index: usize,
    pub(super) samples: usize,
    pub(super) reply: oneshot::Sender<Result<Vec<Completion>, FailedRequest>>,
}

impl Abandonable for SamplingPart {
    fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }
}

impl SamplingPart {
    fn to_request(&self, group: GroupId) -> SampleRequest {
        let CheckedRequest { prompt, sampling, max_completion_length, options, .. } = &*self.request;
        let mut options = options.clone();
        options.adapter = self.adapter;
        SampleRequest {
            group,
            prompt: prompt.to_vec(),
            first_index: self.first_index as u32,
            turn: 0,
            samples: self.samples,
            sampling: *sampling,
            max_completion_length: *max_completion_length,
            baseline: false,
            keep_cache: false,
            options,
        }
    }
}

/// What the engine does at the moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineActivity {
    /// Sequences in flight.
    pub(super) running: usize,
    pub(super) version: PolicyVersion,
    pub(super) counts: EngineCounts,
    /// Part of the KV cache that is in use, from 0 to 1.
    pub(super) cache_usage: f64,
}

/// An engine with its clients.
#[derive(Debug)]
pub(super) struct EngineThread {
    sampler: LocalSampler,
    waiting: Arc<WaitingRequests<SamplingPart>>,
    activity: Arc<Mutex<EngineActivity>>,
    /// The one whose turn it is.
    next: Option<(SampleRequest, SamplingPart)>,
    running: HashMap<GroupId, RunningPart>,
    /// Parts taken so far; numbers the next one.
    taken: u64,
}

#[derive(Debug)]
struct RunningPart {
    left: usize,
    completions: Vec<Completion>,
    reply: oneshot::Sender<Result<Vec<Completion>, FailedRequest>>,
}

impl EngineThread {
    pub(super) fn new(
        sampler: LocalSampler,
        waiting: Arc<WaitingRequests<SamplingPart>>,
        activity: Arc<Mutex<EngineActivity>>,
    ) -> Self {
        Self { sampler, waiting, activity, next: None, running: HashMap::new(), taken: 0 }
    }

    /// Serves until the queue is closed. An engine that fails closes it.
    pub(super) fn serve(mut self) {
        if let Err(error) = self.serve_until_closed() {
            self.waiting.close(&error.to_string());
        }
    }

    fn serve_until_closed(&mut self) -> Result<(), RolloutError> {
        while self.waiting.closed().is_none() {
            self.abort_abandoned()?;
            self.admit()?;
            if self.sampler.is_idle() {
                self.waiting.wait(LOOK_UP);
                if self.sampler.newer_weights(Duration::ZERO)?.is_some() {
                    self.sampler.apply_weights(OnUpdate::Keep)?;
                }
            } else {
                let completions = self.sampler.poll(Duration::ZERO)?;
                completions.into_iter().for_each(|completion| self.deliver(completion));
            }
            self.publish();
        }
        Ok(())
    }

    /// Drops the sequences whose clients are gone.
    fn abort_abandoned(&mut self) -> Result<(), RolloutError> {
        let abandoned = self.running.iter().filter(|(_, part)| part.reply.is_closed());
        let abandoned: Vec<GroupId> = abandoned.map(|(group, _)| *group).collect();
        for group in abandoned {
            self.running.remove(&group);
            self.sampler.abort(group)?;
        }
        Ok(())
    }

    /// Gives requests to the engine while it has capacity for the one whose turn it is.
    fn admit(&mut self) -> Result<(), RolloutError> {
        loop {
            let part = self.next.take().filter(|(_, part)| !part.is_abandoned());
            let Some((request, part)) = part.or_else(|| self.take_next()) else { return Ok(()) };
            if !self.sampler.has_capacity_for(&request) {
                self.next = Some((request, part));
                return Ok(());
            }
            let (group, left) = (request.group, request.sequences());
            match self.sampler.submit(request) {
                Ok(()) => {
                    let running = RunningPart { left, completions: Vec::new(), reply: part.reply };
                    self.running.insert(group, running);
                }
                Err(error) if is_of_the_request(&error) => {
                    let failure = match error {
                        RolloutError::UnknownAdapter { .. } => user_failure(FREED.to_owned()),
                        error => server_failure(error.to_string()),
                    };
                    // The client may be gone.
                    let _ = part.reply.send(Err(failure));
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn take_next(&mut self) -> Option<(SampleRequest, SamplingPart)> {
        let part = self.waiting.pop()?;
        let group = GroupId(self.taken);
        self.taken += 1;
        Some((part.to_request(group), part))
    }

    fn deliver(&mut self, completion: Completion) {
        let group = completion.group;
        let Some(part) = self.running.get_mut(&group) else { return };
        part.left = part.left.saturating_sub(1);
        part.completions.push(completion);
        if part.left == 0
            && let Some(part) = self.running.remove(&group)
        {
            let _ = part.reply.send(Ok(part.completions));
        }
    }

    fn publish(&self) {
        *self.activity.lock().unwrap_or_else(PoisonError::into_inner) = EngineActivity {
            running: self.sampler.in_flight(),
            version: self.sampler.version(),
            counts: self.sampler.counts(),
            cache_usage: self.sampler.cache_usage().unwrap_or(0.0),
        };
    }
}

impl Drop for EngineThread {
    /// Also after a panic no client waits for ever.
    fn drop(&mut self) {
        self.waiting.close("the thread of the engine ended unexpectedly");
    }
}

/// Whether the request is at fault, so that the engine can serve others.
fn is_of_the_request(error: &RolloutError) -> bool {
    matches!(error, RolloutError::UnknownAdapter { .. } | RolloutError::NoAlternatives) || error.is_input()
}
