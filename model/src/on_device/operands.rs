//! The operands of kernels that follow from the configuration: norms, heads, and the angles of rotary embeddings.
//!
//! Passes over packs and decode steps take them from here, so that both compute the same layer.

use device::ops::attention::AttentionHeads;
use device::ops::convolution::{ConvolutionInputs, DeltaGates, DeltaShape};
use device::ops::heads::{HeadAngles, HeadNorm, angles};
use device::ops::latent::LatentHeads;
use device::ops::norm::RmsNorm;
use device::{Device, DeviceBuffer, Result, Storage, View, ViewMut};

use super::DeviceDecoder;
use crate::Config;
use crate::decoder::logit_factor;
use crate::layer::{DeltaNetSpec, LatentSpec, Operand};
use crate::ops::attention::AttentionRule;

/// What mixes the tokens of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MixerKind {
    /// Attention of projections of the input.
    Attention,
    /// Attention through latents.
    Latent(LatentSpec),
    /// A recurrence.
    DeltaNet(DeltaNetSpec),
}

/// A rotary embedding of the model.
#[derive(Debug)]
pub(super) struct DeviceRotary {
    /// `[pairs]` radians per position.
    inv_freq: DeviceBuffer<f32>,
    /// Multiplies cosines and sines.
    amplitude: f32,
}

/// The rotary embeddings of the layers.
#[derive(Debug)]
pub(super) struct DeviceRotaries {
    /// Of `Config::rotaries`.
    all: Vec<DeviceRotary>,
    /// Their number in each layer; `None` for a layer without one.
    of_layers: Vec<Option<usize>>,
}

/// Cosines and sines of the positions of some tokens.
#[derive(Debug)]
pub(super) struct DeviceAngles {
    /// `[T, pairs]`
    cos: DeviceBuffer<f32>,
    /// `[T, pairs]`
    sin: DeviceBuffer<f32>,
    pairs: usize,
}

impl DeviceRotary {
    /// Number of rotated pairs of a head.
    fn pairs(&self) -> usize {
        self.inv_freq.len()
    }
}

impl DeviceRotaries {
    pub(super) fn new(device: &Device, config: &Config) -> Result<Self> {
        let rotaries = config.rotaries();
        let upload = |rotary: &crate::Rotary| {
            let inv_freq = device.upload(&rotary.inv_freq(config.rotary_dim()))?;
            Ok(DeviceRotary { inv_freq, amplitude: rotary.amplitude() })
        };
        let of = |layer: &crate::LayerSpec| {
            rotaries.iter().position(|rotary| layer.attention.rotary == Some(*rotary))
        };
        Ok(Self {
            all: rotaries.iter().map(upload).collect::<Result<_>>()?,
            of_layers: config.layers.iter().map(of).collect(),
        })
    }

    /// Memory for the angles of `tokens` tokens in each rotary embedding.
    pub(super) fn reserve(&self, device: &Device, tokens: usize) -> Result<Vec<DeviceAngles>> {
        let of = |rotary: &DeviceRotary| {
            let (pairs, len) = (rotary.pairs(), tokens * rotary.pairs());
            Ok(DeviceAngles { cos: device.uninit(len)?, sin: device.uninit(len)?, pairs })
        };
        self.all.iter().map(of).collect()
    }

    /// Computes the angles of `positions [T]` in each rotary embedding. Does not synchronise.
    pub(super) fn compute(
        &self,
        device: &Device,
        positions: View<'_, u32>,
        to: &mut [DeviceAngles],
    ) -> Result<()> {
        for (rotary, to) in self.all.iter().zip(to) {
            let range = 0..positions.len() * rotary.pairs();
            let (cos, sin) = (to.cos.view_mut(range.clone()), to.sin.view_mut(range));
            angles(device, positions, rotary.inv_freq.all(), rotary.amplitude, cos, sin)?;
        }
        Ok(())
    }

    /// Those of layer `index` for `tokens` tokens, of what [`Self::compute`] wrote.
    pub(super) fn of_layer<'a>(
        &self,
        index: usize,
        all: &'a [DeviceAngles],
        tokens: usize,
    ) -> Option<HeadAngles<'a>> {
        let DeviceAngles { cos, sin, pairs } = &all[self.of_layers[index]?];
        let range = 0..tokens * pairs;
        Some(HeadAngles { pairs: *pairs, cos: cos.view(range.clone()), sin: sin.view(range) })
    }
}

impl DeltaNetSpec {
    /// Its sizes, for devices.
    pub(super) fn shape(&self) -> DeltaShape {
        let Self { key_heads, value_heads, key_dim, value_dim, taps, files: _ } = *self;
        DeltaShape { key_heads, value_heads, key_dim, value_dim, taps }
    }

    /// Values of what a sequence keeps in the memory of a device: the last inputs of the convolution, then the states.
    pub(super) fn slot_len(&self) -> usize {
        self.tail_len() + self.heads_len()
    }
}

impl<T: Storage> DeviceDecoder<T> {
    /// What mixes the tokens of layer `index`.
    pub(super) fn mixer_kind(&self, index: usize) -> MixerKind {
        let layer = &self.config.layers[index];
        match (layer.delta_net, layer.attention.latent) {
            (None, None) => MixerKind::Attention,
            (None, Some(spec)) => MixerKind::Latent(spec),
            (Some(spec), _) => MixerKind::DeltaNet(spec),
        }
    }

    /// The heads of layers with latents of `spec`.
    pub(super) fn latent_heads(&self, spec: &LatentSpec) -> LatentHeads {
        let LatentSpec { nope, rope, value, interleaved, .. } = *spec;
        LatentHeads { heads: self.config.num_heads, nope, rope, value, interleaved }
    }

    /// What the convolution of layer `index`, whose values are `weights`, sees in `projection [T, stride]`, by `sources [T, taps - 1]`.
    pub(super) fn convolution<'a>(
        &self,
        (index, spec): (usize, &DeltaNetSpec),
        weights: View<'a, T>,
        projection: View<'a, T>,
        sources: View<'a, u32>,
    ) -> ConvolutionInputs<'a, T> {
        let kernel = weights.slice(self.layout.ranges(index)[Operand::Convolution].clone());
        ConvolutionInputs { shape: spec.shape(), projection, kernel, sources }
    }

    /// The gates of layer `index`, whose values are `weights`, of `inputs [T, 2, value_heads]`.
    pub(super) fn delta_gates<'a>(
        &self,
        index: usize,
        weights: View<'a, T>,
        inputs: View<'a, f32>,
    ) -> DeltaGates<'a, T> {
        let ranges = self.layout.ranges(index);
        let [logs, bias] =
            [Operand::DecayRate, Operand::TimeBias].map(|of| weights.slice(ranges[of].clone()));
        DeltaGates { inputs, logs, bias }
    }

    /// The norm of the result of each head of a recurrence in layer `index`, whose values are `weights`.
    pub(super) fn result_norm<'a>(&self, index: usize, weights: View<'a, T>) -> RmsNorm<'a, T> {
        let weight = weights.slice(self.layout.ranges(index)[Operand::ResultNorm].clone());
        RmsNorm::new(weight, self.config.rms_norm_eps)
    }

    /// The norm with `weight [width]` as it is stored.
    pub(super) fn norm<'a>(&self, weight: View<'a, T>) -> RmsNorm<'a, T> {
        RmsNorm { offset: self.config.norm_offset, ..RmsNorm::new(weight, self.config.rms_norm_eps) }
    }

    /// The final norm with `weight [hidden]`, whose result is divided as logits are, which are linear in it.
    pub(super) fn final_norm_of<'a>(&self, weight: View<'a, T>) -> RmsNorm<'a, T> {
        RmsNorm { factor: logit_factor(&self.config), ..self.norm(weight) }
    }

    /// The norm of the result of a half of layer `index`, with `weight [hidden]`, multiplied as the result is.
    pub(super) fn norm_after<'a>(&self, index: usize, weight: View<'a, T>) -> RmsNorm<'a, T> {
        RmsNorm { factor: self.multiplier(index), ..self.norm(weight) }
    }

    /// Multiplies the results of the halves of layer `index`.
    pub(super) fn multiplier(&self, index: usize) -> f32 {
        self.config.layers[index].residual_multiplier
    }

    /// Whether the results of the halves of layer `index` are added to the residual stream as they are.
    pub(super) fn adds_plainly(&self, index: usize) -> bool {
        !self.config.layers[index].norm.is_after() && self.multiplier(index) == 1.0
    }

    /// The norm of queries and keys of layer `index`, whose values are `weights`.
    pub(super) fn head_norm<'a>(&self, index: usize, weights: View<'a, T>) -> Option<HeadNorm<'a, T>> {
        let both = weights.slice(self.layout.ranges(index)[Operand::QueryKeyNorm].clone());
        if both.is_empty() {
            return None;
        }
        // Of the same width each if heads are normalised apart, and of their own otherwise.
        let apart = both.len() == 2 * self.shape.head_dim;
        let queries = if apart { self.shape.head_dim } else { self.shape.query_width() };
        let (query, key) = (both.slice(0..queries), both.slice(queries..both.len()));
        Some(HeadNorm { query, key, offset: self.config.norm_offset, eps: self.config.rms_norm_eps })
    }

    /// How layer `index`, whose values are `weights`, attends.
    pub(super) fn attention_heads<'a>(&self, index: usize, weights: View<'a, T>) -> AttentionHeads<'a, T> {
        let AttentionRule { shape, scale, window, .. } = self.config.attention_rule(index);
        let sinks = weights.slice(self.layout.ranges(index)[Operand::Sinks].clone());
        AttentionHeads { shape, scale, window, sinks: (!sinks.is_empty()).then_some(sinks) }
    }

    /// Whether every query head of layer `index` has the gate of its result behind it.
    pub(super) fn is_gated(&self, index: usize) -> bool {
        self.config.layers[index].attention.gated
    }

    /// Values of what a sequence keeps in the memory of a device in the layers with a recurrence before `index`.
    pub(super) fn slot_start(&self, index: usize) -> usize {
        self.config.layers[..index]
            .iter()
            .filter_map(|layer| layer.delta_net)
            .map(|spec| spec.slot_len())
            .sum()
    }

    /// The same in all layers.
    pub(super) fn slot_len(&self) -> usize {
        self.slot_start(self.config.num_layers())
    }

    /// The windows of all layers, each once.
    pub(super) fn windows(&self) -> Vec<usize> {
        let mut windows: Vec<usize> =
            (0..self.config.num_layers()).map(|index| self.config.attention_rule(index).window).collect();
        windows.sort_unstable();
        windows.dedup();
        windows
    }
}

/// Rows that were computed, or that are those of another buffer.
#[derive(Debug)]
pub(super) enum DeviceRows<'a, T: Storage> {
    Computed(DeviceBuffer<T>),
    Same(View<'a, T>),
}

impl<T: Storage> DeviceRows<'_, T> {
    pub(super) fn all(&self) -> View<'_, T> {
        match self {
            Self::Computed(buffer) => buffer.all(),
            Self::Same(view) => *view,
        }
    }
}

/// A copy of `x [n]` into new memory of `device`.
pub(super) fn copied<T: Storage>(device: &Device, x: View<'_, T>) -> Result<DeviceBuffer<T>> {
    let mut out = device.uninit(x.len())?;
    device.copy(x, out.all_mut())?;
    Ok(out)
}

/// Multiplies embedded tokens `x [T, d]` where the model does.
pub(super) fn multiply_embedded<T: Storage>(
    device: &Device,
    config: &Config,
    x: ViewMut<'_, T>,
) -> Result<()> {
    match config.embedding_multiplier {
        1.0 => Ok(()),
        factor => device::ops::vectors::scale(device, factor, x),
    }
}
