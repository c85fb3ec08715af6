//! The command line.
//!
//! Invariant: a bare recipe means `run`, and no recipe can hide a command: a command's name wins over a file of that
//! name. Nothing here reads files beyond asking whether the first argument is one.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args, CommandFactory, Parser, Subcommand};

use model::{Quantization, Recompute, WeightDtype};
use trainer::optimizer::OptimizerKind;

use crate::init::Template;

mod buffer_bench;
mod compute_on;
mod doctor;
mod explain;
mod fit;
mod resume;
mod reward;
mod serve;
mod weights_bench;
mod worker;

pub use buffer_bench::BufferBenchArgs;
pub use compute_on::ComputeOn;
pub use doctor::DoctorArgs;
pub use explain::ExplainArgs;
pub use fit::FitArgs;
pub use resume::ResumeArgs;
pub use reward::{GradeArgs, RewardTestArgs, RewardWhat};
pub use serve::{KeepArgs, ServeBufferArgs, ServeRewardArgs, ServeWhat};
pub use weights_bench::WeightsBenchArgs;
pub use worker::{
    AllowArgs, JoinArgs, LeadArgs, RewardWorkerArgs, RolloutArgs, TrainerWorkerArgs, WorkerWhat,
};

const USAGE: &str = "rlrun RECIPE.toml [OPTIONS]\n       rlrun COMMAND";

const EXAMPLES: &str = "\
Examples:
  rlrun init                                      write a recipe to start from
  rlrun grpo_math.toml                            run it
  rlrun grpo_math.toml --set trainer.steps=10     run it with another value
  rlrun generate outputs/grpo_math '37+48='       ask the trained model
  rlrun explain trainer.learning_rate             say what a key means

Values come from the recipe, the files it extends, variables such as RLRUN__TRAINER__STEPS, and --set; later wins.
Exit status: 0 done, 1 the run failed, 2 the input was wrong.";

/// Asynchronous reinforcement-learning post-training of language models.
#[derive(Debug, Parser)]
#[command(name = "rlrun", version, override_usage = USAGE, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train as the recipe says; `rlrun RECIPE.toml` is the same
    Run(RunArgs),
    /// Look for mistakes in a recipe, its model and its data without training
    Check(RecipeArgs),
    /// Show every value with its origin, the batch arithmetic and the memory needed
    Plan(RecipeArgs),
    /// Write a recipe to start from
    Init(InitArgs),
    /// Show what of this machine rlrun can use, and why it cannot use the rest
    Doctor(DoctorArgs),
    /// Say what a key, a section or a word of a recipe means, and what other frameworks call it
    Explain(ExplainArgs),
    /// Measure the accuracy of a trained model
    Eval(EvalArgs),
    /// Let a model answer
    Generate(GenerateArgs),
    /// Write a trained model as a Hugging Face directory
    Export(ExportArgs),
    /// Go on with a run from its last checkpoint
    Resume(ResumeArgs),
    /// Serve a part of rlrun to other processes
    #[command(subcommand)]
    Serve(ServeWhat),
    /// Take part in a run that is served elsewhere
    #[command(subcommand)]
    Worker(WorkerWhat),
    /// Try rewards by themselves
    #[command(subcommand)]
    Reward(RewardWhat),
    /// Measure how fast this machine samples and trains a model, and how far that is from its limits
    Bench(Box<BenchArgs>),
    /// Fit a scaling curve to runs: how far they would go with more compute
    Fit(FitArgs),
}

/// A recipe and what is changed in it.
#[derive(Debug, Args)]
pub struct RecipeArgs {
    /// Recipe file
    pub recipe: PathBuf,
    /// Change a value, such as `trainer.learning_rate=1e-6` or `rewards[0].weight=0.5`; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// `rlrun run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The recipe.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Directory of the run [default: outputs/NAME]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Name of the run [default: the recipe's]
    #[arg(long)]
    pub name: Option<String>,
    /// How much is shown.
    #[command(flatten)]
    pub loudness: Loudness,
}

/// How much is shown.
#[derive(Clone, Copy, Debug, Args)]
pub struct Loudness {
    /// Show nothing but errors
    #[arg(short, long, action = ArgAction::SetTrue)]
    pub quiet: bool,
    /// Characters of a line of the step table [default: as many as the terminal has]
    #[arg(long, value_name = "COLUMNS", value_parser = at_least_one)]
    pub width: Option<usize>,
}

/// `rlrun init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Which recipe
    #[arg(long, value_enum, default_value_t)]
    pub template: Template,
    /// File to write [default: the template's name]
    pub file: Option<PathBuf>,
}

/// `rlrun eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Run directory or model directory
    #[arg(value_name = "RUN_OR_MODEL")]
    pub target: PathBuf,
    /// Recipe that names the tasks and rewards
    #[arg(long, value_name = "RECIPE")]
    pub recipe: PathBuf,
    /// Answers per task, for avg@n and pass@k; more than one needs a temperature [default: eval.samples]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub samples: Option<usize>,
    /// Sampling temperature; 0 takes the most likely token [default: eval.temperature]
    #[arg(long, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// Most tasks of a set [default: eval.tasks]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub tasks: Option<usize>,
    /// Change a value of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// `rlrun generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Run directory or model directory
    #[arg(value_name = "MODEL_OR_RUN")]
    pub target: PathBuf,
    /// Prompts, each answered on its own
    #[arg(required_unless_present = "interactive")]
    pub prompts: Vec<String>,
    /// Sampling temperature; 0 takes the most likely token
    #[arg(long, default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f64,
    /// Longest completion in tokens
    #[arg(long, default_value_t = 256, value_parser = at_least_one)]
    pub max_tokens: usize,
    /// Chat until the end of input
    #[arg(long, conflicts_with = "prompts")]
    pub interactive: bool,
    /// Where it computes.
    #[command(flatten)]
    pub on: ComputeOn,
}

/// `rlrun export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Run directory
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Checkpoint to write [default: the last]
    #[arg(long)]
    pub step: Option<u64>,
    /// Directory to write to
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Write the LoRA adapter alone, for PEFT, instead of the model with it merged in
    #[arg(long)]
    pub adapter: bool,
    /// Number format of the weights; f32 is what was trained, 16 bits round it
    #[arg(long, default_value = "f32", value_parser = weight_dtype(), conflicts_with = "adapter")]
    pub dtype: WeightDtype,
}

/// `rlrun bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    /// One measure; all of them with their defaults if none is named.
    #[command(subcommand)]
    pub what: Option<BenchWhat>,
    /// Model directory in Hugging Face format
    // Required unless a measure is named, which then has one of its own.
    #[arg(long, value_name = "DIR", required = true)]
    pub model: Option<PathBuf>,
    /// How it is shown.
    #[command(flatten)]
    pub output: BenchOutput,
}

/// What `rlrun bench` measures.
#[derive(Debug, Subcommand)]
pub enum BenchWhat {
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
    /// New weights on their way to a sampler, by every transport
    Weights(WeightsBenchArgs),
}

/// What is measured, and how it is shown.
#[derive(Debug, Args)]
pub struct BenchModel {
    /// Model directory in Hugging Face format
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

/// `rlrun bench generate`.
#[derive(Debug, Args)]
pub struct GenerateBenchArgs {
    /// What is measured.
    #[command(flatten)]
    pub target: BenchModel,
    /// Where it computes.
    #[command(flatten)]
    pub on: ComputeOn,
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

/// `rlrun bench train`.
#[derive(Debug, Args)]
pub struct TrainBenchArgs {
    /// What is measured.
    #[command(flatten)]
    pub target: BenchModel,
    /// Where it computes.
    #[command(flatten)]
    pub on: ComputeOn,
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
    /// Steps that are timed, after one that is not
    #[arg(long, default_value_t = 3, value_parser = at_least_one)]
    pub repeats: usize,
}

/// `rlrun bench loop`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("policy").required(true).args(["model", "recipe"]))]
pub struct LoopBenchArgs {
    /// Model directory in Hugging Face format
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

/// `rlrun bench ops`.
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

impl BenchArgs {
    /// How results are shown.
    #[must_use]
    pub fn output(&self) -> BenchOutput {
        match &self.what {
            Some(BenchWhat::Generate(args)) => args.target.output,
            Some(BenchWhat::Train(args)) => args.target.output,
            Some(BenchWhat::Loop(args)) => args.output,
            Some(BenchWhat::Ops(args)) => BenchOutput { threads: Some(1), json: args.json },
            Some(BenchWhat::Buffer(args)) => BenchOutput { threads: Some(1), json: args.json },
            Some(BenchWhat::Weights(args)) => BenchOutput { threads: args.threads, json: args.json },
            None => self.output,
        }
    }
}

impl GenerateBenchArgs {
    /// The batches to measure.
    #[must_use]
    pub fn batches(&self) -> Vec<usize> {
        if self.sweep { (0..=8).map(|doublings| 1 << doublings).collect() } else { vec![self.batch] }
    }
}

impl Cli {
    /// Parses the arguments of the process, its name first.
    ///
    /// # Errors
    /// Arguments that make no sense, and `--help` and `--version`: print it and exit with its exit code.
    pub fn parse_args(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut args: Vec<_> = args.into_iter().collect();
        if let Some(first) = first_positional(&args)
            && !is_command(first)
            && is_recipe(first)
        {
            args.insert(1, "run".into());
        }
        Self::try_parse_from(args)
    }
}

impl RunArgs {
    /// The `--set` arguments, with `--name` as the last of them.
    #[must_use]
    pub fn all_sets(&self) -> Vec<String> {
        let name = self.name.iter().map(|name| format!("name={}", toml::Value::from(name.as_str())));
        self.recipe.sets.iter().cloned().chain(name).collect()
    }
}

/// The first argument that is neither an option nor the value of one.
fn first_positional(args: &[OsString]) -> Option<&OsStr> {
    let mut rest = args.iter().skip(1);
    while let Some(arg) = rest.next() {
        let text = arg.to_string_lossy();
        if ["--set", "--run-dir", "--name", "--width"].contains(&text.as_ref()) {
            rest.next();
        } else if !text.starts_with('-') {
            return Some(arg);
        }
    }
    None
}

fn is_command(arg: &OsStr) -> bool {
    arg == "help" || Cli::command().get_subcommands().any(|command| command.get_name() == arg)
}

fn is_recipe(arg: &OsStr) -> bool {
    let path = Path::new(arg);
    path.extension().is_some_and(|extension| extension == "toml") || path.is_file()
}

/// The words of `trainer.optimizer` in a recipe.
fn optimizer() -> impl TypedValueParser<Value = OptimizerKind> {
    let all = OptimizerKind::ALL;
    let words = PossibleValuesParser::new(all.map(OptimizerKind::as_str));
    words.map(move |word| all.into_iter().find(|kind| kind.as_str() == word).unwrap_or_default())
}

/// The words of `--dtype`.
fn weight_dtype() -> impl TypedValueParser<Value = WeightDtype> {
    PossibleValuesParser::new(WeightDtype::ALL.map(WeightDtype::as_str))
        .map(|word| WeightDtype::ALL.into_iter().find(|dtype| dtype.as_str() == word).unwrap_or_default())
}

/// The words of `rollout.quantization` in a recipe.
fn quantization() -> impl TypedValueParser<Value = Quantization> {
    PossibleValuesParser::new(["none", "int8"]).map(|word| match word.as_str() {
        "int8" => Quantization::Int8,
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

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("it must be a number, 0 or more".to_owned()),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(value) if value > 0 => Ok(value),
        _ => Err("it must be a whole number, 1 or more".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
        Cli::parse_args(std::iter::once("rlrun").chain(args.iter().copied()).map(OsString::from))
    }

    fn parse_run(args: &[&str]) -> RunArgs {
        let Command::Run(run) = parse(args).unwrap().command else { panic!("{args:?} is a run") };
        run
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_bare_recipe_runs() {
        for args in [
            &["a.toml", "-q", "--set", "x.y=1", "--name", "n", "--width", "80"][..],
            &["-q", "--width", "80", "--set", "x.y=1", "--name", "n", "a.toml"],
            &["--set", "x.y=1", "--name=n", "-q", "--width=80", "--", "a.toml"],
        ] {
            let run = parse_run(args);
            assert_eq!(run.recipe.recipe, Path::new("a.toml"));
            assert_eq!(run.all_sets(), ["x.y=1", "name=\"n\""]);
            assert!(run.loudness.quiet);
            assert_eq!(run.loudness.width, Some(80));
        }
        assert_eq!(parse_run(&["run", "check"]).recipe.recipe, Path::new("check"));
        assert_eq!(parse_run(&["run", "a.toml", "--run-dir", "d"]).run_dir.unwrap(), Path::new("d"));
    }

    #[test]
    fn a_file_without_the_extension_is_a_recipe_and_a_command_wins() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("recipe");
        std::fs::write(&file, "").unwrap();
        assert_eq!(parse_run(&[file.to_str().unwrap()]).recipe.recipe, file);
        assert!(matches!(parse(&["check", "run.toml"]).unwrap().command, Command::Check(_)));
        assert!(matches!(parse(&["init"]).unwrap().command, Command::Init(_)));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_status_two() {
        for (args, message) in [
            (&["frobnicate"][..], "unrecognized subcommand 'frobnicate'"),
            (&["chek", "a.toml"], "tip: a similar subcommand exists: 'check'"),
            (&["generate", "m"], "<PROMPTS>..."),
            (&["generate", "m", "p", "--temperature", "-1"], "it must be a number, 0 or more"),
            (&["generate", "m", "p", "--max-tokens", "0"], "it must be a whole number, 1 or more"),
            (&["export", "r"], "--out <DIR>"),
            (&["init", "--template", "ppo"], "grpo-math, grpo-gsm8k"),
            (&["a.toml", "--sets", "x=1"], "--set"),
        ] {
            let error = parse(args).unwrap_err();
            assert!(error.to_string().contains(message), "{args:?}: {error}");
            assert_eq!(error.exit_code(), 2);
        }
        assert_eq!(parse(&["--help"]).unwrap_err().exit_code(), 0);
        assert_eq!(parse(&["-V"]).unwrap_err().exit_code(), 0);
    }

    #[test]
    fn every_command_takes_its_arguments() {
        let Command::Generate(generate) =
            parse(&["generate", "m", "p", "q", "--temperature", "1"]).unwrap().command
        else {
            panic!("it generates")
        };
        assert_eq!((generate.prompts.len(), generate.temperature, generate.max_tokens), (2, 1.0, 256));
        assert!(parse(&["generate", "m", "--interactive"]).is_ok());
        assert!(parse(&["eval", "m", "--recipe", "r.toml"]).is_ok());
        assert!(parse(&["export", "r", "--step", "3", "--out", "d", "--dtype", "bf16"]).is_ok());
        assert!(parse(&["resume", "r", "--from", "3"]).is_ok());
        assert!(parse(&["resume", "r", "--set", "trainer.steps=9", "-q"]).is_ok());
        assert!(parse(&["plan", "r.toml", "--set", "a.b=c"]).is_ok());
        assert!(parse(&["explain"]).is_ok() && parse(&["explain", "trainer.steps", "grpo"]).is_ok());
    }
}
