//! The network on a device: the same decoder as [`crate::decoder`], whose operations are kernels.
//!
//! Weights and activations are stored in `T`, f32 or bf16; sums and gradients of weights are f32. A decoder has no weights of
//! its own: a pass asks for them unit by unit ([`UnitWeights`]) and returns gradients unit by unit ([`UnitGradients`]), so that
//! they can be on one device or gathered from several.
//!
//! # Layout
//! - `units`: sources of weights and sinks of gradients; `stored`: weights that stay in quantised blocks; `factors`: the gradients of
//!   a unit, or of the low-rank factors of its weights
//! - `operands`: norms, heads and angles as kernels take them
//! - `layer`: one layer, forward and backward, its halves in `layer::mixer` and `layer::feed_forward`; `head`: the heads
//! - `experts`: the router and the experts of a layer
//! - `ranks`: those that compute a pass together; `context`: those of them that share its tokens
//! - `train`: passes over packs; `stage`: those of some of the layers
//! - `sampler`: decoding from a paged KV cache; `steps`: the memory of a step, and recorded steps (CUDA graphs); the halves of its
//!   layers in `steps::mixer` and `steps::feed_forward`; `adapters`: those of the tokens of a step, beside its weights

mod adapters;
mod context;
mod experts;
mod factors;
mod head;
mod layer;
mod operands;
mod ranks;
mod sampler;
mod stage;
mod steps;
mod stored;
mod train;
mod units;

use std::sync::Arc;

use device::ops::attention::MAX_HEAD_DIM;
use device::ops::convolution::{MAX_HEAD, MAX_TAPS};
use device::ops::heads::HeadShape;
use device::{Device, DeviceBuffer, Result, Storage, ViewMut, bf16};
use serde::{Deserialize, Serialize};

use self::context::ContextPass;
pub use self::context::DeviceContextRanks;
pub use self::factors::DeviceFactors;
pub use self::head::HEAD_ROWS;
pub use self::layer::RouteCounts;
use self::operands::DeviceRotaries;
pub use self::ranks::{DeviceExpertRanks, DevicePassRanks, DeviceRanks};
pub use self::sampler::{DeviceSampler, DrawRequest, StagedWeights};
pub use self::steps::recorded_tokens;
pub use self::stored::StoredWeights;
pub use self::train::{DeviceLayersTrace, DeviceTrace};
pub use self::units::{FlatGradients, FlatWeights, UnitGradients, UnitWeights};
use crate::layer::{AttentionSpec, FeedForward, LayerSpec, Norm, QueryKeyNorm};
use crate::{Config, Layout, Pack, Recompute, Reduction};

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
#[derive(Clone, Debug)]
pub struct DeviceDecoder<T: Storage> {
    device: Device,
    /// The same device; memory that is allocated through it is accounted as activations.
    activations: Device,
    config: Config,
    layout: Arc<Layout>,
    shape: HeadShape,
    rotaries: Arc<DeviceRotaries>,
    recompute: Recompute,
    /// The ranks that compute a pass together.
    ranks: DevicePassRanks,
    storage: std::marker::PhantomData<T>,
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
        Ok(Self {
            device: device.clone(),
            activations: device.labelled("activations"),
            config: config.clone(),
            layout: Arc::clone(layout),
            shape: config.head_shape(),
            rotaries: Arc::new(DeviceRotaries::new(device, config)?),
            recompute,
            ranks: DevicePassRanks::default(),
            storage: std::marker::PhantomData,
        })
    }

    /// The same decoder, whose passes `ranks` compute together: those that share the weights of a [`ModelShard`](crate::ModelShard) without
    /// tree sums, or the tokens.
    #[must_use]
    pub fn among(&self, ranks: DevicePassRanks) -> Self {
        Self { ranks, ..self.clone() }
    }

    /// Tokens of `pack` that this rank computes.
    #[must_use]
    pub fn rows(&self, pack: &Pack) -> usize {
        self.context(pack).map_or(pack.token_ids().len(), |context| context.own().len())
    }

    /// How ranks divide the tokens of `pack`; `None` if this rank computes all.
    fn context(&self, pack: &Pack) -> Option<ContextPass> {
        Some(ContextPass::new(self.ranks.context.as_ref()?, &self.config, pack))
    }

    /// Adds up the partial results `values [n]` of the ranks that share the weights, in place.
    fn sum_over_ranks<S: Storage>(&self, values: ViewMut<'_, S>) -> Result<()> {
        self.ranks.sum(&self.activations, values)
    }

    /// Waits for the calls that are on their way, if several ranks compute the pass.
    fn wait_for_ranks(&self) -> Result<()> {
        self.ranks.wait()
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

    /// Token ids on the device, checked: a kernel would read beyond the table.
    fn ids(&self, token_ids: &[u32]) -> Result<DeviceBuffer<u32>> {
        check_ids(&self.device, "gather_rows", token_ids, self.config.vocab_size)?;
        self.activations.upload(token_ids)
    }
}

/// What the model computes that devices do not.
fn missing(config: &Config) -> Option<&'static str> {
    if config.head_dim > MAX_HEAD_DIM {
        return Some("heads of more than 256 values");
    }
    let recurrence = config.delta_net();
    config.layers.iter().find_map(|layer| {
        // Another kind of layer does not compile until its operations, or a refusal, are here.
        let LayerSpec {
            norm: Norm::RmsBefore | Norm::RmsAfter | Norm::RmsAround,
            attention: AttentionSpec { window: _, rotary: _, scale: _, sinks: _, gated: _, latent: _ },
            delta_net,
            query_key_norm: QueryKeyNorm::None | QueryKeyNorm::PerHead | QueryKeyNorm::Whole,
            qkv_bias: _,
            output_bias: _,
            feed_forward: FeedForward::SwiGlu | FeedForward::GeGlu | FeedForward::Experts(_),
            residual_multiplier: _,
        } = *layer;
        match delta_net {
            Some(spec) if delta_net != recurrence || spec.taps < 2 || spec.taps > MAX_TAPS => {
                Some("recurrences of several sizes, or with convolutions of one token or of more than 8")
            }
            Some(spec) if spec.key_dim.max(spec.value_dim) > MAX_HEAD => {
                Some("heads of recurrences of more than 256 values")
            }
            _ => None,
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
