//! The command line of `rlrun report`.

use std::path::PathBuf;

use clap::Args;

/// `rlrun report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run directories; several are drawn over each other
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// File to write; it is replaced if it exists
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub output: PathBuf,
}
