//! One decoder layer as data: what it computes, and the tensors that it is made of.
//!
//! A family of models is a row of the table in `config/families.rs`, which gives a [`LayerSpec`]. The tensors follow from it
//! (`Config::layer_tensors`). Everything else reads these two and knows no family: the flat layout and the weight files,
//! initialisation, LoRA, the sums that tensor-parallel ranks would share, the memory plan, and the code of the processor and
//! of devices.
//!
//! Invariant: tensors of one `Operand` are neighbours in the layout, so that they are one matrix or vector to a layer, or one for
//! each expert.

use std::borrow::Cow;
use std::ops::{Index, Range};

use device::ops::heads::HeadShape;
use serde::{Deserialize, Serialize};

use crate::Config;

/// What a decoder layer computes. All layers of a model are alike: a residual block of causal attention with grouped
/// key-value heads (GQA, Ainslie et al. 2023, arXiv 2305.13245) and rotary position embedding, then one of a feed-forward
/// network, both on a normalised input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// The norm of a block.
    pub norm: Norm,
    /// The norm of queries and keys before the rotary embedding.
    pub query_key_norm: QueryKeyNorm,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub output_bias: bool,
    /// The feed-forward network.
    pub feed_forward: FeedForward,
}

/// The norm of a residual block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// RMSNorm of the block's input: `x + f(norm(x))`.
    RmsBefore,
}

/// The norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// None.
    None,
    /// RMSNorm of every head, with one weight `[head_dim]` for all queries and one for all keys.
    PerHead,
    /// RMSNorm of all heads together, with a weight `[heads * head_dim]` for the queries and one for the keys.
    Whole,
}

/// The feed-forward network of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// `down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv 2002.05202).
    SwiGlu,
    /// The sum of the results of some SwiGLU networks, which a router chooses for each token and weighs.
    Experts(ExpertSpec),
}

/// Experts, and how they are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSpec {
    /// Number of experts.
    pub count: usize,
    /// Experts of a token: those with the largest probabilities, a softmax over all.
    pub per_token: usize,
    /// Whether the probabilities of the chosen experts are divided by their sum.
    pub normalized: bool,
}

/// A layer that can have a LoRA adapter: the linear layers of every decoder block, the embedding and the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TargetModule {
    /// Query projection.
    QProj,
    /// Key projection.
    KProj,
    /// Value projection.
    VProj,
    /// Output projection of attention.
    OProj,
    /// Gate projection of the feed-forward block.
    GateProj,
    /// Up projection of the feed-forward block.
    UpProj,
    /// Down projection of the feed-forward block.
    DownProj,
    /// Embedding, if it is not the head too.
    EmbedTokens,
    /// Head, if it is not the embedding too.
    LmHead,
}

impl TargetModule {
    /// The linear layers of a block; with experts those of every expert.
    pub const BLOCK: [Self; 7] =
        [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

    /// All layers.
    pub const ALL: [Self; 9] = [
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::OProj,
        Self::GateProj,
        Self::UpProj,
        Self::DownProj,
        Self::EmbedTokens,
        Self::LmHead,
    ];

    /// The name in Hugging Face models and in PEFT.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
            Self::EmbedTokens => "embed_tokens",
            Self::LmHead => "lm_head",
        }
    }

    /// The module whose weight has this Hugging Face name.
    #[must_use]
    pub fn of_weight(name: &str) -> Option<Self> {
        let module = name.strip_suffix(".weight")?.rsplit('.').next()?;
        Self::ALL.into_iter().find(|target| target.as_str() == module)
    }
}

/// A matrix or vector that a layer computes with: one tensor of the files, or several that are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// `[hidden]` weight of the attention block's norm.
    AttentionNorm,
    /// `[queries + keys + values, hidden]`
    Qkv,
    /// `[queries + keys + values]`
    QkvBias,
    /// Weights of the norms of queries and keys.
    QueryKeyNorm,
    /// `[hidden, queries]`
    Output,
    /// `[hidden]`
    OutputBias,
    /// `[hidden]` weight of the feed-forward block's norm.
    FeedForwardNorm,
    /// `[experts, hidden]`
    Router,
    /// `[2 * intermediate, hidden]`: gate and up; with experts one after the other.
    GateUp,
    /// `[hidden, intermediate]`; with experts one after the other.
    Down,
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

impl Config {
    /// The heads of attention.
    pub(crate) fn head_shape(&self) -> HeadShape {
        HeadShape { heads: self.num_heads, kv_heads: self.num_kv_heads, head_dim: self.head_dim }
    }

    /// The tensors of a layer, in the order of the flat layout.
    pub(crate) fn layer_tensors(&self) -> Vec<LayerTensor> {
        use Operand::{AttentionNorm, Down, FeedForwardNorm, GateUp, Output, OutputBias, Qkv, QkvBias};
        let LayerSpec { norm, query_key_norm, qkv_bias, output_bias, feed_forward } = self.layer;
        let (hidden, inner, head) = (self.hidden_size, self.intermediate_size, self.head_dim);
        let (queries, keys) = (self.head_shape().query_width(), self.head_shape().kv_width());
        let mut tensors = Vec::new();
        let mut push = |name: &'static str, shape: &[usize], operand, sharding| {
            tensors.push(LayerTensor { name: name.into(), shape: shape.to_vec(), operand, sharding });
        };
        match norm {
            Norm::RmsBefore => {
                push("input_layernorm.weight", &[hidden], AttentionNorm, Sharding::Replicated);
            }
        }
        push("self_attn.q_proj.weight", &[queries, hidden], Qkv, Sharding::Outputs);
        push("self_attn.k_proj.weight", &[keys, hidden], Qkv, Sharding::Outputs);
        push("self_attn.v_proj.weight", &[keys, hidden], Qkv, Sharding::Outputs);
        if qkv_bias {
            push("self_attn.q_proj.bias", &[queries], QkvBias, Sharding::Outputs);
            push("self_attn.k_proj.bias", &[keys], QkvBias, Sharding::Outputs);
            push("self_attn.v_proj.bias", &[keys], QkvBias, Sharding::Outputs);
        }
        match query_key_norm {
            QueryKeyNorm::None => {}
            QueryKeyNorm::PerHead => {
                push("self_attn.q_norm.weight", &[head], Operand::QueryKeyNorm, Sharding::Replicated);
                push("self_attn.k_norm.weight", &[head], Operand::QueryKeyNorm, Sharding::Replicated);
            }
            QueryKeyNorm::Whole => {
                push("self_attn.q_norm.weight", &[queries], Operand::QueryKeyNorm, Sharding::Replicated);
                push("self_attn.k_norm.weight", &[keys], Operand::QueryKeyNorm, Sharding::Replicated);
            }
        }
        push("self_attn.o_proj.weight", &[hidden, queries], Output, Sharding::Inputs);
        if output_bias {
            push("self_attn.o_proj.bias", &[hidden], OutputBias, Sharding::Replicated);
        }
        match norm {
            Norm::RmsBefore => {
                push("post_attention_layernorm.weight", &[hidden], FeedForwardNorm, Sharding::Replicated);
            }
        }
        match feed_forward {
            FeedForward::SwiGlu => {
                push("mlp.gate_proj.weight", &[inner, hidden], GateUp, Sharding::Outputs);
                push("mlp.up_proj.weight", &[inner, hidden], GateUp, Sharding::Outputs);
                push("mlp.down_proj.weight", &[hidden, inner], Down, Sharding::Inputs);
            }
            FeedForward::Experts(ExpertSpec { count, .. }) => {
                push("mlp.gate.weight", &[count, hidden], Operand::Router, Sharding::Replicated);
                let mut of_expert = |expert: usize, module: &str, shape: &[usize], operand, sharding| {
                    let name = format!("mlp.experts.{expert}.{module}.weight").into();
                    tensors.push(LayerTensor { name, shape: shape.to_vec(), operand, sharding });
                };
                for expert in 0..count {
                    of_expert(expert, "gate_proj", &[inner, hidden], GateUp, Sharding::Outputs);
                    of_expert(expert, "up_proj", &[inner, hidden], GateUp, Sharding::Outputs);
                }
                for expert in 0..count {
                    of_expert(expert, "down_proj", &[hidden, inner], Down, Sharding::Inputs);
                }
            }
        }
        tensors
    }

    /// The experts of a layer, if it has any.
    #[must_use]
    pub fn experts(&self) -> Option<ExpertSpec> {
        match self.layer.feed_forward {
            FeedForward::SwiGlu => None,
            FeedForward::Experts(spec) => Some(spec),
        }
    }

    /// The linear operation of `weight`; with experts, that of one of them.
    pub(crate) fn linear_spec(&self, weight: Operand) -> LinearSpec {
        let tensors = self.layer_tensors();
        let bias = weight.bias().filter(|bias| tensors.iter().any(|tensor| tensor.operand == *bias));
        let (mut input, mut outputs, mut sharding) = (0, Vec::new(), Sharding::Replicated);
        let of_weight = tensors.iter().filter(|tensor| tensor.operand == weight);
        let networks = match (weight, self.experts()) {
            (Operand::GateUp | Operand::Down, Some(ExpertSpec { count, .. })) => count,
            _ => 1,
        };
        let tensors_each = of_weight.clone().count() / networks;
        for tensor in of_weight.take(tensors_each) {
            input = tensor.shape[1];
            outputs.push(tensor.shape[0]);
            sharding = tensor.sharding;
        }
        LinearSpec { weight, bias, input, outputs, sharding }
    }

    /// Weights of the matrices of one layer.
    #[must_use]
    pub fn layer_matrix_weights(&self) -> usize {
        let tensors = self.layer_tensors();
        let matrices = tensors.iter().filter(|tensor| tensor.shape.len() == 2);
        matrices.map(|tensor| tensor.shape.iter().product::<usize>()).sum()
    }

    /// Multiply-adds of a token with the matrices of one layer: with experts those of the token alone.
    #[must_use]
    pub fn layer_multiply_adds(&self) -> usize {
        let weights = |tensor: &LayerTensor| {
            let weights = tensor.shape.iter().product::<usize>();
            match (tensor.operand, self.experts()) {
                (Operand::GateUp | Operand::Down, Some(ExpertSpec { count, per_token, .. })) => {
                    weights * per_token / count
                }
                _ => weights,
            }
        };
        self.layer_tensors().iter().filter(|tensor| tensor.shape.len() == 2).map(weights).sum()
    }
}

impl Operand {
    /// The bias of a matrix.
    fn bias(self) -> Option<Self> {
        match self {
            Self::Qkv => Some(Self::QkvBias),
            Self::Output => Some(Self::OutputBias),
            _ => None,
        }
    }
}

/// Ranges of the operands among the values of a layer, the same in every layer; empty if the layer has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerRanges([Range<usize>; Operand::Down as usize + 1]);

impl LayerRanges {
    /// The ranges of `tensors`, one after the other from 0.
    pub(crate) fn new(tensors: &[LayerTensor]) -> Self {
        let (mut ranges, mut end) = (Self::default(), 0);
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
    use crate::config::tests::tiny;

    #[test]
    fn tensors_of_an_operand_are_neighbours_and_ranges_cover_the_layer() {
        for config in tiny() {
            let tensors = config.layer_tensors();
            let ranges = LayerRanges::new(&tensors);
            let (mut start, mut covered) = (0, 0);
            for tensor in &tensors {
                let end = start + tensor.shape.iter().product::<usize>();
                let range = &ranges[tensor.operand];
                assert!(range.start <= start && end <= range.end, "{} is outside of {range:?}", tensor.name);
                start = end;
            }
            covered += ranges.0.iter().map(Range::len).sum::<usize>();
            assert_eq!(covered, start, "operands overlap");
            assert_eq!(crate::Layout::new(&config).layers()[0].len(), start);
        }
    }

    #[test]
    fn every_shared_matrix_is_a_target_of_lora() {
        for config in tiny() {
            for LayerTensor { name, shape, sharding, .. } in config.layer_tensors() {
                let is_matrix = shape.len() == 2;
                let is_router = &name[..] == "mlp.gate.weight";
                assert_eq!(TargetModule::of_weight(&name).is_some(), is_matrix && !is_router, "{name}");
                assert!(!is_matrix || (sharding == Sharding::Replicated) == is_router, "{name}");
            }
        }
    }
}
