//! The arguments of `rlrun-bench episodes`.

use std::path::PathBuf;

use clap::Args;
use rlrun::args::at_least_one;

/// `rlrun-bench episodes`.
#[derive(Clone, Debug, Args)]
pub struct EpisodesBenchArgs {
    /// Environments that exist at a time
    #[arg(long, default_value_t = 32, value_parser = at_least_one)]
    pub environments: usize,
    /// Groups that are played
    #[arg(long, default_value_t = 96, value_parser = at_least_one)]
    pub groups: usize,
    /// Episodes of a group
    #[arg(long, default_value_t = 8, value_parser = at_least_one)]
    pub group: usize,
    /// Fewest turns of an episode
    #[arg(long, default_value_t = 10, value_parser = at_least_one)]
    pub min_turns: usize,
    /// Most turns of an episode
    #[arg(long, default_value_t = 50, value_parser = at_least_one)]
    pub max_turns: usize,
    /// Median time of a tool, milliseconds; log-normal
    #[arg(long, default_value_t = 10.0, value_parser = positive)]
    pub tool_ms: f64,
    /// Standard deviation of the logarithm of a tool's time
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub tool_sigma: f64,
    /// Time of a completion, milliseconds
    #[arg(long, default_value_t = 5.0, value_parser = positive)]
    pub completion_ms: f64,
    /// Seed of turns and times
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Environment in Python that is measured instead of the simulated ones: FILE.py:NAME, each in a process of its own; a
    /// completion takes no time then
    #[arg(long, value_name = "FILE")]
    pub path: Option<PathBuf>,
    /// What the policy says to it in every turn
    #[arg(long, default_value = "0")]
    pub action: String,
    /// Interpreter for it
    #[arg(long, default_value = "python3")]
    pub python: String,
    /// Print one JSON object per schedule instead of a table
    #[arg(long)]
    pub json: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    number.filter(|value| (0.01..=1e5).contains(value)).ok_or("0.01 to 100000 are possible".to_owned())
}
