//! Training in a run directory, for the commands that start and resume runs.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "mpi")]
use model::SharedCores;
use trainer::Leader;
use trajectory::PolicyVersion;

use crate::args::Loudness;
use crate::controller;
use crate::failure::Failure;
use crate::pipeline::{self, Ending, RunOptions};
use crate::program::Program;
use crate::recipe::Recipe;
use crate::report::{Report, Style};
use crate::run_dir::RunDir;

/// Where a training starts.
pub(super) struct TrainingStart {
    pub(super) run_dir: RunDir,
    /// The checkpoint to resume from; the last by default.
    pub(super) from: Option<PolicyVersion>,
    /// The leader of ranks that a launcher has started.
    pub(super) leader: Option<Arc<Leader>>,
}

/// Trains as the recipe says: in this process, or in processes that this one supervises.
pub(super) fn train(
    recipe: &Recipe,
    start: TrainingStart,
    loudness: &Loudness,
    program: &Program,
) -> Result<String, Failure> {
    let TrainingStart { run_dir, from, leader } = start;
    let path = run_dir.path().to_path_buf();
    // Dropped only after a run without an error: MPI would wait for ranks that cannot continue, and this process with it.
    let kept = ManuallyDrop::new(leader.clone());
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
    drop(ManuallyDrop::into_inner(kept));
    outcome(ending, &path)
}

/// The leader of the ranks that `mpirun` has started, if the recipe says so and this is rank 0; `None` if this was another
/// rank, which is done.
pub(super) fn launched(recipe: &Recipe) -> Result<Option<Option<Arc<Leader>>>, Failure> {
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
        let ranks = Arc::new(ranks);
        // As in `train`: an error of this rank alone ends its process, and `mpirun` ends the others.
        let kept = ManuallyDrop::new(Arc::clone(&ranks));
        follow(ranks, Arc::new(recipe.trainer_pool(&SharedCores::all())))?;
        drop(ManuallyDrop::into_inner(kept));
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

/// The report of a run as loud as the user wants it.
pub(super) fn report(loudness: &Loudness, program: &Program) -> Arc<Report> {
    let style = Style::detect(loudness.quiet, program.environment());
    Arc::new(Report::new(style).wide(loudness.width))
}
