//! The command line of `rlrun why`.

use std::path::PathBuf;

use clap::Args;

/// `rlrun why`.
#[derive(Debug, Args)]
pub struct WhyArgs {
    /// Run directory; the run may be in progress
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Show the critical path of this step
    #[arg(long, value_name = "N")]
    pub step: Option<u64>,
    /// Hardware of the run, for the gains of recommendations: a100, b200, cpu, h100, h200, l40s, or a TOML file [default: cpu, or
    /// h200 for a run on a GPU]
    #[arg(long, value_name = "NAME_OR_FILE")]
    pub hardware: Option<String>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}
