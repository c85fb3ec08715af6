//! The command line of `rlrun resume`.

use std::path::PathBuf;

use clap::Args;

use super::Loudness;

/// `rlrun resume`.
#[derive(Debug, Args)]
pub struct ResumeArgs {
    /// Run directory
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Change a value of the run's recipe, if it may change (`rlrun explain KEY` says so); can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Continue with an empty journal if it is missing: groups that are in no checkpoint are lost, and tasks start again
    #[arg(long)]
    pub without_journal: bool,
    /// Resume from the checkpoint of this step instead of the last; later checkpoints are kept under other names
    #[arg(long, value_name = "STEP")]
    pub from: Option<u64>,
    /// Amount of output.
    #[command(flatten)]
    pub loudness: Loudness,
}
