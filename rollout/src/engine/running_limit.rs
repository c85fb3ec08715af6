//! How many sequences an engine runs at once: the bound of its configuration, or the fewest that are enough.
//!
//! Invariant: the limit is for admission alone. It is at most [`EngineConfig::max_running`](super::EngineConfig::max_running), and no
//! sequence in flight is dropped because it falls.

use std::time::Instant;

use buffer::{RunningControl, RunningObservation};
use rewards::load::unix_seconds;

use super::Engine;
use crate::RolloutError;
use crate::activity::LimitChange;
use crate::sampler::Completion;

/// The limit of an engine that follows capacity and demand.
#[derive(Debug)]
pub(super) struct AdaptedLimit {
    control: RunningControl,
    /// When the last step ended.
    last: Option<Instant>,
    /// Changes that were not taken yet.
    changes: Vec<LimitChange>,
}

impl Engine {
    /// The same. With `adapts`, the steps of a [`LocalSampler`](super::LocalSampler) decide how many sequences run at once, between
    /// those of one request of the largest kind and the bound of the configuration ([`RunningControl`]).
    #[must_use]
    pub fn adapting_running(self, adapts: bool) -> Self {
        let control = || RunningControl::new(self.config.max_samples, self.config.max_running);
        let adapted = adapts.then(|| AdaptedLimit { control: control(), last: None, changes: Vec::new() });
        Self { adapted, ..self }
    }

    /// Sequences up to which requests are admitted, if that adapts.
    #[must_use]
    pub fn running_limit(&self) -> Option<usize> {
        self.adapted.as_ref().map(|adapted| adapted.control.limit())
    }

    /// The changes of [`Self::running_limit`] since the last call.
    pub(super) fn take_limit_changes(&mut self) -> Vec<LimitChange> {
        self.adapted.as_mut().map(|adapted| std::mem::take(&mut adapted.changes)).unwrap_or_default()
    }

    /// [`Engine::step`], and what its time and its tokens say about the limit.
    pub(super) fn timed_step(&mut self) -> Result<Vec<Completion>, RolloutError> {
        let (start, in_flight, before) = (Instant::now(), self.in_flight(), self.counts);
        let ended = self.step()?;
        let Some(adapted) = self.adapted.as_mut().filter(|_| self.counts.steps > before.steps) else {
            return Ok(ended);
        };
        let version = self.version;
        let tokens = (self.counts.sampled_tokens - before.sampled_tokens) as f64;
        let now = Instant::now();
        let decode_s = now.duration_since(start).as_secs_f64();
        let since = adapted.last.replace(now).unwrap_or(start);
        let elapsed_s = now.duration_since(since).as_secs_f64();
        let seen = RunningObservation { version, in_flight, steps: 1.0, tokens, decode_s, elapsed_s };
        let change = adapted.control.observe(seen);
        adapted.changes.extend(change.map(|change| LimitChange {
            at: unix_seconds(),
            version,
            before: change.before,
            after: change.after,
            capacity: change.capacity,
            demand: change.demand,
        }));
        Ok(ended)
    }
}
