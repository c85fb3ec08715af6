//! Rewards of trajectories: built-in functions, functions of users, reward models, and their weighted sum.
//!
//! # Layout
//! - [`reward`]: [`Reward`], the one trait that every reward implements, its input ([`RewardInput`]) and its result
//!   ([`Outcome`])
//! - [`set`]: [`RewardSet`], the weighted sum that keeps every component by name
//! - [`spec`], [`registry`]: the table of a reward in a recipe, the kinds of rewards, and how they are built
//! - [`math`], [`math_dapo`], [`hendrycks`], [`gsm8k`], [`countdown`], [`exact`], [`regex`], [`format`](mod@format),
//!   [`length`], [`repetition`]: built-ins, one pure function each
//! - [`python`]: functions of the user, in the process pool of `host`
//! - [`reward_model`]: reward models, in this process or behind a server
//! - [`function`]: rewards that are Rust functions, also of users; [`limited`]: a timeout and a limit on concurrency for any
//! - [`http`], [`judge`]: reward servers and language models as judges, over one HTTP client
//! - `code`: programs against tests, in the sandbox of `host` (Linux)
//! - [`load`]: counters and latencies of a reward
//! - [`error`]: the errors, [`RewardError`]
//!
//! # Invariants
//! - A reward that fails is recorded as failed. It is a score of 0 only if the recipe sets that, and then the failure is still
//!   recorded.
//! - Every value that leaves a [`RewardSet`] is finite.
//! - A reward that hangs or crashes costs the trajectory that it was called for, and no other.
//!
//! ```
//! use rewards::{Registry, RewardContext, RewardInput, RewardSet, RewardSpec};
//! use trajectory::{Prompt, Task, TaskId};
//!
//! let specs = [RewardSpec::new("math")];
//! let set = RewardSet::from_specs(&specs, &Registry::builtin(), &RewardContext::default())?;
//! let task = Task {
//!     id: TaskId(0),
//!     prompt: Prompt::Text("37+48=".into()),
//!     answer: Some("85".into()),
//!     columns: Default::default(),
//! };
//! let inputs = [RewardInput::text(&task, "so it is \\boxed{85}")];
//! # let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
//! let scores = runtime.block_on(set.score(&inputs))?;
//! assert_eq!(scores[0].total, Some(1.0));
//! # Ok::<(), rewards::RewardError>(())
//! ```

#[cfg(target_os = "linux")]
pub mod code;
pub mod countdown;
pub mod criterion;
pub mod error;
pub mod exact;
pub mod format;
pub mod function;
pub mod gsm8k;
pub mod hendrycks;
pub mod http;
pub mod judge;
pub mod length;
pub mod limited;
pub mod load;
pub mod math;
pub mod math_dapo;
pub mod python;
pub mod regex;
pub mod registry;
pub mod repetition;
pub mod reward;
pub mod reward_model;
pub mod set;
pub mod spec;

pub use criterion::Criterion;
pub use error::RewardError;
pub use function::{Builtin, FunctionError, FunctionInput};
pub use limited::Limited;
pub use load::{Latency, Load, LoadCounts};
pub use registry::{Registry, RewardContext, RewardKind};
pub use reward::{BoxFuture, Judged, Outcome, Reward, RewardInput, Scope, TrajectoryRef};
pub(crate) use set::join;
pub use set::{OnError, PartScore, RewardSet, WeightedReward};
pub use spec::RewardSpec;

#[cfg(test)]
mod testing;
