//! `rlrun diff`: the first step, token and tensor in which two runs differ.
//!
//! Invariant: files are only read. What only one run has is named, and never counts as equal.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{ModelDirectory, Parameters};
use serde_json::{Map, Value};
use trajectory::{Group, PolicyVersion, Trajectory};

use crate::args::DiffArgs;
use crate::failure::Failure;
use crate::program::Program;
use crate::recipe::Recipe;
use crate::replay::measured_times;
use crate::run_dir::RunDirError;
use crate::schedule::{self, ScheduleError, ScheduleReader, ScheduleRecord, StepRecord, TrainedTensors};

/// Metrics that follow from tokens, rewards and weights, by what their names begin with.
const COMPARED: [&str; 7] =
    ["reward/mean", "loss/", "optim/", "entropy", "kl/", "completions/", "eval/accuracy"];

/// Bytes of a file that are compared at a time.
const CHUNK: usize = 1 << 20;

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
    match schedules(runs, &mut found) {
        Err(Failure::Schedule(error @ ScheduleError::Foreign { .. })) => {
            found.not_compared.push(format!("trajectories and the weights of every step: {error}"));
        }
        compared => compared?,
    }
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
    /// Says that only `run` has `what` of `steps`, if there are any.
    fn only_in(&mut self, run: &Path, what: &str, steps: &[u64]) {
        if let (Some(first), Some(last)) = (steps.first(), steps.last()) {
            let (count, run) = (steps.len(), run.display());
            self.not_compared.push(format!("{what} {first} to {last} ({count}): only {run} has them"));
        }
    }

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
    let changes = first.changes_to(second);
    let is_apart = |key: &str| APART.iter().any(|section| key.starts_with(section));
    let (apart, changes): (Vec<_>, Vec<_>) = changes.iter().partition(|change| is_apart(&change.key));
    if !apart.is_empty() {
        let keys: Vec<&str> = apart.iter().map(|change| change.key.as_str()).collect();
        let what = format!("recipe keys that change nothing else: {}", keys.join(", "));
        found.not_compared.push(what);
    }
    if !changes.is_empty() {
        let changes: Vec<String> = changes.iter().map(|change| change.to_string()).collect();
        found.different.push(format!("recipe: {}", changes.join(", ")));
    } else if apart.is_empty() {
        found.equal.push("all keys of the recipes".to_owned());
    } else {
        found.equal.push("all other keys of the recipes".to_owned());
    }
    Ok(())
}

/// The steps of a schedule, one by one.
struct ScheduleSteps {
    reader: ScheduleReader,
    path: PathBuf,
    /// When the steps of the run ended, by its metrics.
    times: BTreeMap<u64, f64>,
    /// The tensors of the last start, and the version before the first step.
    tensors: TrainedTensors,
    first: Option<PolicyVersion>,
}

impl ScheduleSteps {
    fn open(run: &Path) -> Result<Self, Failure> {
        let path = schedule::path(run);
        let (reader, times) = (ScheduleReader::open(&path)?, measured_times(run));
        Ok(Self { reader, path, times, tensors: TrainedTensors::default(), first: None })
    }

    fn next(&mut self) -> Result<Option<StepRecord>, Failure> {
        while let Some(record) = self.reader.next()? {
            match record {
                ScheduleRecord::Step(step) => {
                    let (version, time) = (step.version.0, step.numbers.time_s);
                    if self.times.get(&version).is_some_and(|measured| *measured != time) {
                        return Err(ScheduleError::other_time(&self.path, version).into());
                    }
                    return Ok(Some(*step));
                }
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
    let numbers = one.numbers.differences(&other.numbers);
    Some(format!("the weights differ after it, first `{name}`; {numbers}"))
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

/// The metrics of every step in `metrics.jsonl`. An evaluation may have a line of its own.
fn metrics_by_step(run: &Path) -> BTreeMap<u64, Map<String, Value>> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let mut steps = BTreeMap::<u64, Map<String, Value>>::new();
    for line in text.lines() {
        let Ok(line) = serde_json::from_str::<Map<String, Value>>(line) else { continue };
        if let Some(step) = line.get("step").and_then(Value::as_u64) {
            steps.entry(step).or_default().extend(line);
        }
    }
    steps
}

fn metrics(runs: [&Path; 2], found: &mut Differences) {
    let [first, second] = runs.map(metrics_by_step);
    for (run, own, other) in [(runs[0], &first, &second), (runs[1], &second, &first)] {
        let alone: Vec<u64> = own.keys().filter(|step| !other.contains_key(step)).copied().collect();
        found.only_in(run, "metrics of steps", &alone);
    }
    let (mut compared, mut last, mut alone) = (0, 0, BTreeSet::new());
    let mut difference = None;
    'steps: for (step, line) in &first {
        let Some(other) = second.get(step) else { continue };
        let is_compared = |name: &&String| COMPARED.iter().any(|of| name.starts_with(of));
        let missing = other.keys().filter(|name| !line.contains_key(*name));
        alone.extend(missing.filter(is_compared));
        for (name, value) in line.iter().filter(|(name, _)| is_compared(name)) {
            let Some(of_other) = other.get(name) else {
                alone.insert(name);
                continue;
            };
            compared += 1;
            if value != of_other {
                let apart = value.as_f64().zip(of_other.as_f64()).map(|(a, b)| (a - b).abs());
                let apart = apart.map_or_else(String::new, |apart| format!(", {apart:.3e} apart"));
                difference =
                    Some(format!("metrics: first in step {step}, `{name}` {value} and {of_other}{apart}"));
                break 'steps;
            }
        }
        last = *step;
    }
    if !alone.is_empty() {
        let names: Vec<&str> = alone.into_iter().map(String::as_str).collect();
        found.not_compared.push(format!("metrics that a step of only one run has: {}", names.join(", ")));
    }
    match difference {
        Some(difference) => found.different.push(difference),
        None if compared == 0 => {
            found.not_compared.push("metrics: the runs have no step in common".to_owned());
        }
        None => found.equal.push(format!("{compared} values of metrics.jsonl up to step {last}")),
    }
}

fn checkpoints(runs: [&Path; 2], found: &mut Differences) -> Result<(), Failure> {
    let [first, second] = runs.map(|run| trainer::checkpoint::list(&run.join("checkpoints")));
    for (run, own, other) in [(runs[0], &first, &second), (runs[1], &second, &first)] {
        let alone = own.iter().filter(|version| !other.contains(version));
        let alone: Vec<u64> = alone.map(|version| version.0).collect();
        found.only_in(run, "checkpoints of steps", &alone);
    }
    let common: Vec<PolicyVersion> = first.into_iter().filter(|version| second.contains(version)).collect();
    let Some(last) = common.last() else {
        found.not_compared.push("tensors: the runs have no checkpoint of a step in common".to_owned());
        return Ok(());
    };
    let (mut policies, mut files) = (0, BTreeSet::new());
    for version in &common {
        let places = runs.map(|run| trainer::checkpoint::path(&run.join("checkpoints"), *version));
        for place in &places {
            trainer::checkpoint::check(place)?;
        }
        let [one, other] = places.each_ref().map(|place| ModelDirectory::open(&place.join("model")));
        let difference = match (one?.load_parameters(), other?.load_parameters()) {
            (Ok(one), Ok(other)) => {
                policies += 1;
                policy_difference(&one, &other)
            }
            (Err(error), _) | (_, Err(error)) => {
                let what = format!("tensors of the policy in checkpoint {}: {error}", version.0);
                found.not_compared.push(what);
                None
            }
        };
        let difference = match difference {
            Some(difference) => Some(difference),
            None => files_difference(&places, &mut files)?,
        };
        if let Some(difference) = difference {
            found.different.push(format!("checkpoint {}: {difference}", version.0));
            return Ok(());
        }
    }
    let of = format!("{} checkpoints, the last of step {}", common.len(), last.0);
    if policies == common.len() {
        found.equal.push(format!("all tensors of the policy in {of}"));
    }
    if !files.is_empty() {
        let names: Vec<String> = files.into_iter().collect();
        found.equal.push(format!("{} of {of}", names.join(", ")));
    }
    Ok(())
}

/// The first difference of two policies.
fn policy_difference(one: &Parameters, other: &Parameters) -> Option<String> {
    let only_one = |name: &str| format!("only one has `{name}` of its shape");
    for spec in one.layout().specs() {
        let Some(of_other) = other.layout().spec(&spec.name).filter(|other| other.shape == spec.shape) else {
            return Some(only_one(&spec.name));
        };
        let (a, b) = (&one.values()[spec.range()], &other.values()[of_other.range()]);
        if let Some(difference) = values_difference(a, b) {
            return Some(format!("`{}` {difference}", spec.name));
        }
    }
    let mut others = other.layout().specs().iter();
    others.find(|spec| one.layout().spec(&spec.name).is_none()).map(|spec| only_one(&spec.name))
}

/// The first difference of the files of two checkpoints that have tensors of others than the policy: optimizer, adapter, critic,
/// island. The names of the files are added to `compared`.
///
/// # Errors
/// A file that cannot be read.
fn files_difference(
    places: &[PathBuf; 2],
    compared: &mut BTreeSet<String>,
) -> Result<Option<String>, Failure> {
    let system = |source| Failure::System {
        what: format!("compare {} with {}", places[0].display(), places[1].display()),
        source,
    };
    let [mut first, mut second] = [BTreeSet::new(), BTreeSet::new()];
    tensor_files(&places[0], "", &mut first).map_err(system)?;
    tensor_files(&places[1], "", &mut second).map_err(system)?;
    if let Some(name) = first.symmetric_difference(&second).next() {
        return Ok(Some(format!("only one has {name}")));
    }
    for name in &first {
        if !same_bytes(&places[0].join(name), &places[1].join(name)).map_err(system)? {
            return Ok(Some(format!("{name} has other bytes")));
        }
    }
    compared.append(&mut first);
    Ok(None)
}

/// Adds the files under `directory`, whose path from the checkpoint is `prefix`, that have tensors of others than the policy.
fn tensor_files(directory: &Path, prefix: &str, found: &mut BTreeSet<String>) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            if name != "model" {
                tensor_files(&entry.path(), &format!("{name}/"), found)?;
            }
        } else if name.ends_with(".safetensors") || name == "island.bin" {
            found.insert(name);
        }
    }
    Ok(())
}

fn same_bytes(one: &Path, other: &Path) -> io::Result<bool> {
    let open = |path: &Path| Ok::<_, io::Error>(BufReader::with_capacity(CHUNK, File::open(path)?));
    let (mut one, mut other) = (open(one)?, open(other)?);
    loop {
        let (a, b) = (one.fill_buf()?, other.fill_buf()?);
        let both = a.len().min(b.len());
        if both == 0 {
            return Ok(a.len() == b.len());
        }
        if a[..both] != b[..both] {
            return Ok(false);
        }
        one.consume(both);
        other.consume(both);
    }
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
