//! `rlrun RECIPE`: the role of this process, the address of the run, and whether it starts or goes on.

use std::net::SocketAddr;
use std::path::Path;

use toml::Value;

use super::by_rank;
use super::check::refuse_what_does_not_fit;
use super::load;
use super::resume::resume_in_place;
use super::train::{TrainingStart, launched, report, train};
use crate::archive::{self, ArchiveRequest};
use crate::args::{ResumeArgs, RunArgs};
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace};
use crate::launchers::network::address_of;
use crate::launchers::{PORT, ServedRecipe};
use crate::program::Program;
use crate::recipe::{Change, Recipe};
use crate::run_dir::{self, RecipeTexts, RunDir};

/// Trains as a recipe says, in a new run directory or, if the user says so, in the one that is there.
pub(super) fn run(args: &RunArgs, program: &Program) -> Result<String, Failure> {
    let RequestedRun { recipe, mut sets } = RequestedRun::of(args, program)?;
    let place = run_dir::place(args.run.run_dir.as_deref(), &recipe.name);
    if args.by_rank
        && let Some(worker) = by_rank::worker(args, &recipe, &place, program)?
    {
        return worker.run(program);
    }
    sets.extend(listen_address(args, &recipe)?);
    if !args.resume_or_start && !args.by_rank {
        return start(args, &sets, program);
    }
    fetch_if_any(args, &recipe, &place, program)?;
    if !is_run(&place) {
        return start(args, &sets, program);
    }
    if let Some(line) = left_out(&recipe, &sets, &place, program)? {
        eprintln!("note: {line}");
    }
    let (run, loudness, without_journal) = (place, args.loudness, args.without_journal);
    let resume = ResumeArgs { run, run_dir: None, sets, without_journal, from: None, loudness };
    resume_in_place(&resume, program)
}

/// A recipe, with what the command changes in it.
struct RequestedRun {
    recipe: Recipe,
    /// `KEY=VALUE` each.
    sets: Vec<String>,
}

impl RequestedRun {
    fn of(args: &RunArgs, program: &Program) -> Result<Self, Failure> {
        let (path, sets) = (&args.run.recipe.recipe, args.run.sets());
        if args.by_rank {
            let ServedRecipe { recipe, sets, .. } = ServedRecipe::load(path, sets, program)?;
            return Ok(Self { recipe, sets });
        }
        Ok(Self { recipe: load(path, &sets, program)?.0, sets })
    }
}

/// Whether a run has been started in `place`.
fn is_run(place: &Path) -> bool {
    place.join("resolved.toml").exists()
}

/// The address of the network interface that the command names, as a change of the recipe.
fn listen_address(args: &RunArgs, recipe: &Recipe) -> Result<Option<String>, Failure> {
    let Some(name) = &args.interface else { return Ok(None) };
    let port = recipe.buffer.listen.map_or(PORT, |listen| listen.port());
    Ok(Some(format!("buffer.listen=\"{}\"", SocketAddr::new(address_of(name)?, port))))
}

/// Fetches the run in the archive of the recipe, if `place` has none and the archive has one with a checkpoint.
fn fetch_if_any(args: &RunArgs, recipe: &Recipe, place: &Path, program: &Program) -> Result<(), Failure> {
    let Some(url) = recipe.archive().filter(|_| !is_run(place)) else { return Ok(()) };
    let (environment, patience) = (program.environment(), recipe.wait());
    let request = ArchiveRequest { url: &url, environment, patience, from: None };
    if !archive::has_run(&request)? {
        return Ok(());
    }
    let report = report(&args.loudness, program);
    archive::fetch(&request, place, &|text| report.note(text))
}

/// What a recipe file says by now that the run in `place` does not follow: it has its own copy, which `sets` change.
fn left_out(
    recipe: &Recipe,
    sets: &[String],
    place: &Path,
    program: &Program,
) -> Result<Option<String>, Failure> {
    let (own, _) = load(&place.join("resolved.toml"), &[], &program.without_overrides())?;
    let is_set =
        |key: &str| sets.iter().any(|set| set.split('=').next().is_some_and(|set| set.trim() == key));
    // A run records the commit of a repository.
    let is_pinned = |change: &Change| match (&change.from, &change.to) {
        (Some(Value::String(from)), Some(Value::String(to))) => from.starts_with(&format!("{to}@")),
        _ => false,
    };
    // A key that the file does not give has what an earlier command gave the run, such as its address.
    let changes = own.changes_to(recipe).into_iter().filter(|change| change.to.is_some());
    let changes = changes.filter(|change| !is_set(&change.key) && !is_pinned(change));
    let shown: Vec<String> = changes.map(|change| change.to_string()).collect();
    Ok((!shown.is_empty()).then(|| {
        format!(
            "the run has a recipe of its own, and the file differs from it: {}; a change needs --set",
            shown.join(", ")
        )
    }))
}

/// Starts a run in a new directory.
fn start(args: &RunArgs, sets: &[String], program: &Program) -> Result<String, Failure> {
    let (recipe, origins) = load(&args.run.recipe.recipe, sets, program)?;
    let given = std::fs::read_to_string(&args.run.recipe.recipe).map_err(|source| Failure::System {
        what: format!("read {}", args.run.recipe.recipe.display()),
        source,
    })?;
    let hub = HuggingFace::of(program);
    // The run records the commits, so that a resume reads the same files.
    let named = hub.pinned(&recipe)?;
    // Before the weights are fetched.
    refuse_what_does_not_fit(&hub.fetched(&named, FetchScope::Description)?)?;
    let recipe = hub.fetched(&named, FetchScope::Everything)?;
    let Some(leader) = launched(&recipe)? else { return Ok(String::new()) };
    let place = run_dir::place(args.run.run_dir.as_deref(), &recipe.name);
    let resolved = named.resolved_toml(&origins);
    let run_dir = RunDir::create(&place, RecipeTexts { given: &given, resolved: &resolved })?;
    let result = train(&recipe, TrainingStart { run_dir, from: None, leader }, &args.loudness, program);
    if result.as_ref().is_err_and(|failure| failure.exit_code() == 2) {
        let run_dir = RunDir::open(&place)?;
        if !run_dir.has_begun() {
            // The name is free again when the mistake is corrected.
            run_dir.remove()?;
        }
    }
    result
}
