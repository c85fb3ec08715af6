//! `rlrun run` and `rlrun resume`.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use buffer::Buffer;
#[cfg(feature = "mpi")]
use model::SharedCores;
use toml::Value;
use trainer::Leader;
use trajectory::PolicyVersion;

use super::by_rank;
use super::check::refuse_what_does_not_fit;
use super::checkpoint_paths::checkpoint_of;
use super::load;
use crate::archive::{self, ArchiveError, ArchiveRequest, ArchiveUrl};
use crate::args::{Loudness, ResumeArgs, RunArgs};
use crate::controller;
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace};
use crate::launchers::network::address_of;
use crate::launchers::{PORT, ServedRecipe};
use crate::pipeline::{self, Ending, RunOptions};
use crate::program::Program;
use crate::recipe::schema::Deadlines;
#[cfg(feature = "postgres")]
use crate::recipe::words::StoreWord;
use crate::recipe::{Change, Recipe, Resumption};
use crate::report::{Report, Style};
use crate::run_buffer;
use crate::run_dir::{self, RecipeTexts, RunDir};

/// Trains as a recipe says, in a new run directory or, if the user says so, in the one that is there.
pub(super) fn run(args: &RunArgs, program: &Program) -> Result<String, Failure> {
    let mut sets = args.run.sets();
    let recipe = if args.by_rank {
        let served = ServedRecipe::load(&args.run.recipe.recipe, sets, program)?;
        sets = served.sets;
        served.recipe
    } else {
        load(&args.run.recipe.recipe, &sets, program)?.0
    };
    let place = run_dir::place(args.run.run_dir.as_deref(), &recipe.name);
    if args.by_rank
        && let Some(worker) = by_rank::worker(args, &recipe, &place, program)?
    {
        return worker.run(program);
    }
    let resume_or_start = args.resume_or_start || args.by_rank;
    if let Some(name) = &args.interface {
        let port = recipe.buffer.listen.map_or(PORT, |listen| listen.port());
        sets.push(format!("buffer.listen=\"{}\"", SocketAddr::new(address_of(name)?, port)));
    }
    let is_run = |place: &Path| place.join("resolved.toml").exists();
    if resume_or_start
        && !is_run(&place)
        && let Some(url) = recipe.archive()
    {
        fetch_if_any(&url, &place, args, recipe.wait(), program)?;
    }
    if resume_or_start && is_run(&place) {
        if let Some(line) = left_out(&recipe, &sets, &place, program)? {
            eprintln!("note: {line}");
        }
        let (run, loudness, without_journal) = (place, args.loudness, args.without_journal);
        let resume = ResumeArgs { run, run_dir: None, sets, without_journal, from: None, loudness };
        return resume_in_place(&resume, program);
    }
    start(args, &sets, program)
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
    let recipe = hub.fetched(&named, FetchScope::Everything)?;
    refuse_what_does_not_fit(&recipe)?;
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

/// Where a training starts.
struct TrainingStart {
    run_dir: RunDir,
    /// The checkpoint to resume from; the last by default.
    from: Option<PolicyVersion>,
    /// The leader of ranks that a launcher has started.
    leader: Option<Arc<Leader>>,
}

/// Trains as the recipe says: in this process, or in processes that this one supervises.
fn train(
    recipe: &Recipe,
    start: TrainingStart,
    loudness: &Loudness,
    program: &Program,
) -> Result<String, Failure> {
    let TrainingStart { run_dir, from, leader } = start;
    let path = run_dir.path().to_path_buf();
    let ending = if recipe.placement.processes {
        // Whenever the controller restarts the lead process, it resumes from the last checkpoint.
        let aside = from.map(|from| trainer::checkpoint::set_aside_after(&run_dir.checkpoints(), Some(from)));
        for (version, place) in aside.transpose()?.unwrap_or_default() {
            let (version, place) = (version.0, place.display());
            report(loudness, program).note(&format!("the checkpoint of step {version} is kept in {place}"));
        }
        controller::run(recipe, run_dir, *loudness)?
    } else {
        let options = RunOptions { leader, from, ..RunOptions::new(program) };
        pipeline::run_in(recipe, &run_dir, &report(loudness, program), options)?
    };
    outcome(ending, &path)
}

/// The leader of the ranks that `mpirun` has started, if the recipe says so and this is rank 0; `None` if this was another
/// rank, which is done.
fn launched(recipe: &Recipe) -> Result<Option<Option<Arc<Leader>>>, Failure> {
    #[cfg(feature = "mpi")]
    if recipe.trainer.ranks == crate::recipe::words::Ranks::Mpi {
        use collective::{Collective, mpi};
        use trainer::{TrainerError, follow};
        let ranks = mpi::start(recipe.wait()).map_err(TrainerError::from)?;
        if ranks.world() != recipe.trainer.world {
            let (started, wanted) = (ranks.world(), recipe.trainer.world);
            let what = format!(
                "mpirun has started {started} ranks, and trainer.world is {wanted}: make them the same"
            );
            return Err(Failure::Argument(what));
        }
        if ranks.rank() == 0 {
            return Ok(Some(Some(Leader::new(Arc::new(ranks)))));
        }
        follow(Arc::new(ranks), Arc::new(recipe.trainer_pool(&SharedCores::all())))?;
        return Ok(None);
    }
    // Without the feature such a recipe was refused.
    let _ = recipe;
    Ok(Some(None))
}

/// The outcome of the command: a run that its launcher has stopped asks to be started again.
pub(super) fn outcome(ending: Ending, run_dir: &Path) -> Result<String, Failure> {
    if ending == Ending::Requeued {
        let run_dir = run_dir.display();
        return Err(Failure::Requeue(format!(
            "stopped and saved; to be started again as: rlrun resume {run_dir}"
        )));
    }
    Ok(String::new())
}

/// Fetches the run in the archive of the recipe, if there is one with a checkpoint.
fn fetch_if_any(
    url: &ArchiveUrl,
    place: &Path,
    args: &RunArgs,
    patience: Duration,
    program: &Program,
) -> Result<(), Failure> {
    let request = ArchiveRequest { url, environment: program.environment(), patience, from: None };
    if !archive::has_run(&request)? {
        return Ok(());
    }
    let report = report(&args.loudness, program);
    archive::fetch(&request, place, &|text| report.note(text))
}

/// Resumes a run from its last checkpoint, or from the one that is named; a run in an archive is fetched first.
pub(super) fn resume(args: &ResumeArgs, program: &Program) -> Result<String, Failure> {
    if !ArchiveUrl::is_one(&args.run) {
        if args.run_dir.is_some() {
            let what =
                "--run-dir is for a run that is fetched from its archive; leave it out, or name the archive";
            return Err(Failure::Argument(what.to_owned()));
        }
        return resume_in_place(args, program);
    }
    let text = args.run.to_string_lossy().into_owned();
    let url: ArchiveUrl = text.parse().map_err(|reason| ArchiveError::Address { text, reason })?;
    let Some(place) = args.run_dir.clone() else {
        let what = format!("{url} is an archive: name a directory for the run with --run-dir DIR");
        return Err(Failure::Argument(what));
    };
    let patience = Duration::from_secs_f64(Deadlines::default().wait_s);
    let from = args.from.map(PolicyVersion);
    let request = ArchiveRequest { url: &url, environment: program.environment(), patience, from };
    let report = report(&args.loudness, program);
    archive::fetch(&request, &place, &|text| report.note(text))?;
    resume_in_place(&ResumeArgs { run: place, run_dir: None, ..args.clone() }, program)
}

/// Resumes the run in a run directory.
fn resume_in_place(args: &ResumeArgs, program: &Program) -> Result<String, Failure> {
    let run_dir = RunDir::open(&args.run)?;
    let path = run_dir.resolved_recipe();
    let before = std::fs::read_to_string(&path)
        .map_err(|source| Failure::System { what: format!("read {}", path.display()), source })?;
    let resume = run_dir.resumes()? + 1;
    let Resumption { recipe, origins, changes } =
        Recipe::resume(&path, &args.sets, program, resume).map_err(Failure::Recipe)?;
    let hub = HuggingFace::of(program);
    let named = hub.pinned(&recipe)?;
    let recipe = hub.fetched_for(&named, &run_dir.checkpoints())?;
    refuse_what_does_not_fit(&recipe)?;
    let journal = run_buffer::journal(run_dir.path());
    let keeps_one = recipe.buffer.store.has_journal() && recipe.supervised.is_none();
    if args.without_journal && keeps_one && !journal.exists() {
        drop(Buffer::open(journal, recipe.buffer_config())?);
    }
    #[cfg(feature = "postgres")]
    if args.without_journal && recipe.buffer.store == StoreWord::Postgres {
        let database = run_buffer::run_database(&recipe, run_dir.path(), program.environment());
        drop(database.of_run(true, Arc::new(|_: &str| ()))?);
    }
    let from = args.from.map(PolicyVersion);
    if let Some(from) = from {
        trainer::checkpoint::check(&checkpoint_of(&args.run, Some(from.0))?)?;
    }
    if !changes.is_empty() {
        run_dir.replace_resolved(&named.resolved_toml(&origins))?;
        let shown: Vec<String> = changes.iter().map(ToString::to_string).collect();
        report(&args.loudness, program).note(&format!("resume {resume} changes {}", shown.join(", ")));
    }
    let recorded: Vec<_> = changes.iter().map(Change::to_json).collect();
    record(&run_dir, "resume", &serde_json::json!({ "resume": resume, "changes": recorded }))?;
    let Some(leader) = launched(&recipe)? else { return Ok(String::new()) };
    let result = train(&recipe, TrainingStart { run_dir, from, leader }, &args.loudness, program);
    if result.as_ref().is_err_and(|failure| failure.exit_code() == 2) && !changes.is_empty() {
        // The next resume does not see values that do not fit model or data.
        let run_dir = RunDir::open(&args.run)?;
        run_dir.replace_resolved(&before)?;
        record(&run_dir, "changes_undone", &serde_json::json!({ "resume": resume }))?;
    }
    result
}

/// Adds an event to those of the run.
fn record(run_dir: &RunDir, event: &str, fields: &serde_json::Value) -> Result<(), Failure> {
    let mut events = run_dir.events()?;
    events.append(&serde_json::json!({ "event": event, "fields": fields }))?;
    Ok(events.sync()?)
}

/// The report of a run as loud as the user wants it.
fn report(loudness: &Loudness, program: &Program) -> Arc<Report> {
    let style = Style::detect(loudness.quiet, program.environment());
    Arc::new(Report::new(style).wide(loudness.width))
}
