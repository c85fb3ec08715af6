//! Causal attention as a mixer: projection, norm and rotation of queries and keys.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use collective::Collective;

use super::{MixerOperands, MixerReverse, MixerTrace, MixerVectors, Projected};
use crate::decoder::LayerAngles;
use crate::ops::adapters::LinearPass;
use crate::ops::attention::{AttentionRule, PackedReverse};
use crate::ops::heads::{self, HeadNormWeights, HeadShape};
use crate::ops::linear::{Linear, bias_gradient};
use crate::ops::result_gate::{join_gates, split_gates};
use crate::ops::{matrix, values};
use crate::pass_ranks::failed;

/// The weights of attention without those of its output projection.
#[derive(Clone, Debug)]
pub(in crate::decoder) struct AttentionWeights {
    pub(in crate::decoder) shape: HeadShape,
    /// Without its sinks.
    pub(in crate::decoder) rule: AttentionRule<'static>,
    /// Number of its rotary embedding among `Config::rotaries`.
    pub(in crate::decoder) rotary: Option<usize>,
    pub(in crate::decoder) eps: f32,
    pub(in crate::decoder) qkv: Linear,
    /// `[heads]` logits of attention that have no key; empty for none.
    pub(in crate::decoder) sinks: Vec<f32>,
    /// Weights of the norms of queries and keys, if the layer has them.
    pub(in crate::decoder) head_norm: Option<Vec<f32>>,
    /// Whether every query head has the gate of its result behind it.
    pub(in crate::decoder) gated: bool,
}

impl AttentionWeights {
    pub(super) fn rule(&self) -> AttentionRule<'_> {
        AttentionRule { sinks: &self.sinks, ..self.rule }
    }

    pub(super) fn bytes(&self) -> usize {
        self.qkv.bytes()
    }

    /// Queries, keys and values of the normalised input `x [T, d]`, and the gate of the result.
    pub(super) fn project(&self, x: &Tensor, angles: &LayerAngles, on: LinearPass<'_>) -> Result<Projected> {
        let (mut qkv, mut gate) = (self.qkv.apply_values(x, on)?, None);
        if self.gated {
            let [own, gates] = split_gates(&qkv, self.shape);
            (qkv, gate) = (own, Some(matrix(gates, self.shape.query_width())?));
        }
        let width = self.shape.width();
        let raw = self.head_norm.is_some().then(|| matrix(qkv.clone(), width)).transpose()?;
        heads::prepare(&mut qkv, self.shape, self.norm_of_heads(), angles.of(self.rotary), on.pool);
        Ok(Projected { raw, latent: None, prepared: matrix(qkv, width)?, gate })
    }

    /// Sums the gradients of keys and values, of those of what was prepared, `d_qkv [T, width]`, over `ranks`.
    pub(super) fn sum_keys(&self, d_qkv: &mut [f32], ranks: &Arc<dyn Collective>) -> Result<()> {
        let keys = self.shape.query_width()..self.shape.width();
        let mut sums: Vec<f32> =
            d_qkv.chunks_exact(self.shape.width()).flat_map(|row| &row[keys.clone()]).copied().collect();
        ranks.all_reduce(&mut sums).map_err(failed)?;
        for (row, sums) in d_qkv.chunks_exact_mut(self.shape.width()).zip(sums.chunks_exact(keys.len())) {
            row[keys.clone()].copy_from_slice(sums);
        }
        Ok(())
    }

    /// Backward for the gradients of what was prepared and of the gate of the result.
    pub(super) fn backward(
        &self,
        trace: &MixerTrace,
        angles: &LayerAngles,
        PackedReverse { d_qkv: d_prepared, d_sinks }: PackedReverse,
        d_gate: Option<&Tensor>,
    ) -> Result<MixerReverse> {
        let d_sinks = match self.sinks.len() {
            0 => None,
            heads => Some(matrix(d_sinks, heads)?),
        };
        let raw = trace.projected.raw.as_ref();
        let kept = match raw {
            Some(_) => Some(matrix(d_prepared.clone(), self.shape.width())?),
            None => None,
        };
        let (norm, angles) = (self.norm_of_heads(), angles.of(self.rotary));
        let mut d_projected = heads::prepare_backward(raw, self.shape, norm, angles, d_prepared)?;
        if let Some(d_gate) = d_gate {
            let joined = join_gates(&values(&d_projected)?, &values(d_gate)?, self.shape);
            d_projected = matrix(joined, self.shape.width() + self.shape.query_width())?;
        }
        let d_normed = self.qkv.input_gradient(&d_projected)?;
        Ok(MixerReverse {
            d_normed,
            d_projected,
            operands: MixerOperands::Attention { d_prepared: kept, d_sinks },
        })
    }

    pub(super) fn vector_gradients(
        &self,
        reverse: &MixerReverse,
        gradients: &mut MixerVectors<'_>,
    ) -> Result<()> {
        let MixerOperands::Attention { d_sinks, .. } = &reverse.operands else {
            candle_core::bail!("the gradients are of another kind of layer")
        };
        if !gradients.qkv_bias.is_empty() {
            bias_gradient(&reverse.d_projected, gradients.qkv_bias)?;
        }
        if let Some(d_sinks) = d_sinks {
            bias_gradient(d_sinks, gradients.sinks)?;
        }
        Ok(())
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
        let MixerOperands::Attention { d_prepared, .. } = &reverse.operands else {
            candle_core::bail!("the gradients are of another kind of layer")
        };
        let raw = &trace.projected.raw;
        if let (Some(raw), Some(g), Some(norm)) = (raw, d_prepared, self.norm_of_heads()) {
            let angles = angles.of(self.rotary);
            heads::head_norm_gradient(raw, self.shape, norm, angles, g, groups, gradient)?;
        }
        Ok(())
    }

    /// Widths of the weights of the norms of queries and of keys; 0 without them.
    pub(super) fn head_norms(&self) -> [usize; 2] {
        self.norm_of_heads().map_or([0; 2], |norm| [norm.query.len(), norm.key.len()])
    }

    fn norm_of_heads(&self) -> Option<HeadNormWeights<'_>> {
        let both = self.head_norm.as_ref()?;
        // Of the same width each if heads are normalised apart, and of their own otherwise.
        let apart = both.len() == 2 * self.shape.head_dim;
        let (query, key) = both.split_at(if apart { self.shape.head_dim } else { self.shape.query_width() });
        Some(HeadNormWeights { query, key, eps: self.eps })
    }
}
