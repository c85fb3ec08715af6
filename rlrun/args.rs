//! The command line.
//!
//! Invariant: a bare recipe means `run`, and no recipe can hide a command: a command's name wins over a file of that
//! name. Nothing here reads files beyond asking whether the first argument is one.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{ArgAction, Args, CommandFactory, Parser, Subcommand};

use model::WeightDtype;

use crate::init::Template;

mod certificate;
mod completions;
mod compute_on;
mod doctor;
mod explain;
mod export_logs;
mod fit;
mod islands;
mod launch;
mod replay;
mod report;
mod resume;
mod reward;
mod runs;
mod serve;
mod simulate;
mod top;
mod training;
mod view;
mod why;
mod worker;

pub use certificate::CertificateArgs;
pub use completions::{CompletionKind, CompletionsArgs};
pub use compute_on::DeviceArgs;
pub use doctor::DoctorArgs;
pub use explain::{ExplainArgs, MarkdownChapter};
pub use export_logs::ExportLogsArgs;
pub use fit::FitArgs;
pub use islands::ServeIslandsArgs;
pub use launch::{KubernetesArgs, LaunchArgs, LaunchCommand, RayArgs, SkypilotArgs, SlurmArgs};
pub use replay::{DiffArgs, ReplayArgs};
pub use report::ReportArgs;
pub use resume::ResumeArgs;
pub use reward::{GradeArgs, RewardCommand, RewardTestArgs};
pub use runs::RunsArgs;
pub use serve::{AdapterArg, KeepArgs, ServeBufferArgs, ServeCommand, ServePolicyArgs, ServeRewardArgs};
pub use simulate::{CalibrationArgs, PlanArgs, SimulateArgs};
pub use top::TopArgs;
pub use training::{NamedModel, ServeTrainingArgs};
pub use view::ViewArgs;
pub use why::WhyArgs;
pub use worker::{
    AllowArgs, JoinArgs, LeadArgs, RewardWorkerArgs, RolloutArgs, TrainerWorkerArgs, WorkerCommand,
};

const USAGE: &str = "rlrun RECIPE.toml [OPTIONS]\n       rlrun COMMAND";

const EXAMPLES: &str = "\
Examples:
  rlrun init                                      write a recipe to start from
  rlrun init --template own-data                  write recipe, data and reward to replace by your own
  rlrun grpo_math.toml                            run it
  rlrun grpo_math.toml --set trainer.steps=10     run it with another value
  rlrun generate outputs/grpo_math '37+48='       ask the trained model
  rlrun explain trainer.learning_rate             say what a key means

Values come from the recipe, the files it extends, variables such as RLRUN__TRAINER__STEPS, and --set; later wins.
Exit status: 0 done, 1 the run failed, 2 the input was wrong, 75 start it again.";

/// The answer to `rlrun bench`, a command of earlier versions.
const BENCH: &str = "unrecognized subcommand 'bench'

  tip: measurements are a program of their own, beside rlrun: 'rlrun-bench' (cargo build --release -p rlrun-bench)";

/// Asynchronous reinforcement-learning post-training of language models.
#[derive(Debug, Parser)]
#[command(name = "rlrun", version, override_usage = USAGE, after_help = EXAMPLES)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train as the recipe says; `rlrun RECIPE.toml` is the same
    Run(RunArgs),
    /// Check a recipe, its model and its data without training
    Check(RecipeArgs),
    /// Show every value with its origin, the batch arithmetic and the memory needed; or search for the fastest settings
    Plan(PlanArgs),
    /// Simulate a recipe in virtual time: time of a step, waits and staleness before it runs
    Simulate(SimulateArgs),
    /// Write a recipe to start from, or a directory with recipe, data and reward
    Init(InitArgs),
    /// Show the hardware and software that rlrun can use, with the reason for each that it cannot
    Doctor(DoctorArgs),
    /// Explain a key, a section or a word of a recipe, with its names in other frameworks, or a metric
    Explain(ExplainArgs),
    /// Measure the accuracy of a trained model
    Eval(EvalArgs),
    /// Generate answers to prompts, or chat
    Generate(GenerateArgs),
    /// Write a trained model as a Hugging Face directory
    Export(ExportArgs),
    /// Write the logs of a run for an experiment tracker
    ExportLogs(ExportLogsArgs),
    /// Resume a run from its last checkpoint
    Resume(ResumeArgs),
    /// Find the first step, token and tensor in which two runs differ
    Diff(DiffArgs),
    /// Repeat a recorded run bit for bit, or train another arm on its trajectories
    Replay(ReplayArgs),
    /// Serve a part of rlrun to other processes
    #[command(subcommand)]
    Serve(ServeCommand),
    /// List runs with their state, step, accuracy and reward, the newest first
    Runs(RunsArgs),
    /// Show runs on a page in the browser: curves, samples, recipe and events
    View(ViewArgs),
    /// Write runs as one HTML file: curves, samples, timeline, recipe and events
    Report(ReportArgs),
    /// Show a run in the terminal: its roles, its last steps, and what limits it
    Top(TopArgs),
    /// Say where the time of a run went: the critical path of its steps, stalls, and what would make it faster
    Why(WhyArgs),
    /// Start a run on several machines with Slurm, Kubernetes, SkyPilot or Ray
    #[command(subcommand)]
    Launch(LaunchCommand),
    /// Join a run on another machine or process as a worker
    #[command(subcommand)]
    Worker(WorkerCommand),
    /// Evaluate rewards without a run
    #[command(subcommand)]
    Reward(RewardCommand),
    /// Fit a scaling curve to runs and extrapolate to more compute
    Fit(FitArgs),
    /// Write completions of a shell, or manual pages
    Completions(CompletionsArgs),
}

/// A recipe and changes to it.
#[derive(Clone, Debug, Args)]
pub struct RecipeArgs {
    /// Recipe file
    pub recipe: PathBuf,
    /// Change a value, such as `trainer.learning_rate=1e-6` or `rewards[0].weight=0.5`; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// The recipe of a run, its name and its directory.
#[derive(Clone, Debug, Args)]
pub struct NewRunArgs {
    /// The recipe.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Directory of the run [default: outputs/NAME]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Name of the run [default: the recipe's]
    #[arg(long)]
    pub name: Option<String>,
}

impl NewRunArgs {
    /// The changes to the recipe file, the name among them.
    #[must_use]
    pub fn sets(&self) -> Vec<String> {
        let mut sets = self.recipe.sets.clone();
        sets.extend(self.name.as_ref().map(|name| format!("name={name:?}")));
        sets
    }
}

/// `rlrun run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The recipe and the place of the run.
    #[command(flatten)]
    pub run: NewRunArgs,
    /// Resume the run in the run directory if there is one, or that in the archive of the recipe, and start it otherwise
    #[arg(long)]
    pub resume_or_start: bool,
    /// With --resume-or-start: as `rlrun resume --without-journal`
    #[arg(long, requires = "resume_or_start")]
    pub without_journal: bool,
    /// Take the role of this process from the rank that its launcher gives: 0 starts or resumes the run, others join it
    #[arg(long)]
    pub by_rank: bool,
    /// Serve the run on the address of this network interface, such as ib0, with the port of `buffer.listen` or 8700
    #[arg(long, value_name = "NAME")]
    pub interface: Option<String>,
    /// Amount of output.
    #[command(flatten)]
    pub loudness: Loudness,
}

/// Amount of output.
#[derive(Clone, Copy, Debug, Args)]
pub struct Loudness {
    /// Show nothing but errors
    #[arg(short, long, action = ArgAction::SetTrue)]
    pub quiet: bool,
    /// Characters of a line of the step table [default: the width of the terminal]
    #[arg(long, value_name = "COLUMNS", value_parser = at_least_one)]
    pub width: Option<usize>,
}

/// `rlrun init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Template
    #[arg(long, value_enum, default_value_t)]
    pub template: Template,
    /// File or directory to write [default: the template's name]
    pub file: Option<PathBuf>,
}

/// `rlrun eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Run directory, model directory, GGUF file, or hf:OWNER/NAME
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
    /// Largest number of tasks of a set [default: eval.tasks]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub tasks: Option<usize>,
    /// File for the answers, one JSON object per line with token ids and reward; an existing file is overwritten
    #[arg(long, value_name = "FILE")]
    pub answers: Option<PathBuf>,
    /// Change a value of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// `rlrun generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Run directory, model directory, GGUF file, or hf:OWNER/NAME
    #[arg(value_name = "MODEL_OR_RUN")]
    pub target: PathBuf,
    /// Prompts, answered independently
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
    /// Device of the command.
    #[command(flatten)]
    pub on: DeviceArgs,
}

/// `rlrun export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Run directory, model directory or GGUF file
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

impl Cli {
    /// Parses the arguments of the process, its name first.
    ///
    /// # Errors
    /// Arguments that make no sense, and `--help` and `--version`: print it and exit with its exit code.
    pub fn parse_args(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut args: Vec<_> = args.into_iter().collect();
        if let Some(first) = first_positional(&args)
            && !is_command(first)
        {
            if is_recipe(first) {
                args.insert(1, "run".into());
            } else if first == "bench" {
                return Err(Self::command().error(ErrorKind::InvalidSubcommand, BENCH));
            }
        }
        Self::try_parse_from(args)
    }
}

/// The first argument that is neither an option nor the value of one.
fn first_positional(args: &[OsString]) -> Option<&OsStr> {
    let mut rest = args.iter().skip(1);
    while let Some(arg) = rest.next() {
        let text = arg.to_string_lossy();
        if ["--set", "--run-dir", "--name", "--interface", "--width"].contains(&text.as_ref()) {
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

/// The words of `--dtype`.
fn weight_dtype() -> impl TypedValueParser<Value = WeightDtype> {
    PossibleValuesParser::new(WeightDtype::ALL.map(WeightDtype::as_str))
        .map(|word| WeightDtype::ALL.into_iter().find(|dtype| dtype.as_str() == word).unwrap_or_default())
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("it must be a number, 0 or more".to_owned()),
    }
}

/// Parses a whole number, 1 or more.
///
/// # Errors
/// Any other text: why it is refused.
pub fn at_least_one(text: &str) -> Result<usize, String> {
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
            assert_eq!(run.run.recipe.recipe, Path::new("a.toml"));
            assert_eq!((run.run.recipe.sets, run.run.name.as_deref()), (vec!["x.y=1".to_owned()], Some("n")));
            assert!(run.loudness.quiet);
            assert_eq!(run.loudness.width, Some(80));
        }
        assert_eq!(parse_run(&["run", "check"]).run.recipe.recipe, Path::new("check"));
        assert_eq!(parse_run(&["run", "a.toml", "--run-dir", "d"]).run.run_dir.unwrap(), Path::new("d"));
    }

    #[test]
    fn a_file_without_the_extension_is_a_recipe_and_a_command_wins() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("recipe");
        std::fs::write(&file, "").unwrap();
        assert_eq!(parse_run(&[file.to_str().unwrap()]).run.recipe.recipe, file);
        assert!(matches!(parse(&["check", "run.toml"]).unwrap().command, Command::Check(_)));
        assert!(matches!(parse(&["init"]).unwrap().command, Command::Init(_)));
    }

    #[test]
    fn invalid_arguments_are_refused_with_status_two() {
        for (args, message) in [
            (&["frobnicate"][..], "unrecognized subcommand 'frobnicate'"),
            (
                &["bench", "--model", "m"],
                "tip: measurements are a program of their own, beside rlrun: 'rlrun-bench'",
            ),
            (&["chek", "a.toml"], "tip: a similar subcommand exists: 'check'"),
            (&["generate", "m"], "<PROMPTS>..."),
            (&["generate", "m", "p", "--temperature", "-1"], "it must be a number, 0 or more"),
            (&["generate", "m", "p", "--max-tokens", "0"], "it must be a whole number, 1 or more"),
            (&["export", "r"], "--out <DIR>"),
            (&["init", "--template", "ppo"], "grpo-math, grpo-smollm, grpo-gsm8k"),
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
        assert!(parse(&["runs"]).is_ok() && parse(&["runs", "d", "--json"]).is_ok());
        assert!(parse(&["explain"]).is_ok() && parse(&["explain", "trainer.steps", "grpo"]).is_ok());
    }
}
