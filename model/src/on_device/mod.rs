//! The network on a device: the same decoder as [`crate::decoder`], whose operations are kernels.
//!
//! Weights and activations are stored in `T`, f32 or bf16; sums and gradients of weights are f32. A decoder has no weights of
//! its own: a pass asks for them unit by unit ([`UnitWeights`]) and returns gradients unit by unit ([`UnitGradients`]), so that
//! they can be on one device or gathered from several.
//!
//! # Layout
//! - `units`: sources of weights and sinks of gradients
//! - `layer`: one layer, forward and backward, its halves in `layer::attention` and `layer::feed_forward`; `head`: the heads
//! - `experts`: the router and the experts of a layer
//! - `train`: passes over packs
//! - `sampler`: decoding from a paged KV cache; `steps`: the memory of a step, and recorded steps (CUDA graphs); the halves of its
//!   layers in `steps::attention` and `steps::feed_forward`

mod experts;
mod head;
mod layer;
mod sampler;
mod steps;
mod train;
mod units;

use std::sync::Arc;

use device::ops::heads::{HeadShape, angles};
use device::{Device, DeviceBuffer, Result, Storage, bf16};
use serde::{Deserialize, Serialize};

pub use self::layer::RouteCounts;
pub use self::sampler::{DeviceSampler, DrawRequest, StagedWeights};
pub use self::steps::recorded_tokens;
pub use self::train::DeviceTrace;
pub use self::units::{FlatGradients, FlatWeights, UnitGradients, UnitWeights};
use crate::layer::{AttentionSpec, FeedForward, LayerSpec, Norm, QueryKeyNorm};
use crate::{Config, Layout, Recompute, Reduction, Rotary};

/// Storage type of weights and activations on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceDtype {
    /// f32, as on the processor.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
}

impl DeviceDtype {
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
    /// The same device; memory that is allocated through it is accounted as activations.
    activations: Device,
    config: Config,
    layout: Arc<Layout>,
    shape: HeadShape,
    inv_freq: DeviceBuffer<f32>,
    recompute: Recompute,
    storage: std::marker::PhantomData<T>,
}

/// Cosines and sines of the positions of some tokens.
#[derive(Debug)]
struct DeviceAngles {
    /// `[T, head_dim / 2]`
    cos: DeviceBuffer<f32>,
    /// `[T, head_dim / 2]`
    sin: DeviceBuffer<f32>,
}

impl<T: Storage> DeviceDecoder<T> {
    /// The decoder of `config` for weights in the order of `layout`.
    ///
    /// # Errors
    /// If the device fails, or `config` has a layer whose operations it does not have, or wants sums in an order that its matrix
    /// products do not have.
    pub fn new(device: &Device, config: &Config, layout: &Arc<Layout>, recompute: Recompute) -> Result<Self> {
        if config.reduction != Reduction::Chain {
            return Err(device::DeviceError::Kernel {
                device: device.name(),
                kernel: "product".to_owned(),
                reason: "tree sums (`model.reduction`) are computed on the processor alone".to_owned(),
            });
        }
        if let Some(missing) = missing(config) {
            return Err(device::DeviceError::Kernel {
                device: device.name(),
                kernel: "layer".to_owned(),
                reason: format!("{missing} are computed on the processor alone so far"),
            });
        }
        let inv_freq =
            config.rotaries().first().map_or(Vec::new(), |rotary| rotary.inv_freq(config.head_dim));
        Ok(Self {
            device: device.clone(),
            activations: device.labelled("activations"),
            config: config.clone(),
            layout: Arc::clone(layout),
            shape: config.head_shape(),
            inv_freq: device.upload(&inv_freq)?,
            recompute,
            storage: std::marker::PhantomData,
        })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The configuration that it was made for.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The layout of the weights.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Angles of `positions [T]`.
    fn angles(&self, positions: &[u32]) -> Result<DeviceAngles> {
        let device = &self.activations;
        let len = positions.len() * self.config.head_dim / 2;
        let mut all = DeviceAngles { cos: device.uninit(len)?, sin: device.uninit(len)? };
        let positions = device.upload(positions)?;
        angles(device, positions.all(), self.inv_freq.all(), all.cos.all_mut(), all.sin.all_mut())?;
        Ok(all)
    }

    /// Token ids on the device, checked: a kernel would read beyond the table.
    fn ids(&self, token_ids: &[u32]) -> Result<DeviceBuffer<u32>> {
        check_ids(&self.device, "gather_rows", token_ids, self.config.vocab_size)?;
        self.activations.upload(token_ids)
    }
}

/// What the model computes that devices do not.
fn missing(config: &Config) -> Option<&'static str> {
    if config.delta_net().is_some() {
        return Some("layers with a recurrence in place of attention");
    }
    let multiplied = [config.embedding_multiplier, config.logits_scaling].iter().any(|factor| *factor != 1.0);
    if multiplied || config.norm_offset != 0.0 {
        return Some("multiplied embeddings and logits, and norms whose weights have an offset");
    }
    let same = config.rotaries().len() == 1;
    config.layers.iter().find_map(|layer| {
        // Another kind of layer does not compile until its operations, or a refusal, are here.
        let LayerSpec {
            norm,
            attention: AttentionSpec { window, rotary, scale, sinks, gated, latent },
            delta_net: _,
            query_key_norm,
            qkv_bias: _,
            output_bias: _,
            feed_forward: FeedForward::SwiGlu | FeedForward::GeGlu | FeedForward::Experts(_),
            residual_multiplier,
        } = *layer;
        let plain = |rotary: Rotary| rotary.share == 1.0 && rotary.amplitude() == 1.0;
        match (norm, query_key_norm) {
            (_, QueryKeyNorm::Whole) => Some("norms of all heads together"),
            (Norm::RmsAfter | Norm::RmsAround, _) => Some("norms after a block"),
            _ if latent.is_some() => Some("latents of queries, keys and values"),
            _ if sinks || gated => Some("attention sinks, and gates on the result of attention"),
            _ if !same || !rotary.is_some_and(plain) => Some(
                "layers without rotary embedding, and embeddings that are partial, scaled by YaRN or differ",
            ),
            _ if window.is_some_and(|window| window < config.max_position_embeddings) => {
                Some("sliding attention windows")
            }
            _ if scale.is_some() || residual_multiplier != 1.0 => {
                Some("scores and residual streams with multipliers of their own")
            }
            (Norm::RmsBefore, QueryKeyNorm::None | QueryKeyNorm::PerHead) => None,
        }
    })
}

/// Refuses an id beyond the vocabulary in the arguments of `kernel`.
fn check_ids(device: &Device, kernel: &str, token_ids: &[u32], vocabulary: usize) -> Result<()> {
    let Some(at) = token_ids.iter().position(|id| *id as usize >= vocabulary) else { return Ok(()) };
    Err(device::DeviceError::Kernel {
        device: device.name(),
        kernel: kernel.to_owned(),
        reason: format!("token {at} has id {}, but the vocabulary ends at {vocabulary}", token_ids[at]),
    })
}
