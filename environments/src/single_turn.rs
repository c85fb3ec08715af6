//! One completion per task: the environment of runs without an environment.
//!
//! Invariant: it adds no message and no reward, so an episode is the prompt and one completion, and the rewards of the
//! recipe alone judge it.

use std::time::Duration;

use trajectory::{Message, Task};

use crate::{
    Action, BoxFuture, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits, Observation,
};

/// The policy answers the prompt once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SingleTurn;

impl EnvironmentFactory for SingleTurn {
    fn name(&self) -> &str {
        "single_turn"
    }

    fn limits(&self) -> EnvironmentLimits {
        // No key of a recipe could allow a completion more time.
        EnvironmentLimits { max_turns: 1, episode_timeout: Duration::MAX, ..EnvironmentLimits::default() }
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(*self)
    }
}

impl Environment for SingleTurn {
    fn reset<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn step<'a>(&'a mut self, _: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        let over = Observation { done: true, ..Observation::default() };
        Box::pin(std::future::ready(Ok(over)))
    }
}
