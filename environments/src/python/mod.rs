//! `python`: environments of the user, as they were written for TRL, skyrl-gym or Gymnasium, or with plain `reset` and `step`.
//!
//! An episode has a process for itself, which is killed if a call takes too long, and used again by another episode if the
//! episode ended well.
//!
//! # Layout
//! - `environment.py`: the adapter of the processes, embedded: how environments are found, recognised and called
//! - `functions`: Python functions that are tools; `functions.py`: their adapter
//! - `schema.py`: JSON schemas of Python functions
//!
//! Invariant: an exception, a crash or a timeout of the environment fails its episode and no other. Exceptions of methods that
//! are tools are answers to the model, as in TRL.

mod functions;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use host::python::{CallError, ForkServer, MEMORY_MB, PythonCode, Session, SessionOptions, SessionPool};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokio::sync::Mutex;
use trajectory::{Message, Prompt, Task};

use crate::tools::{COUNTS, Tool, ToolError, ToolSet};
use crate::{
    Action, BoxFuture, Environment, EnvironmentContext, EnvironmentError, EnvironmentFactory,
    EnvironmentLimits, EnvironmentSpec, EnvironmentSpecError, MAX_ROLES, Observation, ToolCallFormat,
    ToolSchema,
};

pub(crate) use functions::PythonFunction;

/// The adapter: schemas, then environments.
const ADAPTER: &str = concat!(include_str!("schema.py"), "\n\n", include_str!("environment.py"));
/// Name of the environment.
const NAME: &str = "python";
/// Default number of processes: episodes that may be open at a time.
const PROCESSES: usize = 64;

/// Makes environments in processes of Python.
#[derive(Debug)]
pub struct PythonEnvironments {
    shared: Arc<PythonShared>,
}

/// What all episodes have in common.
#[derive(Debug)]
struct PythonShared {
    pool: SessionPool,
    found: FoundEnvironment,
    format: ToolCallFormat,
    limits: EnvironmentLimits,
    answer_chars: usize,
    mask_bad_calls: bool,
}

/// The environment as `environment.py` describes it.
#[derive(Clone, Debug, Deserialize)]
struct FoundEnvironment {
    /// Its name in the file.
    environment: String,
    /// The convention of its methods.
    convention: String,
    /// Its methods that are tools.
    tools: Vec<ToolSchema>,
    /// The roles that the policy plays.
    roles: Vec<String>,
}

/// What a call of `reset`, `step` or `end` gives.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PythonAnswer {
    messages: Vec<Message>,
    reward: Option<f64>,
    done: bool,
    /// The role that acts next.
    role: Option<String>,
    /// Rewards by role.
    rewards: BTreeMap<String, Option<f64>>,
}

/// What a call of a tool gives: one of both.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct MethodAnswer {
    text: Option<String>,
    error: Option<String>,
}

impl MethodAnswer {
    /// The text of an answer; what the call raised is for the model.
    fn of(answer: Value) -> Result<String, ToolError> {
        let Self { text, error } =
            serde_json::from_value(answer).map_err(|error| ToolError::Unusable(error.to_string()))?;
        text.ok_or_else(|| ToolError::Refused(error.unwrap_or_default()))
    }
}

/// A kind of environment whose processes run code of the user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessKind {
    /// The word in the recipe.
    pub(crate) name: &'static str,
    /// How the code is found and called, in Python.
    pub(crate) adapter: &'static str,
    /// What `path` has to be.
    pub(crate) wanted: &'static str,
    /// File of what the code prints.
    pub(crate) log: &'static str,
    /// Longest import and longest call.
    pub(crate) timeout: Duration,
}

impl ProcessKind {
    /// Starts Python and blocks until the file is imported. Returns the processes, and what the adapter says of the code.
    ///
    /// # Errors
    /// No path; no runtime; code that cannot be imported or used.
    pub(crate) fn start<D: DeserializeOwned>(
        self,
        spec: &EnvironmentSpec,
        context: &EnvironmentContext,
    ) -> Result<(SessionPool, D), EnvironmentSpecError> {
        let wrong = |key: &str, reason: String| EnvironmentSpecError::Value { key: key.to_owned(), reason };
        let Some(path) = &spec.path else {
            return Err(wrong("path", format!("is missing; {}", self.wanted)));
        };
        let Some(runtime) = &context.runtime else {
            let reason = format!("is `{}`, which needs a runtime that waits for processes", self.name);
            return Err(wrong("kind", reason));
        };
        let named = spec.environment.as_deref().unwrap_or_default();
        let server = ForkServer::start(PythonCode {
            interpreter: spec.python.clone().unwrap_or_else(|| "python3".to_owned()),
            adapter: self.adapter,
            config: json!({"path": path, "dialect": spec.dialect, "parameters": spec.parameters}),
            environment: host::python::environment(&context.variables, named),
            log: context.scratch.join(self.log),
            timeout: self.timeout,
            memory_mb: spec.memory_mb.unwrap_or(MEMORY_MB),
            runtime: runtime.clone(),
        });
        let server = server.map_err(|error| unusable(&error.reason))?;
        let found = serde_json::from_value(server.loaded().description.clone());
        let found = found.map_err(|error| unusable(&error.to_string()))?;
        let processes = spec.processes.unwrap_or(PROCESSES);
        Ok((SessionPool::start(server, SessionOptions { processes }), found))
    }
}

/// The error of code that cannot be used.
fn unusable(reason: &str) -> EnvironmentSpecError {
    EnvironmentSpecError::Value { key: "path".to_owned(), reason: format!("fails: {reason}") }
}

impl PythonEnvironments {
    /// Starts Python and blocks until the file is imported.
    ///
    /// # Errors
    /// An environment that cannot be used: no such file, a failed import, methods of no known convention.
    pub(crate) fn new(
        spec: &EnvironmentSpec,
        context: &EnvironmentContext,
    ) -> Result<Self, EnvironmentSpecError> {
        let kind = ProcessKind {
            name: NAME,
            adapter: ADAPTER,
            wanted: "name a Python file, or FILE.py:NAME",
            log: "environment.log",
            timeout: spec.limits().step_timeout,
        };
        let (pool, found) = kind.start::<FoundEnvironment>(spec, context)?;
        if found.roles.len() > MAX_ROLES {
            return Err(unusable(&format!(
                "it has {} roles; at most {MAX_ROLES} are possible",
                found.roles.len()
            )));
        }
        let shared = PythonShared {
            pool,
            found,
            format: spec.format.or(context.format).unwrap_or(ToolCallFormat::Json),
            limits: spec.limits(),
            answer_chars: spec.answer_chars(),
            mask_bad_calls: spec.mask_bad_calls.unwrap_or(false),
        };
        Ok(Self { shared: Arc::new(shared) })
    }
}

impl EnvironmentFactory for PythonEnvironments {
    fn name(&self) -> &str {
        NAME
    }

    fn limits(&self) -> EnvironmentLimits {
        self.shared.limits
    }

    fn about(&self) -> Option<String> {
        let FoundEnvironment { environment, convention, tools, roles } = &self.shared.found;
        let tools: Vec<&str> = tools.iter().map(|tool| &tool.name[..]).collect();
        let called = match &tools[..] {
            [] => String::new(),
            tools => format!(
                " with the tools {}, called in the form `{}`",
                tools.join(", "),
                self.shared.format.name()
            ),
        };
        let roles = if roles.is_empty() { String::new() } else { format!(", roles {}", roles.join(", ")) };
        let turns = self.shared.limits.max_turns;
        Some(format!(
            "`{NAME}`: `{environment}` in the convention of {convention}{called}{roles}; at most {turns} turns"
        ))
    }

    fn counts(&self) -> &'static [&'static str] {
        if self.shared.found.tools.is_empty() { &[] } else { COUNTS }
    }

    fn tools(&self) -> &[ToolSchema] {
        &self.shared.found.tools
    }

    fn roles(&self) -> &[String] {
        &self.shared.found.roles
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(PythonEpisode { shared: Arc::clone(&self.shared), session: Arc::default(), tools: None })
    }
}

/// The process of an episode, shared with the tools that call it.
type EpisodeSession = Arc<Mutex<Option<Session>>>;

/// One episode.
#[derive(Debug)]
struct PythonEpisode {
    shared: Arc<PythonShared>,
    session: EpisodeSession,
    /// The methods of the environment; `None` if none is a tool.
    tools: Option<ToolSet>,
}

impl PythonEpisode {
    /// Makes a call of the process.
    async fn call<T: for<'a> Deserialize<'a>>(
        &self,
        call: &Value,
        turn: usize,
    ) -> Result<T, EnvironmentError> {
        let failed = |evidence: String| {
            let environment = NAME.to_owned();
            EnvironmentError::Failed { environment, turn, evidence }
        };
        let mut session = self.session.lock().await;
        let Some(open) = session.as_mut() else { return Err(failed("its process has ended".to_owned())) };
        let seconds = self.shared.limits.step_timeout;
        let answer = open.call(call.to_string(), seconds).await.map_err(|error| match error {
            CallError::Timeout => EnvironmentError::TimedOut {
                environment: NAME.to_owned(),
                turn,
                seconds: seconds.as_secs_f64(),
            },
            CallError::Failed { reason } => failed(reason),
        })?;
        serde_json::from_value(answer).map_err(|error| failed(error.to_string()))
    }

    /// Waits for a free process.
    async fn occupy(&self) -> Result<(), EnvironmentError> {
        let mut session = self.session.lock().await;
        if session.is_none() {
            let opened = self.shared.pool.open().await.map_err(|error| EnvironmentError::Failed {
                environment: NAME.to_owned(),
                turn: 0,
                evidence: error.to_string(),
            })?;
            *session = Some(opened);
        }
        Ok(())
    }

    async fn open(&mut self, task: &Task) -> Result<Vec<Message>, EnvironmentError> {
        self.occupy().await?;
        let schemas = self.shared.found.tools.iter();
        let session = || Arc::clone(&self.session);
        let limits = self.shared.limits;
        // The process keeps the limit of a tool; its answer comes before the end of the turn.
        let of_set = EnvironmentLimits { tool_timeout: limits.step_timeout, ..limits };
        let tools: Vec<Box<dyn Tool>> = schemas
            .map(|schema| Box::new(PythonMethod { schema: schema.clone(), session: session(), limits }) as _)
            .collect();
        self.tools = (!tools.is_empty()).then(|| {
            ToolSet::new(tools, self.shared.format)
                .with_limits(of_set, self.shared.answer_chars)
                .masking_bad_calls(self.shared.mask_bad_calls)
        });
        let call = json!({"op": "reset", "row": row(task), "prompt": prompt(task), "seed": task.id.0});
        Ok(self.call::<PythonAnswer>(&call, 0).await?.messages)
    }

    async fn advance(&mut self, action: Action<'_>) -> Result<Observation, EnvironmentError> {
        let observation = match &self.tools {
            None => {
                let call = json!({"op": "step", "text": action.text, "role": action.role});
                self.observed(action, self.call(&call, action.turn).await?)?
            }
            Some(tools) => {
                let mut observation = tools.observe(action).await?;
                if observation.done || action.last {
                    observation.reward =
                        self.call::<PythonAnswer>(&json!({"op": "end"}), action.turn).await?.reward;
                }
                observation
            }
        };
        Ok(observation)
    }
}

impl PythonEpisode {
    fn observed(&self, action: Action<'_>, answer: PythonAnswer) -> Result<Observation, EnvironmentError> {
        let PythonAnswer { messages, reward, done, role, rewards } = answer;
        let roles = &self.shared.found.roles;
        let place = |name: &String| {
            roles.iter().position(|role| role == name).ok_or_else(|| EnvironmentError::Failed {
                environment: NAME.to_owned(),
                turn: action.turn,
                evidence: format!("it names the role {name:?}; its roles are {}", roles.join(", ")),
            })
        };
        let mut observation = Observation { messages, reward, done, ..Observation::default() };
        observation.next_role = role.as_ref().map(place).transpose()?.unwrap_or(action.role);
        for (role, reward) in &rewards {
            let (role, Some(reward)) = (place(role)?, reward) else { continue };
            if role == action.role {
                observation.reward = Some(observation.reward.unwrap_or(0.0) + reward);
            } else {
                observation.other_rewards.push((role, *reward));
            }
        }
        Ok(observation)
    }
}

impl Environment for PythonEpisode {
    fn acquire<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<(), EnvironmentError>> {
        Box::pin(self.occupy())
    }

    fn reset<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(self.open(task))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        Box::pin(self.advance(action))
    }
}

impl Drop for PythonEpisode {
    fn drop(&mut self) {
        // A session in the middle of a call is locked, and is dropped with the call.
        if let Some(session) = self.session.try_lock().ok().and_then(|mut session| session.take()) {
            session.finish();
        }
    }
}

/// A method of an environment that is a tool.
#[derive(Debug)]
struct PythonMethod {
    schema: ToolSchema,
    session: EpisodeSession,
    limits: EnvironmentLimits,
}

impl PythonMethod {
    async fn invoke(&self, arguments: &Map<String, Value>) -> Result<String, ToolError> {
        let call = json!({"op": "call", "name": self.schema.name, "arguments": arguments}).to_string();
        let mut session = self.session.lock().await;
        let gone = || ToolError::Unusable("its process has ended".to_owned());
        let limit = self.limits.tool_timeout;
        let answer = session.as_mut().ok_or_else(gone)?.call(call, limit).await;
        let answer = answer.map_err(|error| {
            ToolError::Unusable(match error {
                CallError::Timeout => format!(
                    "{} gave no answer within {:.0} s; its process was ended, and with it the state of the episode",
                    self.schema.name,
                    limit.as_secs_f64()
                ),
                failed => failed.to_string(),
            })
        })?;
        MethodAnswer::of(answer)
    }
}

impl Tool for PythonMethod {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call<'a>(&'a self, arguments: &'a Map<String, Value>) -> BoxFuture<'a, Result<String, ToolError>> {
        Box::pin(self.invoke(arguments))
    }
}

/// The columns of a task, with its answer.
pub(crate) fn row(task: &Task) -> Map<String, Value> {
    let mut row = task.columns.clone();
    if let Some(answer) = &task.answer {
        row.entry("answer").or_insert_with(|| Value::from(&answer[..]));
    }
    row
}

/// The prompt of a task as messages.
pub(crate) fn prompt(task: &Task) -> Vec<Value> {
    let message = |message: &Message| json!({"role": message.role, "content": message.content});
    match &task.prompt {
        Prompt::Text(text) => vec![message(&Message::new("user", text.clone()))],
        Prompt::Messages(messages) => messages.iter().map(message).collect(),
    }
}
