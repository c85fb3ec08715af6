//! The operands of a layer: the matrices and vectors that it computes with, and the tensors and places that they have.
//!
//! Invariant: tensors of one [`Operand`] are neighbours, and the ranges of a layer follow from its tensors alone.

use std::borrow::Cow;
use std::ops::{Index, Range};

use crate::file_tensors::FusedTensor;

/// A matrix or vector that a layer computes with: one tensor of the files, or several that are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// `[hidden]` weight of the attention block's norm.
    AttentionNorm,
    /// `[queries + keys + values, hidden]`, with gates `[2 * queries + ...]`; of a DeltaNet with its gate behind them.
    Qkv,
    /// `[queries + keys + values]`
    QkvBias,
    /// Weights of the norms of queries and keys.
    QueryKeyNorm,
    /// `[heads]` logits of attention that have no key.
    Sinks,
    /// `[query_rank, hidden]` to the latent of queries.
    QueryDown,
    /// `[query_rank]`
    QueryDownBias,
    /// `[query_rank]` weight of the norm of the latent of queries.
    QueryLatentNorm,
    /// `[queries, query_rank]`, or `[queries, hidden]` without a latent of queries.
    QueryUp,
    /// `[key_rank + rope, hidden]` to the latent of keys and values, and to what is rotated of the keys.
    KeyDown,
    /// `[key_rank + rope]`
    KeyDownBias,
    /// `[key_rank]` weight of the norm of the latent of keys and values.
    KeyLatentNorm,
    /// `[heads * (nope + value), key_rank]`
    KeyUp,
    /// `[2 * value heads, hidden]` strength of updates, and decay, of a DeltaNet.
    DeltaGates,
    /// `[channels, 1, taps]` of a DeltaNet.
    Convolution,
    /// `[value heads]` logarithm of the rate of decay of a DeltaNet.
    DecayRate,
    /// `[value heads]` bias of the decay of a DeltaNet.
    TimeBias,
    /// `[value_dim]` weight of the norm of the result of each head of a DeltaNet; without the offset of other norms.
    ResultNorm,
    /// `[hidden, queries]`, of a DeltaNet `[hidden, values]`, with latents `[hidden, heads * value]`.
    Output,
    /// `[hidden]`
    OutputBias,
    /// `[hidden]` weight of the norm of the attention block's result.
    AttentionAfterNorm,
    /// `[hidden]` weight of the feed-forward block's norm.
    FeedForwardNorm,
    /// `[hidden]` weight of the norm of the feed-forward block's result.
    FeedForwardAfterNorm,
    /// `[experts, hidden]`
    Router,
    /// `[experts]`
    RouterBias,
    /// `[experts]` what is added to the scores that choose experts; frozen.
    RouterCorrection,
    /// `[2 * intermediate, hidden]`: gate and up; with experts one after the other.
    GateUp,
    /// `[2 * intermediate]`, likewise.
    GateUpBias,
    /// `[hidden, intermediate]`; with experts one after the other.
    Down,
    /// `[hidden]`, likewise.
    DownBias,
    /// `[2 * shared, hidden]` gate and up of the network beside the experts.
    SharedGateUp,
    /// `[hidden, shared]`
    SharedDown,
    /// `[1, hidden]`
    SharedGate,
}

impl Operand {
    /// Whether samplers have the matrix in f32, whatever their other matrices are stored in.
    pub(crate) fn is_exact(self) -> bool {
        matches!(self, Self::Router | Self::SharedGate | Self::DeltaGates)
    }

    /// The bias of a matrix.
    pub(crate) fn bias(self) -> Option<Self> {
        match self {
            Self::Qkv => Some(Self::QkvBias),
            Self::QueryDown => Some(Self::QueryDownBias),
            Self::KeyDown => Some(Self::KeyDownBias),
            Self::Output => Some(Self::OutputBias),
            Self::Router => Some(Self::RouterBias),
            Self::GateUp => Some(Self::GateUpBias),
            Self::Down => Some(Self::DownBias),
            _ => None,
        }
    }
}

/// How tensor-parallel ranks share a matrix (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharding {
    /// Every rank has all of it.
    Replicated,
    /// By its outputs: column-parallel.
    Outputs,
    /// By its inputs: row-parallel.
    Inputs,
}

/// One tensor of a layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerTensor {
    /// Its Hugging Face name within the layer.
    pub(crate) name: Cow<'static, str>,
    /// `[out, in]` of a projection, `[n]` of a norm or a bias.
    pub(crate) shape: Vec<usize>,
    pub(crate) operand: Operand,
    pub(crate) sharding: Sharding,
    /// The tensor of files that it is a part of; absent if it is one itself.
    pub(crate) fused: Option<FusedTensor>,
}

impl LayerTensor {
    /// A tensor that files have as it is.
    pub(super) fn new(
        name: impl Into<Cow<'static, str>>,
        shape: &[usize],
        operand: Operand,
        sharding: Sharding,
    ) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), operand, sharding, fused: None }
    }
}

/// A linear operation of a layer.
#[derive(Clone, Debug)]
pub(crate) struct LinearSpec {
    pub(crate) weight: Operand,
    /// Absent if the layer has no tensor of it.
    pub(crate) bias: Option<Operand>,
    /// Width of the input.
    pub(crate) input: usize,
    /// Widths of its outputs, one per tensor.
    pub(crate) outputs: Vec<usize>,
    pub(crate) sharding: Sharding,
}

/// Ranges of the operands among the values of a layer; empty if the layer has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerRanges([Range<usize>; Operand::SharedGate as usize + 1]);

impl LayerRanges {
    /// The ranges of `tensors`, one after the other from 0.
    pub(crate) fn new(tensors: &[LayerTensor]) -> Self {
        let (mut ranges, mut end) = (Self(std::array::from_fn(|_| 0..0)), 0);
        for tensor in tensors {
            let range = &mut ranges.0[tensor.operand as usize];
            let start = if Range::is_empty(range) { end } else { range.start };
            end += tensor.shape.iter().product::<usize>();
            *range = start..end;
        }
        ranges
    }
}

impl Index<Operand> for LayerRanges {
    type Output = Range<usize>;

    fn index(&self, operand: Operand) -> &Range<usize> {
        &self.0[operand as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::of_every_family;

    #[test]
    fn tensors_of_an_operand_are_neighbours_and_ranges_cover_the_layer() {
        for config in of_every_family() {
            for index in 0..config.num_layers() {
                let tensors = config.layer_tensors(index);
                let layout = crate::Layout::new(&config);
                let ranges = layout.ranges(index);
                let (mut start, mut covered) = (0, 0);
                for tensor in &tensors {
                    let end = start + tensor.shape.iter().product::<usize>();
                    let range = &ranges[tensor.operand];
                    assert!(
                        range.start <= start && end <= range.end,
                        "{} is outside of {range:?}",
                        tensor.name
                    );
                    start = end;
                }
                covered += ranges.0.iter().map(Range::len).sum::<usize>();
                assert_eq!(covered, start, "operands overlap");
                assert_eq!(layout.layers()[index].len(), start);
            }
        }
    }
}
