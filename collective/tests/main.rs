//! Every implementation of the collective operations has the same results: each rank of each runs the suite of `suite.rs`.

#[cfg(feature = "emulator")]
mod devices;
#[cfg(feature = "mpi")]
mod mpi;
mod processes;
mod suite;
mod threads;
