//! The command line of `rlrun resume`.

use std::path::PathBuf;

use clap::Args;

use super::Loudness;

/// `rlrun resume`.
#[derive(Clone, Debug, Args)]
pub struct ResumeArgs {
    /// Run directory; or the archive of a run, such as s3://BUCKET/RUN, which is fetched into --run-dir
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Directory for a run that is fetched from its archive: an empty or a new one
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
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
