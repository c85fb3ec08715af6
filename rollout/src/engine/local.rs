//! The engine of this process behind [`Sampler`]: the engine, and the source of its weights.
//!
//! Invariant: a receipt is sent after the engine serves the version, with the digest that was computed of the weights that
//! it serves.

use std::time::{Duration, Instant};

use model::CoreReservation;
use trajectory::{GroupId, PolicyVersion};

use super::Engine;
use super::adapter_slots::{AdapterSlots, WaitingChanges, adapter_slots};
use crate::RolloutError;
use crate::activity::LimitChange;
use crate::applier::{Applier, ReadyWeights};
use crate::sampler::{
    AppliedWeights, Completion, EngineCounts, OnUpdate, PartialCompletion, SampleRequest, Sampler,
};

/// The engine of this process as a sampler.
#[derive(Debug)]
pub struct LocalSampler {
    engine: Engine,
    /// Where newer weights come from; `None` for weights that stay.
    applier: Option<Applier>,
    /// The newest version that is staged.
    staged: Option<ReadyWeights>,
    /// What [`AdapterSlots`] asked for.
    changes: Option<WaitingChanges>,
    /// Marks the core of the calling thread as in use between two steps.
    reservation: Option<CoreReservation>,
}

impl LocalSampler {
    /// A sampler that serves what `engine` serves until `applier` has something newer.
    #[must_use]
    pub fn new(engine: Engine, applier: Applier) -> Self {
        Self { engine, applier: Some(applier), staged: None, changes: None, reservation: None }
    }

    /// A sampler that serves the weights of `engine` and no others.
    #[must_use]
    pub fn fixed(engine: Engine) -> Self {
        Self { engine, applier: None, staged: None, changes: None, reservation: None }
    }

    /// The same, and a handle that changes from any thread what it serves.
    #[must_use]
    pub fn with_slots(self) -> (Self, AdapterSlots) {
        let (slots, changes) = adapter_slots();
        (Self { changes: Some(changes), ..self }, slots)
    }

    /// Makes the changes that were asked for so far.
    fn make_changes(&mut self) -> Result<(), RolloutError> {
        self.changes.as_ref().map_or(Ok(()), |changes| changes.make(&mut self.engine))
    }
}

impl Sampler for LocalSampler {
    fn version(&self) -> PolicyVersion {
        self.engine.version()
    }

    fn has_capacity(&self, completions: usize) -> bool {
        self.engine.has_capacity(completions)
    }

    fn has_capacity_for(&self, request: &SampleRequest) -> bool {
        self.engine.has_capacity_for(request)
    }

    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError> {
        self.make_changes()?;
        self.engine.submit(request)
    }

    fn poll(&mut self, _: Duration) -> Result<Vec<Completion>, RolloutError> {
        if self.applier.is_some() && self.reservation.is_none() && !self.engine.is_idle() {
            // Between two steps no other role should begin to use this core.
            self.reservation = Some(self.engine.pool().reserve_core());
        }
        self.make_changes()?;
        self.engine.timed_step()
    }

    fn abort(&mut self, group: GroupId) -> Result<usize, RolloutError> {
        let aborted = self.engine.abort(group);
        // The engine may be idle now, so that no step frees them.
        self.engine.free_ended_adapters()?;
        Ok(aborted)
    }

    fn partials(&mut self) -> Vec<PartialCompletion> {
        self.engine.partials()
    }

    fn cache_usage(&self) -> Option<f64> {
        Some(self.engine.cache_usage())
    }

    fn end_episode(&mut self, group: GroupId, index: u32) {
        self.engine.end_episode(group, index);
    }

    fn newer_weights(&mut self, wait: Duration) -> Result<Option<PolicyVersion>, RolloutError> {
        if !wait.is_zero() {
            self.reservation = None;
        }
        self.make_changes()?;
        match &mut self.applier {
            None if wait.is_zero() => {}
            None => std::thread::sleep(wait),
            Some(applier) => {
                if let Some(ready) = applier.take(wait)? {
                    self.staged = Some(ready);
                }
            }
        }
        Ok(self.staged.as_ref().map(ReadyWeights::version))
    }

    fn apply_weights(&mut self, on_update: OnUpdate) -> Result<Option<AppliedWeights>, RolloutError> {
        let (Some(mut ready), Some(applier)) = (self.staged.take(), &self.applier) else { return Ok(None) };
        let (version, start) = (ready.version(), Instant::now());
        if self.engine.is_asleep() {
            self.engine.wake_up(ready.take_served(), version)?;
        } else {
            let before = self.engine.apply(ready.take_served(), version)?;
            if let Some(before) = before {
                applier.give_back(before);
            }
            if on_update == OnUpdate::Recompute {
                self.engine.recompute()?;
            }
        }
        let stalled = start.elapsed();
        applier.confirm(&ready, stalled, self.engine.taken())?;
        Ok(Some(AppliedWeights { version, stalled }))
    }

    fn sleep(&mut self) -> Result<u64, RolloutError> {
        self.reservation = None;
        Ok(self.engine.sleep())
    }

    fn is_asleep(&self) -> bool {
        self.engine.is_asleep()
    }

    fn counts(&self) -> EngineCounts {
        self.engine.counts()
    }

    fn running_limit(&self) -> Option<usize> {
        self.engine.running_limit()
    }

    fn take_limit_changes(&mut self) -> Vec<LimitChange> {
        self.engine.take_limit_changes()
    }
}
