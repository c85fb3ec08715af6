//! The command line of `rlrun doctor`.

use std::path::PathBuf;

use clap::Args;

/// `rlrun doctor`.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Recipe whose database and archive (buffer.url, checkpoint.url) are tried too
    #[arg(value_name = "RECIPE")]
    pub recipe: Option<PathBuf>,
    /// Change a value of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "recipe")]
    pub sets: Vec<String>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}
