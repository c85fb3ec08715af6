//! `rlrun plan --search`: the fastest settings of a recipe.
//!
//! # Layout
//! - [`candidate`]: settings, as changes of a recipe and as keys
//! - `show`: the three best, and why the others lose
//!
//! Invariant: candidates are enumerated in a fixed order. Memory is that of the plan, time that of the simulator; the settings shown
//! and written pass the rules of recipes. A learning rate or an algorithm is never changed, the batch only if asked.

pub mod candidate;
mod show;

use std::collections::BTreeMap;
use std::path::Path;

use model::Config;
use simulator::{LimitingSide, RangeOverSeeds, Scenario};

use crate::args::PlanArgs;
use crate::failure::Failure;
use crate::plan::memory::Memory;
use crate::plan::memory::devices::DeviceMemory;
use crate::program::Program;
use crate::recipe::{Model, Recipe};
use crate::simulate::hardware::HardwareKind;
use crate::simulate::inputs::ScenarioInputs;
use crate::simulate::{inputs_of, shape, simulated};

use candidate::{Passes, SearchCandidate, SearchSpace};

/// Completions that all candidates simulate together.
const MAX_COMPLETIONS: u64 = 4_000_000;
/// Fewest and most steps of a candidate, without those of its staleness.
const STEPS: [u64; 2] = [6, 20];
/// Steps of the best.
const FINAL_STEPS: u64 = 40;
/// How many are shown.
const BEST: usize = 3;
/// Finalists that are checked by the rules before the search gives up.
const CHECKED: usize = 400;
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
    let (recipe, _) = Recipe::load(path, sets, program).map_err(Failure::Recipe)?;
    let config = shape(&recipe)?;
    let inputs = inputs_of(&recipe, &config, &args.inputs)?;
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
    let search = PlanSearch { recipe: &recipe, config: &config, inputs: &inputs, seeds: args.inputs.seeds };
    let space = SearchSpace::new(&recipe, gpus as usize, args.any_batch);
    let found = search.found(&space, |candidate| rules(candidate, path, sets, program))?;
    if found.best.is_empty() {
        let reasons: Vec<&str> = found.refused.keys().map(String::as_str).take(BEST).collect();
        let what = format!(
            "no settings of {} fit {} and the rules of recipes: {} need too much memory, at least {:.1} GiB of {:.1}; {}; give more \
             devices with `--gpus`, or change the recipe",
            recipe.name,
            inputs.hardware.name,
            found.too_large.0,
            found.too_large.1 / f64::from(1 << 30),
            inputs.hardware.memory_bytes.value / f64::from(1 << 30),
            reasons.join("; ")
        );
        return Err(Failure::DoesNotFit(what));
    }
    let mut text = show::text(&found, &recipe, &inputs.hardware, gpus);
    if let Some(file) = &args.write {
        let best = &found.best[0].0.candidate;
        write(file, &best.recipe_toml(path, sets)?)?;
        text += &format!("\nwrote {}; next: rlrun check {}", file.display(), file.display());
    }
    Ok(text)
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
        let mut fitting = Vec::new();
        for candidate in space.placements() {
            let (fits, (count, least)) = self.fastest_passes(&candidate, space.passes());
            too_large = (too_large.0 + count, least.min(too_large.1));
            fitting.extend(fits);
        }
        let completions = (self.recipe.buffer.batch_groups * self.recipe.rollout.group_size) as u64;
        let bounds = space.staleness();
        let all = (fitting.len() * bounds.len()) as u64 * completions.max(1);
        let steps = (MAX_COMPLETIONS / all.max(1)).clamp(STEPS[0], STEPS[1]);
        let mut known: BTreeMap<String, RangeOverSeeds> = BTreeMap::new();
        let mut ranked = Vec::new();
        for (candidate, memory) in fitting {
            for max_staleness in &bounds {
                let candidate = SearchCandidate { max_staleness: *max_staleness, ..candidate.clone() };
                let (scenario, _) = self.scenario(&candidate, steps + max_staleness)?;
                // Settings that differ in memory alone are simulated once.
                let key = format!("{scenario:?}");
                let range = match known.get(&key) {
                    Some(range) => range.clone(),
                    None => simulated(&scenario, 1)?,
                };
                let (tokens_per_s, limits) = (range.tokens_per_s.p50, range.limits());
                known.insert(key, range);
                ranked.push(Ranked { candidate, tokens_per_s, limits, memory });
            }
        }
        sort(&mut ranked);
        let (mut best, mut refused, mut notes) = (Vec::new(), BTreeMap::new(), Vec::new());
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

    /// The placement with those passes of training that take the least time of all that fit; how many do not fit, and what the
    /// smallest of these needs, bytes.
    fn fastest_passes(
        &self,
        placement: &SearchCandidate,
        passes: &[Passes],
    ) -> (Option<(SearchCandidate, f64)>, (usize, f64)) {
        let mut fastest: Option<(f64, SearchCandidate, f64)> = None;
        let (mut count, mut least) = (0, f64::INFINITY);
        for passes in passes {
            let candidate = SearchCandidate { passes: *passes, ..placement.clone() };
            let recipe = candidate.applied(self.recipe);
            let memory = self.memory(&recipe);
            if memory > self.inputs.hardware.memory_bytes.value {
                (count, least) = (count + 1, memory.min(least));
                continue;
            }
            let Ok((scenario, _)) = self.inputs.scenario(&recipe, self.config, 2) else { continue };
            let seconds = seconds_of_step(&scenario);
            if fastest.as_ref().is_none_or(|(other, ..)| seconds < *other) {
                fastest = Some((seconds, candidate, memory));
            }
        }
        (fastest.map(|(_, candidate, memory)| (candidate, memory)), (count, least))
    }

    fn scenario(&self, candidate: &SearchCandidate, steps: u64) -> Result<(Scenario, Vec<String>), Failure> {
        self.inputs.scenario(&candidate.applied(self.recipe), self.config, steps)
    }

    /// Memory of the fullest device, or of the process, bytes.
    fn memory(&self, recipe: &Recipe) -> f64 {
        if self.inputs.hardware.kind == HardwareKind::Gpu {
            let devices = DeviceMemory::of(recipe, self.config);
            return devices.iter().map(DeviceMemory::total).max().unwrap_or(0) as f64;
        }
        let tokenizer = match &recipe.model {
            Model::Path(path) => model::directory::tokenizer_bytes(path).unwrap_or(0),
            Model::Random(_) => 0,
        };
        Memory::of(recipe, self.config, tokenizer).total() as f64
    }
}

/// Training of a batch of mean lengths, seconds.
fn seconds_of_step(scenario: &Scenario) -> f64 {
    let sequences = scenario.batch_groups * scenario.group_size;
    let length = scenario.lengths.mean() + scenario.prompt_tokens;
    let ranks = scenario.trainer.ranks as f64;
    let of_rank = (sequences as f64 / ranks).ceil();
    let one = simulator::TrainingCost { ranks: 1, ..scenario.trainer };
    one.seconds(&[]) + of_rank * (one.per_token_s * length + one.per_square_s * length * length)
}

/// The fastest first; of those within [`WORTH`] of each other the one with less staleness, and then the earlier one.
fn sort(ranked: &mut Vec<Ranked>) {
    ranked.sort_by(|a, b| b.tokens_per_s.total_cmp(&a.tokens_per_s));
    let mut rest = std::mem::take(ranked);
    while !rest.is_empty() {
        let floor = rest[0].tokens_per_s * (1.0 - WORTH);
        let close = rest.partition_point(|other| other.tokens_per_s >= floor);
        let least =
            (0..close).min_by_key(|index| (rest[*index].candidate.max_staleness, *index)).unwrap_or(0);
        ranked.push(rest.remove(least));
    }
}

/// Whether the rules of recipes accept a candidate, or why not.
fn rules(candidate: &SearchCandidate, path: &Path, sets: &[String], program: &Program) -> Result<(), String> {
    let keys = candidate.keys();
    // A program without CUDA plans for GPUs that it cannot use itself.
    let own = keys.iter().filter(|(key, _)| cfg!(feature = "cuda") || !candidate::names_devices(key));
    let all: Vec<String> =
        sets.iter().cloned().chain(own.map(|(key, value)| format!("{key}={value}"))).collect();
    let loaded = Recipe::load(path, &all, program);
    loaded
        .map(|_| ())
        .map_err(|errors| errors.first().map_or_else(String::new, |error| error.message.clone()))
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
