//! Latent projections as data: the widths of multi-head latent attention (MLA), and the tensors that it is made of.
//!
//! Invariant: as in `layer`: everything else reads these, and knows no family.

use super::{LayerSpec, LayerTensor, Operand, Sharding};
use crate::Config;
use crate::ops::latent::LatentShape;

/// Added to the mean square under the root of the norms of latents, whatever that of other norms is: transformers does so.
pub(crate) const LATENT_EPS: f32 = 1e-6;

/// Queries, and keys and values, through a narrow latent each, which is normalised: multi-head latent attention (MLA,
/// DeepSeek-V2, DeepSeek-AI 2024, arXiv 2405.04434). A query or a key has a part without position, then one that is rotated;
/// that of the keys is computed from the input, and is common to all heads.
///
/// The cache has the expanded keys and values of all heads, of one width: a position takes the memory of heads, not that of its
/// latent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSpec {
    /// Width of the latent of queries; `None` if they are computed from the input.
    pub query_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub key_rank: usize,
    /// Width of the part of a query or a key without position.
    pub nope: usize,
    /// Width of the rotated part; even.
    pub rope: usize,
    /// Width of a value; at most that of a key.
    pub value: usize,
    /// Whether the values of a rotated pair are neighbours, or the halves of the rotated part.
    pub interleaved: bool,
}

impl LatentSpec {
    /// Width of a query or a key.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.nope + self.rope
    }

    /// Parts and values of `head` values, latents of a half and a quarter of `hidden`.
    pub(crate) fn fresh(hidden: usize, head: usize) -> Self {
        Self {
            query_rank: Some((hidden / 2).max(1)),
            key_rank: (hidden / 4).max(1),
            nope: head,
            rope: (head / 4).max(1) * 2,
            value: head,
            interleaved: true,
        }
    }

    /// The heads, of which there are so many.
    pub(crate) fn shape(&self, heads: usize) -> LatentShape {
        let Self { nope, rope, value, interleaved, .. } = *self;
        LatentShape { heads, nope, rope, value, interleaved }
    }

    /// Appends the tensors of queries, keys and values; those from the input may have a bias.
    pub(super) fn push_tensors(&self, tensors: &mut Vec<LayerTensor>, config: &Config, spec: &LayerSpec) {
        let (hidden, heads) = (config.hidden_size, config.num_heads);
        let (queries, expanded) = (heads * self.head_dim(), heads * (self.nope + self.value));
        let mut push = |name: &'static str, shape: &[usize], operand, sharding| {
            tensors.push(LayerTensor::new(name, shape, operand, sharding));
        };
        let (shared, own) = (Sharding::Outputs, Sharding::Replicated);
        match self.query_rank {
            None => push("self_attn.q_proj.weight", &[queries, hidden], Operand::QueryUp, shared),
            Some(rank) => {
                push("self_attn.q_a_proj.weight", &[rank, hidden], Operand::QueryDown, own);
                if spec.qkv_bias {
                    push("self_attn.q_a_proj.bias", &[rank], Operand::QueryDownBias, own);
                }
                push("self_attn.q_a_layernorm.weight", &[rank], Operand::QueryLatentNorm, own);
                push("self_attn.q_b_proj.weight", &[queries, rank], Operand::QueryUp, shared);
            }
        }
        let (rank, both) = (self.key_rank, self.key_rank + self.rope);
        push("self_attn.kv_a_proj_with_mqa.weight", &[both, hidden], Operand::KeyDown, own);
        if spec.qkv_bias {
            push("self_attn.kv_a_proj_with_mqa.bias", &[both], Operand::KeyDownBias, own);
        }
        push("self_attn.kv_a_layernorm.weight", &[rank], Operand::KeyLatentNorm, own);
        push("self_attn.kv_b_proj.weight", &[expanded, rank], Operand::KeyUp, shared);
    }
}

impl Config {
    /// The latent projections of the first layer that has any.
    #[must_use]
    pub fn latent(&self) -> Option<LatentSpec> {
        self.layers.iter().find_map(|layer| layer.attention.latent)
    }

    /// Width of the part of a head that a rotary embedding rotates a share of.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        self.latent().map_or(self.head_dim, |latent| latent.rope)
    }
}
