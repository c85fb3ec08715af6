//! The program that connects all crates: recipe, command line, run directory and terminal.
//!
//! - [`recipe`]: one TOML file that defines a run, with the origin of every value
//! - [`program`]: what a program adds to every recipe, and its main function; [`args`], [`commands`]: the command line
//!   and its commands; [`allocator`]: the memory allocator of a program
//! - [`failpoints`]: failure injection for tests
//! - [`reward`]: rewards evaluated without a run; [`huggingface`]: models and datasets of the Hugging Face Hub
//! - `doctor`: the hardware and software that rlrun can use; `explain`: the meaning of a key of a recipe
//! - [`plan`]: batch arithmetic and memory of a recipe before it runs, and the search for its fastest settings; [`simulate`]: its steps in
//!   virtual time; [`fit`]: extrapolation of a run to more compute; `why`: where the time of a run went
//! - [`pipeline`]: a run; `run_buffer`: its buffer; `sampler`: its samplers; `engines`: vLLM and SGLang; `curation`: its selection of tasks;
//!   `companion`: a program beside a run; `auxiliary_models`: reference, critic and demonstrations; [`serve`]: a part of a run as a separate process
//! - [`schedule`]: what a run did in which order; `replay`: a recorded run again; `run_diff`: the first difference of two runs
//! - `controller`: starts and restarts the processes of a run; `workers`: these processes and their protocol with the run;
//!   `trainer_progress`: the phase of the trainer; `watchdog`: which role waits for which when a run makes no progress
//! - `launchers`: Slurm, Kubernetes, SkyPilot, Ray and MPI; `lead_address`: where workers find a run; `credentials`: the tokens and the
//!   certificate that a run makes for itself
//! - `acting`: the environment of a recipe, for its model; [`evaluation`]: metrics on held-out tasks
//! - [`archive`]: a run in an object store; [`run_dir`]: the directory with all files of a run; `timeline`: when each role did what; `status`: the present state;
//!   `trackers`: logs for experiment trackers; `run_page`: the live page that a run serves
//! - [`metrics`], [`report`], [`chart`]: the measurements of a step and their display; `diagnosis`: whether the run
//!   learns; [`memory`]: the resident memory of the process
//!
//! # Invariants
//! - Only [`program`] reads the environment, once.
//! - Files are authoritative; the terminal only shows them.
//!
//! ```
//! use rlrun::plan::BatchPlan;
//! use rlrun::program::Program;
//! use rlrun::recipe::Recipe;
//! let path = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/grpo_math.toml"));
//! let (recipe, origins) = Recipe::load(path, &["buffer.max_staleness=0".to_owned()], &Program::default()).map_err(|e| e[0].clone())?;
//! assert_eq!(BatchPlan::of(&recipe).slots, recipe.buffer.batch_groups as u64);
//! assert_eq!(origins.describe("buffer.max_staleness"), "--set");
//! # Ok::<(), rlrun::recipe::Diagnostic>(())
//! ```

mod acting;
mod agents;
pub mod allocator;
pub mod archive;
pub mod args;
mod auxiliary_models;
pub mod chart;
pub mod commands;
mod companion;
mod controller;
mod conversations;
mod credentials;
mod curation;
mod demonstrations;
mod diagnosis;
mod doctor;
mod engines;
pub mod evaluation;
mod explain;
pub mod failpoints;
pub mod failure;
pub mod fit;
pub mod huggingface;
pub mod init;
mod island;
mod launchers;
mod lead_address;
pub mod memory;
pub mod metrics;
pub mod observe;
pub mod peers;
pub mod pipeline;
pub mod plan;
pub mod prepare;
pub mod program;
pub mod recipe;
mod replay;
pub mod report;
pub mod reward;
mod run_buffer;
#[cfg(feature = "postgres")]
mod run_database;
mod run_diff;
pub mod run_dir;
mod run_page;
mod runs;
mod sampler;
pub mod schedule;
pub mod serve;
mod serve_islands;
pub mod settings;
pub mod signals;
pub mod simulate;
mod status;
mod supervised;
mod timeline;
mod trackers;
mod trainer_progress;
pub mod training;
pub mod warmup;
mod watchdog;
mod why;
mod workers;

pub use program::{main, main_with};
