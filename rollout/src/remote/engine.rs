//! The state of each engine: it joins with the current weights, loads newer ones, and is left out while it is gone.
//!
//! Invariant: an engine in use has proven to serve the current version, or is loading it. It loads one version at a time, so the
//! last one that it was sent is the one that it has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use trajectory::PolicyVersion;

use super::client::{EngineClient, EngineFailure};
use super::protocol::EngineKind;
use super::push::{ProvenLoad, WrittenVersion, is_paused};
use super::{EngineEvent, RemoteSampler};
use crate::RolloutError;

/// Pause between two tries to reach an engine that is gone.
const TRY_AGAIN: Duration = Duration::from_secs(3);
/// Pause between two questions how many requests wait within an engine.
const MEASURE: Duration = Duration::from_millis(500);
/// Deadline of a look at an engine.
pub(super) const LOOK: Duration = Duration::from_secs(10);

/// One engine.
pub(super) struct RemoteEngine {
    pub(super) client: Arc<EngineClient>,
    pub(super) state: EngineState,
    /// The model that it serves.
    pub(super) model: String,
    /// The version that it has proven last: what it samples is of this one or a newer one.
    pub(super) proven: PolicyVersion,
    /// Whether a version is being loaded into it.
    pub(super) loading: bool,
    /// Sequences in flight.
    pub(super) sequences: usize,
    pub(super) queue: EngineQueue,
    /// When it answered last.
    pub(super) heard: Instant,
    /// Whether it is being asked whether it is paused.
    pub(super) asked: bool,
    /// Why it was last left out.
    pub(super) lost: String,
}

/// Requests of all users of an engine that wait within it.
pub(super) struct EngineQueue {
    /// The smaller of the last two answers, since a request that has just come waits for a step.
    pub(super) waiting: u64,
    /// The last answer.
    last: u64,
    /// When it is asked again; `None` while it is asked.
    next: Option<Instant>,
}

impl EngineQueue {
    /// An empty queue, which is asked for at once.
    fn unknown(now: Instant) -> Self {
        Self { waiting: 0, last: 0, next: Some(now) }
    }

    /// Whether it is asked for now; the answer is awaited then.
    fn is_due(&mut self, now: Instant) -> bool {
        self.next.take_if(|next| now >= *next).is_some()
    }

    /// The engine answered that `waiting` requests wait.
    pub(super) fn answered(&mut self, waiting: u64) {
        self.waiting = waiting.min(self.last);
        (self.last, self.next) = (waiting, Some(Instant::now() + MEASURE));
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum EngineState {
    /// It serves the current version, or loads it while it serves the one before.
    Up,
    /// It is reached and gets weights.
    Joining,
    /// It is tried again then.
    Down(Instant),
}

impl RemoteEngine {
    /// An engine that has not been reached yet.
    pub(super) fn unknown(client: EngineClient, now: Instant) -> Self {
        Self {
            client: Arc::new(client),
            state: EngineState::Down(now),
            model: String::new(),
            proven: PolicyVersion::default(),
            loading: false,
            sequences: 0,
            queue: EngineQueue::unknown(now),
            heard: now,
            asked: false,
            lost: String::new(),
        }
    }

    /// Whether it is tried again now. A load that still runs could end after that of a newer version, and leave the older one.
    fn is_tried_again(&self, now: Instant) -> bool {
        !self.loading && matches!(self.state, EngineState::Down(next) if now >= next)
    }

    /// Whether it takes `sequences` more, if `most` are the most that this sampler sends. One that has none of this sampler takes any
    /// number; one in which requests wait takes no more.
    pub(super) fn has_space(&self, sequences: usize, most: usize) -> bool {
        let space = self.sequences + sequences <= most && self.queue.waiting == 0;
        self.state == EngineState::Up && (space || self.sequences == 0)
    }
}

impl RemoteSampler {
    /// Loads `written` into an engine, after a look at the model that it serves.
    pub(super) fn load(&mut self, engine: usize, written: &Arc<WrittenVersion>) -> Result<(), RolloutError> {
        self.engines[engine].loading = true;
        let client = Arc::clone(&self.engines[engine].client);
        let (pusher, written) = (Arc::clone(&self.pusher), Arc::clone(written));
        let (on_update, max_length) = (self.on_update, self.config.max_length);
        self.spawn(move || {
            let loaded = served_model(&client, max_length).and_then(|base| {
                let model = written.served_name(&base);
                let proven = pusher.load(&client, model, &written, on_update)?;
                Ok((model.to_owned(), proven))
            });
            EngineEvent::Loaded { engine, version: written.version, loaded }
        })
    }

    pub(super) fn loaded(
        &mut self,
        engine: usize,
        version: PolicyVersion,
        loaded: Result<(String, ProvenLoad), EngineFailure>,
    ) -> Result<(), RolloutError> {
        self.engines[engine].loading = false;
        if let Some(update) = self.update.as_mut().filter(|update| update.snapshot.version == version) {
            update.loading.remove(&engine);
        }
        match loaded {
            Ok((model, ProvenLoad { stalled, resumed })) => {
                if resumed {
                    self.resumed(engine);
                }
                if let Some(update) = self.update.as_mut().filter(|update| update.snapshot.version == version)
                {
                    update.stalled = update.stalled.max(stalled);
                }
                let newest = self.current.clone().filter(|current| current.version != version);
                let one = &mut self.engines[engine];
                (one.model, one.proven, one.heard) = (model, version, Instant::now());
                match newest {
                    // A newer version was written while it joined.
                    Some(newest) if one.state == EngineState::Joining => return self.load(engine, &newest),
                    _ if one.state == EngineState::Joining => {
                        one.state = EngineState::Up;
                        let url = one.client.url();
                        (self.config.notice)(&format!("the rollout engine {url} serves {version}"));
                    }
                    _ => {}
                }
                self.without_engine = None;
                Ok(())
            }
            Err(EngineFailure::Gone(reason)) => {
                self.lose(engine, &reason);
                Ok(())
            }
            Err(EngineFailure::Refused(evidence)) => Err(self.failure(engine, &evidence, self.start_with())),
        }
    }

    pub(super) fn resumed(&self, engine: usize) {
        let url = self.engines[engine].client.url();
        (self.config.notice)(&format!(
            "the rollout engine {url} was paused by another program, and is resumed"
        ));
    }

    /// An engine is gone: it is left out until it answers again.
    pub(super) fn lose(&mut self, engine: usize, reason: &str) {
        let one = &mut self.engines[engine];
        let known = one.state == EngineState::Up;
        one.state = EngineState::Down(Instant::now() + TRY_AGAIN);
        reason.clone_into(&mut one.lost);
        if known {
            let url = one.client.url();
            (self.config.notice)(&format!(
                "the rollout engine {url} {reason}; it is left out until it answers again, and its requests begin again elsewhere"
            ));
        }
        if !self.engines.iter().any(|engine| engine.state == EngineState::Up) {
            self.without_engine.get_or_insert_with(Instant::now);
        }
    }

    /// Every engine with the reason why it was left out.
    fn losses(&self) -> String {
        let each = self.engines.iter().map(|engine| match &engine.lost[..] {
            "" => format!("{} has not answered yet", engine.client.url()),
            lost => format!("{} {lost}", engine.client.url()),
        });
        each.collect::<Vec<_>>().join(", ")
    }

    /// Looks after engines that are gone or quiet.
    pub(super) fn maintain(&mut self) -> Result<(), RolloutError> {
        let now = Instant::now();
        if let Some(since) = self.without_engine
            && since.elapsed() > self.config.wait
        {
            return Err(RolloutError::Deadline {
                who: "a rollout worker",
                whom: format!("one of its rollout engines: {}; {}", self.losses(), self.start_with()),
                seconds: self.config.wait.as_secs_f64(),
            });
        }
        for engine in 0..self.engines.len() {
            let one = &mut self.engines[engine];
            if one.state == EngineState::Up && one.sequences > 0 && one.queue.is_due(now) {
                let (client, kind) = (Arc::clone(&one.client), self.config.kind);
                self.spawn(move || {
                    // Some engines do not say.
                    let metrics = client.text("/metrics", LOOK).unwrap_or_default();
                    EngineEvent::Measured { engine, queued: kind.queued(&metrics).unwrap_or(0) }
                })?;
            }
            let one = &mut self.engines[engine];
            match one.state {
                EngineState::Down(_) if one.is_tried_again(now) => {
                    let Some(current) = self.current.clone() else { continue };
                    one.state = EngineState::Joining;
                    self.load(engine, &current)?;
                }
                EngineState::Up
                    if one.sequences > 0 && !one.asked && one.heard.elapsed() > self.config.quiet =>
                {
                    let loads = self.update.as_ref().is_some_and(|update| update.loading.contains(&engine));
                    if loads {
                        continue;
                    }
                    one.asked = true;
                    let (client, kind) = (Arc::clone(&one.client), self.config.kind);
                    self.spawn(move || {
                        let paused = is_paused(&client, kind).unwrap_or(false);
                        let resumed = paused && client.call(&kind.resume(), LOOK).is_ok();
                        EngineEvent::Looked { engine, resumed }
                    })?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The model that an engine serves.
///
/// # Errors
/// An engine that does not answer, serves no model, or a shorter context than `max_length`.
fn served_model(client: &EngineClient, max_length: usize) -> Result<String, EngineFailure> {
    let models = EngineKind::models(&client.get("/v1/models", LOOK)?);
    let Some((name, context)) = models.into_iter().next() else {
        return Err(EngineFailure::Refused("serves no model".to_owned()));
    };
    if context.is_some_and(|context| context < max_length as u64) {
        let context = context.unwrap_or_default();
        return Err(EngineFailure::Refused(format!(
            "serves a context of {context} tokens, and prompt and completion of the recipe have up to {max_length}"
        )));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_is_gone_is_not_tried_again_before_its_load_has_ended() {
        let now = Instant::now();
        let mut engine = RemoteEngine::unknown(EngineClient::new("http://127.0.0.1:1").unwrap(), now);
        assert!(engine.is_tried_again(now));
        engine.loading = true;
        assert!(!engine.is_tried_again(now + TRY_AGAIN));
        (engine.loading, engine.state) = (false, EngineState::Down(now + TRY_AGAIN));
        assert!(!engine.is_tried_again(now) && engine.is_tried_again(now + TRY_AGAIN));
        engine.state = EngineState::Joining;
        assert!(!engine.is_tried_again(now + TRY_AGAIN));
    }
}
