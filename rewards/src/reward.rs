//! The trait that every reward implements, with its input and its outcome.
//!
//! Invariant: a reward sees finished trajectories and changes nothing. Scoring is asynchronous and fallible, because many
//! rewards ask processes, servers and models; each keeps its own limits on time and concurrency, and its [`Load`].

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use serde_json::{Map, Value};
use trajectory::{PolicyVersion, Prompt, Task, TaskId, Turn};

use crate::registry::Decode;
use crate::{Load, RewardError};

/// A future on the heap that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The outcome of one reward for one trajectory, or its failure.
pub type Judged = Result<Outcome, RewardError>;

/// A reward: it scores trajectories or whole groups.
pub trait Reward: Send + Sync + fmt::Debug {
    /// Name in the recipe, in metrics and in [`trajectory::Component`]; unique within a [`crate::RewardSet`].
    fn name(&self) -> &str;

    /// The input of a call: one trajectory as it ends, or a whole group.
    fn scope(&self) -> Scope {
        Scope::Trajectory
    }

    /// Judges each of `inputs`: one trajectory, or all of a group where [`Reward::scope`] says so. One outcome for each,
    /// in order; a wrong answer is a value, not an error.
    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>>;

    /// A description for people: the function and its file, the model, the sandbox.
    fn about(&self) -> Option<String> {
        None
    }

    /// Its counters.
    fn load(&self) -> &Load;
}

/// The input of a call of a reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// One trajectory, as soon as it ends.
    #[default]
    Trajectory,
    /// All trajectories of a group, as soon as the last has ended, for rewards that compare them.
    Group,
}

/// The outcome of a reward for a trajectory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The value before weighting; `None` if the reward does not apply to this trajectory and counts nothing.
    pub value: Option<f64>,
    /// Further results by name: all are shown beside the trajectory, and numbers are metrics.
    pub details: Map<String, Value>,
}

impl Outcome {
    /// A value with one detail more.
    #[must_use]
    pub fn with(mut self, name: &str, detail: impl Into<Value>) -> Self {
        self.details.insert(name.to_owned(), detail.into());
        self
    }
}

impl From<f64> for Outcome {
    fn from(value: f64) -> Self {
        Self { value: Some(value), details: Map::new() }
    }
}

/// One finished trajectory as a reward sees it.
#[derive(Clone, Copy, Debug)]
pub struct RewardInput<'a> {
    /// The task, with the reference answer and all columns of the row.
    pub task: &'a Task,
    /// Which of the group's trajectories this is, from 0.
    pub index: u32,
    /// The last completion as text, without its stop token.
    pub text: &'a str,
    /// Tokens of the prompt; empty where only text is known.
    pub prompt_ids: &'a [u32],
    /// Tokens after the prompt, those of the environment included; empty where only text is known.
    pub completion_ids: &'a [u32],
    /// The turns of the policy, with the rewards of the environment; empty where only text is known. Their ranges count from
    /// the first token of the prompt.
    pub turns: &'a [Turn],
    /// Whether the completion was cut off by its length limit.
    pub truncated: bool,
    /// The length limit in tokens.
    pub max_completion_length: usize,
    /// The policy version that sampled its last token, which is the number of training steps done by then.
    pub version: PolicyVersion,
}

impl<'a> RewardInput<'a> {
    /// A text that answers `task`, of which no tokens are known: for graders by hand and for tests.
    #[must_use]
    pub fn text(task: &'a Task, text: &'a str) -> Self {
        Self {
            task,
            index: 0,
            text,
            prompt_ids: &[],
            completion_ids: &[],
            turns: &[],
            truncated: false,
            max_completion_length: usize::MAX,
            version: PolicyVersion::default(),
        }
    }

    /// The prompt as one text, for people, judges and servers: a conversation has a line per message, with its role.
    #[must_use]
    pub fn prompt_text(&self) -> String {
        match &self.task.prompt {
            Prompt::Text(text) => text.clone(),
            Prompt::Messages(messages) => {
                let lines = messages.iter().map(|message| format!("{}: {}", message.role, message.content));
                lines.collect::<Vec<_>>().join("\n")
            }
        }
    }

    /// Prompt, and prompt with completion, as the policy saw them: tokens decoded, special ones included. Where no tokens
    /// are known or nothing decodes them, the texts.
    #[must_use]
    pub fn decoded(&self, decode: Option<&Decode>) -> (String, String) {
        match decode.filter(|_| !self.prompt_ids.is_empty()) {
            Some(decode) => {
                (decode(self.prompt_ids), decode(&[self.prompt_ids, self.completion_ids].concat()))
            }
            None => {
                let prompt = self.prompt_text();
                let whole = format!("{prompt}{}", self.text);
                (prompt, whole)
            }
        }
    }

    /// Which trajectory this is, for messages.
    #[must_use]
    pub fn trajectory(&self) -> TrajectoryRef {
        TrajectoryRef { task: self.task.id, index: self.index }
    }

    /// The reference answer of the task.
    ///
    /// # Errors
    /// [`RewardError::NoAnswer`] if the task has none; `reward` is the name of the reward.
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

impl TrajectoryRef {
    /// The error of a reward that could not judge it.
    pub(crate) fn failed(self, reward: &str, reason: impl Into<String>) -> RewardError {
        RewardError::Failed { reward: reward.to_owned(), trajectory: self, reason: reason.into() }
    }

    /// The error of a reward that did not judge it in time.
    pub(crate) fn timed_out(self, reward: &str, limit: Duration) -> RewardError {
        RewardError::Timeout { reward: reward.to_owned(), trajectory: self, seconds: limit.as_secs_f64() }
    }
}

/// Judges trajectories at the same time, each by itself.
pub(crate) fn each<'a, F>(
    inputs: &'a [RewardInput<'a>],
    judge: impl Fn(&'a RewardInput<'a>) -> F,
) -> BoxFuture<'a, Vec<Judged>>
where
    F: Future<Output = Judged> + Send + 'a,
{
    let judging: Vec<_> = inputs.iter().map(|input| Box::pin(judge(input)) as BoxFuture<'a, _>).collect();
    Box::pin(crate::join(judging.into_iter()))
}

impl fmt::Display for TrajectoryRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {}, trajectory {}", self.task.0, self.index)
    }
}

/// Where tests delay the reward `name`, or end its process.
pub(crate) fn scoring_failpoint(name: &str) {
    fail::fail_point!("reward-score");
    fail::fail_point!(&format!("reward-score:{name}"));
    let _ = name;
}
