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
use crate::launchers::{PORT, variables};
use crate::lead_address;
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
                recipe: Some(args.run.recipe.recipe.clone()),
                sets: args.run.recipe.sets.clone(),
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
    let port = recipe.buffer.listen.map_or(PORT, |listen| listen.port());
    let head = variables::head(environment).filter(|_| recipe.buffer.credentials.is_some());
    let place = head.map_or_else(|| run_dir.display().to_string(), |head| lead_address::url_of(&head, port));
    JoinArgs {
        join: (!environment.contains_key(variables::JOIN)).then_some(place),
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rewards::Registry;

    use super::*;

    fn join_of(sets: &[&str], variables: &[(&str, &str)]) -> JoinArgs {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let program = Program::new(Registry::builtin(), variables);
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("recipes/grpo_math.toml");
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let (recipe, _) = Recipe::load(&path, &sets, &program).unwrap();
        join(&recipe, Path::new("runs/a"), &program)
    }

    #[test]
    fn a_worker_looks_for_its_run_in_a_shared_directory_or_at_the_first_host() {
        let head = [("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2")];
        let listen = "buffer.listen=0.0.0.0:9000";
        assert_eq!(join_of(&[listen], &head).join.as_deref(), Some("runs/a"));
        let keys = join_of(&[listen, "buffer.credentials=/keys"], &head);
        assert_eq!(
            (keys.join.as_deref(), keys.credentials),
            (Some("https://10.0.0.1:9000"), Some("/keys".into()))
        );
        let named = [head[0], (variables::JOIN, "https://run:1")];
        assert_eq!(join_of(&[listen, "buffer.credentials=/keys"], &named).join, None);
    }
}
