//! Whole-system tests, one binary. `reference_loop.rs` is the algorithm as one plain loop; read it first.

mod parity;
mod reference_loop;
mod structure;
