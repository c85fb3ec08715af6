//! The command line.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use model::{Quantization, Recompute};
use rlrun::args::{DeviceArgs, ServeBufferArgs, at_least_one};
use trainer::optimizer::OptimizerKind;

mod buffer;
mod episodes;
mod samplers;
mod turns;
mod weights;

pub use buffer::BufferBenchArgs;
pub use episodes::EpisodesBenchArgs;
pub use samplers::SamplersBenchArgs;
pub use turns::TurnsBenchArgs;
pub use weights::WeightsBenchArgs;

/// Measure how fast this machine samples and trains a model, and how far that is from its limits.
#[derive(Debug, Parser)]
#[command(
    name = "rlrun-bench",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct BenchArgs {
    /// One measure; all of them with their defaults if none is named.
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// Model directory in Hugging Face format, or GGUF file
    // Required unless a measure is named, which then has one of its own.
    #[arg(long, value_name = "DIR", required = true)]
    pub model: Option<PathBuf>,
    /// How it is shown.
    #[command(flatten)]
    pub output: BenchOutput,
}

/// A measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Sampling alone: random prompts, every completion at full length
    Generate(GenerateBenchArgs),
    /// Training alone: forward, backward, clip and optimizer on full sequences
    Train(TrainBenchArgs),
    /// Steps of a real run, synchronous and asynchronous
    Loop(LoopBenchArgs),
    /// The operations of the decoder one by one, on one thread
    Ops(OpsBenchArgs),
    /// A served buffer: appends, leases, memory, and the time to open it again
    Buffer(BufferBenchArgs),
    /// Use of environments whose episodes have very different lengths, under three schedules
    Episodes(EpisodesBenchArgs),
    /// Turns of episodes, with the KV pages of the turns before and without them
    Turns(TurnsBenchArgs),
    /// Simulated rollout workers, for a run that is served elsewhere
    Samplers(SamplersBenchArgs),
    /// New weights on their way to a sampler, by every transport
    Weights(Box<WeightsBenchArgs>),
    /// Serve the buffer that another process of this program measures
    #[command(hide = true)]
    ServeBuffer(Box<ServeBufferArgs>),
    /// Render chat templates for another process of this program
    #[command(hide = true)]
    Templates,
}

/// What is measured, and how it is shown.
#[derive(Debug, Args)]
pub struct BenchModel {
    /// Model directory in Hugging Face format, or GGUF file
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// How it is shown.
    #[command(flatten)]
    pub output: BenchOutput,
}

/// How a measurement is made and shown.
#[derive(Clone, Copy, Debug, Args)]
pub struct BenchOutput {
    /// Threads that share the work [default: all cores]
    #[arg(long, value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Print one JSON object per result instead of a table
    #[arg(long)]
    pub json: bool,
}

/// `rlrun-bench generate`.
#[derive(Debug, Args)]
pub struct GenerateBenchArgs {
    /// What is measured.
    #[command(flatten)]
    pub target: BenchModel,
    /// Where it computes.
    #[command(flatten)]
    pub on: DeviceArgs,
    /// Completions sampled together
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    pub batch: usize,
    /// Completions per prompt, which is read once for all of them
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    pub group: usize,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 16, value_parser = at_least_one)]
    pub prompt: usize,
    /// Tokens of a completion
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    pub new: usize,
    /// Calls that are timed, after one that is not
    #[arg(long, default_value_t = 3, value_parser = at_least_one)]
    pub repeats: usize,
    /// What the weights are packed as
    #[arg(long, default_value = "none", value_parser = quantization())]
    pub quantization: Quantization,
    /// Measure 1, 2, 4 up to 256 completions together
    #[arg(long, conflicts_with = "batch")]
    pub sweep: bool,
    /// Draw the sweep into an SVG file
    #[arg(long, value_name = "FILE", requires = "sweep")]
    pub plot: Option<PathBuf>,
}

/// `rlrun-bench train`.
#[derive(Debug, Args)]
pub struct TrainBenchArgs {
    /// What is measured.
    #[command(flatten)]
    pub target: BenchModel,
    /// Where it computes.
    #[command(flatten)]
    pub on: DeviceArgs,
    /// Sequences of an optimizer step
    #[arg(long, default_value_t = 256, value_parser = at_least_one)]
    pub sequences: usize,
    /// Tokens of a sequence that go through the network
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    pub length: usize,
    /// Tokens packed into one forward and backward pass
    #[arg(long, default_value_t = 4096, value_parser = at_least_one)]
    pub microbatch_tokens: usize,
    /// What turns gradients into updates
    #[arg(long, default_value = OptimizerKind::Adamw.as_str(), value_parser = optimizer())]
    pub optimizer: OptimizerKind,
    /// What the backward computes again instead of keeping it
    #[arg(long, default_value = "none", value_parser = recompute())]
    pub recompute: Recompute,
    /// Trains an adapter of this rank on all linear layers instead of the weights
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub lora_rank: Option<usize>,
    /// Steps that are timed, after one that is not
    #[arg(long, default_value_t = 3, value_parser = at_least_one)]
    pub repeats: usize,
}

/// `rlrun-bench loop`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("policy").required(true).args(["model", "recipe"]))]
pub struct LoopBenchArgs {
    /// Model directory in Hugging Face format, or GGUF file
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Recipe that names model, tasks and everything else, instead of a model
    #[arg(long, value_name = "FILE")]
    pub recipe: Option<PathBuf>,
    /// Tasks with prompt and answer, JSON Lines or Parquet [default: generated additions]
    #[arg(long, value_name = "FILE", conflicts_with = "recipe")]
    pub tasks: Option<PathBuf>,
    /// Prompts per step [default: 32, or the recipe's]
    #[arg(long, value_parser = at_least_one)]
    pub prompts: Option<usize>,
    /// Completions per prompt [default: 8, or the recipe's]
    #[arg(long, value_parser = at_least_one)]
    pub group: Option<usize>,
    /// Longest completion in tokens [default: 16, or the recipe's]
    #[arg(long, value_parser = at_least_one)]
    pub max_new: Option<usize>,
    /// Sample this many tokens whatever they are, and train on every completion; measures speed alone
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one, conflicts_with_all = ["max_new", "recipe"])]
    pub force_length: Option<usize>,
    /// Steps of the run, at least 3
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(3..))]
    pub steps: u64,
    /// Versions between sampling and training, each measured on its own; 0 is synchronous
    #[arg(long, value_delimiter = ',', default_values_t = [0, 4])]
    pub staleness: Vec<u64>,
    /// Change a value of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// How it is shown.
    #[command(flatten)]
    pub output: BenchOutput,
}

/// `rlrun-bench ops`.
#[derive(Debug, Args)]
pub struct OpsBenchArgs {
    /// Model directory in Hugging Face format; only its shapes are used
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Tokens that an operation works on together
    #[arg(long, value_delimiter = ',', value_parser = at_least_one, default_values_t = [1, 8, 32, 64, 512])]
    pub rows: Vec<usize>,
    /// Repeats of each operation, every one of some milliseconds
    #[arg(long, default_value_t = 5, value_parser = at_least_one)]
    pub repeats: usize,
    /// Print one JSON object per result instead of a table
    #[arg(long)]
    pub json: bool,
}

impl GenerateBenchArgs {
    /// The batches to measure.
    #[must_use]
    pub fn batches(&self) -> Vec<usize> {
        if self.sweep { (0..=8).map(|doublings| 1 << doublings).collect() } else { vec![self.batch] }
    }
}

/// The words of `trainer.optimizer` in a recipe.
fn optimizer() -> impl TypedValueParser<Value = OptimizerKind> {
    let all = OptimizerKind::ALL;
    let words = PossibleValuesParser::new(all.map(OptimizerKind::as_str));
    words.map(move |word| all.into_iter().find(|kind| kind.as_str() == word).unwrap_or_default())
}

/// The words of `rollout.quantization` in a recipe.
fn quantization() -> impl TypedValueParser<Value = Quantization> {
    PossibleValuesParser::new(["none", "int8", "bf16"]).map(|word| match word.as_str() {
        "int8" => Quantization::Int8,
        "bf16" => Quantization::Bf16,
        _ => Quantization::None,
    })
}

/// The words of `trainer.recompute` in a recipe.
fn recompute() -> impl TypedValueParser<Value = Recompute> {
    PossibleValuesParser::new(["none", "block", "sequence"]).map(|word| match word.as_str() {
        "block" => Recompute::Block,
        "sequence" => Recompute::Sequence,
        _ => Recompute::None,
    })
}
