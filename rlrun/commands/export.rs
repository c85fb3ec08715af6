//! `rlrun export`: a model as a Hugging Face directory, or its adapter for PEFT.
//!
//! Invariant: what is declared is what is written, and an adapter names a model that exists outside the run if it can.

use std::path::Path;

use model::{Config, ModelDirectory};

use super::checkpoint_paths::{model_of, parameters_of};
use super::load;
use crate::args::ExportArgs;
use crate::failure::Failure;
use crate::huggingface::{RepositoryKind, RepositoryName};
use crate::program::Program;
use crate::recipe::{Model, Recipe};

/// Writes what a run has trained.
pub(super) fn export(args: &ExportArgs, program: &Program) -> Result<String, Failure> {
    let model = model_of(&args.run, args.step)?;
    if args.adapter {
        let checkpoint = model.parent().unwrap_or(&model);
        let adapter = trainer::checkpoint::adapter_path(checkpoint);
        if !adapter.is_dir() {
            let what = format!("{} has no adapter; it was trained without `[lora]`", args.run.display());
            return Err(Failure::NotThere(what));
        }
        trainer::checkpoint::check(checkpoint)?;
        let base = base_of(args, &model, program)?;
        trainer::lora::export(&adapter, &args.out, &base)?;
        let (out, adapter) = (args.out.display(), adapter.display());
        return Ok(format!("wrote {out} from {adapter}, for the model {base}"));
    }
    let directory = ModelDirectory::open(&model)?;
    directory.export(&args.out, &parameters_of(&directory)?, args.dtype)?;
    let (out, dtype) = (args.out.display(), args.dtype.declared());
    Ok(format!("wrote {out} from {} as {dtype}", model.display()))
}

/// The model that the adapter of a run belongs to, as PEFT is to load it; `model` is that of its checkpoint. A model that
/// `rlrun serve training` trained has no recipe, and a copy of its base beside it.
///
/// # Errors
/// A recipe that cannot be read, an adapter that PEFT could not load.
fn base_of(args: &ExportArgs, model: &Path, program: &Program) -> Result<String, Failure> {
    let resolved = args.run.join("resolved.toml");
    if !resolved.exists() {
        let base = trainer::checkpoint::base_path(&args.run.join("checkpoints"));
        return Ok(std::path::absolute(&base).unwrap_or(base).to_string_lossy().into_owned());
    }
    let (recipe, _) = load(&resolved, &[], &program.without_overrides())?;
    if let Some(why) = recipe.why_not_in_peft(&Config::load(model)?) {
        let what = format!(
            "the adapter of {} does not fit: {why}; without --adapter the merged model is written",
            args.run.display()
        );
        return Err(Failure::Argument(what));
    }
    Ok(base_of_recipe(&args.run, &recipe))
}

/// The model that the adapter of a run belongs to, as PEFT is to load it: that of its recipe, by its name on the hub if it lies in
/// the cache of the hub. A model that the run made or warmed up is only in the run, and PEFT reads no GGUF file; but a base that
/// stays quantised is the model of the recipe.
fn base_of_recipe(run: &Path, recipe: &Recipe) -> String {
    let path = match &recipe.model {
        Model::Path(path) if recipe.has_quantized_base() => path.clone(),
        Model::Path(path) if recipe.warmup.is_none() && !ModelDirectory::is_file(path) => path.clone(),
        Model::Path(_) | Model::Random(_) => trainer::checkpoint::base_path(&run.join("checkpoints")),
    };
    if let Ok(name) = RepositoryName::parse(&path, RepositoryKind::Model) {
        return name.repository;
    }
    if let Some(name) = hub_name(&path) {
        return name;
    }
    let path = std::path::absolute(&path).unwrap_or(path);
    path.to_string_lossy().into_owned()
}

/// `ORG/NAME` of a directory `models--ORG--NAME/snapshots/REVISION`.
fn hub_name(path: &Path) -> Option<String> {
    let mut above = path.components().rev().skip(1).map(|part| part.as_os_str().to_string_lossy());
    let (snapshots, model) = (above.next()?, above.next()?);
    let name = model.strip_prefix("models--").filter(|_| snapshots == "snapshots")?;
    Some(name.replacen("--", "/", 1))
}
