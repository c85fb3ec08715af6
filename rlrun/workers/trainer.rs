//! `rlrun worker trainer`: a further rank of a trainer whose ranks are processes.
//!
//! Invariant: it has nothing of its own but its cores: models, states of optimizers and batches come from the first rank,
//! and it ends with that.

use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::time::Duration;

use ::rewards::LoadCounts;
use ::rewards::reward_model::ModelServer;
use ::rollout::Progress;
use ::trainer::collective::tcp;
use ::trainer::{TrainerError, follow};
use model::{Cores, Team};

use super::membership::{Account, Membership, derived};
use super::roster::Role;
use crate::args::TrainerWorkerArgs;
use crate::failure::Failure;
use crate::program::Program;
use crate::recipe::Recipe;
use crate::signals::{Signals, end_with_parent};

/// What ranks prove to each other that they know is made of the run's token for this.
pub(crate) const MEETING: &str = "rlrun 2026 meeting of the ranks of a trainer";
/// Where launchers say which process this is.
const RANK_VARIABLES: [&str; 4] = ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"];

/// Follows the first rank until the run ends.
///
/// # Errors
/// A run that cannot be reached or has all its ranks; another rank that is gone.
pub(crate) fn run(args: &TrainerWorkerArgs, program: &Program) -> Result<(), Failure> {
    if let Some(parent) = args.join.parent {
        end_with_parent(parent)?;
    }
    let rank = rank(args, program)?;
    let signals = Signals::listen()?;
    let stop = signals.stop_flag();
    let Some(mut membership) = Membership::join(Role::Trainer, &args.join, &stop)? else { return Ok(()) };
    let scratch = tempfile::tempdir()
        .map_err(|source| Failure::System { what: "make a temporary directory".to_owned(), source })?;
    let (recipe, _) = membership.unpack(scratch.path())?;
    let (recipe, _) = Recipe::load(&recipe, &[], &program.without_overrides()).map_err(Failure::Recipe)?;
    let secret = derived(membership.token(), MEETING).unwrap_or_default();
    let collective = meet(&args.join.join, &membership, (&secret, rank), recipe.wait())?;
    let told = Told { rank: ::trainer::Collective::rank(&collective) };
    eprintln!("joined {} as rank {}", args.join.join, told.rank);
    membership.begin(told, stop)?;
    let cores = args.threads.map_or_else(Cores::all, Cores::new);
    let followed = follow(Arc::new(collective), Arc::new(recipe.trainer_team(&cores)) as Arc<Team>);
    membership.leave(followed.map_err(gone))
}

/// A rank that lost the others can be started again, as they can.
fn gone(error: TrainerError) -> Failure {
    match error {
        TrainerError::Collective(error) => Failure::Requeue(error.to_string()),
        error => error.into(),
    }
}

/// The rank that was asked for; `None` for any.
fn rank(args: &TrainerWorkerArgs, program: &Program) -> Result<Option<usize>, Failure> {
    let said = RANK_VARIABLES.iter().find_map(|name| Some((name, program.environment().get(*name)?)));
    let of_launcher = match (args.rank, said) {
        (None, Some((name, value))) => Some(value.parse::<usize>().map_err(|_| {
            Failure::Argument(format!(
                "the variable {name} is `{value}`, which is no rank; give one with --rank"
            ))
        })?),
        (rank, _) => rank,
    };
    if of_launcher == Some(0) {
        return Err(Failure::Argument("the first rank is the run itself: rlrun RECIPE".to_owned()));
    }
    Ok(of_launcher)
}

/// Meets the other ranks, on the host that serves the run.
fn meet(
    url: &str,
    membership: &Membership,
    (secret, rank): (&str, Option<usize>),
    wait: Duration,
) -> Result<tcp::Tcp, Failure> {
    let port = membership.joined.ranks.unwrap_or_default();
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest).trim_end_matches('/');
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let mut places = format!("{host}:{port}").to_socket_addrs().map_err(|source| Failure::System {
        what: format!("find the host {host}, where ranks meet"),
        source,
    })?;
    let Some(place) = places.next() else {
        return Err(Failure::Argument(format!("the host {host} of {url} has no address")));
    };
    tcp::join(place, secret.as_bytes(), rank, wait).map_err(|error| gone(error.into()))
}

struct Told {
    rank: usize,
}

impl Account for Told {
    fn doing(&self) -> String {
        format!("follows as rank {}", self.rank)
    }

    fn progress(&self) -> Option<Progress> {
        None
    }

    fn take_loads(&self) -> Vec<(String, LoadCounts)> {
        Vec::new()
    }

    fn serves(&self) -> Option<(String, ModelServer)> {
        None
    }
}
