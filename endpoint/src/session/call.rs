//! A call of a session, from its request to its answer.
//!
//! Invariant: it is recorded once and whole, or not at all: a call that is dropped, or whose session ended meanwhile, counts as
//! cancelled.

use std::sync::Arc;

use tokio::time::Instant;

use super::store::StoredSession;
use super::tokens::compare;
use super::{
    Continuation, NextPrompt, PromptRenderer, SessionError, SessionPurpose, SessionRequest, SessionResponse,
    SessionSampler, SessionStore,
};

/// A call of a session that is under way. To drop it is to cancel the call.
#[derive(Debug)]
pub struct SessionCall {
    store: SessionStore,
    entry: Arc<StoredSession>,
    /// False once it was recorded.
    open: bool,
}

impl SessionCall {
    /// A call of the session of `entry`, which counts it as under way.
    pub(super) fn new(store: SessionStore, entry: Arc<StoredSession>) -> Self {
        Self { store, entry, open: true }
    }

    /// What the session is for.
    #[must_use]
    pub fn purpose(&self) -> SessionPurpose {
        self.entry.lock().purpose
    }

    /// How the policy is sampled in it, if it is the session of an episode.
    #[must_use]
    pub fn sampler(&self) -> Option<Arc<SessionSampler>> {
        self.entry.lock().sampler.clone()
    }

    /// Number of interactions so far.
    #[must_use]
    pub fn interactions(&self) -> usize {
        self.entry.lock().interactions().len()
    }

    /// Whether a conversation of `messages` messages fits the limits of the session.
    ///
    /// # Errors
    /// The limit that is reached.
    pub fn fits(&self, messages: usize) -> Result<(), SessionError> {
        self.entry.lock().fits(messages)
    }

    /// What `prompt [P]` continues.
    #[must_use]
    pub fn continuation(&self, prompt: &[u32]) -> Continuation {
        compare(self.entry.lock().interactions(), prompt)
    }

    /// The prompt of the call.
    ///
    /// # Errors
    /// Those of `renderer`.
    pub fn next_prompt<R: PromptRenderer>(
        &self,
        request: &SessionRequest,
        renderer: &R,
    ) -> Result<NextPrompt, R::Error> {
        self.entry.lock().next_prompt(request, renderer)
    }

    /// Records the answer, or several of one request, once they are complete; false if the session ended before.
    pub fn record(
        mut self,
        request: &SessionRequest,
        prompt: &NextPrompt,
        responses: Vec<SessionResponse>,
        now: Instant,
    ) -> bool {
        self.open = false;
        let mut session = self.entry.lock();
        session.under_way = session.under_way.saturating_sub(1);
        session.last_used = now;
        if session.ended {
            drop(session);
            self.store.registry().counts.cancelled += 1;
            return false;
        }
        let before = session.drift();
        let recorded = responses.len() as u64;
        session.record(request, prompt, responses);
        let after = session.drift();
        drop(session);
        let mut registry = self.store.registry();
        let counts = &mut registry.counts;
        counts.interactions += recorded;
        counts.clean += after.clean - before.clean;
        counts.realign += after.realign - before.realign;
        counts.fork += after.fork - before.fork;
        true
    }
}

impl Drop for SessionCall {
    fn drop(&mut self) {
        if self.open {
            let mut session = self.entry.lock();
            session.under_way = session.under_way.saturating_sub(1);
            drop(session);
            self.store.registry().counts.cancelled += 1;
        }
    }
}
