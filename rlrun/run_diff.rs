//! `rlrun diff`: the first step, token and tensor in which two runs differ.
//!
//! Invariant: files are only read. What only one run has is named, and never counts as equal.

use std::path::Path;
use std::sync::Arc;

use model::ModelDirectory;
use serde_json::{Map, Value};
use trajectory::{Group, PolicyVersion, Trajectory};

use crate::args::DiffArgs;
use crate::failure::Failure;
use crate::program::Program;
use crate::recipe::Recipe;
use crate::run_dir::RunDirError;
use crate::schedule::{self, ScheduleReader, ScheduleRecord, StepRecord, TrainedTensors};

/// Metrics that follow from tokens, rewards and weights, by what their names begin with.
const COMPARED: [&str; 7] =
    ["reward/mean", "loss/", "optim/", "entropy", "kl/", "completions/", "eval/accuracy"];

/// Keys that change nothing that is compared, by what they begin with.
const APART: [&str; 3] = ["name", "log.", "dashboard."];

/// Compares the runs that `args` name. Returns what differs, or that nothing does, and what could not be compared.
///
/// # Errors
/// A directory that is no run; a schedule or a checkpoint that was cut or edited.
pub(crate) fn run(args: &DiffArgs, program: &Program) -> Result<String, Failure> {
    let runs = [args.first.as_path(), args.second.as_path()];
    let mut found = Differences::default();
    recipes(runs, program, &mut found)?;
    schedules(runs, &mut found)?;
    metrics(runs, &mut found);
    checkpoints(runs, &mut found)?;
    Ok(found.text(runs))
}

/// What was found, a line each.
#[derive(Default)]
struct Differences {
    different: Vec<String>,
    equal: Vec<String>,
    /// What could not be compared, and why.
    not_compared: Vec<String>,
}

impl Differences {
    fn text(&self, runs: [&Path; 2]) -> String {
        let [first, second] = runs.map(Path::display);
        let mut lines = Vec::new();
        if self.different.is_empty() {
            lines.push(format!("{first} and {second} are equal in what could be compared"));
        }
        lines.extend(self.different.iter().cloned());
        lines.extend(self.equal.iter().map(|what| format!("equal: {what}")));
        lines.extend(self.not_compared.iter().map(|what| format!("not compared: {what}")));
        lines.join("\n")
    }
}

fn recipes(runs: [&Path; 2], program: &Program, found: &mut Differences) -> Result<(), Failure> {
    let program = program.without_overrides();
    let mut recipes = Vec::new();
    for run in runs {
        let path = run.join("resolved.toml");
        if !path.exists() {
            return Err(RunDirError::NotARun { path: run.to_path_buf() }.into());
        }
        match Recipe::load(&path, &[], &program) {
            Ok((recipe, _)) => recipes.push(recipe),
            Err(errors) => found.not_compared.push(format!(
                "recipes: {} cannot be read: {}",
                path.display(),
                errors.first().map(ToString::to_string).unwrap_or_default()
            )),
        }
    }
    let [first, second] = &recipes[..] else { return Ok(()) };
    let changes: Vec<String> = first
        .changes_to(second)
        .into_iter()
        .filter(|change| !APART.iter().any(|section| change.key.starts_with(section)))
        .map(|change| change.to_string())
        .collect();
    if changes.is_empty() {
        found.equal.push("all keys of the recipes".to_owned());
    } else {
        found.different.push(format!("recipe: {}", changes.join(", ")));
    }
    Ok(())
}

/// The steps of a schedule, one by one.
struct ScheduleSteps {
    reader: ScheduleReader,
    /// The tensors of the last start, and the version before the first step.
    tensors: TrainedTensors,
    first: Option<PolicyVersion>,
}

impl ScheduleSteps {
    fn open(run: &Path) -> Result<Self, Failure> {
        let reader = ScheduleReader::open(&schedule::path(run))?;
        Ok(Self { reader, tensors: TrainedTensors::default(), first: None })
    }

    fn next(&mut self) -> Result<Option<StepRecord>, Failure> {
        while let Some(record) = self.reader.next()? {
            match record {
                ScheduleRecord::Step(step) => return Ok(Some(*step)),
                ScheduleRecord::Start(start) => {
                    self.first.get_or_insert(start.version);
                    self.tensors = start.tensors;
                }
            }
        }
        Ok(None)
    }

    /// The first step of version `version` or later.
    fn at(&mut self, version: PolicyVersion) -> Result<Option<StepRecord>, Failure> {
        while let Some(step) = self.next()? {
            if step.version >= version {
                return Ok(Some(step));
            }
        }
        Ok(None)
    }
}

fn schedules(runs: [&Path; 2], found: &mut Differences) -> Result<(), Failure> {
    if let Some(without) = runs.iter().find(|run| !schedule::path(run).exists()) {
        let what = "trajectories and the weights of every step";
        found.not_compared.push(format!("{what}: {} has no `{}`", without.display(), schedule::FILE));
        return Ok(());
    }
    let [mut first, mut second] = [ScheduleSteps::open(runs[0])?, ScheduleSteps::open(runs[1])?];
    let (Some(mut one), Some(mut other)) = (first.next()?, second.next()?) else {
        found.not_compared.push("trajectories: a schedule has no step".to_owned());
        return Ok(());
    };
    if one.version != other.version {
        let later = one.version.max(other.version);
        found.not_compared.push(format!("steps before {}: only one run recorded them", later.0));
        let (Some(a), Some(b)) = (at(&mut first, one, later)?, at(&mut second, other, later)?) else {
            found.not_compared.push("trajectories: the schedules have no step in common".to_owned());
            return Ok(());
        };
        (one, other) = (a, b);
    } else if let Some(name) = first.tensors.first_difference(&second.tensors) {
        found.different.push(format!("weights before step {}: `{name}` differs", one.version.0));
    }
    let from = one.version.0;
    loop {
        if let Some(difference) = step_difference(&one, &other, &first.tensors) {
            found.different.push(format!("step {}: {difference}", one.version.0));
            return Ok(());
        }
        let last = one.version.0;
        (one, other) = match (first.next()?, second.next()?) {
            (Some(one), Some(other)) => (one, other),
            (None, None) => {
                let what =
                    format!("steps {from} to {last} of the schedules: order, tokens, rewards, weights");
                found.equal.push(what);
                return Ok(());
            }
            (one, _) => {
                let longer = if one.is_some() { runs[0] } else { runs[1] };
                found.equal.push(format!("steps {from} to {last} of the schedules"));
                found.not_compared.push(format!("steps after {last}: only {} has them", longer.display()));
                return Ok(());
            }
        };
    }
}

/// `step`, or the step of `steps` that makes `version`.
fn at(
    steps: &mut ScheduleSteps,
    step: StepRecord,
    version: PolicyVersion,
) -> Result<Option<StepRecord>, Failure> {
    if step.version >= version { Ok(Some(step)) } else { steps.at(version) }
}

/// The first difference of two steps.
fn step_difference(one: &StepRecord, other: &StepRecord, tensors: &TrainedTensors) -> Option<String> {
    let ids = |step: &StepRecord| step.groups.iter().map(|group| group.id.0).collect::<Vec<_>>();
    let (own, others) = (ids(one), ids(other));
    if let Some(place) = (0..own.len().max(others.len())).find(|place| own.get(*place) != others.get(*place))
    {
        let shown = |id: Option<&u64>| id.map_or_else(|| "none".to_owned(), u64::to_string);
        return Some(format!(
            "the batches differ: at place {place} group {} and group {}",
            shown(own.get(place)),
            shown(others.get(place))
        ));
    }
    let groups = one.groups.iter().zip(&other.groups);
    if let Some(difference) = { groups }.find_map(|(one, other)| group_difference(one, other)) {
        return Some(difference);
    }
    let names = TrainedTensors { names: tensors.names.clone(), digests: one.tensors.digests.clone() };
    let name = names.first_difference(&other.tensors)?;
    let (a, b) = (&one.numbers, &other.numbers);
    let numbers =
        [("learning rate", a.learning_rate, b.learning_rate), ("gradient norm", a.grad_norm, b.grad_norm)];
    let differ = numbers.iter().filter(|(_, a, b)| a.to_bits() != b.to_bits());
    let shown: String =
        differ.map(|(what, a, b)| format!("; {what} {a:?} and {b:?}, {:.3e} apart", (a - b).abs())).collect();
    Some(format!("the weights differ after it, first `{name}`{shown}"))
}

fn group_difference(one: &Arc<Group>, other: &Arc<Group>) -> Option<String> {
    let id = one.id;
    if one.task != other.task {
        return Some(format!(
            "{id} has task {} and task {}, or other columns",
            one.task.id.0, other.task.id.0
        ));
    }
    let (a, b) = (one.trajectories.len(), other.trajectories.len());
    let pairs = one.trajectories.iter().zip(&other.trajectories);
    let difference = { pairs }.find_map(|(one, other)| {
        let difference = trajectory_difference(one, other)?;
        Some(format!("{id}, trajectory {}, {difference}", one.index))
    });
    difference.or_else(|| (a != b).then(|| format!("{id} has {a} and {b} trajectories")))
}

fn trajectory_difference(one: &Trajectory, other: &Trajectory) -> Option<String> {
    for ((one, _), (other, _)) in one.rows().zip(other.rows()) {
        let (a, b) = (one.token_ids(), other.token_ids());
        if let Some(token) = (0..a.len().max(b.len())).find(|token| a.get(*token) != b.get(*token)) {
            let shown = |id: Option<&u32>| id.map_or_else(|| "none".to_owned(), u32::to_string);
            return Some(format!("token {token}: id {} and {}", shown(a.get(token)), shown(b.get(token))));
        }
        if one.versions() != other.versions() {
            return Some("the same tokens were sampled by other versions".to_owned());
        }
        let logprobs = one.behavior_logprobs().iter().zip(other.behavior_logprobs());
        if let Some((token, (a, b))) = { logprobs }.enumerate().find(|(_, (a, b))| a.to_bits() != b.to_bits())
        {
            let apart = (a - b).abs();
            return Some(format!("token {token}: log-probability {a:?} and {b:?}, {apart:.3e} apart"));
        }
    }
    if one.reward() != other.reward() {
        return Some(format!("reward {:?} and {:?}", one.reward(), other.reward()));
    }
    (one != other).then(|| "the record differs beside its tokens: turns, experts or components".to_owned())
}

/// The lines of `metrics.jsonl` that are of a training step or an evaluation.
fn lines(run: &Path) -> Vec<Map<String, Value>> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn metrics(runs: [&Path; 2], found: &mut Differences) {
    let [first, second] = runs.map(lines);
    let step = |line: &Map<String, Value>| line.get("step").and_then(Value::as_u64);
    let (mut compared, mut last) = (0, 0);
    for line in &first {
        let Some(other) = second.iter().find(|other| step(other) == step(line)) else { continue };
        let of_step = step(line).unwrap_or_default();
        for (name, value) in line.iter().filter(|(name, _)| COMPARED.iter().any(|of| name.starts_with(of))) {
            let Some(of_other) = other.get(name) else { continue };
            compared += 1;
            if value != of_other {
                let apart = value.as_f64().zip(of_other.as_f64()).map(|(a, b)| (a - b).abs());
                let apart = apart.map_or_else(String::new, |apart| format!(", {apart:.3e} apart"));
                let what =
                    format!("metrics: first in step {of_step}, `{name}` {value} and {of_other}{apart}");
                found.different.push(what);
                return;
            }
        }
        last = of_step;
    }
    if compared == 0 {
        found.not_compared.push("metrics: the runs have no step in common".to_owned());
    } else {
        found.equal.push(format!("{compared} values of metrics.jsonl up to step {last}"));
    }
}

fn checkpoints(runs: [&Path; 2], found: &mut Differences) -> Result<(), Failure> {
    let [first, second] = runs.map(|run| trainer::checkpoint::list(&run.join("checkpoints")));
    let common: Vec<PolicyVersion> = first.into_iter().filter(|version| second.contains(version)).collect();
    if common.is_empty() {
        found.not_compared.push("tensors: the runs have no checkpoint of a step in common".to_owned());
    }
    for version in &common {
        let place = |run: &Path| trainer::checkpoint::path(&run.join("checkpoints"), *version).join("model");
        let [one, other] = [ModelDirectory::open(&place(runs[0]))?, ModelDirectory::open(&place(runs[1]))?];
        let (one, other) = match (one.load_parameters(), other.load_parameters()) {
            (Ok(one), Ok(other)) => (one, other),
            (Err(error), _) | (_, Err(error)) => {
                found.not_compared.push(format!("tensors of checkpoint {}: {error}", version.0));
                return Ok(());
            }
        };
        for spec in one.layout().specs() {
            let Some(of_other) = other.layout().spec(&spec.name).filter(|other| other.shape == spec.shape)
            else {
                let what = format!("checkpoint {}: only one has `{}` of its shape", version.0, spec.name);
                found.different.push(what);
                return Ok(());
            };
            let (a, b) = (&one.values()[spec.range()], &other.values()[of_other.range()]);
            if let Some(difference) = values_difference(a, b) {
                found.different.push(format!("checkpoint {}: `{}` {difference}", version.0, spec.name));
                return Ok(());
            }
        }
    }
    if let Some(last) = common.last() {
        found.equal.push(format!("all tensors of {} checkpoints, the last of step {}", common.len(), last.0));
    }
    Ok(())
}

/// How two tensors `[n]` differ.
fn values_difference(a: &[f32], b: &[f32]) -> Option<String> {
    let differ = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits();
    let count = a.iter().zip(b).filter(differ).count();
    let at = a.iter().zip(b).position(|pair| differ(&pair))?;
    let largest =
        a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)).fold(0.0, |m: f64, d| m.max(d.abs()));
    let (all, first, other) = (a.len(), a[at], b[at]);
    Some(format!(
        "differs in {count} of {all} values, at most {largest:.3e} apart; first value {at}: {first:?} and {other:?}"
    ))
}
