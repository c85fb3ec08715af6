//! A reward model that is served by another process, on this machine or another.
//!
//! Invariant: it is asked about the same tokens as a model in this process would be, so its scores are the same.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::wire::{Answer, Asked, Described, MODEL, SCORES};
use crate::http::transport::{CallError, Transport, seed};
use crate::load::Waiting;
use crate::{RewardContext, RewardError, RewardInput, RewardSpec};

/// How long the server may take to say what its model is.
const HELLO: Duration = Duration::from_secs(30);

/// The server of a reward model.
#[derive(Debug)]
pub(super) struct Remote {
    name: String,
    transport: Arc<Transport>,
    described: Described,
    running: Semaphore,
    timeout: Duration,
}

impl Remote {
    /// Asks the server what its model is.
    ///
    /// # Errors
    /// A URL that cannot be used, a server that is not there or is none of a reward model.
    pub(super) fn connect(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        let at = |path: &'static str| move |url: &str| format!("{}{path}", url.trim_end_matches('/'));
        let hello = Transport::new(spec, context, at(MODEL))?;
        let failed = |reason: String| RewardError::Start { reward: spec.name().to_owned(), reason };
        let said = hello.get(HELLO).map_err(|error| {
            failed(match error {
                CallError::Timeout => {
                    format!("no answer within {HELLO:?}; is `rlrun serve reward` running there?")
                }
                CallError::Failed(reason) => format!("{reason}; is `rlrun serve reward` running there?"),
            })
        })?;
        let described = serde_json::from_value(said.clone())
            .map_err(|_| failed(format!("the server is none of a reward model; it said {said}")))?;
        Ok(Self {
            name: spec.name().to_owned(),
            transport: Arc::new(Transport::new(spec, context, at(SCORES))?),
            described,
            running: Semaphore::new(spec.concurrency.max(1)),
            timeout: spec.timeout(),
        })
    }

    /// Whether it reads tokens of the tokenizer with this fingerprint.
    pub(super) fn shares_tokens(&self, fingerprint: &str) -> bool {
        self.described.tokenizer.as_deref() == Some(fingerprint)
    }

    /// Longest sequence, tokens.
    pub(super) fn max_context(&self) -> usize {
        self.described.max_context
    }

    /// The score of a sequence.
    pub(super) async fn score(
        &self,
        asked: Asked,
        waiting: Waiting<'_>,
        input: &RewardInput<'_>,
    ) -> Result<f32, RewardError> {
        // The semaphore is never closed, so a permit always comes; waiting for it is not the model's time.
        let _permit = self.running.acquire().await;
        let _running = waiting.begin();
        let trajectory = input.trajectory();
        let failed = |reason: String| trajectory.failed(&self.name, reason);
        let said: Value = self
            .transport
            .post(&json!(asked), seed(trajectory), self.timeout)
            .await
            .map_err(|error| error.of(&self.name, self.timeout, trajectory))?;
        match serde_json::from_value(said.clone()) {
            Ok(Answer { score: Some(score), .. }) => Ok(score),
            Ok(Answer { error: Some(reason), .. }) => Err(failed(reason)),
            _ => Err(failed(format!("the server said {said}, which is no score"))),
        }
    }
}
