//! The mixer of a layer: the part of its first half that lets a token see those before it.
//!
//! A mixer projects the normalised input, mixes tokens and gives the input of the output projection, which is the block's.
//! The mixing itself depends on where the tokens before are: in the same pack, or in a cache. So it is a function that the caller
//! gives.
//!
//! Invariant: as in `block`: the backward is the exact vector-Jacobian product, and gradients of weights are computed apart, over
//! all tokens in their order.

mod attention;
mod latent;

use candle_core::{Result, Tensor};

pub(super) use self::attention::AttentionWeights;
pub(super) use self::latent::{LatentOperands, LatentPiece, LatentTrace, LatentWeights, gradient_jobs};
use super::LayerAngles;
use crate::ThreadPool;
use crate::ops::attention::{AttentionRule, PackedReverse};

/// The weights.
#[derive(Clone, Debug)]
pub(super) enum MixerWeights {
    Attention(Box<AttentionWeights>),
    /// Attention of queries, keys and values through latents.
    Latent(Box<LatentWeights>),
}

/// How tokens are mixed.
#[derive(Clone, Copy, Debug)]
pub(super) enum MixingRule<'a> {
    Attention(AttentionRule<'a>),
}

/// The backward of the mixing.
#[derive(Debug)]
pub(super) enum MixingReverse {
    Attention(PackedReverse),
}

/// What the projections of a mixer give. `T` tokens.
#[derive(Debug)]
struct Projected {
    /// `[T, width]` before norm and rotation, if heads are normalised.
    raw: Option<Tensor>,
    /// In a layer with latents.
    latent: Option<LatentTrace>,
    /// `[T, width]` what is mixed.
    prepared: Tensor,
}

/// Activations of a mixer, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct MixerTrace {
    projected: Projected,
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
    /// In a layer with latents.
    pub(super) latent: Option<LatentOperands>,
    /// `[T, width]` gradient of what is mixed, where norms of heads need it.
    d_prepared: Option<Tensor>,
    /// `[T, heads]` what each token adds to the gradient of the sinks; absent without sinks.
    d_sinks: Option<Tensor>,
}

/// Gradients of the vectors of a mixer, as parts of those of a layer; empty for what it does not have.
pub(super) struct MixerVectors<'a> {
    pub(super) qkv_bias: &'a mut [f32],
    pub(super) head_norm: &'a mut [f32],
    pub(super) sinks: &'a mut [f32],
}

impl MixerWeights {
    /// How tokens are mixed.
    pub(super) fn rule(&self) -> MixingRule<'_> {
        match self {
            Self::Attention(attention) => MixingRule::Attention(attention.rule()),
            Self::Latent(latent) => MixingRule::Attention(latent.rule()),
        }
    }

    /// Memory of the linear layers, bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.bytes(),
            Self::Latent(latent) => latent.bytes(),
        }
    }

    /// Forward of the normalised input `x [T, d]`; `mix` mixes what is prepared, `[T, width]`, to `[T, mixed]`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        mix: impl FnOnce(&Tensor) -> Result<Tensor>,
        pool: &ThreadPool,
    ) -> Result<MixerTrace> {
        let projected = match self {
            Self::Attention(attention) => attention.project(x, angles, pool)?,
            Self::Latent(latent) => latent.project(x, angles, pool)?,
        };
        let mut result = mix(&projected.prepared)?;
        if let Self::Latent(latent) = self {
            result = latent.narrowed(&result)?;
        }
        Ok(MixerTrace { projected, result })
    }

    /// Backward for the gradient `g [T, mixed]` of the result for the normalised input `x [T, d]`. `mix_backward` is the backward of
    /// `mix`.
    pub(super) fn backward(
        &self,
        x: &Tensor,
        trace: &MixerTrace,
        angles: &LayerAngles,
        g: &Tensor,
        mix_backward: impl FnOnce(&Tensor, &Tensor) -> Result<MixingReverse>,
    ) -> Result<MixerReverse> {
        let padded;
        let g = match self {
            Self::Attention(_) => g,
            Self::Latent(latent) => {
                padded = latent.widened(g)?;
                &padded
            }
        };
        match (self, mix_backward(&trace.projected.prepared, g)?) {
            (Self::Attention(attention), MixingReverse::Attention(mixed)) => {
                attention.backward(trace, angles, mixed)
            }
            (Self::Latent(latent), MixingReverse::Attention(mixed)) => {
                latent.backward(x, trace, angles, &mixed.d_qkv)
            }
        }
    }

    /// Adds the gradients of the vectors for some tokens.
    pub(super) fn vector_gradients(
        &self,
        trace: &MixerTrace,
        reverse: &MixerReverse,
        angles: &LayerAngles,
        gradients: &mut MixerVectors<'_>,
    ) -> Result<()> {
        match self {
            Self::Attention(attention) => attention.vector_gradients(trace, reverse, angles, gradients),
            // Those of latents are jobs beside those of their matrices.
            Self::Latent(_) => Ok(()),
        }
    }
}
