//! Python code of the user, called in processes that can be killed.
//!
//! # Layout
//! - `user_code.py`, `worker.py`: the Python side, embedded; between the two runs an *adapter*, the Python source that finds
//!   the user's code and calls it. `function.py` is the adapter of plain functions ([`FUNCTION_ADAPTER`]); rewards have one for
//!   the conventions of other frameworks
//! - `fork_server`: the process that imports the code once and forks the workers
//! - `session`: workers that keep state for one caller; `spawner`: starts workers
//! - `pool`: the queue and the workers; `batch`: the calls that one worker makes, and what becomes of each when it ends badly
//! - `protocol`, `log`: the messages of the processes, and their output
//!
//! # Ends of processes
//! A call that takes longer than its timeout ends with its whole process group, and with what left the group: a worker's
//! orphans become children of the fork server, which kills them. All processes end with the pool, and when this process is
//! killed. Only if this process and the fork server are killed at the same moment can a program survive that user code started
//! (by `subprocess`, not by `fork`).
//!
//! Invariant: no call is lost and none is charged for another: see `batch`. A worker keeps no state from one call to the next
//! that a call may rely on: any worker may get any call; but for a [`Session`], which has its worker for itself.

mod batch;
mod fork_server;
mod log;
mod pool;
mod protocol;
mod session;
mod spawner;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::Handle;

pub use self::fork_server::ForkServer;
pub use self::pool::{PendingCall, PoolOptions, ProcessPool};
pub use self::protocol::LoadedCode;
pub use self::session::{Session, SessionOptions, SessionPool};

/// Adapter of a plain function: a call is `{"args": [..], "kwargs": {..}}`, and its result any JSON value.
///
/// Its configuration has `path`, which is `file.py:function` or `module:function`, or `source` and `function`.
pub const FUNCTION_ADAPTER: &str = include_str!("function.py");

/// Variables that every process gets; a name that ends in `*` matches every name with that prefix.
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
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);
/// Default memory limit of a worker, MiB.
pub const MEMORY_MB: u64 = 4096;

/// Python code, and how the processes that call it are started.
#[derive(Debug)]
pub struct PythonCode {
    /// Interpreter: a name to be found on `PATH`, or a path.
    pub interpreter: String,
    /// Python source that finds the code and calls it; `user_code.py` says what it defines.
    pub adapter: &'static str,
    /// Argument of the adapter's `load`.
    pub config: Value,
    /// All variables of the processes; [`environment`] chooses them.
    pub environment: BTreeMap<String, String>,
    /// File that what the processes print is appended to.
    pub log: PathBuf,
    /// Longest call. At most a year counts.
    pub timeout: Duration,
    /// MiB that a worker may allocate beyond what it shares with the fork server.
    pub memory_mb: u64,
    /// Where the pool waits for its processes.
    pub runtime: Handle,
}

impl PythonCode {
    /// Code without a timeout, with the default memory limit and no variables of the environment.
    #[must_use]
    pub fn new(
        interpreter: &str,
        adapter: &'static str,
        config: Value,
        log: PathBuf,
        runtime: Handle,
    ) -> Self {
        Self {
            interpreter: interpreter.to_owned(),
            adapter,
            config,
            environment: BTreeMap::new(),
            log,
            timeout: MAX_TIMEOUT,
            memory_mb: MEMORY_MB,
            runtime,
        }
    }
}

/// Why the processes cannot be started, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct StartError {
    /// Evidence and remedy.
    pub reason: String,
}

impl From<String> for StartError {
    fn from(reason: String) -> Self {
        Self { reason }
    }
}

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// It took longer than the timeout, and was killed.
    #[error("the call took longer than its timeout")]
    Timeout,
    /// It raised an exception, crashed, or could not be made.
    #[error("{reason}")]
    Failed {
        /// The reason, with the end of the traceback or of the output.
        reason: String,
    },
}

/// The variables of `all` that the processes get: no secrets unless they are in `named`, no GPU, one thread for OpenMP.
#[must_use]
pub fn environment(all: &BTreeMap<String, String>, named: &[String]) -> BTreeMap<String, String> {
    let listed = |name: &str| {
        ENVIRONMENT.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => *allowed == name,
        })
    };
    let kept = all.iter().filter(|(name, _)| listed(name) || named.contains(name));
    let mut environment: BTreeMap<_, _> = kept.map(|(name, value)| (name.clone(), value.clone())).collect();
    // GPUs belong to the policy. Threads of tokenizers and OpenMP do not survive a fork, and samplers use the cores; a
    // recipe that names the variable overrides this.
    environment.entry("OMP_NUM_THREADS".to_owned()).or_insert_with(|| "1".to_owned());
    for (name, value) in [("CUDA_VISIBLE_DEVICES", ""), ("TOKENIZERS_PARALLELISM", "false")] {
        if !named.iter().any(|chosen| chosen == name) {
            environment.insert(name.to_owned(), value.to_owned());
        }
    }
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_kept_back_unless_they_are_named() {
        let all = ["PATH", "LC_ALL", "LANG", "WANDB_API_KEY", "JUDGE_KEY", "CUDA_VISIBLE_DEVICES"];
        let all = all.map(|name| (name.to_owned(), name.to_lowercase())).into();
        let kept = environment(&all, &["JUDGE_KEY".to_owned()]);
        let names: Vec<_> = kept.keys().map(String::as_str).collect();
        let own = ["CUDA_VISIBLE_DEVICES", "JUDGE_KEY", "LANG", "LC_ALL", "OMP_NUM_THREADS", "PATH"];
        assert_eq!(names, [&own[..], &["TOKENIZERS_PARALLELISM"]].concat());
        assert_eq!(kept["CUDA_VISIBLE_DEVICES"], "");
    }
}
