//! The command line of `rlrun-bench buffer`.

use std::path::PathBuf;

use clap::Args;
use rlrun::args::at_least_one;

/// `rlrun-bench buffer`.
#[derive(Debug, Args)]
pub struct BufferBenchArgs {
    /// Connections that append at the same time, each number measured on its own
    #[arg(long, value_delimiter = ',', value_parser = at_least_one, default_values_t = [256, 1000])]
    pub clients: Vec<usize>,
    /// Bytes of a group in JSON
    #[arg(long, value_name = "BYTES", value_parser = at_least_one, default_value_t = 4096)]
    pub group_bytes: usize,
    /// Seconds that each measure takes
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "5")]
    pub seconds: f64,
    /// Size of the journal that is opened again after its server was killed, GiB; 0 leaves that out
    #[arg(long, value_name = "GIB", value_parser = gib, default_value = "1")]
    pub reopen_gib: f64,
    /// Directory on the disk to measure [default: that of temporary files]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Measure a buffer in the PostgreSQL database at this URL too, in a schema of its own, which stays there
    #[arg(long, value_name = "URL")]
    pub postgres: Option<String>,
    /// Print one JSON object per result instead of a line
    #[arg(long)]
    pub json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    number(text)
        .filter(|seconds| (0.1..=3600.0).contains(seconds))
        .ok_or("0.1 to 3600 are possible".to_owned())
}

fn gib(text: &str) -> Result<f64, String> {
    number(text).filter(|gib| (0.0..=32.0).contains(gib)).ok_or("0 to 32 are possible".to_owned())
}

fn number(text: &str) -> Option<f64> {
    text.parse().ok()
}
