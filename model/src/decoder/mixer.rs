//! The mixer of a layer: the part of its first half that lets a token see those before it.
//!
//! A mixer projects the normalised input, mixes tokens and gives the input of the output projection, which is the block's.
//! The mixing itself depends on where the tokens before are: in the same pack, on other ranks, or in a cache. So the caller mixes,
//! between the projections and the rest.
//!
//! Invariant: as in `block`: the backward is the exact vector-Jacobian product, and gradients of weights are computed apart, over
//! all tokens in their order.

mod attention;
mod delta_net;
mod latent;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use collective::Collective;

pub(super) use self::attention::AttentionWeights;
pub(super) use self::delta_net::DeltaNetWeights;
pub(super) use self::latent::{LatentOperands, LatentPiece, LatentTrace, LatentWeights, gradient_jobs};
use super::LayerAngles;
use super::block::OperandGradients;
use crate::ThreadPool;
use crate::layer::Operand;
use crate::ops::adapters::LinearPass;
use crate::ops::attention::{AttentionRule, PackedReverse};
use crate::ops::delta_net::{DeltaReverse, DeltaRule};
use crate::ops::linear::Linear;
use crate::ops::result_gate::{ResultNorm, gated, gated_backward};

/// The weights.
#[derive(Clone, Debug)]
pub(super) enum MixerWeights {
    Attention(Box<AttentionWeights>),
    /// Attention of queries, keys and values through latents.
    Latent(Box<LatentWeights>),
    DeltaNet(Box<DeltaNetWeights>),
}

/// How tokens are mixed.
#[derive(Clone, Copy, Debug)]
pub(super) enum MixingRule<'a> {
    Attention(AttentionRule<'a>),
    DeltaNet(DeltaRule<'a>),
}

/// The backward of the mixing.
#[derive(Debug)]
pub(super) enum MixingReverse {
    Attention(PackedReverse),
    DeltaNet(DeltaReverse),
}

/// What the projections of a mixer give. `T` tokens.
#[derive(Debug)]
pub(super) struct Projected {
    /// `[T, width]` before norm and rotation, if heads are normalised.
    raw: Option<Tensor>,
    /// In a layer with latents.
    latent: Option<LatentTrace>,
    /// `[T, width]` what is mixed.
    pub(super) prepared: Tensor,
    /// `[T, mixed]` the gate of the result before its activation, if there is one.
    gate: Option<Tensor>,
}

/// Backward of the gate of a mixer's result. `T` tokens.
#[derive(Debug)]
pub(super) struct ReversedGate {
    /// `[T, mixed]` gradient of the result.
    d_result: Tensor,
    /// `[T, mixed]` gradient of what the mixing gave.
    pub(super) d_mixed: Tensor,
    /// `[T, mixed]` gradient of the gate, if there is one.
    d_gate: Option<Tensor>,
}

/// Activations of a mixer, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct MixerTrace {
    pub(super) projected: Projected,
    /// `[T, mixed]` before the gate, if there is one.
    mixed: Option<Tensor>,
    /// `[T, mixed]` the result: the input of the output projection.
    pub(super) result: Tensor,
}

/// Backward of a mixer: the gradient of its input, and the operands of its weight gradients.
#[derive(Debug)]
pub(super) struct MixerReverse {
    /// `[T, d]` gradient of the normalised input.
    pub(super) d_normed: Tensor,
    /// `[T, projected]` gradient of the projection; with latents, of that to the latent of keys and values.
    pub(super) d_projected: Tensor,
    operands: MixerOperands,
}

/// What gradients of the vectors of a mixer are computed from.
#[derive(Debug)]
enum MixerOperands {
    Attention {
        /// `[T, width]` gradient of what is mixed, where norms of heads need it.
        d_prepared: Option<Tensor>,
        /// `[T, heads]` what each token adds to the gradient of the sinks; absent without sinks.
        d_sinks: Option<Tensor>,
    },
    Latent(LatentOperands),
    DeltaNet {
        /// `[T, 2 value_heads]` gradient of the gates of the recurrence.
        d_gates: Tensor,
        /// `[T, value_heads]` what each token adds to the gradient of the logarithm of the rates.
        d_rates: Tensor,
        /// `[T, channels]` gradient of the sums of the convolution.
        d_sums: Vec<f32>,
        /// The rows of the segments, each with those that it continues.
        runs: Vec<[Range<usize>; 2]>,
        /// `[T, mixed]` gradient of the result.
        d_result: Tensor,
    },
}

/// Gradients of the vectors of a mixer, as parts of those of a layer; empty for what it does not have.
pub(super) struct MixerVectors<'a> {
    pub(super) qkv_bias: &'a mut [f32],
    pub(super) head_norm: &'a mut [f32],
    pub(super) sinks: &'a mut [f32],
    pub(super) convolution: &'a mut [f32],
    pub(super) decay_rate: &'a mut [f32],
    pub(super) time_bias: &'a mut [f32],
    pub(super) result_norm: &'a mut [f32],
}

impl<'a> MixerVectors<'a> {
    /// Takes them out of `gradients`.
    pub(super) fn of(gradients: &mut OperandGradients<'a>) -> Self {
        Self {
            qkv_bias: gradients.vector(Operand::QkvBias),
            head_norm: gradients.vector(Operand::QueryKeyNorm),
            sinks: gradients.vector(Operand::Sinks),
            convolution: gradients.vector(Operand::Convolution),
            decay_rate: gradients.vector(Operand::DecayRate),
            time_bias: gradients.vector(Operand::TimeBias),
            result_norm: gradients.vector(Operand::ResultNorm),
        }
    }
}

impl MixerReverse {
    /// `[T, 2 value_heads]` gradient of the gates of the recurrence, if there is one.
    pub(super) fn d_gates(&self) -> Option<&Tensor> {
        match &self.operands {
            MixerOperands::Attention { .. } | MixerOperands::Latent(_) => None,
            MixerOperands::DeltaNet { d_gates, .. } => Some(d_gates),
        }
    }

    /// In a layer with latents.
    pub(super) fn latent(&self) -> Option<&LatentOperands> {
        match &self.operands {
            MixerOperands::Latent(operands) => Some(operands),
            MixerOperands::Attention { .. } | MixerOperands::DeltaNet { .. } => None,
        }
    }
}

impl MixerWeights {
    /// How tokens are mixed.
    pub(super) fn rule(&self) -> MixingRule<'_> {
        match self {
            Self::Attention(attention) => MixingRule::Attention(attention.rule()),
            Self::Latent(latent) => MixingRule::Attention(latent.rule()),
            Self::DeltaNet(delta_net) => MixingRule::DeltaNet(delta_net.rule()),
        }
    }

    /// Memory of the linear layers, bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.bytes(),
            Self::Latent(latent) => latent.bytes(),
            Self::DeltaNet(delta_net) => delta_net.bytes(),
        }
    }

    /// Calls `change` for every linear layer.
    pub(super) fn change_linears(&mut self, change: &mut impl FnMut(&mut Linear)) {
        match self {
            Self::Attention(attention) => change(&mut attention.qkv),
            Self::Latent(latent) => latent.change_linears(change),
            Self::DeltaNet(delta_net) => {
                change(&mut delta_net.projection);
                change(&mut delta_net.gates);
            }
        }
    }

    /// The norm of the result before its gate.
    fn result_norm(&self) -> Option<ResultNorm<'_>> {
        match self {
            Self::Attention(_) | Self::Latent(_) => None,
            Self::DeltaNet(delta_net) => Some(delta_net.result_norm()),
        }
    }

    /// The projections of the normalised input `x [T, d]`.
    pub(super) fn project(&self, x: &Tensor, angles: &LayerAngles, on: LinearPass<'_>) -> Result<Projected> {
        match self {
            Self::Attention(attention) => attention.project(x, angles, on),
            Self::Latent(latent) => latent.project(x, angles, on),
            Self::DeltaNet(delta_net) => delta_net.project(x, on),
        }
    }

    /// The result for what was `projected`, whose prepared part was mixed to `mixed [T, mixed]`.
    pub(super) fn finish(
        &self,
        projected: Projected,
        mut mixed: Tensor,
        pool: &ThreadPool,
    ) -> Result<MixerTrace> {
        if let Self::Latent(latent) = self {
            mixed = latent.narrowed(&mixed)?;
        }
        let (mixed, result) = match &projected.gate {
            None => (None, mixed),
            Some(gate) => {
                let result = gated(&mixed, gate, self.result_norm(), pool)?;
                (Some(mixed), result)
            }
        };
        Ok(MixerTrace { projected, mixed, result })
    }

    /// The gradient of what the mixing gave, for the gradient `g [T, mixed]` of the result.
    pub(super) fn begin_backward(&self, trace: &MixerTrace, g: Tensor) -> Result<ReversedGate> {
        let (d_mixed, d_gate) = match (&trace.mixed, &trace.projected.gate) {
            (Some(mixed), Some(gate)) => {
                let [d_mixed, d_gate] = gated_backward(mixed, gate, self.result_norm(), &g)?;
                (d_mixed, Some(d_gate))
            }
            _ => (g.clone(), None),
        };
        let d_mixed = match self {
            Self::Latent(latent) => latent.widened(&d_mixed)?,
            Self::Attention(_) | Self::DeltaNet(_) => d_mixed,
        };
        Ok(ReversedGate { d_result: g, d_mixed, d_gate })
    }

    /// Sums the gradients of keys and values over `ranks`, whose queries read the same ones.
    pub(super) fn sum_keys(&self, mixing: &mut MixingReverse, ranks: &Arc<dyn Collective>) -> Result<()> {
        match (self, mixing) {
            (Self::Attention(attention), MixingReverse::Attention(mixed)) => {
                attention.sum_keys(&mut mixed.d_qkv, ranks)
            }
            _ => candle_core::bail!("only attention has key-value heads that ranks have copies of"),
        }
    }

    /// Backward of the projections of the normalised input `x [T, d]`, after the backward of the mixing.
    pub(super) fn finish_backward(
        &self,
        x: &Tensor,
        trace: &MixerTrace,
        angles: &LayerAngles,
        ReversedGate { d_result, d_gate, .. }: ReversedGate,
        mixing: MixingReverse,
    ) -> Result<MixerReverse> {
        match (self, mixing, d_gate) {
            (Self::Attention(attention), MixingReverse::Attention(mixed), d_gate) => {
                attention.backward(trace, angles, mixed, d_gate.as_ref())
            }
            (Self::Latent(latent), MixingReverse::Attention(mixed), None) => {
                latent.backward(x, trace, angles, &mixed.d_qkv)
            }
            (Self::DeltaNet(delta_net), MixingReverse::DeltaNet(mixed), Some(d_gate)) => {
                delta_net.backward(mixed, &d_gate, &d_result)
            }
            _ => candle_core::bail!("the activations are of another kind of layer"),
        }
    }

    /// Widths of the weights of the norms of query heads and of key heads; 0 without them.
    pub(super) fn head_norms(&self) -> [usize; 2] {
        match self {
            Self::Attention(attention) => attention.head_norms(),
            Self::Latent(_) | Self::DeltaNet(_) => [0; 2],
        }
    }

    /// Adds the gradients of the norms of heads for some tokens to those of `groups` of heads, `[groups, norm]` of queries and then
    /// of keys.
    pub(super) fn head_norm_gradient(
        &self,
        trace: &MixerTrace,
        reverse: &MixerReverse,
        angles: &LayerAngles,
        groups: [usize; 2],
        gradient: &mut [f32],
    ) -> Result<()> {
        match self {
            Self::Attention(attention) => {
                attention.head_norm_gradient(trace, reverse, angles, groups, gradient)
            }
            Self::Latent(_) | Self::DeltaNet(_) => Ok(()),
        }
    }

    /// Adds the gradients of the vectors for some tokens, but those of the norms of heads.
    pub(super) fn vector_gradients(
        &self,
        trace: &MixerTrace,
        reverse: &MixerReverse,
        gradients: &mut MixerVectors<'_>,
    ) -> Result<()> {
        match self {
            Self::Attention(attention) => attention.vector_gradients(reverse, gradients),
            // Those of latents are jobs beside those of their matrices.
            Self::Latent(_) => Ok(()),
            Self::DeltaNet(delta_net) => delta_net.vector_gradients(trace, reverse, gradients),
        }
    }
}
