//! Where users' code runs: a pool of Python processes that can be killed, and a sandbox for programs.
//!
//! # Layout
//! - [`python`]: calls of Python code in a pool of forked processes, with timeouts, memory limits and a log
//! - `sandbox`: untrusted programs, with limits on the files, calls and resources that they can use (Linux)
//! - `reaper`: kills the processes of both if this process is killed
//! - [`random`]: text that other processes cannot guess
//!
//! # Invariants
//! - No process outlives the pool or the run that started it, nor this process, also if that is killed.
//! - A call or a program that hangs, crashes or floods its output ends with an error and costs no other call.
//! - This crate knows nothing of rewards, environments or models: calls have JSON arguments and JSON results.
//!
//! ```no_run
//! # async fn example(runtime: tokio::runtime::Handle) -> Result<(), Box<dyn std::error::Error>> {
//! use host::python::{FUNCTION_ADAPTER, ForkServer, PoolOptions, ProcessPool, PythonCode};
//!
//! let config = serde_json::json!({"path": "tools.py:search"});
//! let code = PythonCode::new("python3", FUNCTION_ADAPTER, config, "search.log".into(), runtime);
//! let server = tokio::task::spawn_blocking(|| ForkServer::start(code)).await??;
//! let pool = ProcessPool::start(server, PoolOptions { workers: 2, max_batch: 1, whole_groups: false });
//! let call = pool.submit(vec![r#"{"args": ["weather"]}"#.to_owned()]).remove(0);
//! println!("{}", call.result().await?);
//! # Ok(())
//! # }
//! ```

pub mod python;
pub mod random;
mod reaper;
#[cfg(target_os = "linux")]
pub mod sandbox;
