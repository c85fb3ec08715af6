//! From batches to new policy versions.
//!
//! # Layout
//! - [`trainer`]: one training step, top to bottom
//! - [`algorithm`]: advantages, losses, how they add up
//! - [`batch`]: leased groups to rows; [`mod@plan`]: rows to micro-batches, shared among ranks;
//!   [`packing`]: a micro-batch as one token stream
//! - [`learner`]: forward, backward, clip, optimizer; [`policy_loss`]: the losses it runs
//! - [`optimizer`]: AdamW with its [`moments`], Muon, Dion; [`schedule`]
//! - [`lora`]: training a low-rank change of some weights, with its files
//! - [`checkpoint`]
//!
//! # Invariants
//! - A step is a function of its batch and of the state before it: the same groups in the same order give the same
//!   weights, bit for bit.
//! - The version goes up by one for every batch, after the optimizer and before anybody is told.

mod adamw;
pub mod algorithm;
pub mod batch;
pub mod checkpoint;
mod error;
pub mod learner;
pub mod lora;
mod lora_files;
mod moment_files;
pub mod moments;
mod norm;
pub mod optimizer;
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
