//! `rlrun check` and `rlrun plan`: a recipe without a run.

use environments::Demonstration;
use model::{Config, ModelDirectory, SharedCores};
use rollout::Episode;
use rollout::engine::Speculation;
use trainer::ParallelConfig;

use super::{load, scratch_directory};
use crate::args::RecipeArgs;
use crate::demonstrations::Demonstrations;
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace};
use crate::memory;
use crate::plan;
use crate::plan::memory::{Memory, devices};
use crate::plan::sampler_ranks::SamplerRankPlan;
use crate::plan::traffic::Traffic;
use crate::prepare::{Prepared, RewardRuntime};
use crate::program::Program;
use crate::recipe::endpoint::AGENT_KINDS;
use crate::recipe::{DataSource, Diagnostic, Model, Origins, Recipe};
use crate::supervised::SupervisedTraining;

/// Opens everything that a recipe names, without training.
pub(super) fn check(args: &RecipeArgs, program: &Program) -> Result<String, Failure> {
    let (recipe, origins) = load(&args.recipe, &args.sets, program)?;
    let hub = HuggingFace::of(program);
    let named = hub.pinned(&recipe)?;
    let from_hub: String = hub.described(&named)?.into_iter().map(|line| line + "\n").collect();
    let described = hub.fetched(&named, FetchScope::Description)?;
    check_files(&described, &origins).map_err(Failure::Recipe)?;
    // Before the weights are fetched.
    refuse_what_does_not_fit(&described)?;
    let recipe = hub.fetched(&named, FetchScope::Everything)?;
    check_files(&recipe, &origins).map_err(Failure::Recipe)?;
    let scratch = scratch_directory()?;
    let directory = recipe.open_model(scratch.path())?;
    let runtime = RewardRuntime::new(program, &SharedCores::all())?;
    let prepared = Prepared::new(&recipe, &directory, &runtime, scratch.path())?;
    // Missing weights and wrong shapes are found only when the weights are read.
    if recipe.has_quantized_base() {
        recipe.over_quantized_base(&directory)?;
    } else {
        recipe.adapter(&directory.load_parameters()?)?;
    }
    if let Some(supervised) = &recipe.supervised {
        let files = ModelDirectory::open(directory.path())?;
        // Without the reference: only the examples are checked.
        SupervisedTraining::new(&recipe, supervised, files, None).check(&prepared)?;
    }
    let held_out = prepared.held_out();
    let played = scripted_episodes(&recipe, &prepared, &directory, &runtime)?;
    let placement = plan::placement(&recipe).map_or_else(String::new, |line| line + "\n");
    let understood = prepared.understood().chain(recipe.describe_correct());
    let understood: String = understood.map(|line| line + "\n").collect();
    let note = recipe.algorithm.note().map_or_else(String::new, |note| format!("{note}\n"));
    Ok(from_hub
        + &understood
        + &played
        + &note
        + &format!(
            "{placement}{}: no mistakes found; {} parameters, {} training tasks ({} skipped: prompt too long), {held_out} held-out tasks, longest prompt \
         {} tokens",
            args.recipe.display(),
            model::Layout::new(directory.config()).len(),
            prepared.train.len(),
            prepared.train.dropped(),
            prepared.train.longest(),
        ))
}

/// What happens in an episode of a scripted player, one line for every environment that a task is played in, so that a template
/// or an environment that fails is found here; empty without an environment.
fn scripted_episodes(
    recipe: &Recipe,
    prepared: &Prepared,
    directory: &ModelDirectory,
    runtime: &RewardRuntime,
) -> Result<String, Failure> {
    /// What the player says to an environment without a script.
    const WORDS: &str = "hello";
    // The loop of an agent is its own.
    let scripted = recipe.environment.as_ref().is_some_and(|environment| {
        environment.script.is_some() || !environment.kinds().any(|kind| AGENT_KINDS.contains(&kind))
    });
    if !scripted {
        return Ok(String::new());
    }
    let demonstrations = Demonstrations {
        prepared,
        directory,
        runtime: runtime.handle(),
        max_completion_length: recipe.rollout.max_completion_length,
        episodes: true,
    };
    let mut lines = String::new();
    for (name, (task, prompt)) in prepared.first_by_environment() {
        let mut draw = 0;
        let next = || {
            draw += 1;
            (Demonstration::Right, draw)
        };
        let played = demonstrations.play(task, prompt, Some(WORDS), next)?;
        let place = name.map_or_else(String::new, |name| format!(" in `{name}`"));
        lines += &format!("a scripted episode{place}: {}\n", describe(&played));
    }
    Ok(lines)
}

/// An episode, by what its roles said and read.
fn describe(played: &[Episode]) -> String {
    let turns: usize = played.iter().map(|episode| episode.turns.len()).sum();
    let longest = played.iter().map(|episode| episode.token_ids().len()).max().unwrap_or(0);
    let rewards: Vec<f64> =
        played.iter().flat_map(|episode| &episode.turns).filter_map(|turn| turn.reward).collect();
    let reward = match rewards.is_empty() {
        true => String::new(),
        false => format!(", rewards of turns {}", rewards.iter().sum::<f64>()),
    };
    let end = played.first().map_or("failed", |episode| episode.end.name());
    format!("{turns} turns, {longest} tokens{reward}, ended by {end}")
}

/// Shows every value with its origin, the batch arithmetic and the memory needed.
pub(super) fn plan(args: &RecipeArgs, program: &Program) -> Result<String, Failure> {
    let (named, origins) = load(&args.recipe, &args.sets, program)?;
    let hub = HuggingFace::of(program);
    let named = hub.pinned(&named)?;
    let from_hub: String = hub.described(&named)?.into_iter().map(|line| format!("\n{line}")).collect();
    let recipe = hub.fetched(&named, FetchScope::Description)?;
    let config = shape(&recipe)?;
    let tokenizer = match &recipe.model {
        Model::Path(path) => model::directory::tokenizer_bytes(path)?,
        Model::Random(_) => model::characters().to_string().len() as u64,
    };
    refuse_degrees(&recipe)?;
    let memory = Memory::of(&recipe, &config, tokenizer);
    let traffic = Traffic::of(&recipe, &config).map_or_else(String::new, |traffic| format!("\n{traffic}"));
    let of_sampler =
        SamplerRankPlan::of(&recipe, &config).map_or_else(String::new, |plan| format!("\n{plan}"));
    let on_devices = match recipe.devices().any() {
        true => devices::describe(&recipe, &config, &devices::there(&recipe, &config)),
        false => None,
    };
    let on_devices = on_devices.map_or_else(String::new, |text| format!("\n{text}"));
    let (resolved, described) = (named.resolved_toml(&origins), plan::describe(&named));
    let island =
        plan::islands::describe(&recipe, &config).map_or_else(String::new, |line| format!("\n{line}"));
    Ok(format!(
        "{resolved}\n{described}{island}{from_hub}\nmemory\n{memory}{on_devices}{traffic}{of_sampler}"
    ))
}

/// The shape of the recipe's model.
fn shape(recipe: &Recipe) -> Result<Config, Failure> {
    let config = match &recipe.model {
        Model::Path(path) => Config::load(path)?,
        Model::Random(sizes) => recipe.fresh_model(sizes),
    };
    Ok(Config { reduction: recipe.reduction, ..config })
}

/// Refuses ranks that cannot share the model, which is not read without them.
fn refuse_degrees(recipe: &Recipe) -> Result<(), Failure> {
    if recipe.rollout.tensor <= 1 && recipe.learner().parallel == ParallelConfig::DATA {
        return Ok(());
    }
    plan::refuse_degrees(recipe, &shape(recipe)?)
}

/// Refuses a recipe that its model cannot follow, and a run that needs more memory than its devices have free.
pub(super) fn refuse_what_does_not_fit(recipe: &Recipe) -> Result<(), Failure> {
    if recipe.rollout.routing_replay && shape(recipe)?.experts().is_none() {
        let what = "`rollout.routing_replay` is set, and the model has no experts: remove it, or name a model with experts";
        return Err(Failure::Argument(what.to_owned()));
    }
    if recipe.trainer.router_correction_rate > 0.0 && !shape(recipe)?.has_router_correction() {
        let what = "`trainer.router_correction_rate` is set, and the routers of the model have no correction: leave it out, or name a \
                    model of the type glm4_moe, glm4_moe_lite or deepseek_v3";
        return Err(Failure::Argument(what.to_owned()));
    }
    if recipe.rollout.speculation != Speculation::None && shape(recipe)?.state_len() > 0 {
        let what = "`rollout.speculation` is set, and the model has a recurrence, whose state does not go back to before a \
                    rejected token: remove it";
        return Err(Failure::Argument(what.to_owned()));
    }
    if recipe.rollout.push_adapter
        && let Some(why) = recipe.why_not_in_peft(&shape(recipe)?)
    {
        let what = format!(
            "`rollout.push_adapter` is set: {why}; leave the key out, and the engine gets the merged weights"
        );
        return Err(Failure::Argument(what));
    }
    refuse_degrees(recipe)?;
    refuse_weights(recipe)?;
    if !recipe.devices().any() {
        return Ok(());
    }
    let config = shape(recipe)?;
    devices::refuse(recipe, &config, &devices::there(recipe, &config))
}

/// Refuses weights that the memory of this machine does not hold: allocating them would end the process.
fn refuse_weights(recipe: &Recipe) -> Result<(), Failure> {
    let Some(left) = memory::available().filter(|_| !recipe.has_quantized_base()) else { return Ok(()) };
    let bytes = model::Layout::new(&shape(recipe)?).len().saturating_mul(size_of::<f32>());
    if bytes <= left {
        return Ok(());
    }
    let gibibytes = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    Err(Failure::DoesNotFit(format!(
        "the weights of the model take {:.1} GiB in f32, and {:.1} GiB of memory are free: name a smaller model, train an adapter with \
         `lora.quantized_base = true`, or use a machine with more memory",
        gibibytes(bytes),
        gibibytes(left)
    )))
}

/// Checks that the files a recipe names can be what it says, each mistake at the line that names it.
fn check_files(recipe: &Recipe, origins: &Origins) -> Result<(), Vec<Diagnostic>> {
    let at = |path: &str| origins.get(path).map(|origin| origin.value.clone());
    let mut errors = Vec::new();
    if let Model::Path(path) = &recipe.model
        && !ModelDirectory::is_file(path)
    {
        for file in ["config.json", "tokenizer.json"] {
            if !path.join(file).is_file() {
                let message = format!("model directory `{}` has no `{file}`", path.display());
                let help = "name a directory in Hugging Face format, with its tokenizer, or a GGUF file";
                errors.push(Diagnostic::new(message, at("model.path")).help(help));
            }
        }
    }
    if let DataSource::Files(files) = &recipe.data.source {
        for (key, paths) in [("data.train", &files.train), ("data.eval", &files.eval)] {
            for path in paths.iter().filter(|path| path.is_file()) {
                if !rollout::tasks::rows::is_dataset(path) {
                    let message = format!("`{}` is no dataset, by the ending of its name", path.display());
                    let help = "use .jsonl, .json, .csv, .parquet or .arrow";
                    errors.push(Diagnostic::new(message, at(key)).help(help));
                }
            }
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}
