//! Every implementation of the collective does the same: what `suite.rs` asks of one rank is asked of all.

#[cfg(feature = "mpi")]
mod mpi;
mod processes;
mod suite;
mod threads;
