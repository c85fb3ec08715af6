//! Ranks that compute on a device.
//!
//! The configuration names the device of a rank, which runs its passes. With AdamW the device also has the f32 master weights,
//! moments and gradients, and updates the weights: all of them on a single rank, its shards in a device group. With any
//! other optimizer or with LoRA, the host receives the gradients, updates its weights and uploads them again.
//!
//! Invariant: checkpoints and policy versions are made of the host's form of weights and optimizer. A copy to the device and
//! back changes no bit, so a run can resume on any device or on the host.
//!
//! # Layout
//! - `config`: the device of each rank, and the state on it
//! - `network`: the decoder on a device; `pass`: its forward and backward passes; `uploads`: weights on their way to it
//! - `loaded`: weights that are trained on a device; `mirror`: the host's copy of them; `moments`: AdamW on a device

mod config;
mod loaded;
mod mirror;
mod moments;
mod network;
mod pass;
#[cfg(all(test, feature = "emulator"))]
mod tests;
mod uploads;

pub use config::{CollectivePlace, DeviceConfig, FrozenPlace, OptimizerPlace};
pub use loaded::LearnerWeights;
pub(crate) use loaded::{GroupWeights, LearnerStorage, SingleWeights, TrainedWeights, UpdatedWeights};
pub(crate) use mirror::Mirror;
pub(crate) use moments::{DeviceMoments, Piece};
pub(crate) use network::{ByDtype, DeviceNetwork, NetworkWeights, by_dtype, open};
pub(crate) use pass::{DevicePass, ParameterSource};
pub(crate) use uploads::{ParameterUpload, upload};
