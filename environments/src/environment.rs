//! The traits of environments, and what an episode exchanges with one.
//!
//! Invariant: an environment belongs to one episode. A call of it is cancelled by dropping its future; nothing is called
//! after that.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use trajectory::{Message, StopReason, Task};

use crate::ToolSchema;

/// A future on the heap that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What one episode of the policy acts in.
///
/// Calls are asynchronous, because tools, processes and servers answer late. An environment that only computes returns a
/// future that is ready at once, which the episode driver never moves to another thread.
pub trait Environment: Send + fmt::Debug {
    /// Waits for what `task` is played with and others use: a process, a session of a server. The wait counts against no limit
    /// of the episode. [`Environment::reset`] follows, and waits for it itself where this was not called.
    ///
    /// # Errors
    /// As for [`Environment::reset`].
    fn acquire<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<(), EnvironmentError>> {
        let _ = task;
        Box::pin(std::future::ready(Ok(())))
    }

    /// Opens the episode of `task`. Returns the messages that follow the prompt of the task before the first turn; none if
    /// the prompt says everything.
    ///
    /// # Errors
    /// An environment that cannot begin; the episode is then not trained on.
    fn reset<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>>;

    /// What follows a turn of the policy.
    ///
    /// # Errors
    /// A failure of the environment itself; the episode is then not trained on. A bad action of the policy is no error: it
    /// is answered with a message, and a reward if it deserves one.
    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>>;

    /// What a scripted player says in the next turn, for demonstrations and for `rlrun check`; `None` without a script.
    /// `draw` is a random number for a player who has a choice.
    fn scripted(&self, player: Demonstration, draw: u64) -> Option<String> {
        let _ = (player, draw);
        None
    }
}

/// How a scripted player plays, or a worked answer is worked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demonstration {
    /// As it should be done.
    Right,
    /// With a habitual mistake.
    Wrong,
}

/// Makes an environment for every episode.
pub trait EnvironmentFactory: Send + Sync + fmt::Debug {
    /// Its name in errors and metrics.
    fn name(&self) -> &str;

    /// What bounds its episodes.
    fn limits(&self) -> EnvironmentLimits {
        EnvironmentLimits::default()
    }

    /// How it was understood, for people: its name and what follows from the recipe; `None` if there is nothing to say.
    fn about(&self) -> Option<String> {
        None
    }

    /// What its observations count ([`Observation::counts`]), so that an episode without such an event counts 0.
    fn counts(&self) -> &'static [&'static str] {
        &[]
    }

    /// The tools that the policy may call. The prompt of an episode describes them.
    fn tools(&self) -> &[ToolSchema] {
        &[]
    }

    /// The roles that the policy plays, at most [`MAX_ROLES`]: each has a conversation of its own, and is rewarded by itself.
    /// The first one begins. Empty for an environment with one role, which needs no name.
    fn roles(&self) -> &[String] {
        &[]
    }

    /// Who plays its episodes, if their loop is elsewhere: then no environment of it is created.
    fn agents(&self) -> Option<AgentSource> {
        None
    }

    /// An environment for one episode. Work that can fail or wait belongs into [`Environment::reset`].
    fn create(&self) -> Box<dyn Environment>;
}

/// Who plays the episodes of an environment whose loop is elsewhere. The policy is an endpoint to them.
#[derive(Clone, Debug)]
pub enum AgentSource {
    /// Agents that are started, one for each episode.
    Started(Arc<dyn AgentRunner>),
    /// Agents of others, which come for an episode.
    Awaited,
}

/// Starts agents.
pub trait AgentRunner: Send + Sync + fmt::Debug {
    /// Runs an agent until it is done. Returns its reward, or `None` if the rewards of the recipe judge its answer.
    ///
    /// # Errors
    /// An agent that fails or takes too long; its episode is then not trained on.
    fn run<'a>(&'a self, call: AgentCall<'a>) -> BoxFuture<'a, Result<Option<f64>, EnvironmentError>>;
}

/// What an agent is started with.
#[derive(Clone, Copy, Debug)]
pub struct AgentCall<'a> {
    /// Address of the endpoint, up to and with `/v1`.
    pub base_url: &'a str,
    /// Its key, which is that of its session.
    pub api_key: &'a str,
    /// Name of the model.
    pub model: &'a str,
    /// What it has to do.
    pub task: &'a Task,
    /// Which of its group's episodes it plays.
    pub index: u32,
    /// The temperature that the policy is sampled at.
    pub temperature: f32,
    /// Most tokens of a completion.
    pub max_completion_length: usize,
}

/// Most roles of an environment.
pub const MAX_ROLES: usize = 16;

/// Bounds of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvironmentLimits {
    /// Most turns of the policy, at least 1. An episode that reaches it, or a lower number that it was given, ends as it is; see
    /// [`Action::last`].
    pub max_turns: usize,
    /// Longest call of one tool. The model reads that there was no answer.
    pub tool_timeout: Duration,
    /// Longest call of `reset` or `step`. A later answer fails the episode.
    pub step_timeout: Duration,
    /// Longest time from the call of `reset`, which follows the wait for a free environment, to the end. A longer episode fails.
    pub episode_timeout: Duration,
}

impl Default for EnvironmentLimits {
    fn default() -> Self {
        Self {
            max_turns: 16,
            tool_timeout: Duration::from_secs(60),
            step_timeout: Duration::from_secs(600),
            episode_timeout: Duration::from_secs(1800),
        }
    }
}

/// One turn of the policy as an environment sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action<'a> {
    /// Which turn of the episode it is, from 0, those of other roles included.
    pub turn: usize,
    /// The role that acts, by its place in [`EnvironmentFactory::roles`]; 0 without roles.
    pub role: usize,
    /// The completion as text, without its stop token.
    pub text: &'a str,
    /// Why the completion ended. Never [`StopReason::Length`]: such a turn ends the episode without a step.
    pub stop: StopReason,
    /// Whether it is the last turn that the episode may have.
    pub last: bool,
}

/// What follows a turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// The role that acts next, by its place in [`EnvironmentFactory::roles`]; 0 without roles.
    pub next_role: usize,
    /// Messages that this role gets before its turn: after its last completion, or, before its first turn, after the prompt
    /// of the task. Not read if `done`.
    pub messages: Vec<Message>,
    /// What the turn is worth by itself; `None` if only the whole episode is judged.
    pub reward: Option<f64>,
    /// What the turn is worth to other roles, which is added to their last turns; nothing for a role that had none.
    pub other_rewards: Vec<(usize, f64)>,
    /// Whether the episode is over.
    pub done: bool,
    /// Whether the turn is not trained on, whatever its reward.
    pub masked: bool,
    /// What happened in the turn, by name; summed over the turns of the episode.
    pub counts: BTreeMap<&'static str, u64>,
}

impl Observation {
    /// Counts one more `event`.
    pub fn count(&mut self, event: &'static str) {
        *self.counts.entry(event).or_default() += 1;
    }
}

/// Why an environment failed. The episode is not trained on, and is counted as failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// The call failed.
    #[error("environment {environment} failed in turn {turn}: {evidence}")]
    Failed {
        /// Its name.
        environment: String,
        /// The turn, from 0.
        turn: usize,
        /// What happened.
        evidence: String,
    },
    /// It did not answer in time.
    #[error("environment {environment} gave no answer in turn {turn} within {seconds:.1} s")]
    TimedOut {
        /// Its name.
        environment: String,
        /// The turn, from 0.
        turn: usize,
        /// Its limit, seconds.
        seconds: f64,
    },
    /// Nothing to play it with became free.
    #[error(
        "the episode waits for a free environment {environment}, and none became free within {seconds:.0} s; allow more of \
         them, or a longer `deadlines.wait_s`"
    )]
    NoneFree {
        /// Its name.
        environment: String,
        /// The limit, seconds.
        seconds: f64,
    },
    /// The episode took too long.
    #[error(
        "the episode in environment {environment} was not over after {seconds:.0} s, in turn {turn}; allow it more time, \
         fewer turns or fewer tokens"
    )]
    EpisodeTooLong {
        /// Its name.
        environment: String,
        /// The turn, from 0.
        turn: usize,
        /// Its limit, seconds.
        seconds: f64,
    },
    /// It names a role that it does not have.
    #[error("environment {environment} names role {role} in turn {turn}; it has {roles}")]
    Role {
        /// Its name.
        environment: String,
        /// The turn, from 0.
        turn: usize,
        /// What it named.
        role: usize,
        /// How many it has.
        roles: usize,
    },
    /// A reward is not a finite number.
    #[error("environment {environment} rewards turn {turn} with {reward}, which is not a finite number")]
    Reward {
        /// Its name.
        environment: String,
        /// The turn, from 0.
        turn: usize,
        /// What it gave.
        reward: f64,
    },
}
