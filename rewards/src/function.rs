//! Rewards that are Rust functions: the built-in ones, and a user's own.
//!
//! Invariant: a built-in function runs on the caller's thread and takes microseconds. A user's function may be slow, so it runs on
//! a thread for blocking work, and the caller stops waiting after its timeout. A thread cannot be killed: a function that never
//! returns occupies its thread, and costs only the trajectory that it was called for.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use trajectory::{PolicyVersion, Task, Turn};

use crate::reward::{Judged, each, scoring_failpoint};
use crate::{BoxFuture, Load, Outcome, Reward, RewardError, RewardInput, RewardSpec};

/// A [`Reward`] made of a name and a pure function that takes microseconds.
pub struct Builtin<F> {
    name: String,
    function: F,
    load: Load,
}

impl<F, O> Builtin<F>
where
    F: Fn(&RewardInput<'_>) -> Result<O, RewardError> + Send + Sync,
    O: Into<Outcome>,
{
    /// Names a function. It runs on the caller's thread.
    pub fn new(name: impl Into<String>, function: F) -> Self {
        Self { name: name.into(), function, load: Load::default() }
    }
}

impl<F> fmt::Debug for Builtin<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builtin").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<F, O> Reward for Builtin<F>
where
    F: Fn(&RewardInput<'_>) -> Result<O, RewardError> + Send + Sync,
    O: Into<Outcome>,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        let judge = |input| {
            let _running = self.load.wait().begin();
            scoring_failpoint(&self.name);
            (self.function)(input).map(Into::into)
        };
        // Lazy, so that a panic or a long computation belongs to the poll and not to the call.
        Box::pin(async move { inputs.iter().map(judge).collect() })
    }

    fn load(&self) -> &Load {
        &self.load
    }
}

/// The trajectory for a user's function: an owned [`RewardInput`].
#[derive(Clone, Debug)]
pub struct FunctionInput {
    /// The task, with the reference answer and all columns of the row.
    pub task: Task,
    /// The last completion as text, without its stop token.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_ids: Vec<u32>,
    /// Tokens after the prompt.
    pub completion_ids: Vec<u32>,
    /// The turns of the policy, with the rewards of the environment. Their ranges count from the first token of the prompt.
    pub turns: Vec<Turn>,
    /// Whether the completion was cut off by its length limit.
    pub truncated: bool,
    /// The policy version that sampled its last token.
    pub version: PolicyVersion,
}

/// The error of a user's function; any error type converts into it.
pub type FunctionError = Box<dyn std::error::Error + Send + Sync>;

/// A user's function.
pub(crate) type UserFunction = dyn Fn(&FunctionInput) -> Result<f64, FunctionError> + Send + Sync;

/// A [`Reward`] made of a user's function.
pub(crate) struct FunctionReward {
    name: String,
    function: Arc<UserFunction>,
    running: Arc<Semaphore>,
    timeout: Duration,
    load: Load,
}

impl FunctionReward {
    pub(crate) fn new(spec: &RewardSpec, function: Arc<UserFunction>) -> Self {
        Self {
            name: spec.name().to_owned(),
            function,
            running: Arc::new(Semaphore::new(spec.concurrency.max(1))),
            timeout: spec.timeout(),
            load: Load::default(),
        }
    }

    async fn judge(&self, input: &RewardInput<'_>) -> Judged {
        let waiting = self.load.wait();
        // The semaphore is never closed, so a permit always comes; time in the queue does not count.
        let permit = Arc::clone(&self.running).acquire_owned().await;
        let _running = waiting.begin();
        let scored = FunctionInput {
            task: input.task.clone(),
            text: input.text.to_owned(),
            prompt_ids: input.prompt_ids.to_vec(),
            completion_ids: input.completion_ids.to_vec(),
            turns: input.turns.to_vec(),
            truncated: input.truncated,
            version: input.version,
        };
        let function = Arc::clone(&self.function);
        // A thread that does not return keeps its permit: no more than `concurrency` can be lost.
        let call = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            function(&scored)
        });
        let failed = |reason: String| input.trajectory().failed(&self.name, reason);
        match tokio::time::timeout(self.timeout, call).await {
            Ok(Ok(Ok(value))) => Ok(value.into()),
            Ok(Ok(Err(error))) => Err(failed(error.to_string())),
            Ok(Err(_)) => Err(failed("the function panicked; its message is in the log".to_owned())),
            Err(_) => Err(input.trajectory().timed_out(&self.name, self.timeout)),
        }
    }
}

impl fmt::Debug for FunctionReward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionReward").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Reward for FunctionReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        each(inputs, |input| self.judge(input))
    }

    fn load(&self) -> &Load {
        &self.load
    }
}
