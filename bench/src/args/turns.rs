//! The arguments of `rlrun-bench turns`.

use clap::Args;
use rlrun::args::at_least_one;

use super::BenchModel;

/// `rlrun-bench turns`.
#[derive(Debug, Args)]
pub struct TurnsBenchArgs {
    /// What is measured.
    #[command(flatten)]
    pub target: BenchModel,
    /// Episodes that are played together
    #[arg(long, default_value_t = 16, value_parser = at_least_one)]
    pub episodes: usize,
    /// Turns of an episode
    #[arg(long, default_value_t = 8, value_parser = at_least_one)]
    pub turns: usize,
    /// Tokens that an episode reads before each turn
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    pub read: usize,
    /// Rounds; the least time of each turn counts
    #[arg(long, default_value_t = 3, value_parser = at_least_one)]
    pub repeats: usize,
}
