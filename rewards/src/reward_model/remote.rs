//! A reward model that is served by another process, on this machine or another.
//!
//! Invariant: it gets the same tokens as a model in this process, so its scores are the same.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::wire::{MODEL, ModelDescription, RewardModelRequest, SCORES, ScoreResponse};
use crate::http::transport::{HttpTransport, RequestError, seed};
use crate::load::WaitingTrajectory;
use crate::{RewardContext, RewardError, RewardInput, RewardSpec};

/// Longest time for the description of the model.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(30);

/// The server of a reward model.
#[derive(Debug)]
pub(super) struct RemoteModel {
    name: String,
    transport: Arc<HttpTransport>,
    described: ModelDescription,
    running: Semaphore,
    timeout: Duration,
}

impl RemoteModel {
    /// Reads the description of the model from its server.
    ///
    /// # Errors
    /// An unusable URL, no server, or a server that does not serve a reward model.
    pub(super) fn connect(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        let at = |path: &'static str| move |url: &str| format!("{}{path}", url.trim_end_matches('/'));
        let describe = HttpTransport::new(spec, context, at(MODEL))?;
        let failed = |reason: String| RewardError::Start { reward: spec.name().to_owned(), reason };
        let found = describe.get(DESCRIBE_TIMEOUT).map_err(|error| {
            failed(match error {
                RequestError::Timeout => {
                    format!("no answer within {DESCRIBE_TIMEOUT:?}; is `rlrun serve reward` running there?")
                }
                RequestError::Failed(reason) => format!("{reason}; is `rlrun serve reward` running there?"),
            })
        })?;
        let described = serde_json::from_value(found.clone())
            .map_err(|_| failed(format!("the server does not serve a reward model; it sent {found}")))?;
        Ok(Self {
            name: spec.name().to_owned(),
            transport: Arc::new(HttpTransport::new(spec, context, at(SCORES))?),
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
        request: RewardModelRequest,
        waiting: WaitingTrajectory<'_>,
        input: &RewardInput<'_>,
    ) -> Result<f32, RewardError> {
        // The semaphore is never closed, so a permit always comes; waiting for it is not the model's time.
        let _permit = self.running.acquire().await;
        let _running = waiting.begin();
        let trajectory = input.trajectory();
        let failed = |reason: String| trajectory.failed(&self.name, reason);
        let response: Value = self
            .transport
            .post(&json!(request), seed(trajectory), self.timeout)
            .await
            .map_err(|error| error.of(&self.name, self.timeout, trajectory))?;
        match serde_json::from_value(response.clone()) {
            Ok(ScoreResponse { score: Some(score), .. }) => Ok(score),
            Ok(ScoreResponse { error: Some(reason), .. }) => Err(failed(reason)),
            _ => Err(failed(format!("the server sent {response}, which is not a score"))),
        }
    }
}
