//! `code`: does the program in the completion pass the tests of the task? Run in a sandbox, judged outside of it.
//!
//! Invariant: a value in [0, 1]. Whatever the program does (crash, loop, fork, reach for files or the network) is a test that it
//! did not pass; a sandbox that fails is an error of the reward and never a score.

pub mod compare;
pub mod extract;
pub mod python;
pub mod run;
pub mod suite;
