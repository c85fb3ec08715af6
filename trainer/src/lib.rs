//! From batches to new policy versions.
//!
//! # Layout
//! - [`trainer`]: one training step, top to bottom
//! - [`algorithm`]: advantages, losses, how they add up
//! - [`batch`]: leased groups to rows; [`mod@plan`]: rows to micro-batches, shared among ranks;
//!   [`packing`]: a micro-batch as one token stream
//! - [`learner`]: forward, backward, clip, optimizer; [`policy_loss`]: the losses it runs
//! - [`adamw`] with its [`moments`], [`schedule`], [`checkpoint`]
//!
//! # Invariants
//! - A step is a function of its batch and of the state before it: the same groups in the same order give the same
//!   weights, bit for bit.
//! - The version goes up by one for every batch, after the optimizer and before anybody is told.

pub mod adamw;
pub mod algorithm;
pub mod batch;
pub mod checkpoint;
mod error;
pub mod learner;
mod moment_files;
pub mod moments;
mod norm;
pub mod packing;
pub mod plan;
pub mod policy_loss;
pub mod report;
pub mod schedule;
pub mod trainer;

pub use checkpoint::{Checkpoint, TrainerState};
pub use error::TrainerError;
pub use learner::{Learner, LearnerConfig};
pub use report::StepReport;
pub use trainer::{Trainer, TrainerConfig};
