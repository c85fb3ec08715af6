//! The commands of the program.
//!
//! - `train`: `run` and `resume`; `by_rank`: the roles of processes that run the same command; `check`: `check` and `plan`; `eval`, `generate`, `export`; `policy`: `serve policy`; `training`: `serve training`;
//!   `view`: the live page; `launch`: runs on several machines; `completions`: scripts of shells and manual pages
//! - `checkpoint_paths`: the model or the checkpoint that an argument names
//!
//! Invariant: a command returns its text or one error with its exit status. Only output that grows while the user watches
//! (the report of a run, a chat) is written before the command ends.

mod by_rank;
mod check;
mod checkpoint_paths;
mod completions;
mod eval;
mod export;
mod export_logs;
mod generate;
mod launch;
mod policy;
mod report;
mod resume;
mod run;
mod top;
mod train;
mod training;
mod view;

use std::path::Path;

use crate::args::{Cli, Command, InitArgs, RewardCommand, ServeCommand, WorkerCommand};
use crate::controller;
use crate::doctor;
use crate::explain;
use crate::failure::Failure;
use crate::fit;
use crate::init;
use crate::plan;
use crate::program::Program;
use crate::recipe::{Origins, Recipe};
use crate::replay;
use crate::reward;
use crate::run_diff;
use crate::runs;
use crate::serve;
use crate::serve_islands;
use crate::simulate;
use crate::why;
use crate::workers;

/// Executes the command of `cli` with `program`. Returns the text to print.
///
/// # Errors
/// The error of the command, ready to be shown.
pub fn execute(cli: &Cli, program: &Program) -> Result<String, Failure> {
    match &cli.command {
        Command::Check(args) => check::check(args, program),
        Command::Plan(args) if args.search => plan::search::run(args, program),
        Command::Plan(args) => match args.needs_search() {
            Some(option) => {
                Err(Failure::Argument(format!("`{option}` has no effect without `--search`; add it")))
            }
            None => check::plan(&args.recipe, program),
        },
        Command::Simulate(args) => simulate::run(args, program),
        Command::Init(args) => write_template(args),
        Command::Doctor(args) => doctor::run(args, program),
        Command::Explain(args) => explain::run(args, program),
        Command::Run(args) => run::run(args, program),
        Command::Eval(args) => eval::eval(args, program),
        Command::Generate(args) => generate::generate(args, program),
        Command::ExportLogs(args) => export_logs::export_logs(args, program),
        Command::Export(args) => export::export(args, program),
        Command::Resume(args) => resume::resume(args, program),
        Command::Diff(args) => run_diff::run(args, program),
        Command::Replay(args) => replay::run(args, program),
        Command::Launch(command) => launch::launch(command, program),
        Command::Worker(command) => worker(command, program),
        Command::Serve(ServeCommand::Buffer(args)) => serve::buffer(args, program),
        Command::Serve(ServeCommand::Islands(args)) => serve_islands::serve(args),
        Command::Serve(ServeCommand::Policy(args)) => policy::serve(args, program),
        Command::Serve(ServeCommand::Reward(args)) => serve::reward(args, program),
        Command::Serve(ServeCommand::Training(args)) => training::serve(args, program),
        Command::Reward(RewardCommand::Grade(args)) => {
            reward::grade(args, program, std::io::stdin().lock(), &mut std::io::stdout())?;
            Ok(String::new())
        }
        Command::Reward(RewardCommand::Test(args)) => reward::test(args, program),
        Command::Fit(args) => fit::run(args),
        Command::Completions(args) => completions::completions(args),
        Command::Runs(args) => runs::run(args),
        Command::View(args) => view::view(args, program),
        Command::Top(args) => top::top(args),
        Command::Why(args) => why::run(args, program),
        Command::Report(args) => report::report(args),
    }
}

fn worker(command: &WorkerCommand, program: &Program) -> Result<String, Failure> {
    match command {
        WorkerCommand::Rollout(args) => workers::rollout::run(args, program).map(|()| String::new()),
        WorkerCommand::Trainer(args) => workers::trainer::run(args, program).map(|()| String::new()),
        WorkerCommand::Reward(args) => workers::reward::run(args, program).map(|()| String::new()),
        WorkerCommand::Lead(args) => train::outcome(controller::lead::run(args, program)?, &args.run),
        WorkerCommand::Templates => model::chat::serve().map(|()| String::new()).map_err(|source| {
            Failure::System { what: "render chat templates for another process".to_owned(), source }
        }),
    }
}

fn write_template(args: &InitArgs) -> Result<String, Failure> {
    let path = args.file.as_deref().unwrap_or(Path::new(args.template.default_path()));
    let recipe = init::init(args.template, path)?;
    let recipe = recipe.display();
    if let [_] = args.template.files() {
        return Ok(format!("wrote {recipe}; next: rlrun {recipe}"));
    }
    let names: Vec<&str> = args.template.files().iter().map(|file| file.name).collect();
    Ok(format!(
        "wrote {}: {}\n\nnext\n  rlrun check {recipe}          finds mistakes in recipe, data and reward\n  \
         rlrun reward test {recipe}    shows what the rewards give for the answers of the data\n  \
         rlrun {recipe}                trains",
        path.display(),
        names.join(", ")
    ))
}

fn load(path: &Path, sets: &[String], program: &Program) -> Result<(Recipe, Origins), Failure> {
    Recipe::load(path, sets, program).map_err(Failure::Recipe)
}

/// A directory that disappears again, for the fresh model of a check.
fn scratch_directory() -> Result<tempfile::TempDir, Failure> {
    tempfile::tempdir()
        .map_err(|source| Failure::System { what: "make a temporary directory".to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn execute_args(args: &[&str]) -> Result<String, Failure> {
        let cli =
            Cli::parse_args(std::iter::once("rlrun").chain(args.iter().copied()).map(Into::into)).unwrap();
        execute(&cli, &Program::default())
    }

    #[test]
    fn a_template_can_be_checked_and_planned() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("mine.toml");
        let file = file.to_str().unwrap();
        assert_eq!(execute_args(&["init", file]).unwrap(), format!("wrote {file}; next: rlrun {file}"));
        let checked = execute_args(&["check", file]).unwrap();
        assert!(
            checked.contains(&format!("{file}: no mistakes found; 113600 parameters, 8000 training tasks")),
            "{checked}"
        );
        // A kind that does here what another one does.
        let process = execute_args(&["check", file, "--set", "algorithm.kind=process"]).unwrap();
        assert!(!checked.contains("note: ") && process.contains("it trains as \"grpo\" does"), "{process}");
        let plan = execute_args(&["plan", file, "--set", "trainer.steps=7"]).unwrap();
        assert!(
            plan.lines().any(|line| line.starts_with("steps = 7 ") && line.ends_with("  # --set"))
                && plan.contains("run           mine, 7 steps"),
            "{plan}"
        );
        let error =
            execute_args(&["check", file, "--set", "trainer.stepps=7", "--set", "seed=x"]).unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().matches("error: ").count()), (2, 2), "{error}");
        assert_eq!(execute_args(&["init", file]).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn the_template_for_own_data_is_complete() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mine");
        let said = execute_args(&["init", "--template", "own-data", path.to_str().unwrap()]).unwrap();
        let recipe = path.join("my_task.toml");
        let recipe = recipe.to_str().unwrap();
        assert!(
            said.contains(&format!("\n  rlrun check {recipe} ")) && said.contains("my_reward.py"),
            "{said}"
        );
        let checked = execute_args(&["check", recipe]).unwrap();
        assert!(
            checked.contains("no mistakes found; ") && checked.contains("100 training tasks"),
            "{checked}"
        );
        assert!(execute_args(&["reward", "test", recipe]).unwrap().contains("places"));
    }

    #[test]
    fn a_plan_for_a_device_names_it_or_says_what_this_program_lacks() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("mine.toml");
        let file = file.to_str().unwrap();
        execute_args(&["init", file]).unwrap();
        assert!(!execute_args(&["plan", file]).unwrap().contains("the trainer, the sampler"));
        let planned = execute_args(&["plan", file, "--set", "placement.device=emulated"]);
        if cfg!(feature = "emulator") {
            let plan = planned.unwrap();
            assert!(plan.contains("\nemulated: the trainer, the sampler, in f32\n"), "{plan}");
            assert!(
                plan.lines()
                    .any(|line| line.starts_with("device = \"emulated\" ") && line.ends_with("  # --set")),
                "{plan}"
            );
        } else {
            let error = planned.unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("build it with `--features emulator`"), "{error}");
        }
        assert!(execute_args(&["doctor"]).unwrap().contains("\ndevices\n"));
        let json: serde_json::Value =
            serde_json::from_str(&execute_args(&["doctor", "--json"]).unwrap()).unwrap();
        assert_eq!(json["devices"]["emulator"], cfg!(feature = "emulator"));
    }

    #[test]
    fn check_looks_at_the_model_directory_and_the_data_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        let text = "[model]\npath = \".\"\n[data]\ntrain = \"t.tsv\"\n[[rewards]]\nkind = \"math\"\n[trainer]\nsteps = 1\n";
        std::fs::write(&path, text).unwrap();
        std::fs::write(directory.path().join("t.tsv"), "").unwrap();
        std::fs::write(directory.path().join("config.json"), "{}").unwrap();
        let error = execute_args(&["check", path.to_str().unwrap()]).unwrap_err().to_string();
        assert!(error.contains("has no `tokenizer.json`") && error.contains("r.toml:2:8"), "{error}");
        assert!(error.contains("is no dataset") && error.contains("r.toml:4:9"), "{error}");
    }
}
