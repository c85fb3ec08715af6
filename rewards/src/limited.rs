//! A timeout and a limit on concurrency around any reward whose futures can be dropped.
//!
//! Invariant: time in the queue does not count for the timeout; a dropped future runs no further.

use std::time::Duration;

use tokio::sync::Semaphore;

use crate::load::WaitingTrajectory;
use crate::reward::{Judged, each, scoring_failpoint};
use crate::{BoxFuture, Load, Reward, RewardInput, RewardSpec, Scope};

/// A reward with a timeout and a limit on concurrent calls.
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
        match self.scope() {
            Scope::Trajectory => each(inputs, |input| async move {
                let judged = self.call(std::slice::from_ref(input)).await.pop();
                judged
                    .unwrap_or_else(|| Err(input.trajectory().failed(self.name(), "it returned no outcome")))
            }),
            Scope::Group => Box::pin(self.call(inputs)),
        }
    }

    fn about(&self) -> Option<String> {
        self.inner.about()
    }

    fn load(&self) -> &Load {
        &self.load
    }
}

impl Limited {
    /// One call within the limits.
    async fn call(&self, inputs: &[RewardInput<'_>]) -> Vec<Judged> {
        let waiting: Vec<_> = inputs.iter().map(|_| self.load.wait()).collect();
        // The semaphore is never closed, so a permit always comes.
        let _permit = self.running.acquire().await;
        let _running: Vec<_> = waiting.into_iter().map(WaitingTrajectory::begin).collect();
        scoring_failpoint(self.name());
        let late = |input: &RewardInput<'_>| Err(input.trajectory().timed_out(self.name(), self.timeout));
        match tokio::time::timeout(self.timeout, self.inner.score(inputs)).await {
            Ok(judged) => judged,
            Err(_) => inputs.iter().map(late).collect(),
        }
    }
}
