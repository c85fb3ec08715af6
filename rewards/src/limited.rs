//! A timeout and a bound on concurrency around any reward whose futures can be given up.
//!
//! Invariant: waiting for a turn is not the reward's time; a future that is given up runs no further.

use std::time::Duration;

use tokio::sync::Semaphore;

use crate::reward::Judged;
use crate::{BoxFuture, Load, Reward, RewardError, RewardInput, RewardSpec, Scope};

/// A reward with a timeout and a bound on how many calls it sees at a time.
#[derive(Debug)]
pub struct Limited {
    inner: Box<dyn Reward>,
    running: Semaphore,
    timeout: Duration,
    load: Load,
}

impl Limited {
    /// Puts the limits of `spec` around `inner`.
    #[must_use]
    pub fn new(inner: Box<dyn Reward>, spec: &RewardSpec) -> Self {
        let running = Semaphore::new(spec.concurrency.max(1));
        Self { inner, running, timeout: spec.timeout(), load: Load::default() }
    }
}

impl Reward for Limited {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn scope(&self) -> Scope {
        self.inner.scope()
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        Box::pin(async move {
            let waiting: Vec<_> = inputs.iter().map(|_| self.load.wait()).collect();
            // The semaphore is never closed, so a permit always comes.
            let _permit = self.running.acquire().await;
            let _running: Vec<_> = waiting.into_iter().map(crate::load::Waiting::begin).collect();
            match tokio::time::timeout(self.timeout, self.inner.score(inputs)).await {
                Ok(judged) => judged,
                Err(_) => inputs.iter().map(|input| Err(self.timed_out(input))).collect(),
            }
        })
    }

    fn about(&self) -> Option<String> {
        self.inner.about()
    }

    fn load(&self) -> &Load {
        &self.load
    }
}

impl Limited {
    fn timed_out(&self, input: &RewardInput<'_>) -> RewardError {
        RewardError::Timeout {
            reward: self.name().to_owned(),
            trajectory: input.trajectory(),
            seconds: self.timeout.as_secs_f64(),
        }
    }
}
