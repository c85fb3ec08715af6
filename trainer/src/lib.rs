//! From batches to new policy versions.
//!
//! # Layout
//! - [`trainer`]: one training step, top to bottom
//! - [`algorithm`]: one file per algorithm, made of the parts of [`credit`] (advantages) and [`loss`]
//! - [`update`]: from a batch to its updates: [`batch`] (leased groups to rows), [`terms`] (what the loss needs to know of
//!   each row), [`objective`] (the loss over predictions), [`critic`]
//! - [`supervised`]: demonstrations and pairs
//! - [`learner`]: forward, backward, clip, optimizer; [`mod@plan`]: rows to micro-batches, shared among ranks;
//!   [`packing`]: a micro-batch as one token stream
//! - [`optimizer`]: AdamW with its [`moments`], Muon, Dion; [`schedule`]
//! - [`on_device`]: ranks that compute on a device
//! - [`lora`]: training a low-rank change of some weights, with its files
//! - [`checkpoint`]; [`colocation`]: a trainer that takes turns with a sampler
//! - [`collective`]: what ranks say to each other; [`lead`] and [`mod@follow`]: ranks that are processes
//!
//! # Invariants
//! - A step is a function of its batch and of the state before it: the same groups in the same order give the same
//!   weights, bit for bit.
//! - The version goes up by one for every batch, after the optimizer and before anybody is told.

mod adamw;
pub mod algorithm;
pub mod batch;
pub mod checkpoint;
pub mod collective;
pub mod colocation;
pub mod credit;
pub mod critic;
mod error;
mod exchange;
pub mod follow;
pub mod lead;
pub mod learner;
pub mod lora;
mod lora_files;
pub mod loss;
mod moment_files;
pub mod moments;
mod norm;
pub mod objective;
pub mod on_device;
pub mod optimizer;
pub mod packing;
mod pass;
pub mod plan;
pub mod publishing;
mod quarantine;
mod rank;
mod ranks;
pub mod report;
pub mod schedule;
mod shards;
pub mod supervised;
pub mod terms;

pub mod trainer;
pub mod update;

pub use checkpoint::{Checkpoint, TrainerState};
pub use collective::{Collective, CollectiveError};
pub use colocation::Colocation;
pub use error::TrainerError;
pub use follow::follow;
pub use lead::Leader;
pub use learner::{Frozen, Learner, LearnerConfig};
pub use on_device::{CollectivePlace, DeviceConfig, DeviceWeights, OptimizerPlace};
pub use publishing::Publishing;
pub use report::StepReport;
pub use trainer::{Companions, Trainer, TrainerConfig};
