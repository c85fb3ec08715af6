//! `python`: a function of the user, as it was written for TRL, verl, OpenRLHF, AReaL, slime or verifiers, called in
//! processes that can be killed.
//!
//! # Layout
//! - `dialects.py`, `worker.py`: the Python side, embedded; how functions are found, recognised and called
//! - `zygote`: the parent process that imports the file once and forks the workers
//! - `pool`: the queue and the workers; `call`: one call and what becomes of its items when it ends badly
//! - `item`, `protocol`, `log`: what goes to the processes, and what comes back
//! - `math_verify`: a pool that runs Math-Verify
//!
//! # What ends with what
//! A call that takes longer than `timeout_s` ends with its whole process group, and with what left the group: a worker's
//! orphans become children of the parent process, which kills them. All processes end with the reward, and when rlrun is
//! killed. Only if rlrun and the parent process are killed at the same moment can a program survive that a function
//! started (by `subprocess`, not by `fork`).
//!
//! Invariant: no input is lost and none is charged for another: see `call`.

#[path = "../../../host/src/python/batch.rs"]
mod call;
mod item;
mod log;
mod math_verify;
#[path = "../../../host/src/python/pool.rs"]
mod pool;
mod protocol;
#[path = "../../../host/src/python/fork_server.rs"]
mod zygote;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::oneshot;

use self::call::{Failure, Job, Rules, Scored, Unit};
use self::item::Needs;
use self::log::Log;
use self::pool::Pool;
use self::protocol::{Config, Hello};
use self::zygote::{BOOTSTRAP, Setup, Zygote};
use crate::load::{Load, Waiting};
use crate::reaper::Reaper;
use crate::registry::{Kind, RewardContext};
use crate::{BoxFuture, Judged, Outcome, Reward, RewardError, RewardInput, RewardSpec, Scope};

pub use self::math_verify::math_verify;

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
/// Variables that every worker gets; a name that ends in `*` stands for all that begin like it.
const ENVIRONMENT: [&str; 16] = [
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_*",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
    "OMP_NUM_THREADS",
];
/// Longest timeout: a year, so that no sum of times overflows.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// Processes of a reward that does not say how many.
const WORKERS: usize = 2;
/// Most trajectories of a call that does not say how many.
const BATCH: usize = 64;
/// MiB that a worker may allocate if nothing is said.
const MEMORY_MB: u64 = 4096;

/// The kind for the registry.
pub(crate) fn kind() -> Kind {
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
    Kind::new("python", PARAMETERS, &["path"], |spec, context| {
        Ok(Box::new(PythonReward::new(spec, context)?))
    })
}

/// A Python function behind a pool of processes.
#[derive(Debug)]
pub struct PythonReward {
    name: String,
    hello: Hello,
    scope: Scope,
    /// Most trajectories of a call that is not for a group.
    batch: usize,
    /// Most trajectories of a group in training; 0 if that is not known.
    group_size: usize,
    timeout: Duration,
    needs: Needs,
    load: Load,
    pool: Pool,
}

impl PythonReward {
    /// Starts the processes and blocks until the file is imported.
    ///
    /// # Errors
    /// What keeps the function from being used: no such file, an import that fails, an unclear choice, no interpreter.
    pub fn new(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        Self::start(spec, context, None)
    }

    /// Starts the processes; `source` is a module of ours instead of the user's file.
    fn start(spec: &RewardSpec, context: &RewardContext, source: Option<&str>) -> Result<Self, RewardError> {
        let name = spec.name().to_owned();
        let failed = |reason: String| RewardError::Start { reward: name.clone(), reason };
        let runtime = context.runtime(spec)?;
        check(spec, source).map_err(failed)?;
        let timeout = spec.timeout().min(LONGEST);
        let log = context.scratch.join(format!("reward_{}.log", file_name(&name)));
        let log = Arc::new(
            Log::open(&log).map_err(|error| failed(format!("cannot write {}: {error}", log.display())))?,
        );
        let config = Config {
            path: spec.path.as_ref().filter(|_| source.is_none()).map(|path| path.display().to_string()),
            source: source.map(str::to_owned),
            function: spec.function.clone().filter(|_| source.is_none()),
            dialect: spec.dialect.clone().unwrap_or_else(|| "auto".to_owned()),
            parameters: spec.parameters.clone(),
            timeout_s: timeout.as_secs_f64(),
            memory_mb: spec.memory_mb.unwrap_or(MEMORY_MB),
            bootstrap: BOOTSTRAP,
        };
        let setup = Arc::new(Setup {
            python: spec.python.clone().unwrap_or_else(|| "python3".to_owned()),
            config,
            environment: environment(&context.environment, spec.environment.as_deref().unwrap_or_default()),
            log: Arc::clone(&log),
            runtime: runtime.clone(),
            reaper: Arc::new(Reaper::start().map_err(|error| failed(error.to_string()))?),
            closed: AtomicBool::new(false),
        });
        let parent = Zygote::start(&setup).map_err(failed)?;
        let hello = parent.hello.clone();
        if let Some(why) = &hello.spawn {
            let warning = format!("rlrun: workers are new processes, which start slowly: {why}\n");
            log.append(warning.as_bytes());
        }
        let scope = scope(spec, &hello).map_err(failed)?;
        let group = hello.batch && scope == Scope::Group;
        let rules = Rules { timeout, batch: hello.batch, concurrent: hello.concurrent, group };
        let workers = spec.workers.unwrap_or(WORKERS).min(spec.concurrency);
        // Items of an `async def` are calls at the same time too.
        let most = if hello.concurrent { spec.concurrency / workers } else { usize::MAX };
        let batch = spec.batch.unwrap_or(BATCH).min(most);
        let pool = Pool::start(setup, parent, rules, workers, batch);
        let needs = Needs::new(&hello, context.decode.clone(), context.max_steps);
        let (load, group_size) = (Load::default(), context.group_size);
        Ok(Self { name, hello, scope, batch, group_size, timeout, needs, load, pool })
    }

    /// Name of the dialect in which the function is called.
    #[must_use]
    pub fn dialect(&self) -> &str {
        &self.hello.dialect
    }

    /// Name of the function.
    #[must_use]
    pub fn function(&self) -> &str {
        &self.hello.function
    }

    /// Why workers are new processes instead of forks of one that has imported the file, if they are.
    #[must_use]
    pub fn spawn_reason(&self) -> Option<&str> {
        self.hello.spawn.as_deref()
    }

    /// How many workers ended in a call and were replaced: killed, crashed, or out of memory.
    #[must_use]
    pub fn replaced(&self) -> u64 {
        self.pool.replaced()
    }

    /// Process ids now: of the parent, then of the workers.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.pool.processes()
    }

    /// The batch that one call of the function gets.
    fn sees(&self) -> String {
        match (self.hello.batch, self.scope) {
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

    fn error(&self, input: &RewardInput<'_>, failure: Failure) -> RewardError {
        let trajectory = input.trajectory();
        match failure {
            Failure::Timeout => trajectory.timed_out(&self.name, self.timeout),
            Failure::NotFinite(value) => {
                RewardError::NotFinite { reward: self.name.clone(), trajectory, value }
            }
            Failure::Failed(reason) => trajectory.failed(&self.name, reason),
        }
    }

    /// Waits for what comes of an input.
    async fn hear(
        &self,
        input: &RewardInput<'_>,
        waiting: Waiting<'_>,
        answer: Result<Answer, Failure>,
    ) -> Judged {
        let scored = match answer {
            Ok(Answer { begun, scored }) => {
                // An error is a job that was never begun: its answer says why.
                let _ = begun.await;
                let _running = waiting.begin();
                scored.await.unwrap_or_else(|_| Err(Failure::Failed("the run ended".to_owned())))
            }
            Err(failure) => Err(failure),
        };
        let (value, details) = scored.map_err(|failure| self.error(input, failure))?;
        Ok(Outcome { value, details })
    }

    /// Puts inputs in line and returns where their answers will come.
    fn enqueue(&self, inputs: &[RewardInput<'_>]) -> Vec<Result<Answer, Failure>> {
        let mut jobs = Vec::with_capacity(inputs.len());
        let mut answers = Vec::with_capacity(inputs.len());
        for input in inputs {
            answers.push(self.needs.item(input).map_err(Failure::Failed).map(|item| {
                let ((reply, scored), (began, begun)) = (oneshot::channel(), oneshot::channel());
                jobs.push(Job { item, reply, began: Some(began), deaths: 0 });
                Answer { begun, scored }
            }));
        }
        if self.hello.batch && self.scope == Scope::Group {
            // A group that lacks one would be scored as another group.
            if let Some(Err(failure)) = answers.iter().find(|answer| answer.is_err()) {
                let failure = failure.clone();
                return inputs.iter().map(|_| Err(failure.clone())).collect();
            }
            self.pool.enqueue([Unit { jobs, alone: true }]);
        } else {
            self.pool.enqueue(jobs.into_iter().map(|job| Unit { jobs: vec![job], alone: false }));
        }
        answers
    }
}

/// What will be heard of a job: that a worker has it, and what came of it.
#[derive(Debug)]
struct Answer {
    begun: oneshot::Receiver<()>,
    scored: oneshot::Receiver<Result<Scored, Failure>>,
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
            .map_or(String::new(), |reason| format!("; each process imports it anew: {reason}"));
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
            let asked = inputs.iter().zip(waiting).zip(self.enqueue(inputs));
            let heard = asked.map(|((input, waiting), answer)| {
                Box::pin(self.hear(input, waiting, answer)) as BoxFuture<'_, _>
            });
            crate::join(heard.collect::<Vec<_>>().into_iter()).await
        })
    }
}

/// Values that no process needs to be started for to see that they are wrong.
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

/// Whether the function gets single trajectories or groups. One that takes lists gets groups unless the recipe says
/// otherwise: it may compare what it is given, and what else waits at that moment depends on timing alone.
fn scope(spec: &RewardSpec, hello: &Hello) -> Result<Scope, String> {
    match spec.scope {
        Some(Scope::Trajectory) if hello.group => Err(format!(
            "functions of dialect {} compare the trajectories of a group, so that `scope` cannot be \"trajectory\"",
            hello.dialect
        )),
        Some(scope) => Ok(scope),
        None if hello.batch => Ok(Scope::Group),
        None => Ok(Scope::Trajectory),
    }
}

/// What the processes get of the environment: no secrets unless the recipe names them.
fn environment(all: &BTreeMap<String, String>, named: &[String]) -> BTreeMap<String, String> {
    let listed = |name: &str| {
        ENVIRONMENT.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => *allowed == name,
        })
    };
    let kept = all.iter().filter(|(name, _)| listed(name) || named.contains(name));
    let mut environment: BTreeMap<_, _> = kept.map(|(name, value)| (name.clone(), value.clone())).collect();
    // The devices are for the policy. Threads of tokenizers and OpenMP do not survive a fork, and cores are shared with
    // samplers; who wants them sets the variable.
    environment.entry("OMP_NUM_THREADS".to_owned()).or_insert_with(|| "1".to_owned());
    for (name, value) in [("CUDA_VISIBLE_DEVICES", ""), ("TOKENIZERS_PARALLELISM", "false")] {
        if !named.iter().any(|chosen| chosen == name) {
            environment.insert(name.to_owned(), value.to_owned());
        }
    }
    environment
}

/// A name without what a file name cannot have.
fn file_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    name.chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_stay_here_unless_they_are_named() {
        let all = ["PATH", "LC_ALL", "LANG", "WANDB_API_KEY", "JUDGE_KEY", "CUDA_VISIBLE_DEVICES"];
        let all = all.map(|name| (name.to_owned(), name.to_lowercase())).into();
        let kept = environment(&all, &["JUDGE_KEY".to_owned()]);
        let names: Vec<_> = kept.keys().map(String::as_str).collect();
        let own = ["CUDA_VISIBLE_DEVICES", "JUDGE_KEY", "LANG", "LC_ALL", "OMP_NUM_THREADS", "PATH"];
        assert_eq!(names, [&own[..], &["TOKENIZERS_PARALLELISM"]].concat());
        assert_eq!(kept["CUDA_VISIBLE_DEVICES"], "");
    }

    #[test]
    fn names_become_names_of_files() {
        assert_eq!(file_name("my reward/../x"), "my_reward_.._x");
    }
}
