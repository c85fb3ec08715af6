//! The network on a device: the same decoder as [`crate::decoder`], whose operations are kernels.
//!
//! Weights and activations are stored in `T`, f32 or bf16; sums are f32, and so are gradients of weights. A decoder has no
//! weights of its own: a pass asks for them unit by unit ([`UnitWeights`]), and hands on gradients unit by unit
//! ([`UnitGradients`]), so that they can lie on one device or be gathered from several.
//!
//! # Layout
//! - `units`: where weights come from and gradients go
//! - `layer`: one layer, forward and backward; `head`: what follows the last one
//! - `train`: passes over packs
//! - `sampler`: decoding from a cache in pages; `steps`: the memory of a step, recorded where it can be

mod head;
mod layer;
mod sampler;
mod steps;
mod train;
mod units;

use std::sync::Arc;

use device::ops::heads::{HeadShape, angles};
use device::{Buffer, Device, Result, Storage, bf16};
use serde::{Deserialize, Serialize};

pub use self::sampler::{DeviceSampler, DrawRequest, StagedWeights};
pub use self::steps::recorded_tokens;
pub use self::train::DeviceTrace;
pub use self::units::{FlatGradients, FlatWeights, UnitGradients, UnitWeights};
use crate::decoder::Places;
use crate::{Config, Layout, Recompute, Reduction};

/// What weights and activations are stored in on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 32 bits, as on the processor.
    #[default]
    F32,
    /// The upper 16 of them.
    Bf16,
}

impl Dtype {
    /// Size of a value, bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }
}

/// The decoder of a configuration, to train and score with on a device.
#[derive(Debug)]
pub struct DeviceDecoder<T: Storage> {
    device: Device,
    /// The same; what is allocated through it counts as activations.
    activations: Device,
    config: Config,
    layout: Arc<Layout>,
    shape: HeadShape,
    inv_freq: Buffer<f32>,
    places: Vec<Places>,
    recompute: Recompute,
    storage: std::marker::PhantomData<T>,
}

/// Cosines and sines of the positions of some tokens.
#[derive(Debug)]
struct Angles {
    /// `[T, head_dim / 2]`
    cos: Buffer<f32>,
    /// `[T, head_dim / 2]`
    sin: Buffer<f32>,
}

impl<T: Storage> DeviceDecoder<T> {
    /// The decoder of `config`, whose weights lie as `layout` says.
    ///
    /// # Errors
    /// If the device fails, or `config` wants sums in an order that its matrix products do not have.
    pub fn new(device: &Device, config: &Config, layout: &Arc<Layout>, recompute: Recompute) -> Result<Self> {
        if config.reduction != Reduction::Chain {
            return Err(device::DeviceError::Kernel {
                device: device.name(),
                kernel: "product".to_owned(),
                reason: "tree sums (`model.reduction`) are computed on the processor alone".to_owned(),
            });
        }
        let (heads, kv_heads, head_dim) = (config.num_heads, config.num_kv_heads, config.head_dim);
        Ok(Self {
            device: device.clone(),
            activations: device.labelled("activations"),
            config: config.clone(),
            layout: Arc::clone(layout),
            shape: HeadShape { heads, kv_heads, head_dim },
            inv_freq: device.upload(&config.inv_freq())?,
            places: (0..config.num_layers).map(|index| Places::new(layout, index)).collect(),
            recompute,
            storage: std::marker::PhantomData,
        })
    }

    /// Where it computes.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The configuration that it was made for.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where the weights lie.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Angles of `positions [T]`.
    fn angles(&self, positions: &[u32]) -> Result<Angles> {
        let device = &self.activations;
        let len = positions.len() * self.config.head_dim / 2;
        let mut all = Angles { cos: device.uninit(len)?, sin: device.uninit(len)? };
        let positions = device.upload(positions)?;
        angles(device, positions.all(), self.inv_freq.all(), all.cos.all_mut(), all.sin.all_mut())?;
        Ok(all)
    }

    /// Ids of tokens, checked: a kernel would read beyond the table.
    fn ids(&self, token_ids: &[u32]) -> Result<Buffer<u32>> {
        check_ids(&self.device, "gather_rows", token_ids, self.config.vocab_size)?;
        self.activations.upload(token_ids)
    }
}

/// An error for an id beyond the vocabulary, which `kernel` would be given.
fn check_ids(device: &Device, kernel: &str, token_ids: &[u32], vocabulary: usize) -> Result<()> {
    let Some(at) = token_ids.iter().position(|id| *id as usize >= vocabulary) else { return Ok(()) };
    Err(device::DeviceError::Kernel {
        device: device.name(),
        kernel: kernel.to_owned(),
        reason: format!("token {at} has id {}, but the vocabulary ends at {vocabulary}", token_ids[at]),
    })
}
