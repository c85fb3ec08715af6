//! `rlrun simulate`: what a recipe will do, before it runs.
//!
//! # Layout
//! - [`hardware`]: files that describe hardware, with the source of every number
//! - [`calibration`]: measurements of `rlrun-bench --json` and of earlier runs; [`measured_run`]: those of a run; [`contention`]: speeds of
//!   both sides of a run
//! - [`inputs`]: the scenario of a recipe, from both
//! - `exchange`: seconds of what ranks send each other, and of weights on their way to samplers
//! - `show`: text and JSON
//!
//! Invariant: files are only read, but for descriptions of models of the Hugging Face Hub, which are fetched into its cache. Decoding and
//! training that were not measured for this model on this device are estimates of the hardware file, and the output says so; measurements
//! of another model or device are refused.

pub mod calibration;
pub mod contention;
mod exchange;
pub mod hardware;
pub mod inputs;
pub mod measured_run;
pub mod measurements;
mod show;

pub(crate) use show::{digits, limits_in_words};

use std::path::Path;

use model::{Config, Layout};
use simulator::{RangeOverSeeds, Scenario, SimulationError};

use crate::args::{CalibrationArgs, SimulateArgs};
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace, RepositoryName};
use crate::program::Program;
use crate::recipe::{Model, Recipe};

use calibration::Calibration;
use hardware::Hardware;
use inputs::ScenarioInputs;
use measurements::Measurements;

/// Simulates the recipe that `args` name and returns the report.
///
/// # Errors
/// A recipe, a hardware file or a calibration that is wrong, measurements of another model or device, or a run that stops.
pub fn run(args: &SimulateArgs, program: &Program) -> Result<String, Failure> {
    if args.published {
        return show::published(args.json);
    }
    // The command line requires a recipe without `--published`.
    let path = args.recipe.as_deref().unwrap_or(Path::new(""));
    let [named, recipe] = described(path, &args.sets, program)?;
    let config = shape(&recipe)?;
    let inputs = inputs_of(&recipe, &named, &config, &args.inputs)?;
    let (scenario, notes) = inputs.scenario(&recipe, &config, args.steps)?;
    let range = simulated(&scenario, args.inputs.seeds)?;
    let shown = show::Shown {
        recipe: &recipe,
        hardware: &inputs.hardware,
        scenario: &scenario,
        range: &range,
        notes: &notes,
    };
    Ok(if args.json { shown.json() } else { shown.text() })
}

/// The recipe at `path` as a run records it, and with the descriptions of models of the Hugging Face Hub in the place of their names.
///
/// # Errors
/// A recipe that is wrong, and a model that is not there.
pub fn described(path: &Path, sets: &[String], program: &Program) -> Result<[Recipe; 2], Failure> {
    let (recipe, _) = Recipe::load(path, sets, program).map_err(Failure::Recipe)?;
    let hub = HuggingFace::of(program);
    let is_named = matches!(&recipe.model, Model::Path(path) if RepositoryName::is_name(path));
    let named = if is_named { hub.pinned(&recipe)? } else { recipe };
    let described = hub.fetched(&named, FetchScope::Description)?;
    Ok([named, described])
}

/// The hardware and the calibration that `args` name, for `recipe`, which a run records as `named`.
///
/// # Errors
/// Files that are wrong, and measurements of another model or device.
pub fn inputs_of(
    recipe: &Recipe,
    named: &Recipe,
    config: &Config,
    args: &CalibrationArgs,
) -> Result<ScenarioInputs, Failure> {
    let on_gpu = recipe.devices().any();
    let name = args.hardware.as_deref().unwrap_or(if on_gpu { "h200" } else { "cpu" });
    let hardware = Hardware::open(name)?;
    let mut measurements = Measurements::default();
    for path in &args.calibration {
        measurements.read(path, named, config, &hardware)?;
    }
    let calibration = Calibration::of(&measurements, recipe, config);
    ScenarioInputs::new(hardware, calibration, Layout::new(config)).with_runs(recipe, config)
}

/// A scenario over seeds.
///
/// # Errors
/// A run that stops, or inputs that nothing can be simulated with.
pub fn simulated(scenario: &Scenario, seeds: u64) -> Result<RangeOverSeeds, Failure> {
    simulator::over_seeds(scenario, seeds)
        .map_err(|error: SimulationError| Failure::Argument(error.to_string()))
}

/// The shape of the model of `recipe`.
///
/// # Errors
/// A model directory that cannot be read, or that is on the Hugging Face Hub and not here, and a run without sampling.
pub fn shape(recipe: &Recipe) -> Result<Config, Failure> {
    if recipe.supervised.is_some() {
        let what = "a run with `[supervised]` samples nothing, so that there is nothing to simulate; `rlrun-bench train` measures its steps";
        return Err(Failure::Argument(what.to_owned()));
    }
    let config = match &recipe.model {
        Model::Path(path) => Config::load(path)?,
        Model::Random(sizes) => recipe.fresh_model(sizes),
    };
    Ok(Config { reduction: recipe.reduction, ..config })
}
