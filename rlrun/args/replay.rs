//! The command lines of `rlrun replay` and `rlrun diff`.

use std::path::PathBuf;

use clap::Args;

use super::Loudness;

/// `rlrun replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// Run directory with a schedule (`[log] schedule = true`)
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Begin at the checkpoint of this step instead of the first recorded one
    #[arg(long, value_name = "STEP")]
    pub from: Option<u64>,
    /// Directory of the replay [default: RUN-replay, or RUN-what-if]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Change a value that leaves the bits as they are, such as trainer.world=2; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Train another arm on the recorded trajectories, with this value changed; can be repeated
    #[arg(long = "what-if", value_name = "KEY=VALUE")]
    pub what_if: Vec<String>,
    /// With --what-if: stop once the KL divergence of the arm from the policies that sampled a batch is more than this above that of
    /// the recorded run, nats per token
    #[arg(long, value_name = "NATS", default_value_t = 0.05, value_parser = bound, requires = "what_if")]
    pub max_kl: f64,
    /// With --what-if: stop once the effective share of a batch's tokens is below this and that of the recorded run
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = bound, requires = "what_if")]
    pub min_ess: f64,
    /// With --what-if: only say that a bound is crossed, and go on
    #[arg(long, requires = "what_if")]
    pub keep_going: bool,
    /// Amount of output.
    #[command(flatten)]
    pub loudness: Loudness,
}

/// `rlrun diff`.
#[derive(Clone, Debug, Args)]
pub struct DiffArgs {
    /// Run directory
    #[arg(value_name = "RUN")]
    pub first: PathBuf,
    /// The other run directory
    #[arg(value_name = "OTHER")]
    pub second: PathBuf,
}

fn bound(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("it must be a number, 0 or more".to_owned()),
    }
}
