//! GPUs as rlrun uses them: memory, kernels, matrix products, and the ways in which several of them talk to each other.
//!
//! The kernels are CUDA C++ in `kernels/`, compiled for the device that is there when it is opened (feature `cuda`), or for
//! the processor by the emulator (feature `emulator`), so that the source that GPUs run is tested where there is none.
//! Without either feature everything compiles and no device opens.
//!
//! # Layout
//! - [`mod@device`]: a device with its one stream, on which everything happens in order; [`memory`]: what lies on it
//! - [`ops`]: the kernels, each with its launcher
//! - [`product`]: matrix products; [`graph`]: launches that are recorded once and replayed
//! - [`group`]: devices that sum up, gather and broadcast together (NCCL)
//! - `cuda`, `emulated`: the two backends; [`inventory`]: which devices there are

#![expect(
    clippy::needless_pass_by_value,
    reason = "a view that is written is given away, so that nobody else writes"
)]
#![cfg_attr(
    not(any(feature = "cuda", feature = "emulator")),
    expect(dead_code, reason = "without a backend no device opens")
)]

mod backend;
#[cfg(feature = "cuda")]
mod cuda;
pub mod device;
pub mod element;
#[cfg(feature = "emulator")]
mod emulated;
pub mod error;
pub mod graph;
pub mod group;
pub mod inventory;
pub mod memory;
pub mod ops;
pub mod product;

pub use backend::Handle;
pub use device::Device;
pub use element::{Element, Storage};
pub use error::{DeviceError, Result};
pub use graph::Graph;
pub use group::{Group, GroupId, Patience};
pub use half::bf16;
pub use memory::{Buffer, View, ViewMut};
pub use product::{Matrix, MatrixMut};
