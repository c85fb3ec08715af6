//! The one trait that every reward implements, and what a reward gets to see.
//!
//! Invariant: a reward sees one finished trajectory and changes nothing. Scoring is asynchronous and fallible, because
//! other implementations ask processes, servers and models; how long that may take is the caller's business.

use std::fmt;
use std::pin::Pin;

use trajectory::{Task, TaskId};

use crate::RewardError;

/// A future on the heap that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What a trajectory is worth in one respect.
pub trait Reward: Send + Sync + fmt::Debug {
    /// Name in the recipe, in metrics and in [`trajectory::Component`]; unique within a [`crate::RewardSet`].
    fn name(&self) -> &str;

    /// Scores one trajectory; the value is before weighting.
    ///
    /// # Errors
    /// Whatever keeps the reward from judging. A wrong answer is a value, not an error.
    fn score<'a>(&'a self, input: &'a RewardInput<'a>) -> BoxFuture<'a, Result<f64, RewardError>>;
}

/// One finished trajectory as a reward sees it.
#[derive(Clone, Copy, Debug)]
pub struct RewardInput<'a> {
    /// What was asked, with the reference answer and all columns of the row.
    pub task: &'a Task,
    /// Which of the group's trajectories this is, from 0.
    pub index: u32,
    /// The last completion as text, without its stop token.
    pub text: &'a str,
    /// Tokens that the policy generated in the whole trajectory.
    pub completion_tokens: usize,
    /// Whether the completion was cut off by its length limit.
    pub truncated: bool,
    /// The length limit in tokens.
    pub max_completion_length: usize,
}

impl<'a> RewardInput<'a> {
    /// Which trajectory this is, for messages.
    #[must_use]
    pub fn trajectory(&self) -> TrajectoryRef {
        TrajectoryRef { task: self.task.id, index: self.index }
    }

    /// The reference answer of the task.
    ///
    /// # Errors
    /// [`RewardError::NoAnswer`] if the task has none; `reward` is the name of who asks.
    pub fn answer(&self, reward: &str) -> Result<&'a str, RewardError> {
        let missing = || RewardError::NoAnswer { reward: reward.to_owned(), trajectory: self.trajectory() };
        self.task.answer.as_deref().ok_or_else(missing)
    }
}

/// Which trajectory an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrajectoryRef {
    /// The dataset row.
    pub task: TaskId,
    /// Which of the group's trajectories, from 0.
    pub index: u32,
}

impl fmt::Display for TrajectoryRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {}, trajectory {}", self.task.0, self.index)
    }
}

/// A [`Reward`] made of a name and a plain function.
pub struct Builtin<F> {
    name: String,
    function: F,
}

impl<F> Builtin<F>
where
    F: Fn(&RewardInput<'_>) -> Result<f64, RewardError> + Send + Sync,
{
    /// Names a function. It runs on the caller's thread and should take microseconds.
    pub fn new(name: impl Into<String>, function: F) -> Self {
        Self { name: name.into(), function }
    }
}

impl<F> fmt::Debug for Builtin<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builtin").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<F> Reward for Builtin<F>
where
    F: Fn(&RewardInput<'_>) -> Result<f64, RewardError> + Send + Sync,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, input: &'a RewardInput<'a>) -> BoxFuture<'a, Result<f64, RewardError>> {
        // Lazy, so that a panic or a long computation belongs to the poll and not to the call.
        Box::pin(async move { (self.function)(input) })
    }
}
