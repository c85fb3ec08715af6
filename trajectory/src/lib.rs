//! The shared vocabulary of rlrun.
//!
//! Every other crate speaks in these nouns; this one knows no runtime, no tensors and no files.
//!
//! # Layout
//! - [`version`]: [`PolicyVersion`], the clock of a run
//! - [`task`]: [`Task`], one dataset row as a prompt and what is known of its answer
//! - [`sample`]: [`Sample`], a trainable token stream whose parallel streams cannot disagree in length
//! - [`group`]: [`Group`] and [`Trajectory`], what the buffer carries from rollout to trainer
//!
//! # Invariants
//! - Tokens are the truth. Text is decoded from them for people and rewards and never goes back into a [`Sample`].
//! - A [`Sample`] whose streams differ in length cannot be constructed, nor deserialised.
//! - Nothing here reads a clock, an environment or a random source.
//!
//! ```
//! use trajectory::{PolicyVersion, Sample, SampleStreams, VersionRun};
//! let sample = Sample::new(SampleStreams {
//!     token_ids: vec![5, 6, 7],
//!     loss_mask: vec![false, true, true],
//!     behavior_logprobs: vec![0.0, -0.1, -0.2],
//!     versions: vec![VersionRun { version: PolicyVersion(3), len: 3 }],
//!     kept: None,
//!     experts: None,
//!     temperature: 1.0,
//! })?;
//! assert_eq!(sample.oldest_version().staleness_at(PolicyVersion(5)), 2);
//! # Ok::<(), trajectory::SampleError>(())
//! ```

pub mod group;
pub mod sample;
pub mod task;
pub mod version;

pub use group::{Branch, Component, Group, GroupId, Score, StopReason, Trajectory, Turn, episode_reward};
pub use sample::{KeptTokens, Sample, SampleError, SampleStreams, TokenExperts, VersionRun};
pub use task::{Message, Prompt, Task, TaskId};
pub use version::PolicyVersion;
