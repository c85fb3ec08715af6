//! The command line of `rlrun launch`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{NewRunArgs, at_least_one};

/// The launchers.
#[derive(Debug, Subcommand)]
pub enum LaunchCommand {
    /// Submit a batch job to Slurm: the run, and samplers that come and go as a step of their own
    Slurm(SlurmArgs),
    /// Create a JobSet in Kubernetes
    Kubernetes(KubernetesArgs),
    /// Start a managed job with SkyPilot
    Skypilot(SkypilotArgs),
    /// Submit a job to a Ray cluster: an actor per process of the run
    Ray(RayArgs),
}

/// What a launcher starts.
#[derive(Clone, Debug, Args)]
pub struct LaunchArgs {
    /// The recipe and the place of the run, on a disk that survives its machine.
    #[command(flatten)]
    pub run: NewRunArgs,
    /// Number of samplers beside those of the run itself, each on a machine of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub rollout_workers: usize,
    /// GPUs of each machine
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gpus: usize,
    /// Cores of each process
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub cpus: Option<usize>,
    /// The program on the machines of the run [default: this file for Slurm and Ray, rlrun for the others]
    #[arg(long, value_name = "PATH")]
    pub program: Option<String>,
    /// Print what would be submitted, and submit nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// `rlrun launch slurm`.
#[derive(Debug, Args)]
pub struct SlurmArgs {
    /// What is started.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Network interface of the run for its workers, such as ib0 [default: all]
    #[arg(long, value_name = "NAME")]
    pub interface: Option<String>,
    /// Partition of the job
    #[arg(long)]
    pub partition: Option<String>,
    /// Account of the job
    #[arg(long)]
    pub account: Option<String>,
    /// Time limit of the job, such as 12:00:00
    #[arg(long)]
    pub time: Option<String>,
    /// Seconds before the time limit at which the run is stopped to save
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = at_least_one)]
    pub grace: usize,
    /// A further option of sbatch, such as --sbatch=--constraint=h100; can be repeated
    #[arg(long = "sbatch", value_name = "OPTION", allow_hyphen_values = true)]
    pub options: Vec<String>,
}

/// `rlrun launch kubernetes`.
#[derive(Debug, Args)]
pub struct KubernetesArgs {
    /// What is started.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Image with rlrun, such as one of the Containerfile, and with the data and rewards of the recipe
    #[arg(long)]
    pub image: String,
    /// Persistent volume claim for the run directory
    #[arg(long, value_name = "CLAIM")]
    pub volume_claim: String,
    /// Namespace [default: that of kubectl]
    #[arg(long)]
    pub namespace: Option<String>,
    /// Queue of Kueue that admits the run
    #[arg(long)]
    pub queue: Option<String>,
    /// Directory for the credentials of the run on this machine, which become a secret [default: outputs/NAME.launch]
    #[arg(long, value_name = "DIR")]
    pub files: Option<PathBuf>,
}

/// `rlrun launch skypilot`.
#[derive(Debug, Args)]
pub struct SkypilotArgs {
    /// What is started.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Accelerators of each machine, such as H100:1
    #[arg(long, conflicts_with = "gpus")]
    pub accelerators: Option<String>,
    /// Where, such as aws/us-east-1, kubernetes or slurm/mycluster
    #[arg(long)]
    pub infra: Option<String>,
    /// Bucket that is mounted for the run directory, such as s3://mine; without it a run that loses its machine begins again
    #[arg(long, value_name = "URL")]
    pub bucket: Option<String>,
    /// Command that installs rlrun on a machine
    #[arg(long, value_name = "COMMAND", default_value = "pip install rlrun")]
    pub setup: String,
    /// Directory for the recipe and the credentials of the run on this machine, which are copied to the others [default:
    /// outputs/NAME.launch]
    #[arg(long, value_name = "DIR")]
    pub files: Option<PathBuf>,
}

/// `rlrun launch ray`.
#[derive(Debug, Args)]
pub struct RayArgs {
    /// What is started.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Network interface of the run for its workers, such as ib0 [default: all]
    #[arg(long, value_name = "NAME")]
    pub interface: Option<String>,
    /// Address of the cluster for `ray job submit` [default: RAY_ADDRESS]
    #[arg(long, value_name = "URL")]
    pub address: Option<String>,
}
