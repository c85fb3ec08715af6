//! Every implementation of the collective does the same: what `suite.rs` asks of one rank is asked of all.

mod suite;
mod threads;
