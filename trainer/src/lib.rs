//! The trainer: turns leased batches of trajectory groups into new policy versions.
//!
//! # Layout
//! - [`trainer`]: one training step, top to bottom
//! - [`algorithm`]: one file per algorithm, which selects an [`advantage`] estimator and a [`loss`]
//! - [`update`]: the optimizer steps of one batch; [`batch`]: leased groups to rows; [`loss_inputs`]: advantages, masks
//!   and weights of each row; [`objective`]: the loss over the network's predictions; [`critic`]
//! - [`supervised`]: supervised fine-tuning on demonstrations, preference pairs, reward models
//! - [`learner`]: forward, backward with gradient accumulation over micro-batches, gradient clipping, optimizer step;
//!   [`microbatch`]: its size; [`mod@plan`]: rows to leaves and micro-batches, leaves to ranks; [`packing`]: a micro-batch as one token stream
//! - [`optimizer`]: AdamW with its [`moments`], Muon, Dion; [`schedule`]: the learning rate
//! - [`Frozen`]: a reference policy or a teacher; [`StateWeights`]: weights in f32, or a base that stays quantised
//! - [`on_device`]: ranks that compute on a GPU
//! - [`lora`]: low-rank adapters and their files
//! - [`outer_exchange`]: what changes the trained values between updates and publication
//! - [`checkpoint`]; [`colocation`]: a trainer and a sampler that share a device in turns
//! - [`lead`] and [`mod@follow`]: ranks that are processes; ranks communicate over the crate `collective`;
//!   [`rank_spans`]: what each rank does when
//!
//! # Invariants
//! - A step is a function of its batch and of the state before it: the same groups in the same order give the same
//!   weights, bit for bit.
//! - The policy version increases by one per batch, after the optimizer step and before the weights are published.

mod adamw;
pub mod advantage;
pub mod algorithm;
pub mod batch;
pub mod checkpoint;
pub mod colocation;
pub mod critic;
mod error;
pub mod follow;
mod frozen;
pub mod lead;
pub mod learner;
pub mod lora;
mod lora_files;
pub mod loss;
pub mod loss_inputs;
pub mod microbatch;
pub mod moments;
mod norm;
pub mod objective;
pub mod on_device;
pub mod optimizer;
mod optimizer_files;
pub mod outer_exchange;
pub mod packing;
pub mod parallel;
mod pass;
pub mod pipeline;
pub mod plan;
mod quarantine;
mod rank;
pub mod rank_spans;
mod ranks;
pub mod report;
pub mod schedule;
mod state_weights;
pub mod supervised;
pub mod token_log;
pub mod weight_publisher;

pub mod trainer;
pub mod update;
mod zero;

pub use checkpoint::{Checkpoint, TrainerState};
pub use colocation::Colocation;
pub use error::TrainerError;
pub use follow::{Followed, follow};
pub use frozen::{Frozen, FrozenWeights};
pub use lead::Leader;
pub use learner::{GradientSums, Learner, LearnerConfig, LearnerStep, TargetRows, UpdateParameters};
pub use on_device::{CollectivePlace, DeviceConfig, FrozenPlace, LearnerWeights, OptimizerPlace};
pub use outer_exchange::{ExchangeReport, OuterExchange};
pub use parallel::{ContextParallel, ParallelConfig};
pub use quarantine::expert_limits;
pub use report::StepReport;
pub use state_weights::StateWeights;
pub use trainer::{AuxiliaryModels, Trainer, TrainerConfig, TrainerParts};
pub use weight_publisher::WeightPublisher;
