//! `rlrun plan --search`: the fastest settings of a recipe.
//!
//! # Layout
//! - [`candidate`]: settings, as changes of a recipe and as keys
//! - `closed_form`: the order in which settings of training and of weights are tried
//! - `show`: the three best, and why the others lose
//!
//! Invariant: candidates are enumerated in a fixed order. Memory is that of the plan, time that of the simulator; the settings shown
//! and written pass the rules of recipes. A learning rate or an algorithm is never changed, the batch only if asked.

pub mod candidate;
mod closed_form;
mod show;

use std::collections::BTreeMap;
use std::path::Path;

use model::Config;
use simulator::{LimitingSide, RangeOverSeeds, Scenario};

use crate::args::PlanArgs;
use crate::failure::Failure;
use crate::plan::memory::Memory;
use crate::plan::memory::devices::DeviceMemory;
use crate::plan::refuse_degrees;
use crate::program::Program;
use crate::recipe::{Model, Recipe, WITHOUT_CUDA};
use crate::simulate::hardware::HardwareKind;
use crate::simulate::inputs::ScenarioInputs;
use crate::simulate::{described, inputs_of, shape, simulated};

use candidate::{SearchCandidate, SearchSpace};
use closed_form::{KnownTimes, TimedSettings, training_key};

/// Completions that all candidates simulate together.
const MAX_COMPLETIONS: u64 = 4_000_000;
/// Fewest and most steps of a candidate, without those that fill its buffer.
const STEPS: [u64; 2] = [6, 20];
/// Steps of the best.
const FINAL_STEPS: u64 = 40;
/// How many are shown.
const BEST: usize = 3;
/// Finalists that are checked by the rules before the search gives up.
const CHECKED: usize = 400;
/// Degrees of which the best settings are simulated beside the fastest by the closed form.
const OTHER_DEGREES: usize = 8;
/// Reasons of refused settings that an error names.
const REASONS: usize = 6;
/// Candidates that are not faster by this share than one with less staleness lose to it.
const WORTH: f64 = 0.02;

/// Settings with what was found for them.
#[derive(Clone, Debug)]
struct Ranked {
    candidate: SearchCandidate,
    tokens_per_s: f64,
    limits: LimitingSide,
    /// The fullest device, or the process: bytes.
    memory: f64,
}

/// The result of a search.
#[derive(Debug)]
struct FoundSettings {
    /// Fastest first.
    ranked: Vec<Ranked>,
    /// Those of the best that pass the rules, with their ranges over seeds.
    best: Vec<(Ranked, RangeOverSeeds)>,
    /// Settings that do not fit, and what the smallest of them needs, bytes.
    too_large: (usize, f64),
    /// Why finalists were refused, with their number.
    refused: BTreeMap<String, usize>,
    notes: Vec<String>,
}

/// Searches for the fastest settings of the recipe that `args` name, and returns the report.
///
/// # Errors
/// A recipe, a hardware file or a calibration that is wrong, nothing that fits, or a file that cannot be written.
pub fn run(args: &PlanArgs, program: &Program) -> Result<String, Failure> {
    let (path, sets) = (&args.recipe.recipe, &args.recipe.sets);
    let [named, recipe] = described(path, sets, program)?;
    let config = shape(&recipe)?;
    let inputs = inputs_of(&recipe, &named, &config, &args.inputs)?;
    let gpus = match inputs.hardware.kind {
        HardwareKind::Gpu => args.gpus.unwrap_or(1),
        HardwareKind::Cpu => {
            if args.gpus.is_some() {
                let what = "`--gpus` is given for hardware without GPUs; name some with `--hardware`, such as `--hardware h200`";
                return Err(Failure::Argument(what.to_owned()));
            }
            0
        }
    };
    if gpus > 0 {
        refuse_placed_roles(&recipe)?;
    }
    let search = PlanSearch { recipe: &recipe, config: &config, inputs: &inputs, seeds: args.inputs.seeds };
    let space = SearchSpace::new(&recipe, &inputs, gpus as usize, args.any_batch);
    let found = search.found(&space, |candidate| {
        rules(candidate, path, sets, program)?;
        search.divides_model(candidate)
    })?;
    if found.best.is_empty() {
        // What cannot be simulated at all has one reason.
        inputs.scenario(&recipe, &config, STEPS[0])?;
        return Err(nothing_fits(&found, &recipe, &inputs));
    }
    let mut text = show::text(&found, &recipe, &inputs.hardware, gpus);
    if let Some(file) = &args.write {
        let best = &found.best[0].0.candidate;
        write(file, &best.recipe_toml(path, sets)?)?;
        text += &format!("\nwrote {}; next: rlrun check {}", file.display(), file.display());
    }
    Ok(text)
}

/// Refuses keys that place roles on devices or in processes: the written recipe extends the given one and cannot remove them.
fn refuse_placed_roles(recipe: &Recipe) -> Result<(), Failure> {
    let placement = &recipe.placement;
    let given: Vec<String> = [
        ("processes", placement.processes),
        ("rollout_workers", placement.rollout_workers.is_some()),
        ("trainer_device", placement.trainer_device.is_some()),
        ("trainer_devices", placement.trainer_devices.is_some()),
        ("rollout_device", placement.rollout_device.is_some()),
        ("rollout_devices", placement.rollout_devices.is_some()),
    ]
    .into_iter()
    .filter(|(_, is_given)| *is_given)
    .map(|(key, _)| format!("`placement.{key}`"))
    .collect();
    if given.is_empty() {
        return Ok(());
    }
    let what = format!(
        "{} gives {}, and the search places roles on GPUs itself; remove these keys",
        recipe.name,
        given.join(", ")
    );
    Err(Failure::Argument(what))
}

/// Why no settings were found: memory, and the first rules.
fn nothing_fits(found: &FoundSettings, recipe: &Recipe, inputs: &ScenarioInputs) -> Failure {
    let gib = |bytes: f64| format!("{:.1} GiB", bytes / f64::from(1 << 30));
    let (too_large, least) = found.too_large;
    let memory = (too_large > 0).then(|| {
        let memory = gib(inputs.hardware.memory_bytes.value);
        format!("{too_large} need too much memory, at least {} of {memory}", gib(least))
    });
    let refused = found.refused.keys().take(REASONS).cloned();
    let reasons: Vec<String> = memory.into_iter().chain(refused).collect();
    Failure::DoesNotFit(format!(
        "no settings of {} fit {} and the rules of recipes: {}; give more devices with `--gpus`, or change the recipe",
        recipe.name,
        inputs.hardware.name,
        reasons.join("; ")
    ))
}

/// Steps that fill the buffer of a candidate before those that count.
fn filling_steps(max_staleness: u64) -> u64 {
    max_staleness.min(STEPS[1])
}

/// What is searched.
struct PlanSearch<'a> {
    recipe: &'a Recipe,
    config: &'a Config,
    inputs: &'a ScenarioInputs,
    seeds: u64,
}

impl PlanSearch<'_> {
    fn found(
        &self,
        space: &SearchSpace,
        rules: impl Fn(&SearchCandidate) -> Result<(), String>,
    ) -> Result<FoundSettings, Failure> {
        let mut too_large = (0, f64::INFINITY);
        let (mut fitting, mut known_times) = (Vec::new(), KnownTimes::default());
        let mut skipped: BTreeMap<String, usize> = BTreeMap::new();
        for candidate in space.placements() {
            let timed = self.timed(&candidate, space, &rules, &mut known_times);
            // What does not fit does not fit with more running sequences either.
            let skipped = skipped.entry(training_key(&candidate)).or_default();
            let (fits, (count, least)) = self.fastest_that_fits(&candidate, &timed[*skipped..]);
            *skipped += count;
            too_large = (too_large.0 + count, least.min(too_large.1));
            fitting.extend(fits);
        }
        let completions =
            self.recipe.buffer.batch_groups.saturating_mul(self.recipe.rollout.group_size) as u64;
        let bounds = space.staleness();
        // Completions of a step of every candidate with one bound.
        let of_step = (fitting.len() as u64).saturating_mul(completions);
        let filling: u64 = bounds.iter().map(|bound| filling_steps(*bound)).sum();
        let all = of_step.saturating_mul(bounds.len() as u64);
        let rest = MAX_COMPLETIONS.saturating_sub(of_step.saturating_mul(filling));
        let steps = (rest / all.max(1)).clamp(STEPS[0], STEPS[1]);
        let mut played = PlayedScenarios { search: self, known: BTreeMap::new() };
        let mut ranked = Vec::new();
        for (candidate, memory) in fitting {
            for max_staleness in &bounds {
                let candidate = SearchCandidate { max_staleness: *max_staleness, ..candidate.clone() };
                ranked.push(played.ranked(candidate, memory, steps)?);
            }
        }
        sort(&mut ranked);
        let accepted = ranked.iter().take(CHECKED).find(|ranked| rules(&ranked.candidate).is_ok());
        if let Some(first) = accepted.map(|ranked| ranked.candidate.clone()) {
            let timed = self.timed(&first, space, &rules, &mut known_times);
            for (candidate, memory) in self.with_other_degrees_and_transports(&first, timed) {
                ranked.push(played.ranked(candidate, memory, steps)?);
            }
            sort(&mut ranked);
        }
        let (mut best, mut refused, mut notes) = (Vec::new(), known_times.refused, Vec::new());
        for ranked in ranked.iter().take(CHECKED) {
            if best.len() == BEST {
                break;
            }
            match rules(&ranked.candidate) {
                Err(reason) => *refused.entry(reason).or_default() += 1,
                Ok(()) => {
                    let (scenario, of) = self.scenario(&ranked.candidate, FINAL_STEPS)?;
                    notes = of;
                    best.push((ranked.clone(), simulated(&scenario, self.seeds)?));
                }
            }
        }
        Ok(FoundSettings { ranked, best, too_large, refused, notes })
    }

    /// The placement with those of the `timed` settings that take the least time of all that fit; how many faster ones do not fit, and
    /// what the smallest of these needs, bytes.
    fn fastest_that_fits(
        &self,
        placement: &SearchCandidate,
        timed: &[TimedSettings],
    ) -> (Option<(SearchCandidate, f64)>, (usize, f64)) {
        let (mut count, mut least) = (0, f64::INFINITY);
        for settings in timed {
            let candidate = settings.at(placement);
            let memory = self.memory(&candidate.applied(self.recipe));
            if memory <= self.inputs.hardware.memory_bytes.value {
                return (Some((candidate, memory)), (count, least));
            }
            (count, least) = (count + 1, memory.min(least));
        }
        (None, (count, least))
    }

    /// `best` with the best settings of other degrees, and of other transports, as far as they fit.
    fn with_other_degrees_and_transports(
        &self,
        best: &SearchCandidate,
        timed: &[TimedSettings],
    ) -> Vec<(SearchCandidate, f64)> {
        let mut all: Vec<(SearchCandidate, f64)> = Vec::new();
        let (mut degrees, mut transports) = (vec![best.parallel], vec![best.transport]);
        for settings in timed {
            let candidate = settings.at(best);
            let of_degrees = candidate.transport == best.transport
                && degrees.len() <= OTHER_DEGREES
                && !degrees.contains(&candidate.parallel);
            let of_transport =
                candidate.parallel == best.parallel && !transports.contains(&candidate.transport);
            if !of_degrees && !of_transport {
                continue;
            }
            let memory = self.memory(&candidate.applied(self.recipe));
            if memory <= self.inputs.hardware.memory_bytes.value {
                if of_degrees {
                    degrees.push(candidate.parallel);
                }
                if of_transport {
                    transports.push(candidate.transport);
                }
                all.push((candidate, memory));
            }
        }
        all
    }

    /// Whether the ranks of a candidate can divide the model, or why not.
    fn divides_model(&self, candidate: &SearchCandidate) -> Result<(), String> {
        let checked = refuse_degrees(&candidate.applied(self.recipe), self.config);
        checked.map_err(|error| error.to_string())
    }

    fn scenario(&self, candidate: &SearchCandidate, steps: u64) -> Result<(Scenario, Vec<String>), Failure> {
        self.inputs.scenario(&candidate.applied(self.recipe), self.config, steps)
    }

    /// Memory of the fullest device, or of the process, bytes.
    fn memory(&self, recipe: &Recipe) -> f64 {
        if self.inputs.hardware.kind == HardwareKind::Gpu {
            return DeviceMemory::fullest(recipe, self.config) as f64;
        }
        let tokenizer = match &recipe.model {
            Model::Path(path) => model::directory::tokenizer_bytes(path).unwrap_or(0),
            Model::Random(_) => 0,
        };
        Memory::of(recipe, self.config, tokenizer).total() as f64
    }
}

/// Scenarios that were simulated.
struct PlayedScenarios<'a> {
    search: &'a PlanSearch<'a>,
    known: BTreeMap<String, RangeOverSeeds>,
}

impl PlayedScenarios<'_> {
    /// A candidate that needs `memory` bytes, simulated for `steps` steps and those that fill its buffer.
    fn ranked(&mut self, candidate: SearchCandidate, memory: f64, steps: u64) -> Result<Ranked, Failure> {
        let (scenario, _) =
            self.search.scenario(&candidate, steps + filling_steps(candidate.max_staleness))?;
        // Settings that differ in memory alone are simulated once.
        let key = format!("{scenario:?}");
        let range = match self.known.get(&key) {
            Some(range) => range.clone(),
            None => simulated(&scenario, 1)?,
        };
        let (tokens_per_s, limits) = (range.tokens_per_s.p50, range.limits());
        self.known.insert(key, range);
        Ok(Ranked { candidate, tokens_per_s, limits, memory })
    }
}

/// The fastest first; of those within [`WORTH`] of each other the one with less staleness, then the one whose passes have fewer ranks,
/// then the faster one.
fn sort(ranked: &mut Vec<Ranked>) {
    ranked.sort_by(|a, b| b.tokens_per_s.total_cmp(&a.tokens_per_s));
    let mut rest = std::mem::take(ranked);
    while !rest.is_empty() {
        let floor = rest[0].tokens_per_s * (1.0 - WORTH);
        let close = rest.partition_point(|other| other.tokens_per_s >= floor);
        let order = |index: &usize| {
            let SearchCandidate { max_staleness, parallel, .. } = &rest[*index].candidate;
            (*max_staleness, parallel.config().of_pass() * parallel.expert, *index)
        };
        let least = (0..close).min_by_key(order).unwrap_or(0);
        ranked.push(rest.remove(least));
    }
}

/// Whether the rules of recipes accept a candidate, or why not.
fn rules(candidate: &SearchCandidate, path: &Path, sets: &[String], program: &Program) -> Result<(), String> {
    let keys = candidate.keys().into_iter().map(|(key, value)| format!("{key}={value}"));
    let all: Vec<String> = sets.iter().cloned().chain(keys).collect();
    let Err(errors) = Recipe::load(path, &all, program) else { return Ok(()) };
    // A program without CUDA plans for GPUs that it cannot use itself.
    let other = errors.iter().find(|error| !error.message.ends_with(WITHOUT_CUDA));
    other.map_or(Ok(()), |error| Err(error.message.clone()))
}

fn write(file: &Path, text: &str) -> Result<(), Failure> {
    if file.exists() {
        let what = format!("{} exists; name another file with `--write`", file.display());
        return Err(Failure::Argument(what));
    }
    let system = |source| Failure::System { what: format!("write {}", file.display()), source };
    std::fs::write(file, text).map_err(system)
}

#[cfg(test)]
mod tests;
