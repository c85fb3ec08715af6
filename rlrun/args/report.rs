//! The command line of `rlrun report`.

use std::path::PathBuf;

use clap::Args;

/// `rlrun report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run directories; several are drawn over each other
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// HTML file to write; it is replaced if it exists [default: report.html, without --png]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the curves as PNG: all of them into FILE.png, or one file for each panel into DIR
    #[arg(long, value_name = "FILE or DIR", num_args = 0..=1, default_missing_value = "report.png")]
    pub png: Option<PathBuf>,
}
