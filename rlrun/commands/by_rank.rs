//! `rlrun RECIPE --by-rank`: the role of a process among those that a launcher has started with the same command.
//!
//! ```text
//! rank 0          the run
//! the next ranks  further ranks of its trainer, if the recipe has ranks that join (`trainer.ranks = "processes"`)
//! all others      samplers
//! ```

use std::path::Path;

use crate::args::{AllowArgs, JoinArgs, RolloutArgs, RunArgs, TrainerWorkerArgs};
use crate::failure::Failure;
use crate::launchers::variables;
use crate::program::Program;
use crate::recipe::Recipe;
use crate::workers;

/// A worker that joins the run of rank 0.
pub(super) enum WorkerByRank {
    /// A further rank of the trainer.
    Trainer(TrainerWorkerArgs),
    /// A sampler.
    Rollout(Box<RolloutArgs>),
}

/// The worker that this process is, with the arguments of the run that all processes have; `None` if it is the run.
///
/// # Errors
/// No launcher has given this process a rank.
pub(super) fn worker(
    args: &RunArgs,
    recipe: &Recipe,
    run_dir: &Path,
    program: &Program,
) -> Result<Option<WorkerByRank>, Failure> {
    let Some(launched) = variables::largest(program.environment()) else {
        return Err(Failure::Argument(format!(
            "--by-rank: no launcher has given this process a rank among several ({}); start samplers with `rlrun worker \
             rollout --join URL`",
            variables::rank_names()
        )));
    };
    let (rank, join) = (launched.rank, join(recipe, run_dir, program));
    Ok(match rank {
        0 => None,
        rank if rank <= recipe.ranks_that_join() => {
            let rank = Some(rank);
            Some(WorkerByRank::Trainer(TrainerWorkerArgs { join, rank, rank_offset: None, threads: None }))
        }
        _ => {
            // The user of this machine has given the recipe, so the run may use what it names.
            let allow = AllowArgs {
                recipe: Some(args.recipe.recipe.clone()),
                sets: args.recipe.sets.clone(),
                ..AllowArgs::default()
            };
            Some(WorkerByRank::Rollout(Box::new(RolloutArgs {
                join,
                allow,
                code: Vec::new(),
                threads: None,
                relay: None,
                relay_url: None,
                engine: None,
                engine_urls: Vec::new(),
                weights_dir: None,
                device: None,
            })))
        }
    })
}

/// The run is at the launcher's first host if the recipe says where its credentials are; otherwise all processes share the run
/// directory, which has its address.
fn join(recipe: &Recipe, run_dir: &Path, program: &Program) -> JoinArgs {
    let environment = program.environment();
    let named = environment.contains_key(variables::JOIN)
        || (recipe.buffer.credentials.is_some() && variables::head(environment).is_some());
    JoinArgs {
        join: (!named).then(|| run_dir.display().to_string()),
        credentials: recipe.buffer.credentials.clone(),
        token_file: None,
        name: None,
        tls_ca: None,
        patience: recipe.deadlines.wait_s,
        parent: None,
    }
}

impl WorkerByRank {
    /// Works until the run ends.
    ///
    /// # Errors
    /// Those of the worker.
    pub(super) fn run(&self, program: &Program) -> Result<String, Failure> {
        match self {
            Self::Trainer(args) => workers::trainer::run(args, program)?,
            Self::Rollout(args) => workers::rollout::run(args, program)?,
        }
        Ok(String::new())
    }
}
