//! `rlrun worker trainer`: a further rank of a trainer whose ranks are processes.
//!
//! Invariant: model, optimizer state and batches come from rank 0, and this process ends with rank 0. If ranks may come and go, a rank
//! that loses the others joins the next group of them. It reads numbers of the
//! run's recipe, and opens no file that the recipe names.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use ::rewards::LoadCounts;
use ::rewards::reward_model::ModelServer;
use ::rollout::Progress;
use ::trainer::{Followed, TrainerError, follow};
use collective::{Collective, CollectiveError, tcp};
use device::DeviceError;
use model::{SharedCores, ThreadPool};

use super::membership::{Membership, WorkerReport, derived};
use super::registry::WorkerRole;
use crate::args::TrainerWorkerArgs;
use crate::failure::Failure;
use crate::launchers::variables;
use crate::program::Program;
use crate::settings::LONGEST_WAIT_S;
use crate::signals::{Signals, end_with_parent};

/// Purpose of the key derivation: the shared secret of the ranks.
pub(crate) const MEETING: &str = "rlrun 2026 meeting of the ranks of a trainer";

/// Longest time to reach the first rank again.
const REACHED: Duration = Duration::from_secs(5);

/// Follows the first rank until the run ends.
///
/// # Errors
/// A run that cannot be reached or has all its ranks; another rank that is gone.
pub(crate) fn run(args: &TrainerWorkerArgs, program: &Program) -> Result<(), Failure> {
    if let Some(parent) = args.join.parent {
        end_with_parent(parent)?;
    }
    let signals = Signals::listen()?;
    let stop = signals.stop_flag();
    let Some(mut membership) = Membership::join(WorkerRole::Trainer, &args.join, program, &stop)? else {
        return Ok(());
    };
    let recipe = membership.raw_recipe()?;
    let rank = rank(args, program.environment(), recipe.trainer.world)?;
    let wait = Duration::try_from_secs_f64(recipe.deadlines.wait_s.min(LONGEST_WAIT_S)).map_err(|error| {
        Failure::Argument(format!("the run sent `deadlines.wait_s` = {}: {error}", recipe.deadlines.wait_s))
    })?;
    let secret = derived(membership.token(), MEETING).unwrap_or_default();
    let place = meeting_place(&membership)?;
    let is_elastic = recipe.trainer.elastic.snapshot_every > 0;
    let mut next = match tcp::join(&place[..], secret.as_bytes(), rank, wait) {
        Err(CollectiveError::NotFormed { .. }) if is_elastic => None,
        joined => Some(joined.map_err(|error| lost(error.into()))?),
    };
    let number = Arc::new(AtomicUsize::new(0));
    membership.start_heartbeat(RankReport { rank: Arc::clone(&number) }, Arc::clone(&stop))?;
    let cores = args.threads.map_or_else(SharedCores::all, SharedCores::new);
    let threads = recipe.placement.trainer_threads.unwrap_or(cores.total()).max(1);
    let pool = Arc::new(ThreadPool::new(&cores, threads));
    let followed = loop {
        number.store(0, Ordering::Relaxed);
        let collective = match next.take().map_or_else(|| join_again(&place, &secret, wait, &stop), Ok) {
            Ok(collective) => collective,
            Err(error) => break Err(error),
        };
        number.store(collective.rank(), Ordering::Relaxed);
        eprintln!("joined {} as rank {} of {}", membership.url(), collective.rank(), collective.world());
        match follow(Arc::new(collective), Arc::clone(&pool)) {
            Ok(Followed::Stopped) => break Ok(()),
            Ok(Followed::Regroups) => eprintln!("the ranks of the trainer regroup"),
            Err(TrainerError::Collective(error)) if is_elastic && !stop.load(Ordering::Relaxed) => {
                eprintln!("{error}; joins again");
            }
            Err(error) => break Err(lost(error)),
        }
    };
    membership.leave(followed)
}

/// A rank that lost the others can be started again.
pub(crate) fn lost(error: TrainerError) -> Failure {
    match error {
        TrainerError::Collective(_)
        | TrainerError::Device(DeviceError::Group { .. } | DeviceError::Peer { .. }) => {
            Failure::Requeue(error.to_string())
        }
        error => error.into(),
    }
}

/// The requested rank of a trainer with `world` ranks; `None` for the next free one. The variables of a launcher count only if
/// its world size is that of the trainer, or with `--rank-offset`.
fn rank(
    args: &TrainerWorkerArgs,
    environment: &BTreeMap<String, String>,
    world: usize,
) -> Result<Option<usize>, Failure> {
    let refused = |said: &str, rank: usize| {
        Failure::Argument(format!(
            "{said} is rank {rank}, and the ranks that join this trainer are 1 to {} (`trainer.world` is {world}, the first is \
             the run itself); name one with --rank, or what to add to the launcher's with --rank-offset",
            world.saturating_sub(1)
        ))
    };
    let (said, rank) = if let Some(rank) = args.rank {
        ("--rank".to_owned(), rank)
    } else if let Some(offset) = args.rank_offset {
        let Some((name, rank)) = variables::any_rank(environment) else {
            let names = variables::rank_names();
            return Err(Failure::Argument(format!(
                "--rank-offset adds to the rank that a launcher gives, and none is in {names}; use --rank"
            )));
        };
        (format!("{name} with --rank-offset {offset}"), rank.saturating_add(offset))
    } else {
        let Some(launched) = variables::launched_as(environment).find(|launched| launched.processes == world)
        else {
            return Ok(None);
        };
        (launched.variable.to_owned(), launched.rank)
    };
    if (1..world).contains(&rank) { Ok(Some(rank)) } else { Err(refused(&said, rank)) }
}

/// Where the ranks meet: the addresses of the host that serves the run, one of which it listens at.
fn meeting_place(membership: &Membership) -> Result<Vec<SocketAddr>, Failure> {
    let url = membership.url();
    let port = membership.joined.ranks.unwrap_or_default();
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest).trim_end_matches('/');
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let places = format!("{host}:{port}").to_socket_addrs().map_err(|source| Failure::System {
        what: format!("find the host {host}, where ranks meet"),
        source,
    })?;
    Ok(places.collect())
}

/// Joins the next group of ranks as any of them. One that no group needs waits until `stop`.
fn join_again(
    place: &[SocketAddr],
    secret: &str,
    wait: Duration,
    stop: &AtomicBool,
) -> Result<tcp::Tcp, Failure> {
    loop {
        // A run that was started again meets elsewhere: this process is started again too.
        let mut refused = place.iter().map(|address| TcpStream::connect_timeout(address, REACHED).err());
        if let Some(errors) = refused.by_ref().collect::<Option<Vec<_>>>() {
            let errors: Vec<_> =
                place.iter().zip(errors).map(|(place, error)| format!("{place} ({error})")).collect();
            let errors = errors.join(", ");
            return Err(Failure::Requeue(format!("the first rank no longer listens at {errors}")));
        }
        match tcp::join(place, secret.as_bytes(), None, wait) {
            Err(CollectiveError::NotFormed { .. }) if !stop.load(Ordering::Relaxed) => {}
            joined => return joined.map_err(|error| lost(error.into())),
        }
    }
}

/// The heartbeat report of a rank.
struct RankReport {
    /// 0, the rank of the run itself, while it has none.
    rank: Arc<AtomicUsize>,
}

impl WorkerReport for RankReport {
    fn doing(&self) -> String {
        match self.rank.load(Ordering::Relaxed) {
            0 => "waits for the other ranks".to_owned(),
            rank => format!("follows as rank {rank}"),
        }
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::thread;

    use clap::Parser;

    use super::*;
    use crate::failure::REQUEUE;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TrainerWorkerArgs,
    }

    fn rank_of(flags: &[&str], variables: &[(&str, &str)], world: usize) -> Result<Option<usize>, String> {
        let line = ["rlrun", "--join", "http://127.0.0.1:1"].iter().chain(flags);
        let args = Line::try_parse_from(line).map_err(|error| error.to_string())?.args;
        let environment = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        rank(&args, &environment.collect(), world).map_err(|error| error.to_string())
    }

    #[test]
    fn a_launcher_counts_if_its_size_is_that_of_the_trainer() {
        let slurm = |rank, size| [("SLURM_PROCID", rank), ("SLURM_STEP_NUM_TASKS", size)];
        assert_eq!(rank_of(&[], &[], 3), Ok(None));
        assert_eq!(rank_of(&[], &slurm("2", "3"), 3), Ok(Some(2)));
        // Variables of something else: a shell of a launcher, a job with other tasks, no number.
        assert_eq!(rank_of(&[], &[("SLURM_PROCID", "0"), ("RANK", "0")], 3), Ok(None));
        assert_eq!(rank_of(&[], &slurm("0", "1"), 3), Ok(None));
        assert_eq!(rank_of(&[], &slurm("x", "3"), 3), Ok(None));
        let both = [&slurm("0", "1")[..], &[("RANK", "1"), ("WORLD_SIZE", "3")]].concat();
        assert_eq!(rank_of(&[], &both, 3), Ok(Some(1)));
        let first = rank_of(&[], &slurm("0", "3"), 3).unwrap_err();
        assert!(first.contains("SLURM_PROCID is rank 0") && first.contains("--rank-offset"), "{first}");
    }

    #[test]
    fn a_rank_that_lost_another_in_a_pass_on_its_device_is_to_be_started_again() {
        let lost_by = |error: CollectiveError| lost(error.into_device_error().into()).exit_code();
        let (rank, operation) = (1, "all_reduce");
        assert_eq!(lost_by(CollectiveError::Gone { rank, peer: 0, operation }), REQUEUE);
        let reason = "2 shards for 3 ranks".to_owned();
        assert_eq!(lost_by(CollectiveError::Arguments { rank, operation, reason }), 1);
    }

    #[test]
    fn a_rank_that_no_group_needs_waits_for_the_next_one() {
        let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let meeting = tcp::Meeting::open(anywhere, b"secret").unwrap();
        let (place, stop) = (meeting.local_addr(), AtomicBool::new(false));
        let (wait, long) = (Duration::from_millis(200), Duration::from_secs(60));
        thread::scope(|scope| {
            let spare = scope.spawn(|| join_again(&[place], "secret", wait, &stop));
            while meeting.waiting() == 0 && !spare.is_finished() {
                thread::sleep(wait / 100);
            }
            // It joins again, and has most of its time left.
            thread::sleep(wait * 5 / 4);
            let leader = meeting.group(&[2], long, long).unwrap();
            // If it gave up just now, it ends with an error.
            stop.store(true, Ordering::Relaxed);
            assert_eq!(spare.join().unwrap().unwrap().world(), leader.world());
        });
    }

    #[test]
    fn a_flag_has_priority_over_a_launcher() {
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert_eq!(rank_of(&["--rank-offset", "1"], &slurm, 3), Ok(Some(1)));
        assert_eq!(rank_of(&["--rank", "2"], &slurm, 3), Ok(Some(2)));
        for (flags, part) in [
            (&["--rank", "3"][..], "--rank is rank 3"),
            (&["--rank-offset", "3"], "SLURM_PROCID with --rank-offset 3 is rank 3"),
            (&["--rank-offset", "0"], "is rank 0, and the ranks that join this trainer are 1 to 2"),
            (&["--rank", "1", "--rank-offset", "1"], "cannot be used with"),
        ] {
            let error = rank_of(flags, &slurm, 3).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let none = rank_of(&["--rank-offset", "1"], &[], 3).unwrap_err();
        assert!(none.contains("SLURM_PROCID"), "{none}");
    }
}
