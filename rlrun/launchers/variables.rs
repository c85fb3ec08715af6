//! The rank of this process and the host of the first one, in the variables of its launcher.
//!
//! Invariant: a variable is believed only with its size: launchers also give a rank to processes that start others, such as
//! the script of a Slurm job.

use std::collections::BTreeMap;

/// Names of the run's address, or of its directory, for workers.
pub(crate) const JOIN: &str = "RLRUN_JOIN";

/// A launcher, and the variables that it sets in each of its processes.
struct Names {
    launcher: &'static str,
    rank: &'static str,
    size: &'static str,
}

/// In the order of preference among launchers of equal size.
const LAUNCHERS: [Names; 5] = [
    Names { launcher: "SkyPilot", rank: "SKYPILOT_NODE_RANK", size: "SKYPILOT_NUM_NODES" },
    Names { launcher: "Slurm", rank: "SLURM_PROCID", size: "SLURM_STEP_NUM_TASKS" },
    Names { launcher: "Open MPI", rank: "OMPI_COMM_WORLD_RANK", size: "OMPI_COMM_WORLD_SIZE" },
    Names { launcher: "PMI", rank: "PMI_RANK", size: "PMI_SIZE" },
    Names { launcher: "torchrun", rank: "RANK", size: "WORLD_SIZE" },
];

/// What a launcher says about this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchedAs {
    /// The launcher's name.
    pub(crate) launcher: &'static str,
    /// The variable of the rank.
    pub(crate) variable: &'static str,
    /// From 0.
    pub(crate) rank: usize,
    /// Number of processes of the launcher, this one among them.
    pub(crate) processes: usize,
}

/// Every launcher that has started this process.
pub(crate) fn launched_as(environment: &BTreeMap<String, String>) -> impl Iterator<Item = LaunchedAs> {
    let number = |name: &str| environment.get(name)?.trim().parse::<usize>().ok();
    LAUNCHERS.iter().filter_map(move |names| {
        let (rank, size) = (number(names.rank)?, number(names.size)?);
        let (launcher, variable) = (names.launcher, names.rank);
        let launched = LaunchedAs { launcher, variable, rank, processes: size };
        (rank < size).then_some(launched)
    })
}

/// The launcher of the most processes: launchers can start each other, and one that starts a single process is the outer one.
pub(crate) fn largest(environment: &BTreeMap<String, String>) -> Option<LaunchedAs> {
    launched_as(environment).reduce(|found, next| if next.processes > found.processes { next } else { found })
}

/// The names of the variables for ranks, for messages.
pub(crate) fn rank_names() -> String {
    LAUNCHERS.map(|names| names.rank).join(", ")
}

/// The first rank that any launcher names, whatever the number of its processes.
pub(crate) fn any_rank(environment: &BTreeMap<String, String>) -> Option<(&'static str, usize)> {
    let rank = |name: &str| environment.get(name)?.trim().parse::<usize>().ok();
    LAUNCHERS.iter().find_map(|names| Some((names.rank, rank(names.rank)?)))
}

/// The host of the first process: where the run is.
pub(crate) fn head(environment: &BTreeMap<String, String>) -> Option<String> {
    let of = |name: &str| environment.get(name).map(|value| value.trim()).filter(|value| !value.is_empty());
    let sky = || Some(of("SKYPILOT_NODE_IPS")?.lines().next()?.trim().to_owned());
    let slurm = || first_of_hostlist(of("SLURM_JOB_NODELIST").or_else(|| of("SLURM_NODELIST"))?);
    let torchrun = || of("MASTER_ADDR").map(str::to_owned);
    // MPI names no host, but says whether all processes are on one.
    let alone = || {
        let size = of("OMPI_COMM_WORLD_SIZE")?;
        (of("OMPI_COMM_WORLD_LOCAL_SIZE") == Some(size)).then(|| "127.0.0.1".to_owned())
    };
    sky().or_else(slurm).or_else(torchrun).or_else(alone)
}

/// The first host of a list in Slurm's form: `a[003-005,9],b` is `a003`.
///
/// `None` for a list that does not begin with a host name.
fn first_of_hostlist(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(next) = rest.chars().next() {
        match next {
            ',' => break,
            '[' => {
                let (numbers, after) = rest[1..].split_once(']')?;
                let first = numbers.split(',').next()?.split('-').next()?;
                host.push_str(first);
                rest = after;
            }
            _ if next.is_alphanumeric() || matches!(next, '-' | '.' | '_') => {
                host.push(next);
                rest = &rest[next.len_utf8()..];
            }
            _ => return None,
        }
    }
    Some(host).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_first_host_of_a_list_is_written_out() {
        for (list, host) in [
            ("n1", Some("n1")),
            ("n1,n2", Some("n1")),
            ("gpu[003-007,012]", Some("gpu003")),
            ("rack[1-2]-node[08,11].cluster", Some("rack1-node08.cluster")),
            ("a-b_c.d[5],x", Some("a-b_c.d5")),
            ("", None),
            ("n[1", None),
            ("$(reboot)", None),
            (",n2", None),
        ] {
            assert_eq!(first_of_hostlist(list).as_deref(), host, "{list}");
        }
    }

    #[test]
    fn the_head_is_the_first_host_of_the_launcher() {
        let head = |pairs: &[(&str, &str)]| head(&variables(pairs));
        assert_eq!(head(&[("SKYPILOT_NODE_IPS", "10.0.0.4\n10.0.0.5\n")]).as_deref(), Some("10.0.0.4"));
        assert_eq!(head(&[("SLURM_JOB_NODELIST", "n[2-3]")]).as_deref(), Some("n2"));
        assert_eq!(head(&[("MASTER_ADDR", "job-master-0")]).as_deref(), Some("job-master-0"));
        let mpi = |local| [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", local)];
        assert_eq!(head(&mpi("2")).as_deref(), Some("127.0.0.1"));
        assert_eq!(head(&mpi("1")), None);
        assert_eq!(head(&[("SLURM_JOB_NODELIST", " ")]), None);
    }

    #[test]
    fn the_launcher_of_the_most_processes_gives_the_rank() {
        let inner =
            [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1"), ("RANK", "2"), ("WORLD_SIZE", "4")];
        let found = largest(&variables(&inner)).unwrap();
        assert_eq!((found.launcher, found.rank, found.processes), ("torchrun", 2, 4));
        // The script of a job has a rank and no size; a rank beyond the size is no rank.
        for none in [&[("SLURM_PROCID", "0")][..], &[("RANK", "4"), ("WORLD_SIZE", "4")], &[]] {
            assert_eq!(largest(&variables(none)), None);
        }
        assert_eq!(any_rank(&variables(&[("SLURM_PROCID", "3")])), Some(("SLURM_PROCID", 3)));
    }
}
