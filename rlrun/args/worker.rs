//! The command line of `rlrun worker`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand};

use super::{Loudness, at_least_one};
use crate::recipe::words::{DeviceWord, EngineWord};

/// The roles of a worker.
#[derive(Debug, Subcommand)]
pub enum WorkerCommand {
    /// Sample for a run; any number of workers may join and leave during the run
    Rollout(RolloutArgs),
    /// Join a run's trainer as a rank (`trainer.ranks = "processes"`)
    Trainer(TrainerWorkerArgs),
    /// Serve a reward model of a run's recipe to its samplers
    Reward(RewardWorkerArgs),
    /// Lead a run from its last checkpoint, its address on standard input; started by the controller
    #[command(hide = true)]
    Lead(LeadArgs),
    /// Render chat templates for the process that started this one, under limits
    #[command(hide = true)]
    Templates,
}

/// Address and credentials of the run.
#[derive(Clone, Debug, Args)]
pub struct JoinArgs {
    /// URL of the run, such as https://10.0.0.1:8700 (`buffer.listen` of its recipe), or its directory [default: RLRUN_JOIN, or
    /// the first host of a launcher (Slurm, SkyPilot, torchrun) and port 8700]
    #[arg(long, value_name = "URL_OR_RUN")]
    pub join: Option<String>,
    /// Directory with the credentials of the run, `tokens` and `ca.pem` [default: those that the run names in its directory]
    #[arg(long, value_name = "DIR")]
    pub credentials: Option<PathBuf>,
    /// File with the run's token: alone, or in a line `writer TOKEN` or `admin TOKEN`
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Name in the run; a worker of that name is replaced [default: the first that is free]
    #[arg(long)]
    pub name: Option<String>,
    /// CA certificates to trust instead of the default set, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Seconds without an answer of the run, such as during its restart, before the worker ends with status 75
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = patience)]
    pub patience: f64,
    /// Process id of the parent; this process ends with it
    #[arg(long, hide = true, value_name = "PID")]
    pub parent: Option<u32>,
}

/// Permissions of the run on a worker's machine, in addition to data.
#[derive(Clone, Debug, Default, Args)]
pub struct AllowArgs {
    /// Recipe of this machine: paths, code, programs, addresses and variables come from it, rewards by name and kind
    #[arg(long, value_name = "FILE")]
    pub recipe: Option<PathBuf>,
    /// Change a value of --recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "recipe")]
    pub sets: Vec<String>,
    /// What the worker may read for the run: files, directories, and repositories of the Hugging Face Hub (hf:OWNER/NAME)
    #[arg(long = "allow-path", value_name = "PATH", num_args = 1..)]
    pub paths: Vec<PathBuf>,
}

/// `rlrun worker rollout`.
#[derive(Debug, Args)]
pub struct RolloutArgs {
    /// Address and credentials of the run.
    #[command(flatten)]
    pub join: JoinArgs,
    /// Files that the worker may read for the run.
    #[command(flatten)]
    pub allow: AllowArgs,
    /// Files of code that the worker may execute for the run, such as reward functions; with `:FUNCTION` for one function
    #[arg(long = "allow-code", value_name = "FILE[:FUNCTION]", num_args = 1..)]
    pub code: Vec<String>,
    /// Largest number of cores at a time [default: the recipe's `placement.rollout_threads`, or all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Sample with this engine instead of rlrun's own
    #[arg(long, value_name = "KIND", requires = "engine_urls")]
    pub engine: Option<EngineWord>,
    /// Address of the engine, such as http://127.0.0.1:8000; can be repeated
    #[arg(long = "engine-url", value_name = "URL", requires = "engine")]
    pub engine_urls: Vec<String>,
    /// Directory that the worker and its engines see, for the weights [default: a temporary directory]
    #[arg(long, value_name = "DIR", requires = "engine")]
    pub weights_dir: Option<PathBuf>,
    /// Device, such as cuda:1 [default: that of the recipe's `placement`]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceWord>,
    /// Pass new weights on to other samplers, who reach this one at this address and port; port 0 chooses a free port
    #[arg(long, value_name = "ADDRESS")]
    pub relay: Option<SocketAddr>,
    /// URL of the relay for other samplers, if it differs from http:// and the address
    #[arg(long, value_name = "URL", requires = "relay")]
    pub relay_url: Option<String>,
}

/// `rlrun worker trainer`.
#[derive(Debug, Args)]
pub struct TrainerWorkerArgs {
    /// Address and credentials of the run.
    #[command(flatten)]
    pub join: JoinArgs,
    /// Rank, 1 or more [default: the rank of a launcher with one process per rank of the trainer
    /// (SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK, RANK), or a free rank]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub rank: Option<usize>,
    /// Add N to the rank of the launcher, for any number of its processes; 1 if it starts all ranks but the run
    #[arg(long, value_name = "N", conflicts_with = "rank")]
    pub rank_offset: Option<usize>,
    /// Largest number of cores at a time [default: the recipe's `placement.trainer_threads`, or all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
}

/// `rlrun worker reward`.
#[derive(Debug, Args)]
pub struct RewardWorkerArgs {
    /// Address and credentials of the run.
    #[command(flatten)]
    pub join: JoinArgs,
    /// Files that the worker may read for the run.
    #[command(flatten)]
    pub allow: AllowArgs,
    /// Name of the reward in the recipe
    #[arg(long, value_name = "NAME")]
    pub reward: String,
    /// Address and port; port 0 chooses a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Listen on the address of this network interface, with the port of --listen
    #[arg(long, value_name = "NAME")]
    pub interface: Option<String>,
    /// URL for samplers, if it differs from http:// and the address
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Listen on the socket that is standard input
    #[arg(long, hide = true, action = ArgAction::SetTrue)]
    pub socket: bool,
    /// Largest number of cores at a time [default: the recipe's `threads` of the reward, or all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
}

/// `rlrun worker lead`.
#[derive(Debug, Args)]
pub struct LeadArgs {
    /// The run directory
    #[arg(long, value_name = "DIR")]
    pub run: PathBuf,
    /// File with one token per role
    #[arg(long, value_name = "FILE")]
    pub token_file: PathBuf,
    /// Largest number of cores at a time
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Process id of the parent; this process ends with it
    #[arg(long, value_name = "PID")]
    pub parent: u32,
    /// Amount of output.
    #[command(flatten)]
    pub loudness: Loudness,
}

fn patience(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && (0.0..=1e6).contains(&seconds) => Ok(seconds),
        _ => Err("it must be a number of seconds, 0 or more".to_owned()),
    }
}
