//! Which environment a task is played in.
//!
//! Invariant: a task names an environment of the recipe, and never one of its own: data runs no code.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use environments::{BoxFuture, Environment, EnvironmentError, EnvironmentFactory, SingleTurn};
use trajectory::Task;

use super::{ExternalPlayer, MessageEncoder};
use crate::RolloutError;

/// Column of a task that names one of [`EpisodeConfig::named`].
pub const ENVIRONMENT_COLUMN: &str = "environment";

/// What episodes are played in.
#[derive(Clone, Debug)]
pub struct EpisodeConfig {
    /// The environment of tasks that name none.
    pub environment: EpisodeEnvironment,
    /// Other environments by name.
    pub named: BTreeMap<String, EpisodeEnvironment>,
    /// Most tokens of an episode, for each role; at most the context of the model.
    pub max_tokens: usize,
    /// Longest time in which no environment becomes free while episodes wait for one.
    pub wait: Duration,
}

/// [`EpisodeConfig::wait`] if nothing else is said.
const WAIT: Duration = Duration::from_secs(600);

/// An environment, and how its messages become tokens.
#[derive(Clone, Debug)]
pub struct EpisodeEnvironment {
    /// Makes the environments.
    pub factory: Arc<dyn EnvironmentFactory>,
    /// Tokens of their messages; `None` for environments that add none.
    pub encoder: Option<Arc<dyn MessageEncoder>>,
    /// Factor of a turn's reward for every turn before it.
    pub discount: f64,
    /// Plays its episodes, if their loop is elsewhere; `factory` then says name and limits alone.
    pub player: Option<Arc<dyn ExternalPlayer>>,
}

impl EpisodeConfig {
    /// One completion per task.
    #[must_use]
    pub fn single_turn() -> Self {
        Self::of(EpisodeEnvironment::new(Arc::new(SingleTurn), None), usize::MAX)
    }

    /// The same environment for all tasks; `max_tokens` as in [`EpisodeConfig::max_tokens`].
    #[must_use]
    pub fn of(environment: EpisodeEnvironment, max_tokens: usize) -> Self {
        Self { environment, named: BTreeMap::new(), max_tokens, wait: WAIT }
    }

    /// The environment of a task.
    ///
    /// # Errors
    /// A task that names an environment that there is not.
    pub fn of_task(&self, task: &Task) -> Result<&EpisodeEnvironment, RolloutError> {
        Ok(named_by(task, &self.named)?.unwrap_or(&self.environment))
    }

    /// The same, whose episodes are played by `player` where their environment has no loop.
    #[must_use]
    pub fn played_by(mut self, player: &Arc<dyn ExternalPlayer>) -> Self {
        let elsewhere = std::iter::once(&mut self.environment).chain(self.named.values_mut());
        for environment in elsewhere.filter(|environment| environment.factory.agents().is_some()) {
            environment.player = Some(Arc::clone(player));
        }
        self
    }

    /// Most roles of an environment; 1 without roles.
    #[must_use]
    pub fn most_roles(&self) -> usize {
        let all = std::iter::once(&self.environment).chain(self.named.values());
        all.map(EpisodeEnvironment::roles).max().unwrap_or(1)
    }
}

/// Which of `named` the column of a task names; `None` if it names none.
///
/// # Errors
/// A task that names something else.
pub fn named_by<'a, T>(task: &Task, named: &'a BTreeMap<String, T>) -> Result<Option<&'a T>, RolloutError> {
    // A column of that name means nothing to a recipe without named environments.
    let name = task.columns.get(ENVIRONMENT_COLUMN).filter(|name| !name.is_null() && !named.is_empty());
    let Some(name) = name else { return Ok(None) };
    let found = name.as_str().and_then(|name| named.get(name));
    let unknown = || RolloutError::NoEnvironment {
        task: task.id,
        name: name.to_string(),
        known: named.keys().cloned().collect::<Vec<_>>().join("`, `"),
    };
    found.map(Some).ok_or_else(unknown)
}

impl EpisodeEnvironment {
    /// Environments of `factory` whose turns have undiscounted rewards.
    #[must_use]
    pub fn new(factory: Arc<dyn EnvironmentFactory>, encoder: Option<Arc<dyn MessageEncoder>>) -> Self {
        Self { factory, encoder, discount: 1.0, player: None }
    }

    /// Number of roles; 1 without roles.
    #[must_use]
    pub fn roles(&self) -> usize {
        self.factory.roles().len().max(1)
    }

    /// Waits until `environment` has what it plays `task` with. `granted` counts such waits that are over: while others end, an
    /// episode is in line, and waits on.
    pub(super) async fn acquired(
        &self,
        environment: &mut dyn Environment,
        task: &Task,
        wait: Duration,
        granted: &AtomicU64,
    ) -> Result<(), EnvironmentError> {
        let mut acquiring = environment.acquire(task);
        loop {
            let before = granted.load(Ordering::Relaxed);
            match tokio::time::timeout(wait, &mut acquiring).await {
                Ok(acquired) => {
                    granted.fetch_add(1, Ordering::Relaxed);
                    return acquired;
                }
                Err(_) if granted.load(Ordering::Relaxed) > before => {}
                Err(_) => {
                    let environment = self.factory.name().to_owned();
                    return Err(EnvironmentError::NoneFree { environment, seconds: wait.as_secs_f64() });
                }
            }
        }
    }

    /// What `call` of an environment in turn `turn` gives within the limit of a turn.
    pub(super) async fn in_time<T>(
        &self,
        turn: usize,
        call: BoxFuture<'_, Result<T, EnvironmentError>>,
    ) -> Result<T, EnvironmentError> {
        let limit = self.factory.limits().step_timeout;
        let late = |_| EnvironmentError::TimedOut {
            environment: self.factory.name().to_owned(),
            turn,
            seconds: limit.as_secs_f64(),
        };
        tokio::time::timeout(limit, call).await.map_err(late)?
    }

    pub(super) fn encoder(&self) -> Result<&dyn MessageEncoder, RolloutError> {
        let environment = || self.factory.name().to_owned();
        self.encoder.as_deref().ok_or_else(|| RolloutError::NoEncoder { environment: environment() })
    }
}
