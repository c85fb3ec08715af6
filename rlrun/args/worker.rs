//! The command line of `rlrun worker`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand};

use super::{Loudness, at_least_one};
use crate::recipe::words::DeviceWord;

/// What a worker does for a run.
#[derive(Debug, Subcommand)]
pub enum WorkerCommand {
    /// Sample for a run; any number of workers may join and leave during the run
    Rollout(RolloutArgs),
    /// Be a further rank of a run's trainer (`trainer.ranks = "processes"`)
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

/// How a worker finds its run.
#[derive(Clone, Debug, Args)]
pub struct JoinArgs {
    /// Where the run is served, such as http://10.0.0.1:8700 (`buffer.listen` of its recipe)
    #[arg(long, value_name = "URL")]
    pub join: String,
    /// File with the run's token: alone, or in a line `writer TOKEN` or `admin TOKEN`
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Name in the run; a worker of that name is replaced [default: the first that is free]
    #[arg(long)]
    pub name: Option<String>,
    /// Certificates to trust instead of those that browsers trust, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Seconds that the run may be away, because it is started again, before the worker ends with status 75
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = patience)]
    pub patience: f64,
    /// The process that started this one, with which it ends
    #[arg(long, hide = true, value_name = "PID")]
    pub parent: Option<u32>,
}

/// What the operator of a worker allows its run, beside data.
#[derive(Clone, Debug, Default, Args)]
pub struct AllowArgs {
    /// Recipe of this machine: paths, code, programs, addresses and variables come from it, rewards by name and kind
    #[arg(long, value_name = "FILE")]
    pub recipe: Option<PathBuf>,
    /// Files and directories that the run may have read here: datasets, reward models
    #[arg(long = "allow-path", value_name = "PATH", num_args = 1..)]
    pub paths: Vec<PathBuf>,
}

/// `rlrun worker rollout`.
#[derive(Debug, Args)]
pub struct RolloutArgs {
    /// How it finds its run.
    #[command(flatten)]
    pub join: JoinArgs,
    /// What the run may have read here.
    #[command(flatten)]
    pub allow: AllowArgs,
    /// Files whose code the run may have run here, such as reward functions; with `:FUNCTION` where the run names one
    #[arg(long = "allow-code", value_name = "FILE[:FUNCTION]", num_args = 1..)]
    pub code: Vec<String>,
    /// Most cores at a time [default: the recipe's `placement.rollout_threads`, or all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Where it computes, such as cuda:1 [default: where the recipe's `placement` says]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceWord>,
}

/// `rlrun worker trainer`.
#[derive(Debug, Args)]
pub struct TrainerWorkerArgs {
    /// How it finds its run.
    #[command(flatten)]
    pub join: JoinArgs,
    /// Which rank, from 1 on [default: that of a launcher which has started as many processes as the trainer has ranks
    /// (SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK, RANK), or any that is free]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub rank: Option<usize>,
    /// Add N to the rank that the launcher gives, however many processes it has started; 1 if it starts all but the run
    #[arg(long, value_name = "N", conflicts_with = "rank")]
    pub rank_offset: Option<usize>,
    /// Most cores at a time [default: the recipe's `placement.trainer_threads`, or all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
}

/// `rlrun worker reward`.
#[derive(Debug, Args)]
pub struct RewardWorkerArgs {
    /// How it finds its run.
    #[command(flatten)]
    pub join: JoinArgs,
    /// What the run may have read here.
    #[command(flatten)]
    pub allow: AllowArgs,
    /// Name of the reward in the recipe
    #[arg(long, value_name = "NAME")]
    pub reward: String,
    /// Address and port; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Where samplers reach it, if that is not http:// and the address
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Listen on the socket that is standard input
    #[arg(long, hide = true, action = ArgAction::SetTrue)]
    pub socket: bool,
    /// Most cores at a time [default: the recipe's `threads` of the reward, or all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
}

/// `rlrun worker lead`.
#[derive(Debug, Args)]
pub struct LeadArgs {
    /// The run directory
    #[arg(long, value_name = "DIR")]
    pub run: PathBuf,
    /// Who may do what
    #[arg(long, value_name = "FILE")]
    pub token_file: PathBuf,
    /// Most cores at a time
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// The process that started this one, with which it ends
    #[arg(long, value_name = "PID")]
    pub parent: u32,
    /// How much is shown.
    #[command(flatten)]
    pub loudness: Loudness,
}

fn patience(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && (0.0..=1e6).contains(&seconds) => Ok(seconds),
        _ => Err("it must be a number of seconds, 0 or more".to_owned()),
    }
}
