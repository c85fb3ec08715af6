//! `agent` and `sessions`: agents whose loop is their own. The policy is an endpoint to them.
//!
//! An `agent` is a Python function of the user, which is called for every episode in a process for itself. `sessions` are
//! played by agents of others, which start a session of the endpoint for each episode.
//!
//! # Layout
//! - `agent.py`: the adapter of the processes, embedded: how an agent is found and called
//! - `generators.py`: a part of it: rollout functions of TRL and generate functions of slime, and what they ask of their trainers
//!
//! Invariant: an exception, a crash or a timeout of an agent fails its episode and no other.

use std::sync::Arc;

use host::python::{CallError, SessionPool};
use serde::Deserialize;
use serde_json::json;
use trajectory::{Message, Task};

use crate::python::{ProcessKind, prompt, row};
use crate::{
    Action, AgentCall, AgentRunner, AgentSource, BoxFuture, Environment, EnvironmentContext,
    EnvironmentError, EnvironmentFactory, EnvironmentLimits, EnvironmentSpec, EnvironmentSpecError,
    GuessNumber, Observation, TicTacToe,
};

/// The adapter.
const ADAPTER: &str = concat!(include_str!("agent.py"), include_str!("generators.py"));
/// Name of agents that are started.
const NAME: &str = "agent";
/// Name of agents that come by themselves.
const AWAITED: &str = "sessions";

/// Agents that are started, as a Python function of the user.
#[derive(Debug)]
pub struct Agents {
    runner: Arc<AgentProcesses>,
    limits: EnvironmentLimits,
    script: Option<Arc<dyn EnvironmentFactory>>,
}

#[derive(Debug)]
struct AgentProcesses {
    pool: SessionPool,
    /// The function, and the arguments that it takes.
    found: FoundAgent,
    limits: EnvironmentLimits,
}

/// An agent as `agent.py` describes it.
#[derive(Clone, Debug, Deserialize)]
struct FoundAgent {
    agent: String,
    arguments: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct AgentAnswer {
    reward: Option<f64>,
}

impl Agents {
    /// Starts Python and blocks until the file is imported.
    ///
    /// # Errors
    /// An agent that cannot be used: no such file or function, a failed import, arguments that it is not given.
    pub(crate) fn new(
        spec: &EnvironmentSpec,
        context: &EnvironmentContext,
    ) -> Result<Self, EnvironmentSpecError> {
        let script = script(spec)?;
        let kind = ProcessKind {
            name: NAME,
            adapter: ADAPTER,
            wanted: "name the function of the agent, FILE.py:NAME",
            log: "agent.log",
            timeout: spec.limits().episode_timeout,
        };
        let (pool, found) = kind.start(spec, context)?;
        let limits = spec.limits();
        Ok(Self { runner: Arc::new(AgentProcesses { pool, found, limits }), limits, script })
    }
}

impl EnvironmentFactory for Agents {
    fn name(&self) -> &str {
        NAME
    }

    fn limits(&self) -> EnvironmentLimits {
        self.limits
    }

    fn about(&self) -> Option<String> {
        let FoundAgent { agent, arguments } = &self.runner.found;
        let (given, seconds) = (arguments.join(", "), self.limits.episode_timeout.as_secs_f64());
        Some(format!("`{NAME}`: `{agent}({given})` in a process for each episode, at most {seconds:.0} s"))
    }

    fn agents(&self) -> Option<AgentSource> {
        Some(AgentSource::Started(Arc::clone(&self.runner) as Arc<dyn AgentRunner>))
    }

    fn create(&self) -> Box<dyn Environment> {
        scripted(self.script.as_ref())
    }
}

impl AgentProcesses {
    async fn play(&self, call: AgentCall<'_>) -> Result<Option<f64>, EnvironmentError> {
        let failed =
            |evidence: String| EnvironmentError::Failed { environment: NAME.to_owned(), turn: 0, evidence };
        let AgentCall { base_url, api_key, model, task, index, temperature, max_completion_length } = call;
        let mut process = self.pool.open().await.map_err(|error| failed(error.to_string()))?;
        let arguments = json!({
            "base_url": base_url, "api_key": api_key, "model": model, "row": row(task), "messages": prompt(task),
            "seed": task.id.0, "index": index, "temperature": temperature,
            "max_completion_length": max_completion_length,
        });
        let seconds = self.limits.episode_timeout;
        let answer = process.call(arguments.to_string(), seconds).await.map_err(|error| match error {
            CallError::Timeout => EnvironmentError::EpisodeTooLong {
                environment: NAME.to_owned(),
                turn: 0,
                seconds: seconds.as_secs_f64(),
            },
            CallError::Failed { reason } => failed(reason),
        })?;
        process.finish();
        let answer: AgentAnswer =
            serde_json::from_value(answer).map_err(|error| failed(error.to_string()))?;
        Ok(answer.reward)
    }
}

impl AgentRunner for AgentProcesses {
    fn run<'a>(&'a self, call: AgentCall<'a>) -> BoxFuture<'a, Result<Option<f64>, EnvironmentError>> {
        Box::pin(self.play(call))
    }
}

/// Agents of others.
#[derive(Debug)]
pub struct AwaitedAgents {
    limits: EnvironmentLimits,
    script: Option<Arc<dyn EnvironmentFactory>>,
}

impl AwaitedAgents {
    /// With the limits of `spec`.
    ///
    /// # Errors
    /// A script that there is not.
    pub fn new(spec: &EnvironmentSpec) -> Result<Self, EnvironmentSpecError> {
        Ok(Self { limits: spec.limits(), script: script(spec)? })
    }
}

impl EnvironmentFactory for AwaitedAgents {
    fn name(&self) -> &str {
        AWAITED
    }

    fn limits(&self) -> EnvironmentLimits {
        self.limits
    }

    fn about(&self) -> Option<String> {
        let seconds = self.limits.episode_timeout.as_secs_f64();
        Some(format!("`{AWAITED}`: agents start a session for each episode, of at most {seconds:.0} s"))
    }

    fn agents(&self) -> Option<AgentSource> {
        Some(AgentSource::Awaited)
    }

    fn create(&self) -> Box<dyn Environment> {
        scripted(self.script.as_ref())
    }
}

/// The environment that a warm-up of agents is played in.
fn script(spec: &EnvironmentSpec) -> Result<Option<Arc<dyn EnvironmentFactory>>, EnvironmentSpecError> {
    let Some(kind) = &spec.script else { return Ok(None) };
    let of = EnvironmentSpec { kind: kind.clone(), ..spec.clone() };
    match &kind[..] {
        "guess_number" => Ok(Some(Arc::new(GuessNumber::new(&of)?))),
        "tic_tac_toe" => Ok(Some(Arc::new(TicTacToe::new(&of)?))),
        other => Err(EnvironmentSpecError::Value {
            key: "script".to_owned(),
            reason: format!("is \"{other}\"; there are scripted players of `guess_number` and `tic_tac_toe`"),
        }),
    }
}

/// An environment with the scripted player of `script`, or without one.
fn scripted(script: Option<&Arc<dyn EnvironmentFactory>>) -> Box<dyn Environment> {
    script.map_or_else(|| Box::new(Elsewhere) as Box<dyn Environment>, |script| script.create())
}

/// Stands where an environment with a loop is expected, as in a warm-up without a script: it says nothing, and ends at once.
#[derive(Debug)]
struct Elsewhere;

impl Environment for Elsewhere {
    fn reset<'a>(&'a mut self, _task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn step<'a>(&'a mut self, _action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(Observation { done: true, ..Observation::default() })))
    }
}
