//! One decoder layer as data: what it computes, and the tensors that it is made of.
//!
//! A family of models is a row of the table in `config/families.rs`, which gives the [`LayerSpec`] of each layer: layers of a model
//! may differ. The tensors follow from it (`Config::layer_tensors`). Everything else reads these two and knows no family: the flat layout and the weight files,
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
use crate::ops::attention::AttentionRule;
use crate::rotary::Rotary;

/// What a decoder layer computes: a residual block of causal attention with grouped key-value heads (GQA, Ainslie et al. 2023,
/// arXiv 2305.13245), then one of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSpec {
    /// The norm of a block.
    pub norm: Norm,
    /// How queries attend to keys.
    pub attention: AttentionSpec,
    /// The norm of queries and keys before the rotary embedding.
    pub query_key_norm: QueryKeyNorm,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub output_bias: bool,
    /// The feed-forward network.
    pub feed_forward: FeedForward,
    /// Multiplies the result of a block before it is added to the residual stream.
    pub residual_multiplier: f32,
}

/// How queries attend to keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// The sliding window (Beltagy et al. 2020, arXiv 2004.05150): number of keys that a query sees, the last of which is its
    /// own; `None` for all up to its own.
    pub window: Option<usize>,
    /// The rotary position embedding of queries and keys, if there is one.
    pub rotary: Option<Rotary>,
    /// Multiplies scores; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
}

/// The norm of a residual block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// RMSNorm of the block's input: `x + f(norm(x))`.
    RmsBefore,
    /// RMSNorm of the block's result: `x + norm(f(x))` (OLMo 2, Walsh et al. 2025, arXiv 2501.00656).
    RmsAfter,
    /// RMSNorm of both: `x + norm(f(norm(x)))` (Gemma 2, Riviere et al. 2024, arXiv 2408.00118).
    RmsAround,
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
    /// `down(gelu(gate(x)) * up(x))` with the approximation of GELU by a hyperbolic tangent (Shazeer 2020, arXiv 2002.05202).
    GeGlu,
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

/// A linear layer of every decoder block, which can have a LoRA adapter.
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
}

impl TargetModule {
    /// All layers.
    pub const ALL: [Self; 7] =
        [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

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
    /// `[hidden]` weight of the norm of the attention block's result.
    AttentionAfterNorm,
    /// `[hidden]` weight of the feed-forward block's norm.
    FeedForwardNorm,
    /// `[hidden]` weight of the norm of the feed-forward block's result.
    FeedForwardAfterNorm,
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

    /// The name, within a layer, of the one tensor that files have of all tensors of `operand`, if they have one.
    pub(crate) fn fused_name(&self, operand: Operand) -> Option<&'static str> {
        match operand {
            Operand::Qkv if self.architecture.has_fused_files() => Some("self_attn.qkv_proj.weight"),
            Operand::GateUp if self.architecture.has_fused_files() => Some("mlp.gate_up_proj.weight"),
            _ => None,
        }
    }

    /// What attention of layer `index` computes.
    pub(crate) fn attention_rule(&self, index: usize) -> AttentionRule {
        let AttentionSpec { window, scale, .. } = self.layers[index].attention;
        let full = AttentionRule::full(self.head_shape());
        AttentionRule { scale: scale.unwrap_or(full.scale), window: window.unwrap_or(full.window), ..full }
    }

    /// The tensors of layer `index`, in the order of the flat layout.
    pub(crate) fn layer_tensors(&self, index: usize) -> Vec<LayerTensor> {
        use Operand::{
            AttentionAfterNorm, AttentionNorm, Down, FeedForwardNorm, GateUp, Output, OutputBias, Qkv,
            QkvBias,
        };
        let LayerSpec { norm, query_key_norm, qkv_bias, output_bias, feed_forward, .. } = self.layers[index];
        let (hidden, inner, head) = (self.hidden_size, self.intermediate_size, self.head_dim);
        let (queries, keys) = (self.head_shape().query_width(), self.head_shape().kv_width());
        let mut tensors = Vec::new();
        let mut push = |name: &'static str, shape: &[usize], operand, sharding| {
            tensors.push(LayerTensor { name: name.into(), shape: shape.to_vec(), operand, sharding });
        };
        if norm.is_before() {
            push("input_layernorm.weight", &[hidden], AttentionNorm, Sharding::Replicated);
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
        if norm.is_after() {
            push("post_attention_layernorm.weight", &[hidden], AttentionAfterNorm, Sharding::Replicated);
        }
        match norm {
            Norm::RmsBefore => {
                push("post_attention_layernorm.weight", &[hidden], FeedForwardNorm, Sharding::Replicated);
            }
            Norm::RmsAround => {
                push("pre_feedforward_layernorm.weight", &[hidden], FeedForwardNorm, Sharding::Replicated);
            }
            Norm::RmsAfter => {}
        }
        match feed_forward {
            FeedForward::SwiGlu | FeedForward::GeGlu => {
                push("mlp.gate_proj.weight", &[inner, hidden], GateUp, Sharding::Outputs);
                push("mlp.up_proj.weight", &[inner, hidden], GateUp, Sharding::Outputs);
                push("mlp.down_proj.weight", &[hidden, inner], Down, Sharding::Inputs);
            }
            FeedForward::Experts(spec) => expert_tensors(&mut tensors, spec, [hidden, inner]),
        }
        if norm.is_after() {
            tensors.push(LayerTensor {
                name: "post_feedforward_layernorm.weight".into(),
                shape: vec![hidden],
                operand: Operand::FeedForwardAfterNorm,
                sharding: Sharding::Replicated,
            });
        }
        tensors
    }

    /// The experts of the first layer that has any.
    #[must_use]
    pub fn experts(&self) -> Option<ExpertSpec> {
        self.layers.iter().find_map(|layer| layer.feed_forward.experts())
    }

    /// The linear operation of `weight` in layer `index`; with experts, that of one of them.
    pub(crate) fn linear_spec(&self, index: usize, weight: Operand) -> LinearSpec {
        let tensors = self.layer_tensors(index);
        let bias = weight.bias().filter(|bias| tensors.iter().any(|tensor| tensor.operand == *bias));
        let (mut input, mut outputs, mut sharding) = (0, Vec::new(), Sharding::Replicated);
        let of_weight = tensors.iter().filter(|tensor| tensor.operand == weight);
        let networks = match (weight, self.layers[index].feed_forward.experts()) {
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

    /// Weights of the matrices of all layers.
    #[must_use]
    pub fn layer_matrix_weights(&self) -> usize {
        let weights = |index| {
            let tensors = self.layer_tensors(index);
            let matrices = tensors.iter().filter(|tensor| tensor.shape.len() == 2);
            matrices.map(|tensor| tensor.shape.iter().product::<usize>()).sum::<usize>()
        };
        (0..self.num_layers()).map(weights).sum()
    }

    /// Multiply-adds of a token with the matrices of all layers: with experts those of the token alone.
    #[must_use]
    pub fn layer_multiply_adds(&self) -> usize {
        let of_layer = |index: usize| {
            let experts = self.layers[index].feed_forward.experts();
            let weights = |tensor: &LayerTensor| {
                let weights = tensor.shape.iter().product::<usize>();
                match (tensor.operand, experts) {
                    (Operand::GateUp | Operand::Down, Some(ExpertSpec { count, per_token, .. })) => {
                        weights * per_token / count
                    }
                    _ => weights,
                }
            };
            let tensors = self.layer_tensors(index);
            tensors.iter().filter(|tensor| tensor.shape.len() == 2).map(weights).sum::<usize>()
        };
        (0..self.num_layers()).map(of_layer).sum()
    }
}

/// Appends the tensors of a router and its experts, which are `inner` wide.
fn expert_tensors(tensors: &mut Vec<LayerTensor>, spec: ExpertSpec, [hidden, inner]: [usize; 2]) {
    use Operand::{Down, GateUp, Router};
    let count = spec.count;
    let mut push = |name: String, shape: [usize; 2], operand, sharding| {
        tensors.push(LayerTensor { name: name.into(), shape: shape.to_vec(), operand, sharding });
    };
    push("mlp.gate.weight".to_owned(), [count, hidden], Router, Sharding::Replicated);
    for expert in 0..count {
        let name = |module: &str| format!("mlp.experts.{expert}.{module}.weight");
        push(name("gate_proj"), [inner, hidden], GateUp, Sharding::Outputs);
        push(name("up_proj"), [inner, hidden], GateUp, Sharding::Outputs);
    }
    for expert in 0..count {
        push(format!("mlp.experts.{expert}.down_proj.weight"), [hidden, inner], Down, Sharding::Inputs);
    }
}

impl Norm {
    /// Whether the input of a block is normalised.
    #[must_use]
    pub fn is_before(self) -> bool {
        self != Self::RmsAfter
    }

    /// Whether the result of a block is normalised.
    #[must_use]
    pub fn is_after(self) -> bool {
        self != Self::RmsBefore
    }
}

impl FeedForward {
    /// Its experts, if it has any.
    #[must_use]
    pub fn experts(self) -> Option<ExpertSpec> {
        match self {
            Self::SwiGlu | Self::GeGlu => None,
            Self::Experts(spec) => Some(spec),
        }
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

/// Ranges of the operands among the values of a layer; empty if the layer has none.
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
    use crate::config::tests::of_every_family;

    #[test]
    fn tensors_of_an_operand_are_neighbours_and_ranges_cover_the_layer() {
        for config in of_every_family() {
            let tensors = config.layer_tensors(1);
            let layout = crate::Layout::new(&config);
            let ranges = layout.ranges(1);
            let (mut start, mut covered) = (0, 0);
            for tensor in &tensors {
                let end = start + tensor.shape.iter().product::<usize>();
                let range = &ranges[tensor.operand];
                assert!(range.start <= start && end <= range.end, "{} is outside of {range:?}", tensor.name);
                start = end;
            }
            covered += ranges.0.iter().map(Range::len).sum::<usize>();
            assert_eq!(covered, start, "operands overlap");
            assert_eq!(layout.layers()[1].len(), start);
        }
    }

    #[test]
    fn every_shared_matrix_is_a_target_of_lora() {
        for config in of_every_family() {
            for LayerTensor { name, shape, sharding, .. } in config.layer_tensors(0) {
                let is_matrix = shape.len() == 2;
                let is_router = &name[..] == "mlp.gate.weight";
                assert_eq!(TargetModule::of_weight(&name).is_some(), is_matrix && !is_router, "{name}");
                assert!(!is_matrix || (sharding == Sharding::Replicated) == is_router, "{name}");
            }
        }
    }
}
