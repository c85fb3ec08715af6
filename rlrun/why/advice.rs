//! Changes of the recipe that would make a run faster, with the gain that the simulator predicts.
//!
//! The simulator is calibrated from the run itself. A change is recommended if its predicted gain is larger than the spread of the
//! prediction over seeds. What the simulator does not model is recommended only for a resource that takes much of the time, and the
//! recommendation says that its gain is not predicted.
//!
//! Invariant: at most [`MOST`] recommendations; every changed recipe passes the rules of recipes. Learning rates, algorithms and
//! batches are never changed.

use std::path::Path;

use dashboard::why::{CauseKind, RunExplanation};
use serde_json::{Value, json};
use simulator::OutcomeRange;

use crate::args::CalibrationArgs;
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace};
use crate::program::Program;
use crate::recipe::Recipe;
use crate::recipe::words::{OnUpdate, StoreWord};
use crate::simulate::inputs::ScenarioInputs;
use crate::simulate::{inputs_of, shape, simulated};

/// Most recommendations.
const MOST: usize = 5;
/// Seeds of a simulation.
const SEEDS: u64 = 5;
/// Completions that a simulation of one recipe and seed has at most.
const MAX_COMPLETIONS: u64 = 100_000;
/// Fewest and most simulated steps, beside one for each version of staleness.
const STEPS: [u64; 2] = [6, 30];
/// A smaller gain is not worth a change.
const MIN_GAIN: f64 = 0.02;
/// Share of the time from which a resource is worth a change that is not predicted.
const MIN_SHARE: f64 = 0.1;
/// A simulation whose step differs more from the measured one predicts nothing for the run.
const FAR_OFF: f64 = 0.25;

/// A change of a recipe.
#[derive(Clone, Debug, PartialEq)]
struct KeyChange {
    key: String,
    from: String,
    to: String,
}

/// A change with its gain.
#[derive(Clone, Debug, PartialEq)]
struct Recommendation {
    change: KeyChange,
    /// More tokens per second, as a share: 10th percentile, median and 90th over seeds; `None` where the simulator does not model it.
    gain: Option<[f64; 3]>,
    why: String,
}

/// What is recommended for a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Advice {
    changes: Vec<Recommendation>,
    notes: Vec<String>,
}

impl Advice {
    /// Recommends changes for the run in `root`, on the hardware with this name.
    ///
    /// # Errors
    /// Hardware that is not known.
    pub(super) fn new(
        root: &Path,
        explanation: &RunExplanation,
        hardware: Option<&str>,
        program: &Program,
    ) -> Result<Self, Failure> {
        let mut advice = Self::default();
        let path = root.join("resolved.toml");
        let recipe = match Recipe::load(&path, &[], program) {
            Ok((recipe, _)) => recipe,
            Err(errors) => {
                let reason = errors.first().map_or_else(String::new, |error| error.message.clone());
                advice
                    .notes
                    .push(format!("nothing is predicted: {} cannot be read: {reason}", path.display()));
                return Ok(advice);
            }
        };
        let inputs = CalibrationArgs {
            hardware: hardware.map(str::to_owned),
            calibration: vec![root.to_path_buf()],
            seeds: SEEDS,
        };
        if let Some(name) = hardware {
            crate::simulate::hardware::Hardware::open(name)?;
        }
        match RecipeSimulation::new(&recipe, &inputs, HuggingFace::of(program)) {
            Ok(simulation) => advice.predicted(&recipe, &path, explanation, &simulation, program),
            Err(error) => advice.notes.push(format!("nothing is predicted: {error}")),
        }
        advice.unpredicted(&recipe, explanation);
        advice.changes.truncate(MOST);
        Ok(advice)
    }

    /// Adds the changes that the simulator predicts a gain for, the largest first.
    fn predicted(
        &mut self,
        recipe: &Recipe,
        path: &Path,
        explanation: &RunExplanation,
        simulation: &RecipeSimulation,
        program: &Program,
    ) {
        let base = match simulation.ranges(recipe) {
            Ok(base) => base,
            Err(error) => return self.notes.push(format!("nothing is predicted: {error}")),
        };
        let (simulated_s, measured_s) = (base.step_s.p50, explanation.median_step_s);
        if (simulated_s / measured_s.max(f64::MIN_POSITIVE) - 1.0).abs() > FAR_OFF {
            return self.notes.push(format!(
                "nothing is predicted: simulated as it was, a step of this run takes {simulated_s:.3} s, and the median measured one \
                 {measured_s:.3} s"
            ));
        }
        for change in candidates(recipe) {
            let set = format!("{}={}", change.key, change.to);
            let Ok((changed, _)) = Recipe::load(path, &[set], program) else { continue };
            let Ok(range) = simulation.ranges(&changed) else { continue };
            let gain = base.gain_of(&range);
            // The worst of the new over the best of the old has to be a gain.
            if gain[1] > MIN_GAIN && range.tokens_per_s.p10 > base.tokens_per_s.p90 {
                let why = format!("{:.3} s per step instead of {simulated_s:.3} s", range.step_s.p50);
                self.changes.push(Recommendation { change, gain: Some(gain), why });
            }
        }
        let median = |of: &Recommendation| of.gain.map_or(0.0, |gain| gain[1]);
        self.changes.sort_by(|a, b| median(b).total_cmp(&median(a)));
        // Of several values of a key, the best.
        let mut keys = Vec::new();
        self.changes.retain(|of| {
            let is_new = !keys.contains(&of.change.key);
            keys.push(of.change.key.clone());
            is_new
        });
    }

    /// Adds changes for resources that take much of the time and that the simulator does not model.
    fn unpredicted(&mut self, recipe: &Recipe, explanation: &RunExplanation) {
        for of in explanation.causes.iter().filter(|of| of.share >= MIN_SHARE) {
            let share = format!("{} takes {:.0} % of the time", of.cause, 100.0 * of.share);
            let change = |key: &str, from: String, to: &str| KeyChange {
                key: key.to_owned(),
                from,
                to: to.to_owned(),
            };
            let added = match (of.cause.kind, &of.cause.name[..]) {
                (CauseKind::Reward, name) => {
                    recipe.rewards.iter().find(|spec| spec.name() == name).map(|spec| {
                        let (now, more) = (spec.concurrency, 2 * spec.concurrency);
                        let key = format!("concurrency of the reward `{name}`");
                        (
                            change(&key, now.to_string(), &more.to_string()),
                            "the simulator has no queue of rewards",
                        )
                    })
                }
                (CauseKind::Disk, "journal") if recipe.buffer.store == StoreWord::Redb => Some((
                    change("buffer.store", "redb".to_owned(), "memory"),
                    "the simulator has no journal; groups are lost in a crash then and are sampled again",
                )),
                (CauseKind::Weights, name) if recipe.placement.processes && name != "publish" => Some((
                    change("weights.dtype", word_of(recipe, "weights", "dtype"), "bf16"),
                    "the simulator has no formats of weights on the way",
                ))
                .filter(|(change, _)| change.from != change.to),
                _ => None,
            };
            if let Some((change, reason)) = added {
                let why = format!("{share}; not predicted: {reason}");
                self.changes.push(Recommendation { change, gain: None, why });
            }
        }
    }

    /// The object of `rlrun why --json` and of the page.
    pub(super) fn to_json(&self) -> Value {
        let round = |share: f64| (share * 1e4).round() / 1e4;
        let change = |of: &Recommendation| {
            json!({
                "key": of.change.key,
                "from": of.change.from,
                "to": of.change.to,
                "gain": of.gain.map(|[p10, p50, p90]| json!({"p10": round(p10), "p50": round(p50), "p90": round(p90)})),
                "why": of.why,
            })
        };
        json!({"changes": self.changes.iter().map(change).collect::<Vec<_>>(), "notes": self.notes})
    }

    /// A line for every recommendation and note.
    pub(super) fn lines(&self) -> Vec<String> {
        let line = |(number, of): (usize, &Recommendation)| {
            let KeyChange { key, from, to } = &of.change;
            let gain = of.gain.map_or_else(String::new, |[p10, p50, p90]| {
                let [p10, p50, p90] = [p10, p50, p90].map(|share| 100.0 * share);
                format!("{p50:+.0} % tokens per second predicted ({p10:+.0} to {p90:+.0} % over seeds), ")
            });
            format!("{number}. {key}: {from} -> {to}: {gain}{}", of.why)
        };
        let mut lines: Vec<String> = (1..).zip(&self.changes).map(line).collect();
        if lines.is_empty() {
            lines.push("none: no change of a key is predicted to gain more than noise".to_owned());
        }
        lines.extend(self.notes.iter().map(|note| format!("note: {note}")));
        lines
    }
}

/// The simulator with the calibration of a run.
struct RecipeSimulation {
    inputs: ScenarioInputs,
    config: model::Config,
    /// Where recipes that name models of the hub have their descriptions from.
    hub: HuggingFace,
}

/// Speed of a simulated recipe.
struct SimulatedSpeed {
    step_s: OutcomeRange,
    tokens_per_s: OutcomeRange,
}

impl SimulatedSpeed {
    /// How much faster `other` is, as a share: 10th percentile, median, 90th.
    fn gain_of(&self, other: &Self) -> [f64; 3] {
        let base = self.tokens_per_s.p50.max(f64::MIN_POSITIVE);
        [other.tokens_per_s.p10, other.tokens_per_s.p50, other.tokens_per_s.p90]
            .map(|speed| speed / base - 1.0)
    }
}

impl RecipeSimulation {
    fn new(recipe: &Recipe, inputs: &CalibrationArgs, hub: HuggingFace) -> Result<Self, Failure> {
        let described = hub.fetched(recipe, FetchScope::Description)?;
        let config = shape(&described)?;
        Ok(Self { inputs: inputs_of(&described, recipe, &config, inputs)?, config, hub })
    }

    fn ranges(&self, recipe: &Recipe) -> Result<SimulatedSpeed, Failure> {
        let recipe = &self.hub.fetched(recipe, FetchScope::Description)?;
        let completions = (recipe.buffer.batch_groups * recipe.rollout.group_size).max(1) as u64;
        let steps = (MAX_COMPLETIONS / completions).clamp(STEPS[0], STEPS[1]) + recipe.buffer.max_staleness;
        let (scenario, _) = self.inputs.scenario(recipe, &self.config, steps)?;
        let range = simulated(&scenario, SEEDS)?;
        Ok(SimulatedSpeed { step_s: range.step_s, tokens_per_s: range.tokens_per_s })
    }
}

/// Changes of single keys that the simulator models.
fn candidates(recipe: &Recipe) -> Vec<KeyChange> {
    let mut changes = Vec::new();
    let mut number = |key: &str, from: u64, to: u64| {
        if to != from && to > 0 {
            changes.push(KeyChange { key: key.to_owned(), from: from.to_string(), to: to.to_string() });
        }
    };
    let staleness = recipe.buffer.max_staleness;
    for to in [staleness + 1, 2 * staleness, 4 * staleness] {
        number("buffer.max_staleness", staleness, to);
    }
    let running = recipe.rollout.max_running as u64;
    for to in [running / 2, 2 * running, 4 * running] {
        number("rollout.max_running", running, to);
    }
    if recipe.placement.processes {
        let workers = recipe.rollout_workers() as u64;
        for to in [workers + 1, 2 * workers] {
            number("placement.rollout_workers", workers, to);
        }
    }
    number("trainer.world", recipe.trainer.world as u64, 2 * recipe.trainer.world as u64);
    let interval = recipe.checkpoint.interval;
    for to in [2 * interval, 4 * interval] {
        number("checkpoint.interval", interval, to);
    }
    if recipe.rollout.on_update != OnUpdate::Keep {
        let from = word_of(recipe, "rollout", "on_update");
        changes.push(KeyChange { key: "rollout.on_update".to_owned(), from, to: "keep".to_owned() });
    }
    changes
}

/// The word that a recipe has for a key.
fn word_of(recipe: &Recipe, section: &str, key: &str) -> String {
    let value = recipe.values().get(section).and_then(|keys| keys.get(key)?.as_str().map(str::to_owned));
    value.unwrap_or_default()
}
