//! `python`: a function of the user, as it was written for TRL, verl, OpenRLHF, AReaL, slime or verifiers, called in the
//! process pool of `host`.
//!
//! # Layout
//! - `dialects.py`: the adapter of the pool, embedded: how functions are found, recognised and called
//! - `item`: a trajectory as the arguments of a call
//! - `math_verify`: a pool that runs Math-Verify
//!
//! Invariant: no input is lost and none is charged for another: the pool sees to it. A function that takes lists sees the
//! trajectories of one group, unless the recipe sets `scope`.

mod item;
mod math_verify;

use std::time::Duration;

use host::python::{CallError, ForkServer, MEMORY_MB, PendingCall, PoolOptions, ProcessPool, PythonCode};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use self::item::ItemFields;
use crate::load::{Load, WaitingTrajectory};
use crate::registry::{RewardContext, RewardKind};
use crate::{BoxFuture, Judged, Outcome, Reward, RewardError, RewardInput, RewardSpec, Scope};

pub use self::math_verify::math_verify;

/// The adapter that calls reward functions.
const ADAPTER: &str = include_str!("dialects.py");
/// Dialects that a recipe may name.
const DIALECTS: [&str; 10] = [
    "auto",
    "trl",
    "verl",
    "verl_batch",
    "openrlhf",
    "areal",
    "slime",
    "slime_group",
    "verifiers",
    "verifiers_group",
];
/// Default number of processes of a reward.
const WORKERS: usize = 2;
/// Default for the most trajectories of a call.
const BATCH: usize = 64;

/// The kind for the registry.
pub(crate) fn kind() -> RewardKind {
    const PARAMETERS: &[&str] = &[
        "path",
        "function",
        "dialect",
        "python",
        "workers",
        "batch",
        "memory_mb",
        "environment",
        "parameters",
        "scope",
    ];
    RewardKind::new("python", PARAMETERS, &["path"], |spec, context| {
        Ok(Box::new(PythonReward::new(spec, context)?))
    })
}

/// A Python function behind a pool of processes.
#[derive(Debug)]
pub struct PythonReward {
    name: String,
    function: FunctionDescription,
    /// One call of the function takes many trajectories.
    takes_lists: bool,
    /// Why workers are new processes, if they are.
    spawn: Option<String>,
    scope: Scope,
    /// Most trajectories of a call that is not for a group.
    batch: usize,
    /// Most trajectories of a group in training; 0 if unknown.
    group_size: usize,
    timeout: Duration,
    fields: ItemFields,
    load: Load,
    pool: ProcessPool,
}

/// The function as `dialects.py` describes it.
#[derive(Clone, Debug, Deserialize)]
struct FunctionDescription {
    dialect: String,
    /// Its name.
    function: String,
    /// Fields that items must have beside those that all have.
    needs: Vec<String>,
    /// It compares the trajectories of a group.
    group: bool,
}

/// The result of a call: an outcome, or a value that JSON cannot carry.
#[derive(Debug, Deserialize)]
struct CallResult {
    value: Option<f64>,
    #[serde(default)]
    details: Map<String, Value>,
    not_finite: Option<String>,
}

impl PythonReward {
    /// Starts the processes and blocks until the file is imported.
    ///
    /// # Errors
    /// The function cannot be used: no such file, a failed import, an ambiguous choice, no interpreter.
    pub fn new(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        Self::start(spec, context, None)
    }

    /// Starts the processes; `source` is the text of a module of rlrun instead of the user's file.
    fn start(spec: &RewardSpec, context: &RewardContext, source: Option<&str>) -> Result<Self, RewardError> {
        let name = spec.name().to_owned();
        let failed = |reason: String| RewardError::Start { reward: name.clone(), reason };
        let runtime = context.runtime(spec)?;
        check(spec, source).map_err(failed)?;
        let timeout = spec.timeout();
        let config = json!({
            "path": spec.path.as_ref().filter(|_| source.is_none()).map(|path| path.display().to_string()),
            "source": source,
            "function": spec.function.as_ref().filter(|_| source.is_none()),
            "dialect": spec.dialect.as_deref().unwrap_or("auto"),
            "parameters": spec.parameters,
        });
        let named = spec.environment.as_deref().unwrap_or_default();
        let server = ForkServer::start(PythonCode {
            interpreter: spec.python.clone().unwrap_or_else(|| "python3".to_owned()),
            adapter: ADAPTER,
            config,
            environment: host::python::environment(&context.environment, named),
            log: context.scratch.join(format!("reward_{}.log", file_name(&name))),
            timeout,
            memory_mb: spec.memory_mb.unwrap_or(MEMORY_MB),
            runtime: runtime.clone(),
        });
        let server = server.map_err(|error| failed(error.reason))?;
        let loaded = server.loaded().clone();
        let function: FunctionDescription =
            serde_json::from_value(loaded.description).map_err(|error| failed(error.to_string()))?;
        let scope = scope(spec, &function, loaded.batch).map_err(failed)?;
        let workers = spec.workers.unwrap_or(WORKERS).min(spec.concurrency);
        // Items of an `async def` are calls at the same time too.
        let most = if loaded.concurrent { spec.concurrency / workers } else { usize::MAX };
        let batch = spec.batch.unwrap_or(BATCH).min(most);
        let whole_groups = loaded.batch && scope == Scope::Group;
        let pool = ProcessPool::start(server, PoolOptions { workers, max_batch: batch, whole_groups });
        Ok(Self {
            name,
            takes_lists: loaded.batch,
            spawn: loaded.spawn,
            scope,
            batch,
            group_size: context.group_size,
            timeout,
            fields: ItemFields::new(&function.needs, context.decode.clone(), context.max_steps),
            function,
            load: Load::default(),
            pool,
        })
    }

    /// Name of the dialect in which the function is called.
    #[must_use]
    pub fn dialect(&self) -> &str {
        &self.function.dialect
    }

    /// Name of the function.
    #[must_use]
    pub fn function(&self) -> &str {
        &self.function.function
    }

    /// Why workers are new processes instead of forks of one that has imported the file, if they are.
    #[must_use]
    pub fn spawn_reason(&self) -> Option<&str> {
        self.spawn.as_deref()
    }

    /// How many workers ended in a call and were replaced: killed, crashed, or out of memory.
    #[must_use]
    pub fn replaced(&self) -> u64 {
        self.pool.replaced()
    }

    /// Process ids now: of the fork server, then of the workers.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.pool.processes()
    }

    /// The batch that one call of the function gets.
    fn sees(&self) -> String {
        match (self.takes_lists, self.scope) {
            (true, Scope::Group) if self.group_size == 0 => {
                "called once per group of completions of a task".to_owned()
            }
            (true, Scope::Group) => format!(
                "called once per group: the {} completions of a task in training, those that it samples of a task in an \
                 evaluation",
                self.group_size
            ),
            (true, Scope::Trajectory) => format!(
                "called with 1 to {} completions of any tasks, those that happen to wait: it must judge each by itself",
                self.batch
            ),
            (false, _) => "called once per completion".to_owned(),
        }
    }

    fn error(&self, input: &RewardInput<'_>, error: CallError) -> RewardError {
        let trajectory = input.trajectory();
        match error {
            CallError::Timeout => trajectory.timed_out(&self.name, self.timeout),
            CallError::Failed { reason } => trajectory.failed(&self.name, reason),
        }
    }

    /// Waits for the outcome of an input.
    async fn outcome(
        &self,
        input: &RewardInput<'_>,
        waiting: WaitingTrajectory<'_>,
        call: Result<PendingCall, String>,
    ) -> Judged {
        let failed = |reason: String| input.trajectory().failed(&self.name, reason);
        let mut call = call.map_err(failed)?;
        call.started().await;
        let _running = waiting.begin();
        let result = call.result().await.map_err(|error| self.error(input, error))?;
        let CallResult { value, details, not_finite } =
            serde_json::from_value(result).map_err(|error| failed(error.to_string()))?;
        match not_finite.map(|text| text.parse()) {
            None => Ok(Outcome { value, details }),
            Some(Ok(value)) => {
                let trajectory = input.trajectory();
                Err(RewardError::NotFinite { reward: self.name.clone(), trajectory, value })
            }
            Some(Err(error)) => Err(failed(format!("the value is not a number: {error}"))),
        }
    }

    /// Submits a call for each input.
    fn submit(&self, inputs: &[RewardInput<'_>]) -> Vec<Result<PendingCall, String>> {
        let items: Vec<_> = inputs.iter().map(|input| self.fields.item(input)).collect();
        if self.takes_lists && self.scope == Scope::Group {
            // A group without one of its items would be scored as another group.
            if let Some(Err(reason)) = items.iter().find(|item| item.is_err()) {
                return inputs.iter().map(|_| Err(reason.clone())).collect();
            }
        }
        let mut calls = self.pool.submit(items.iter().flatten().cloned().collect()).into_iter();
        let dropped = || "the run ended".to_owned();
        items.into_iter().map(|item| item.and_then(|_| calls.next().ok_or_else(dropped))).collect()
    }
}

impl Reward for PythonReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn scope(&self) -> Scope {
        self.scope
    }

    fn about(&self) -> Option<String> {
        let how = self
            .spawn_reason()
            .map_or(String::new(), |reason| format!("; each process imports it again: {reason}"));
        let (function, dialect) = (self.function(), self.dialect());
        Some(format!("function `{function}` in the dialect of {dialect}, {}{how}", self.sees()))
    }

    fn load(&self) -> &Load {
        &self.load
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        Box::pin(async move {
            // All wait before the first is answered: they may be one call.
            let waiting: Vec<_> = inputs.iter().map(|_| self.load.wait()).collect();
            let calls = inputs.iter().zip(waiting).zip(self.submit(inputs));
            let outcomes = calls.map(|((input, waiting), call)| {
                Box::pin(self.outcome(input, waiting, call)) as BoxFuture<'_, _>
            });
            crate::join(outcomes.collect::<Vec<_>>().into_iter()).await
        })
    }
}

/// Checks the values that can be checked before a process starts.
fn check(spec: &RewardSpec, source: Option<&str>) -> Result<(), String> {
    let dialect = spec.dialect.as_deref().unwrap_or("auto");
    if !DIALECTS.contains(&dialect) {
        return Err(format!("there is no `dialect` \"{dialect}\"; there are {}", DIALECTS.join(", ")));
    }
    for (key, value) in
        [("workers", spec.workers), ("batch", spec.batch), ("concurrency", Some(spec.concurrency))]
    {
        if value == Some(0) {
            return Err(format!("`{key}` is 0; it must be at least 1"));
        }
    }
    if !(spec.timeout_s.is_finite() && spec.timeout_s > 0.0) {
        return Err(format!("`timeout_s` is {}; it must be above 0", spec.timeout_s));
    }
    if spec.memory_mb == Some(0) {
        return Err("`memory_mb` is 0; it must be at least 1".to_owned());
    }
    let path = spec.path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let file = path.rsplit_once(':').map_or(path.as_str(), |(file, _)| file);
    let exists = |path: &str| std::path::Path::new(path).exists();
    if source.is_none() && file.ends_with(".py") && !exists(&path) && !exists(file) {
        return Err(format!(
            "there is no file {file}; `path` is a Python file, or a module with `:function`"
        ));
    }
    Ok(())
}

/// Whether the function gets single trajectories or groups. One that takes lists gets groups unless the recipe sets `scope`:
/// it may compare the trajectories that it gets, and which others wait at that moment depends on timing alone.
fn scope(spec: &RewardSpec, function: &FunctionDescription, takes_lists: bool) -> Result<Scope, String> {
    match spec.scope {
        Some(Scope::Trajectory) if function.group => Err(format!(
            "functions of dialect {} compare the trajectories of a group, so that `scope` cannot be \"trajectory\"",
            function.dialect
        )),
        Some(scope) => Ok(scope),
        None if takes_lists => Ok(Scope::Group),
        None => Ok(Scope::Trajectory),
    }
}

/// A name as part of a file name: other characters become `_`.
fn file_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    name.chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_file_names() {
        assert_eq!(file_name("my reward/../x"), "my_reward_.._x");
    }
}
