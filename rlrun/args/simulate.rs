//! The command lines of `rlrun simulate` and `rlrun plan`.

use std::path::PathBuf;

use clap::Args;

use super::RecipeArgs;

/// `rlrun simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Recipe file
    #[arg(required_unless_present = "published")]
    pub recipe: Option<PathBuf>,
    /// Change a value of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// What it is simulated with.
    #[command(flatten)]
    pub inputs: CalibrationArgs,
    /// Training steps to simulate
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(2..=100_000))]
    pub steps: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Show measurements that others have published beside what is predicted for them
    #[arg(long, conflicts_with_all = ["recipe", "sets"])]
    pub published: bool,
}

/// Hardware, measurements and seeds of a simulation.
#[derive(Clone, Debug, Args)]
pub struct CalibrationArgs {
    /// Hardware: a100, b200, cpu, h100, h200, l40s, or a TOML file [default: cpu, or h200 for a recipe on a GPU]
    #[arg(long, value_name = "NAME_OR_FILE")]
    pub hardware: Option<String>,
    /// Results of `rlrun-bench --json`, or the directory of an earlier run; can be repeated
    #[arg(long, value_name = "FILE_OR_RUN")]
    pub calibration: Vec<PathBuf>,
    /// Seeds; 10th and 90th percentile are over these
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    pub seeds: u64,
}

/// `rlrun plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The recipe.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Search for the fastest settings: samplers against trainers, staleness, running sequences, micro-batch, recomputation,
    /// number format, parallel degrees, transport of weights
    #[arg(long)]
    pub search: bool,
    /// With --search: GPUs that are there [default: 1]
    #[arg(long, value_name = "N", requires = "search", value_parser = clap::value_parser!(u64).range(1..=4_096))]
    pub gpus: Option<u64>,
    /// With --search: also other numbers of groups in a step, which change what a step learns
    #[arg(long, requires = "search")]
    pub any_batch: bool,
    /// With --search: write a recipe with the fastest settings
    #[arg(long, value_name = "FILE", requires = "search")]
    pub write: Option<PathBuf>,
    /// What it is simulated with.
    #[command(flatten)]
    pub inputs: CalibrationArgs,
}

impl PlanArgs {
    /// An option that has no effect without `--search`, if one is given.
    #[must_use]
    pub fn needs_search(&self) -> Option<&'static str> {
        match (&self.inputs.hardware, &self.inputs.calibration[..]) {
            _ if self.search => None,
            (Some(_), _) => Some("--hardware"),
            (None, [_, ..]) => Some("--calibration"),
            (None, []) => None,
        }
    }
}
