//! Ranks that compute on a device.
//!
//! A rank gives its passes to the device that its configuration names. One that trains with AdamW has f32 weights, moments
//! and gradients there too, and updates them there: all of them if it is alone, its shards if it exchanges with others from
//! device to device. Any other gets the gradients to the host, updates what the host has, and brings the weights up again.
//!
//! Invariant: checkpoints and versions are made of the host's form of weights and optimizer, and nothing is lost on the
//! way there and back, so a run can go on where it likes.
//!
//! # Layout
//! - `config`: which device, and what is on it
//! - `engine`: the weights on a device, and the optimizer
//! - `pass`: forward and backward there; `mirror`: the host's copy of what is there

mod config;
mod engine;
mod mirror;
mod pass;
#[cfg(all(test, feature = "emulator"))]
mod tests;

pub use config::{CollectivePlace, DeviceConfig, OptimizerPlace};
pub use engine::LearnerWeights;
pub(crate) use engine::{DeviceRank, open};
pub(crate) use mirror::Mirror;
pub(crate) use pass::DevicePass;
