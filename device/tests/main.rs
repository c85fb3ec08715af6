//! What a device computes, on the emulator and on a GPU where there is one.

mod common;
#[cfg(feature = "cuda")]
mod compiles;
mod graphs;
mod groups;
mod memory;
mod ops;
mod products;
