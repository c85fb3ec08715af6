//! The arguments of `rlrun-bench samplers`.

use std::path::PathBuf;

use clap::Args;
use rlrun::args::at_least_one;

/// `rlrun-bench samplers`.
#[derive(Debug, Args)]
pub struct SamplersBenchArgs {
    /// URL of the run
    #[arg(long, value_name = "URL")]
    pub join: String,
    /// File with a line `writer TOKEN`
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Workers that join
    #[arg(long, default_value_t = 8, value_parser = at_least_one)]
    pub workers: usize,
    /// The first of them that pass weights on
    #[arg(long, default_value_t = 0)]
    pub relays: usize,
    /// Groups that a worker samples at a time
    #[arg(long, default_value_t = 2, value_parser = at_least_one)]
    pub running: usize,
    /// Time from the admission of a group to its last token, milliseconds
    #[arg(long, default_value_t = 1000)]
    pub group_ms: u64,
    /// Completions of a group, as `rollout.group_size` of the run
    #[arg(long, default_value_t = 8, value_parser = at_least_one)]
    pub completions: usize,
    /// Tokens of a completion
    #[arg(long, default_value_t = 24, value_parser = at_least_one)]
    pub tokens: usize,
    /// Longest pause of a worker without a slot before it asks again, milliseconds
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..))]
    pub longest_pause_ms: u64,
}
