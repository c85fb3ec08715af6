//! The command line of `rlrun doctor`.

use clap::Args;

/// `rlrun doctor`.
#[derive(Clone, Copy, Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}
