//! `rlrun-bench`: how fast this machine samples and trains a model, and how far that is from the machine's limits.
//!
//! # Layout
//! - [`args`]: the command line; [`suite`]: the measures, one after the other
//! - [`machine`]: the limits of the machine; [`accelerator`]: those of a device
//! - [`cost`]: operations and memory traffic that a piece of work needs at least
//! - [`measure`]: one result, as a row of a table and as one JSON object, whose fields are listed there
//! - [`generate`], [`train`], [`steps`], [`ops`]: sampling, training, the whole loop, single operations
//! - [`mod@buffer`]: a served buffer
//! - [`episodes`]: use of environments under three schedules
//! - [`samplers`]: simulated rollout workers of a served run
//! - [`turns`]: a turn of an episode after the turns before it
//! - [`mod@weights`]: publishing new weights, against the speed of a copy
//!
//! Invariant: nothing here computes. The timed code is the code that a run executes.

#![expect(
    clippy::result_large_err,
    reason = "the error of every command, which is some bytes above the limit"
)]

pub mod accelerator;
pub mod args;
pub mod buffer;
pub mod cost;
pub mod episodes;
pub mod generate;
pub mod machine;
pub mod measure;
pub mod ops;
pub mod samplers;
pub mod steps;
pub mod suite;
pub mod train;
pub mod turns;
pub mod weights;

use std::process::ExitCode;

use clap::Parser;
use environments::EnvironmentRegistry;
use rewards::Registry;
use rlrun::program::{self, Entry};

use crate::args::BenchArgs;

/// The whole command line.
#[must_use]
pub fn main() -> ExitCode {
    let entry = Entry {
        registry: Registry::builtin(),
        environments: EnvironmentRegistry::default(),
        templates: &["templates"],
    };
    program::run(entry, BenchArgs::try_parse_from, |args, program| {
        suite::run(args, program, &mut std::io::stdout()).map(|()| String::new())
    })
}
