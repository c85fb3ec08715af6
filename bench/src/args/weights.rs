//! The command line of `rlrun-bench weights`.

use std::path::PathBuf;

use clap::Args;
use device::device::DeviceLocation;
use rlrun::args::at_least_one;

/// `rlrun-bench weights`.
#[derive(Debug, Args)]
pub struct WeightsBenchArgs {
    /// Size of the model as f32, 10^6 bytes
    #[arg(long, value_parser = at_least_one, default_value_t = 500)]
    pub megabytes: usize,
    /// Pushes that are timed by each transport, after three that are not
    #[arg(long, default_value_t = 7, value_parser = at_least_one)]
    pub repeats: usize,
    /// Threads that copy and digest [default: all cores, at most 8]
    #[arg(long, value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Share of the weights that change from push to push, where deltas are measured
    #[arg(long, value_parser = share, default_value = "0.01")]
    pub changed: f64,
    /// Directory for shared memory
    #[arg(long, value_name = "DIR", default_value = if cfg!(target_os = "linux") { "/dev/shm" } else { "/tmp" })]
    pub shm: PathBuf,
    /// Measure instead pushes that stay on devices: "cuda", "cuda:1", or "emulated"
    #[arg(long, value_parser = str::parse::<DeviceLocation>, conflicts_with = "density")]
    pub device: Option<DeviceLocation>,
    /// Measure instead how many bf16 weights change in a step of training at learning rates 1e-6, 1e-5 and 1e-4
    #[arg(long)]
    pub density: bool,
    /// Model to train for `--density` [default: a fresh one]
    #[arg(long, value_name = "DIR", requires = "density")]
    pub model: Option<PathBuf>,
    /// Steps of training at each learning rate
    #[arg(long, default_value_t = 8, value_parser = at_least_one, requires = "density")]
    pub steps: usize,
    /// Print one JSON object per result instead of a line
    #[arg(long)]
    pub json: bool,
    /// Where the process that measures serves what this one receives
    #[arg(long, value_name = "URL", hide = true)]
    pub receive_from: Option<String>,
    /// Receive over the network alone
    #[arg(long, hide = true, requires = "receive_from")]
    pub over_http: bool,
}

fn share(text: &str) -> Result<f64, String> {
    let share: Option<f64> = text.parse().ok();
    share.filter(|share| (0.0..=1.0).contains(share)).ok_or("0 to 1 are possible".to_owned())
}
