//! What the commands do.
//!
//! Invariant: a command returns what it has to say or one error with its exit status; nothing is printed here.

use std::path::Path;

use crate::args::{Cli, Command, InitArgs, RecipeArgs};
use crate::init::{self, InitError};
use crate::plan;
use crate::recipe::{DataSource, Diagnostic, Model, Origins, Recipe};
use crate::run_dir::RunDirError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The recipe, its model or its data are wrong.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n\n"))]
    Recipe(Vec<Diagnostic>),
    /// A run directory cannot be used.
    #[error("error: {0}")]
    RunDir(#[from] RunDirError),
    /// A template cannot be written.
    #[error("error: {0}")]
    Init(#[from] InitError),
    /// The command needs a model, and none is linked into this program.
    #[error("error: `rlrun {0}` is not part of this build; use `check`, `plan` or `init`")]
    NotInThisBuild(&'static str),
}

impl Error {
    /// 1 the run failed, 2 the input was wrong.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Recipe(_) | Self::RunDir(_) | Self::Init(_) => 2,
            Self::NotInThisBuild(_) => 1,
        }
    }
}

/// Does what the command line says; `env` are the variables of the process. Returns what there is to say.
///
/// # Errors
/// What went wrong, ready to be shown.
pub fn execute(cli: &Cli, env: &[(String, String)]) -> Result<String, Error> {
    match &cli.command {
        Command::Check(args) => check(args, env),
        Command::Plan(args) => plan(args, env),
        Command::Init(args) => write_template(args),
        Command::Run(_) => Err(Error::NotInThisBuild("run")),
        Command::Eval(_) => Err(Error::NotInThisBuild("eval")),
        Command::Generate(_) => Err(Error::NotInThisBuild("generate")),
        Command::Export(_) => Err(Error::NotInThisBuild("export")),
        Command::Resume(_) => Err(Error::NotInThisBuild("resume")),
    }
}

fn check(args: &RecipeArgs, env: &[(String, String)]) -> Result<String, Error> {
    let (recipe, origins) = load(args, env)?;
    check_model_and_data(&recipe, &origins).map_err(Error::Recipe)?;
    Ok(format!("{}: no mistakes found", args.recipe.display()))
}

fn plan(args: &RecipeArgs, env: &[(String, String)]) -> Result<String, Error> {
    let (recipe, origins) = load(args, env)?;
    Ok(format!("{}\n{}", recipe.resolved_toml(&origins), plan::describe(&recipe)))
}

fn write_template(args: &InitArgs) -> Result<String, Error> {
    let path = args.file.as_deref().unwrap_or(Path::new(args.template.file_name()));
    init::init(args.template, path)?;
    Ok(format!("wrote {}; next: rlrun {}", path.display(), path.display()))
}

fn load(args: &RecipeArgs, env: &[(String, String)]) -> Result<(Recipe, Origins), Error> {
    Recipe::load(&args.recipe, &args.sets, env.iter().cloned()).map_err(Error::Recipe)
}

/// Checks the model and the data that a recipe names, as far as that goes without loading them.
fn check_model_and_data(recipe: &Recipe, origins: &Origins) -> Result<(), Vec<Diagnostic>> {
    let at = |path: &str| origins.get(path).map(|origin| origin.value.clone());
    let mut errors = Vec::new();
    if let Model::Path(path) = &recipe.model {
        for file in ["config.json", "tokenizer.json"] {
            if !path.join(file).is_file() {
                let message = format!("model directory `{}` has no `{file}`", path.display());
                let help = "name a directory in Hugging Face format, with its tokenizer";
                errors.push(Diagnostic::new(message, at("model.path")).help(help));
            }
        }
    }
    if let DataSource::Files(files) = &recipe.data.source {
        for (key, paths) in [("data.train", &files.train), ("data.eval", &files.eval)] {
            for path in paths.iter().filter(|path| path.is_file()) {
                let known =
                    path.extension().is_some_and(|e| ["jsonl", "json", "parquet"].iter().any(|k| e == *k));
                if !known {
                    let message =
                        format!("`{}` is no dataset: it ends neither in .jsonl nor .parquet", path.display());
                    errors.push(Diagnostic::new(message, at(key)).help("convert or rename the file"));
                }
            }
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn execute_args(args: &[&str]) -> Result<String, Error> {
        let cli =
            Cli::parse_args(std::iter::once("rlrun").chain(args.iter().copied()).map(Into::into)).unwrap();
        execute(&cli, &[])
    }

    #[test]
    fn a_template_can_be_checked_and_planned() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("mine.toml");
        let file = file.to_str().unwrap();
        assert_eq!(execute_args(&["init", file]).unwrap(), format!("wrote {file}; next: rlrun {file}"));
        assert_eq!(execute_args(&["check", file]).unwrap(), format!("{file}: no mistakes found"));
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
    fn check_looks_at_the_model_directory_and_the_data_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        let text = "[model]\npath = \".\"\n[data]\ntrain = \"t.csv\"\n[[rewards]]\nkind = \"math\"\n[trainer]\nsteps = 1\n";
        std::fs::write(&path, text).unwrap();
        std::fs::write(directory.path().join("t.csv"), "").unwrap();
        std::fs::write(directory.path().join("config.json"), "{}").unwrap();
        let error = execute_args(&["check", path.to_str().unwrap()]).unwrap_err().to_string();
        assert!(error.contains("has no `tokenizer.json`") && error.contains("r.toml:2:8"), "{error}");
        assert!(error.contains("is no dataset") && error.contains("r.toml:4:9"), "{error}");
    }
}
