//! From tasks to scored groups.
//!
//! # Layout
//! - [`tasks`]: datasets, the arithmetic generator, the endless shuffled stream of tasks
//! - [`prompts`]: tasks as tokens, checked before any work is done
//! - [`engine`]: continuous batching over a paged cache
//! - [`applier`]: new weights, made ready beside the decoding
//! - [`curation`]: which tasks are drawn and which groups are kept
//! - [`scoring`]: rewards beside the generation, groups put together and handed to the buffer
//! - [`worker`]: the loop that ties them together; [`evaluate`]: the same engine without a buffer
//!
//! # Invariants
//! - A trajectory is a function of weights, prompt, seed, group and index.
//! - A slot that was admitted ends in a finalized group or goes back to the buffer.
//! - Every wait has a deadline, and its error says who waited for whom.

pub mod applier;
pub mod curation;
pub mod engine;
mod error;
pub mod evaluate;
pub mod prompts;
pub mod scoring;
pub mod tasks;
pub mod worker;

pub use engine::{
    Completion, Engine, EngineConfig, EngineCounts, Interruption, Network, Request, ServeOn, Served,
    StopRules,
};
pub use error::RolloutError;
pub use prompts::{Overlong, PromptSet};
pub use worker::{Doing, OnUpdate, Progress, Worker, WorkerConfig};
