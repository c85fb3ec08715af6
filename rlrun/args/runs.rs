//! The command line of `rlrun runs`.

use std::path::PathBuf;

use clap::Args;

/// `rlrun runs`.
#[derive(Debug, Args)]
pub struct RunsArgs {
    /// Directory that the runs are in
    #[arg(value_name = "DIR", default_value = "outputs")]
    pub directory: PathBuf,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}
