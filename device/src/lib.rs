//! GPUs: memory, kernels, matrix products, CUDA graphs, and collective operations between devices.
//!
//! Kernels are CUDA C++ in `kernels/`. The feature `cuda` compiles them for the GPU when a device is opened. The
//! feature `emulator` compiles the same source for the CPU, so that it is tested on machines without a GPU. Without
//! either feature the crate compiles and no device opens.
//!
//! # Layout
//! - [`mod@device`]: a device with one stream; [`memory`]: buffers and views of its memory
//! - [`ops`]: kernels and their launchers
//! - [`product`]: matrix products; [`graph`]: CUDA graphs
//! - [`group`]: broadcast, all-gather and reduce-scatter between devices (NCCL)
//! - `cuda`, `emulated`: the backends; [`inventory`]: devices of this machine

#![expect(clippy::needless_pass_by_value, reason = "passing a mutable view by value prevents other writes")]
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

pub use backend::MemoryHandle;
pub use device::Device;
pub use element::{Element, Storage};
pub use error::{DeviceError, Result};
pub use graph::Graph;
pub use group::{DeviceGroup, DeviceGroupId, GroupTimeout};
pub use half::bf16;
pub use memory::{DeviceBuffer, View, ViewMut};
pub use product::{Matrix, MatrixMut};
