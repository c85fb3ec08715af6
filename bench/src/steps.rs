//! The whole loop: steps of a real run, in a temporary run directory.
//!
//! Invariant: the benchmark runs the pipeline of every run from a recipe and reads durations from its metrics; there is no
//! second loop. Steps at the start are skipped until the number of groups in flight is steady.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{ModelDirectory, SharedCores};
use rewards::{Builtin, OnError, RewardInput, RewardSet, WeightedReward};
use rlrun::failure::Failure;
use rlrun::pipeline::{self, Ending, RunOptions};
use rlrun::prepare::{Prepared, RewardRuntime};
use rlrun::program::Program;
use rlrun::recipe::{Model, Recipe};
use rlrun::report::{Report, Style};
use rlrun::run_dir::{RecipeTexts, RunDir};
use rlrun::simulate::measured_run::MeasuredRun;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::accelerator::Accelerator;
use crate::args::LoopBenchArgs;
use crate::cost::SamplingWork;
use crate::measure::{Work, median};
use crate::suite::{model_name, shape_of, with_device};

/// Least number of steps that are left out at the start.
const STARTING: usize = 5;

/// Recipe text of every measured loop: nothing but steps.
const ALWAYS: [&str; 2] = ["checkpoint.interval=0", "log.samples=0"];

/// The recipe of a measured loop, in a temporary directory.
#[derive(Debug)]
pub struct LoopRecipe {
    recipe: Recipe,
    given: String,
    resolved: String,
    /// Whether rewards are alternating.
    forced: bool,
    scratch: TempDir,
}

impl LoopRecipe {
    /// The recipe that `args` name, with at most `staleness` versions between sampling and training.
    ///
    /// # Errors
    /// If it cannot be read, or is wrong.
    pub fn load(args: &LoopBenchArgs, staleness: u64, program: &Program) -> Result<Self, Failure> {
        let scratch = tempfile::tempdir()
            .map_err(|source| Failure::System { what: "make a temporary directory".to_owned(), source })?;
        let path = recipe_file(args, scratch.path())?;
        let given = std::fs::read_to_string(&path)
            .map_err(|source| Failure::System { what: format!("read {}", path.display()), source })?;
        let sets = settings(args, staleness);
        let (mut recipe, origins) = Recipe::load(&path, &sets, program).map_err(Failure::Recipe)?;
        // Not one of the settings: a recipe without held-out tasks takes no key for them.
        recipe.eval.interval = 0;
        let resolved = recipe.resolved_toml(&origins);
        Ok(Self { recipe, given, resolved, forced: args.force_length.is_some(), scratch })
    }

    /// The device of the trainer's first rank, whose limits those of the loop are; `None` for the processor.
    ///
    /// # Errors
    /// If it is not there.
    pub fn accelerator(&self) -> Result<Option<Accelerator>, Failure> {
        let place = self.recipe.devices().trainer.first().copied().flatten();
        place.map(|at| Accelerator::at(at, self.recipe.dtype_on(place))).transpose()
    }
}

/// Runs the loop of a recipe, whose sampler and trainer share `cores`, or are `on` a device.
///
/// # Errors
/// A model or tasks that cannot be used, or any failure of the run.
pub fn work(
    of: &LoopRecipe,
    cores: &Arc<SharedCores>,
    on: Option<&Accelerator>,
    program: &Program,
) -> Result<Work, Failure> {
    let LoopRecipe { recipe, given, resolved, forced, scratch } = of;
    let run_dir = RunDir::create(&scratch.path().join("run"), RecipeTexts { given, resolved })?;
    let rewards = forced.then(alternating).transpose()?;
    let options = RunOptions::new(program).cores(Arc::clone(cores)).rewards(rewards);
    if pipeline::run_in(recipe, &run_dir, &Arc::new(Report::new(Style::Quiet)), options)? == Ending::Stopped {
        let source = std::io::ErrorKind::Interrupted.into();
        return Err(Failure::System { what: "finish the measurement".to_owned(), source });
    }
    let read = |name: &str| {
        let path = run_dir.path().join(name);
        let failed = |source| Failure::System { what: format!("read {}", path.display()), source };
        std::fs::read_to_string(&path).map_err(failed)
    };
    let metrics = read("metrics.jsonl")?;
    let steps = Steps::of(&metrics, recipe.buffer.max_staleness)?;
    // A recipe with `log.timeline = 0` has no timeline.
    let measured =
        || MeasuredRun::of(&recipe.values(), &metrics, &read("timeline.jsonl").unwrap_or_default()).ok();
    let directory = recipe.open_model(run_dir.path())?;
    let runtime = RewardRuntime::new(program, cores)?;
    let prepared = Prepared::new(recipe, &directory, &runtime, run_dir.path())?;
    // Forced completions have neither the lengths nor the rewards of the recipe.
    let run = if *forced { None } else { measured() };
    Ok(Work { run, ..result(recipe, on, &steps, &directory, &prepared) })
}

/// Rewards that are never all equal in a group, so that every completion is trained on.
fn alternating() -> Result<Arc<RewardSet>, Failure> {
    let reward =
        Box::new(Builtin::new("alternating", |input: &RewardInput<'_>| Ok(f64::from(input.index % 2))));
    Ok(Arc::new(RewardSet::new(vec![WeightedReward { reward, weight: 1.0, on_error: OnError::Fail }])?))
}

/// The recipe that the user named, or one for the model that the user named.
fn recipe_file(args: &LoopBenchArgs, scratch: &Path) -> Result<PathBuf, Failure> {
    if let Some(recipe) = &args.recipe {
        return Ok(recipe.clone());
    }
    let quoted = |path: &Path| {
        std::path::absolute(path)
            .map(|path| toml::Value::from(path.to_string_lossy().into_owned()).to_string())
            .map_err(|source| Failure::System { what: format!("find {}", path.display()), source })
    };
    let Some(model) = &args.model else {
        return Err(Failure::Argument("name a model or a recipe: --model DIR or --recipe FILE".to_owned()));
    };
    let mut text = format!("[model]\npath = {}\n", quoted(model)?);
    // Writing to a string cannot fail.
    let _ = match &args.tasks {
        Some(tasks) => write!(text, "[data]\ntrain = {}\n", quoted(tasks)?),
        None => write!(text, "[data.arithmetic]\neval_tasks = 0\n"),
    };
    text.push_str("[rollout]\nmax_completion_length = 16\n[trainer]\nlearning_rate = 1e-4\n");
    let reward = if args.tasks.is_some() { "exact" } else { "math" };
    let _ = write!(text, "[[rewards]]\nkind = \"{reward}\"\n");
    let path = scratch.join("loop.toml");
    std::fs::write(&path, text)
        .map_err(|source| Failure::System { what: format!("write {}", path.display()), source })?;
    Ok(path)
}

/// Changes of the recipe; the user's own settings come last.
fn settings(args: &LoopBenchArgs, staleness: u64) -> Vec<String> {
    let mut sets: Vec<String> = ALWAYS.map(str::to_owned).into();
    sets.push(format!("trainer.steps={}", args.steps));
    sets.push(format!("buffer.max_staleness={staleness}"));
    // A recipe keeps its own numbers, a model has none.
    let or = |given: Option<usize>, default| given.or(args.recipe.is_none().then_some(default));
    let (prompts, group) = (or(args.prompts, 32), or(args.group, 8));
    sets.extend(prompts.map(|prompts| format!("buffer.batch_groups={prompts}")));
    sets.extend(group.map(|group| format!("rollout.group_size={group}")));
    if let (Some(prompts), Some(group)) = (prompts, group) {
        sets.push(format!("rollout.max_running={}", prompts.saturating_mul(group)));
    }
    sets.extend(args.max_new.map(|tokens| format!("rollout.max_completion_length={tokens}")));
    if let Some(length) = args.force_length {
        sets.push(format!("rollout.max_completion_length={length}"));
        sets.push("rollout.ignore_stop=true".to_owned());
    }
    sets.extend(args.sets.iter().cloned());
    sets
}

/// The steps that count, from the metrics of a run.
#[derive(Debug)]
struct Steps {
    /// Wall time of each, from the end of the step before, seconds.
    seconds: Vec<f64>,
    metrics: Vec<Map<String, Value>>,
}

impl Steps {
    fn of(text: &str, staleness: u64) -> Result<Self, Failure> {
        let lines: Vec<Map<String, Value>> =
            text.lines().map(serde_json::from_str).collect::<Result<_, _>>().map_err(|error| {
                Failure::Internal(format!("a run wrote metrics that are no JSON: {error}"))
            })?;
        // The time of a step with an evaluation, such as the last one of a recipe with held-out tasks, contains the evaluation.
        let measured: Vec<(f64, &Map<String, Value>)> = lines
            .windows(2)
            .filter(|pair| !pair[1].keys().any(|name| name.starts_with("eval/")))
            .map(|pair| (number(&pair[1], "time_s") - number(&pair[0], "time_s"), &pair[1]))
            .collect();
        let starting = STARTING.max(staleness as usize + 1).min(measured.len() / 2);
        let (seconds, metrics): (_, Vec<_>) =
            measured.into_iter().skip(starting).map(|(seconds, line)| (seconds, line.clone())).unzip();
        Ok(Self { seconds, metrics })
    }

    /// Mean of a measurement over the steps that count.
    fn mean(&self, name: &str) -> f64 {
        let sum: f64 = self.metrics.iter().map(|line| number(line, name)).sum();
        sum / self.metrics.len().max(1) as f64
    }
}

/// A measurement of a step; 0 if it was not taken.
fn number(line: &Map<String, Value>, name: &str) -> f64 {
    line.get(name).and_then(Value::as_f64).unwrap_or(0.0)
}

fn result(
    recipe: &Recipe,
    on: Option<&Accelerator>,
    steps: &Steps,
    directory: &ModelDirectory,
    prepared: &Prepared,
) -> Work {
    let prompts = recipe.buffer.batch_groups as f64;
    let completions = prompts * recipe.rollout.group_size as f64;
    let (new, trained) = (steps.mean("completions/mean_length"), 1.0 - steps.mean("reward/frac_zero_std"));
    let tokens: usize = prepared.train.iter().map(|(_, prompt)| prompt.len()).sum();
    let prompt = tokens as f64 / prepared.train.len().max(1) as f64;
    let shape = shape_of(directory, on);
    // One pass of the network per token of the completions that run side by side; micro-batches as full as they may be.
    let side_by_side = completions.min(recipe.rollout.max_running as f64);
    let passes = new * completions / side_by_side;
    let quantization = recipe.rollout.quantization;
    let sampling = SamplingWork { prompts, prompt, completions, new, passes, quantization };
    let rows = completions * trained;
    let length = prompt + new - 1.0;
    let passes = (rows * length / recipe.trainer.microbatch_tokens as f64).ceil();
    let training = shape.training(std::iter::repeat_n(length, rows.round() as usize), rows * new, passes);
    let name = match &recipe.model {
        Model::Path(path) => model_name(path),
        Model::Random(_) => recipe.name.clone(),
    };
    let seconds = median(&steps.seconds);
    Work {
        name: "loop",
        model: name,
        parameters: shape.parameters as usize,
        settings: with_device(
            on,
            vec![
                ("staleness", json!(recipe.buffer.max_staleness)),
                ("prompts", json!(recipe.buffer.batch_groups)),
                ("group", json!(recipe.rollout.group_size)),
                ("max_new", json!(recipe.rollout.max_completion_length)),
                ("forced", json!(recipe.rollout.ignore_stop)),
            ],
        ),
        seconds: steps.seconds.clone(),
        tokens: completions * new,
        cost: shape.sampling(&sampling) + training,
        further: vec![
            ("samples_per_s", completions / seconds),
            ("mean_length", new),
            ("trained_share", trained),
            ("sampler_idle", steps.mean("rollout/idle_ratio")),
            ("trainer_idle", steps.mean("trainer/idle_ratio")),
        ],
        run: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_at_the_start_and_steps_with_an_evaluation_do_not_count() {
        let line = |step: u64| {
            let accuracy = if step == 0 || step == 20 { ",\"eval/accuracy\":0.5" } else { "" };
            let time = if step == 20 { 99.0 } else { (step * step) as f64 };
            format!("{{\"step\":{step},\"time_s\":{time},\"reward/frac_zero_std\":{step}{accuracy}}}\n")
        };
        let text: String = (0..=20).map(line).collect();
        // Step s takes s^2 - (s - 1)^2 = 2 s - 1 seconds; the first 7 are left out, and the last, which was evaluated.
        let steps = Steps::of(&text, 6).unwrap();
        assert_eq!(steps.seconds, (8..20).map(|s| f64::from(2 * s - 1)).collect::<Vec<_>>());
        assert_eq!(steps.mean("reward/frac_zero_std"), 13.5);
        assert_eq!(Steps::of(&text, 0).unwrap().seconds.len(), 14);
        assert!(Steps::of("{", 0).is_err());
    }
}
