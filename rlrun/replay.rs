//! `rlrun replay`: a recorded run again, synchronously, to the same bits; or another arm on its trajectories.
//!
//! # Layout
//! - `recorded`: the schedule of a run, checked as a whole before anything is computed
//! - `settings`: which recipes can be replayed, what may be changed in one, and whose tokens are taken as recorded
//! - `comparison`: what is compared at every step; `arm`: how far an arm may leave the policies that sampled its batches
//! - `batches`: the recorded batches in place of a buffer
//!
//! Invariant: nothing of the recorded run is written. A replay that ends without an error has the bits of the record, for everything
//! that is not named as taken from it.

mod arm;
mod batches;
mod comparison;
mod recorded;
mod settings;

use std::path::{Path, PathBuf};

use trajectory::PolicyVersion;

use crate::args::ReplayArgs;
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace};
use crate::pipeline::{self, RunOptions};
use crate::program::Program;
use crate::recipe::{Model, Origins, Recipe};
use crate::report::{Report, Style};
use crate::run_dir::{RecipeTexts, RunDir, RunDirError};
use crate::schedule::build_id;

pub(crate) use arm::ArmBounds;
pub(crate) use batches::RecordedBatches;
pub(crate) use comparison::{RunReplay, SampledAgain};
pub(crate) use recorded::measured_times;
use recorded::{RecordedPart, RecordedRun};

/// Directories of a run that its checkpoints refer to, beside the model that the run made.
const NEEDED: [&str; 2] = ["checkpoints/base", "reference"];

/// Replays the run that `args` name. Returns what was compared.
///
/// # Errors
/// A schedule that cannot be used, a setting that cannot be replayed, the first difference, a replay that was stopped.
pub(crate) fn run(args: &ReplayArgs, program: &Program) -> Result<String, Failure> {
    let recorded = RecordedRun::open(&args.run)?;
    let from = first_step(args, &recorded)?;
    let program = program.without_overrides();
    let parts = recorded.parts(from);
    let recipes: Vec<(Recipe, Origins)> =
        parts.iter().map(|part| settings::recipe(part, args, &program)).collect::<Result<_, _>>()?;
    let elsewhere = sampled_elsewhere(&recorded, &program)?;
    let report = Report::new(Style::detect(args.loudness.quiet, program.environment()));
    let report = std::sync::Arc::new(report.wide(args.loudness.width));
    let place = place(args)?;
    let hub = HuggingFace::of(&program);
    let mut run_dir = None;
    let bounds = ArmBounds { max_kl: args.max_kl, min_ess: args.min_ess, keep_going: args.keep_going };
    let bounds = (!args.what_if.is_empty()).then_some(bounds);
    let mut replay = RunReplay::new(&recorded.path, from, bounds, std::sync::Arc::clone(&report))?;
    for (part, (recipe, origins)) in parts.iter().zip(&recipes) {
        let fetched = hub.fetched(recipe, FetchScope::Everything)?;
        let resolved = recipe.resolved_toml(origins);
        let run_dir = match &run_dir {
            None => {
                let given = std::fs::read_to_string(args.run.join("recipe.toml")).unwrap_or_default();
                let texts = RecipeTexts { given: &given, resolved: &resolved };
                let made = RunDir::create(&place, texts).map_err(taken)?;
                if from != PolicyVersion(0) {
                    copy_state(&args.run, &place, from, recipe)?;
                }
                run_dir.insert(made)
            }
            Some(made) => {
                made.replace_resolved(&resolved)?;
                made
            }
        };
        name_build(part, &report)?;
        // A batch may have groups that were sampled before a resume.
        let sampled_by = elsewhere.iter().rfind(|(from, _)| *from <= part.from).map(|(_, by)| *by);
        replay.begin_part(sampled_by);
        let options = RunOptions::new(&program);
        if !pipeline::replay_in(&fetched, run_dir, &report, options, &mut replay, part.until)? {
            break;
        }
    }
    replay.summary(&args.run, &place, recorded.last)
}

/// The versions from which on something sampled that a replay cannot repeat, with what it was.
fn sampled_elsewhere(
    recorded: &RecordedRun,
    program: &Program,
) -> Result<Vec<(PolicyVersion, &'static str)>, Failure> {
    let mut found = Vec::new();
    for part in recorded.parts(recorded.first) {
        found.extend(settings::sampled_elsewhere(&part, program)?.map(|by| (part.from, by)));
    }
    Ok(found)
}

/// The version that the replay begins at.
fn first_step(args: &ReplayArgs, recorded: &RecordedRun) -> Result<PolicyVersion, Failure> {
    let (first, last) = (recorded.first, recorded.last);
    let from = args.from.map_or(first, PolicyVersion);
    if from < first || from >= last {
        return Err(Failure::Argument(format!(
            "--from {}: the schedule of {} has steps {} to {}; name the checkpoint before one of them",
            from.0,
            args.run.display(),
            first.next().0,
            last.0
        )));
    }
    if from != PolicyVersion(0) {
        let checkpoints = args.run.join("checkpoints");
        let versions = trainer::checkpoint::list(&checkpoints);
        if !versions.contains(&from) {
            let known: Vec<String> = versions.iter().map(|version| version.0.to_string()).collect();
            return Err(Failure::NotThere(format!(
                "{} has no checkpoint of step {} to begin at; there are those of steps {}: name one with --from, or keep more \
                 with `checkpoint.keep_last`",
                args.run.display(),
                from.0,
                known.join(", ")
            )));
        }
        trainer::checkpoint::check(&trainer::checkpoint::path(&checkpoints, from))?;
    }
    Ok(from)
}

/// The directory of a replay: beside the run by default, and never in it.
fn place(args: &ReplayArgs) -> Result<PathBuf, Failure> {
    let system = |source| Failure::System { what: format!("find {}", args.run.display()), source };
    let run = args.run.canonicalize().map_err(system)?;
    let place = args.run_dir.clone().unwrap_or_else(|| {
        // `.` and `..` have no name.
        let named = if args.run.file_name().is_some() { &args.run } else { &run };
        let mut name = named.file_name().unwrap_or_default().to_owned();
        name.push(if args.what_if.is_empty() { "-replay" } else { "-what-if" });
        named.with_file_name(name)
    });
    // The last directories of it may not exist yet.
    let absolute = std::path::absolute(&place).map_err(system)?;
    let existing = absolute.ancestors().find_map(|above| above.canonicalize().ok());
    if existing.is_some_and(|existing| existing.starts_with(&run)) {
        return Err(Failure::Argument(format!(
            "{} is in the recorded run, in which a replay writes nothing; choose another directory with --run-dir",
            place.display()
        )));
    }
    Ok(place)
}

/// `error`; a replay is not resumed.
fn taken(error: RunDirError) -> Failure {
    match error {
        RunDirError::NotEmpty { path } => Failure::Argument(format!(
            "run directory `{}` is not empty; remove it, or choose another for the replay with --run-dir",
            path.display()
        )),
        other => other.into(),
    }
}

/// Copies what a resume from step `from` reads.
fn copy_state(run: &Path, place: &Path, from: PolicyVersion, recipe: &Recipe) -> Result<(), Failure> {
    let checkpoint = trainer::checkpoint::path(Path::new("checkpoints"), from);
    let made = matches!(recipe.model, Model::Random(_)).then_some(Path::new("model"));
    let needed = NEEDED.iter().map(Path::new).chain(made).chain([&*checkpoint]);
    for directory in needed.filter(|directory| run.join(directory).is_dir()) {
        let copied = copy_directory(&run.join(directory), &place.join(directory));
        copied.map_err(|source| Failure::System {
            what: format!("copy {} to {}", run.join(directory).display(), place.display()),
            source,
        })?;
    }
    Ok(())
}

/// Copies the regular files under a directory.
fn copy_directory(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_directory(&source, &target)?;
        } else if kind.is_file() {
            std::fs::copy(&source, &target)?;
        }
    }
    Ok(())
}

/// Says which bits may differ if another program recorded the run.
fn name_build(part: &RecordedPart, report: &Report) -> Result<(), Failure> {
    let system = |source| Failure::System { what: "read the program that is running".to_owned(), source };
    let own = build_id().map_err(system)?;
    if own != part.start.build {
        report.note(&format!(
            "steps {} to {} were recorded by another build of rlrun ({}, build {}; this is {}, build {own}): log-probabilities and \
             weights may differ in their last bits wherever kernels, sums or the compiler changed; the replay stops at the first \
             that does",
            part.from.next().0,
            part.until.0,
            part.start.rlrun,
            part.start.build,
            env!("CARGO_PKG_VERSION"),
        ));
    }
    Ok(())
}
