//! Device tests, on the emulator and on a GPU if there is one.

mod common;
#[cfg(feature = "cuda")]
mod compiles;
mod graphs;
mod groups;
mod memory;
mod ops;
mod products;
