//! The command line of `rlrun top`.

use std::path::PathBuf;

use clap::Args;

/// `rlrun top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Run directory: running, finished or copied
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Show the present state once, without following it
    #[arg(long)]
    pub once: bool,
    /// Characters of a line [default: the width of the terminal]
    #[arg(long, value_name = "COLUMNS", value_parser = super::at_least_one)]
    pub width: Option<usize>,
}
