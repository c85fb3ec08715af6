//! What a trajectory is worth: built-in reward functions and their weighted sum.
//!
//! # Layout
//! - [`reward`]: [`Reward`], the one trait that every reward implements, and [`RewardInput`], what it sees
//! - [`set`]: [`RewardSet`], the weighted sum that keeps every component by name
//! - [`spec`]: [`RewardSpec`], a reward as a recipe states it, and its checked construction
//! - [`math`], [`gsm8k`], [`exact`], [`regex`], [`format`](mod@format), [`length`]: the built-ins, one pure function each
//! - [`error`]: what can go wrong, [`RewardError`]
//!
//! # Invariants
//! - A reward that fails is recorded as failed. It never turns into a score of 0 unless the recipe says so, and then
//!   the failure is still recorded.
//! - Every value that leaves a [`RewardSet`] is finite.
//! - Nothing here waits, starts threads or reads a clock: time limits and concurrency belong to the caller.
//!
//! ```
//! use rewards::{RewardInput, RewardKind, RewardSet, RewardSpec};
//! use trajectory::{Prompt, Task, TaskId};
//!
//! let set = RewardSet::from_specs(&[RewardSpec::new(RewardKind::Math)])?;
//! let task = Task {
//!     id: TaskId(0),
//!     prompt: Prompt::Text("37+48=".into()),
//!     answer: Some("85".into()),
//!     columns: Default::default(),
//! };
//! let input = RewardInput {
//!     task: &task,
//!     index: 0,
//!     text: "so it is \\boxed{85}",
//!     completion_tokens: 7,
//!     truncated: false,
//!     max_completion_length: 16,
//! };
//! # let mut context = std::task::Context::from_waker(std::task::Waker::noop());
//! # let std::task::Poll::Ready(score) = std::pin::pin!(set.score(&input)).poll(&mut context) else { unreachable!() };
//! # let score = score?;
//! // let score = set.score(&input).await?;
//! assert_eq!(score.total, Some(1.0));
//! # Ok::<(), rewards::RewardError>(())
//! ```

#[cfg(target_os = "linux")]
pub mod code;
pub mod error;
pub mod exact;
pub mod format;
pub mod gsm8k;
pub mod length;
pub mod math;
pub mod regex;
pub mod reward;
#[cfg(target_os = "linux")]
pub mod sandbox;
pub mod set;
pub mod spec;

pub use error::RewardError;
pub use reward::{BoxFuture, Builtin, Reward, RewardInput, TrajectoryRef};
pub use set::{OnError, RewardSet, WeightedReward};
pub use spec::{Gsm8kMethod, RewardKind, RewardSpec};

#[cfg(test)]
mod testing;
