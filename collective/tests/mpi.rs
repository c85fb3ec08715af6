//! Ranks that `mpirun` starts; `tests/run` does that. MPI can be started once in a process, so each test is a call of
//! `mpirun` of its own.

use std::io::Write;
use std::time::Duration;

use collective::{Collective, mpi};

use crate::suite;

#[test]
#[ignore = "is one rank of several; run it as tests/run does"]
fn ranks_of_mpirun_conform() {
    let rank = mpi::start(Duration::from_secs(60)).expect("MPI starts once");
    assert!(mpi::start(Duration::from_secs(60)).is_err(), "it cannot start twice");
    suite::conforms(&rank);
}

#[test]
#[ignore = "is one rank of several; run it as tests/run does"]
fn a_rank_of_mpirun_that_hangs_is_named() {
    let rank = mpi::start(Duration::from_secs(1)).expect("MPI starts once");
    rank.barrier().expect("all ranks come");
    let last = rank.world() - 1;
    if rank.rank() == last {
        // A rank that gives up ends its process. Then mpirun ends this one.
        std::thread::sleep(Duration::from_secs(600));
    }
    let error = rank.barrier().expect_err("the last rank does not come").to_string();
    assert!(error.contains(&format!("waited 1 s for rank {last} in `barrier`")), "{error}");
    writeln!(std::io::stdout(), "rank {} has named rank {last}", rank.rank())
        .expect("mpirun reads the output");
}
