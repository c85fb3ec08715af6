//! `rlrun resume`: a run directory, or an archive that a run directory is fetched from, goes on.

use std::path::Path;
#[cfg(feature = "postgres")]
use std::sync::Arc;
use std::time::Duration;

use buffer::Buffer;
use model::Config;
use trajectory::PolicyVersion;

use super::check::refuse_what_does_not_fit;
use super::checkpoint_paths::checkpoint_of;
use super::train::{TrainingStart, launched, report, train};
use crate::archive::{self, ArchiveError, ArchiveRequest, ArchiveUrl};
use crate::args::ResumeArgs;
use crate::failure::Failure;
use crate::huggingface::{HuggingFace, RepositoryName};
use crate::program::Program;
use crate::recipe::schema::Deadlines;
use crate::recipe::words::StoreWord;
use crate::recipe::{Change, Model, Recipe, Resumption};
use crate::run_buffer;
use crate::run_dir::RunDir;

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
pub(super) fn resume_in_place(args: &ResumeArgs, program: &Program) -> Result<String, Failure> {
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
    refuse_what_does_not_fit(&with_model_of_checkpoint(&recipe, &run_dir.checkpoints()))?;
    if args.without_journal {
        make_empty_buffer(&recipe, &run_dir, program)?;
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
        // The next resume does not see values that do not fit model or data. Those that the run was trained with stay.
        let run_dir = RunDir::open(&args.run)?;
        if !run_dir.has_begun_since_resume()? {
            run_dir.replace_resolved(&before)?;
            record(&run_dir, "changes_undone", &serde_json::json!({ "resume": resume }))?;
            report(&args.loudness, program).note("the changes are undone: the run did not begin with them");
        }
    }
    result
}

/// `recipe` with the model as the newest checkpoint describes it, if that of the recipe is on a hub and was not fetched.
fn with_model_of_checkpoint(recipe: &Recipe, checkpoints: &Path) -> Recipe {
    let mut described = recipe.clone();
    if let Model::Path(path) = &mut described.model
        && RepositoryName::is_name(path)
    {
        let versions = trainer::checkpoint::list(checkpoints);
        let models =
            versions.iter().map(|version| trainer::checkpoint::path(checkpoints, *version).join("model"));
        // Damaged checkpoints are named where the run is started.
        *path = models.rev().find(|model| Config::load(model).is_ok()).unwrap_or_else(|| path.clone());
    }
    described
}

/// Makes the buffer of a run whose own one is lost.
fn make_empty_buffer(recipe: &Recipe, run_dir: &RunDir, program: &Program) -> Result<(), Failure> {
    let journal = run_buffer::journal(run_dir.path());
    match recipe.buffer.store {
        StoreWord::Redb if recipe.supervised.is_none() && !journal.exists() => {
            drop(Buffer::open(journal, recipe.buffer_config())?);
        }
        #[cfg(feature = "postgres")]
        StoreWord::Postgres => {
            let database = run_buffer::run_database(recipe, run_dir.path(), program.environment());
            drop(database.of_run(true, Arc::new(|_: &str| ()))?);
        }
        _ => {}
    }
    #[cfg(not(feature = "postgres"))]
    let _ = program;
    Ok(())
}

/// Adds an event to those of the run.
fn record(run_dir: &RunDir, event: &str, fields: &serde_json::Value) -> Result<(), Failure> {
    let mut events = run_dir.events()?;
    events.append(&serde_json::json!({ "event": event, "fields": fields }))?;
    Ok(events.sync()?)
}
