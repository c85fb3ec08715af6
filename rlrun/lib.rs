//! The program that knows every crate: recipe, command line, run directory and terminal.
//!
//! - [`recipe`]: one TOML file that says everything about a run, with the origin of every value
//! - [`program`]: what a program brings to every recipe, and its main function; [`args`], [`commands`]: the command line
//!   and what it does; [`allocator`]: the memory of such a program
//! - [`failpoints`]: places where tests make a run go wrong
//! - [`reward`]: rewards tried by themselves
//! - `doctor`: what of this machine can be used; `explain`: what a key of a recipe means
//! - [`plan`]: what a recipe amounts to before it runs; [`fit`]: how far a run would go with more compute
//! - [`pipeline`]: a run, `run_buffer` its buffer, `curation` its choice of tasks, `auxiliary_models` reference, critic and demonstrations; [`serve`]: a part of a run as a
//!   process of its own
//! - `controller`: the processes of a run, if it has some; `workers`: what they do, and what they and the run say to each
//!   other; `trainer_progress`: what the process does; `watchdog`: which role waits for which when a run makes no progress
//! - [`evaluation`]: what is measured on held-out tasks
//! - [`run_dir`]: where a run leaves everything
//! - [`metrics`], [`report`], [`chart`]: the measurements of a step and how they are shown, `diagnosis` what they say about
//!   whether the run learns; [`memory`]: that of the process
//!
//! # Invariants
//! - Only [`program`] reads the environment, once.
//! - Files are the truth; the terminal only shows.
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

pub mod allocator;
pub mod args;
mod auxiliary_models;
pub mod chart;
pub mod commands;
mod controller;
mod conversations;
mod curation;
mod demonstrations;
mod diagnosis;
mod doctor;
pub mod evaluation;
mod explain;
pub mod failpoints;
pub mod failure;
pub mod fit;
pub mod init;
pub mod memory;
pub mod metrics;
pub mod observe;
pub mod peers;
pub mod pipeline;
pub mod plan;
pub mod prepare;
pub mod program;
pub mod recipe;
pub mod report;
pub mod reward;
mod run_buffer;
pub mod run_dir;
pub mod serve;
pub mod settings;
pub mod signals;
mod supervised;
mod trainer_progress;
pub mod warmup;
mod watchdog;
mod workers;

pub use program::main;
