//! One decoder layer as data: what it computes, and the tensors that it is made of.
//!
//! A family of models is a row of the table in `config/families.rs`, which gives the [`LayerSpec`] of each layer: layers of a model
//! may differ. The tensors follow from it (`Config::layer_tensors`). Everything else reads these two and knows no family: the
//! flat layout and the weight files, initialisation, LoRA, the sums that tensor-parallel ranks would share, the memory plan, and the code of the processor and
//! of devices.
//!
//! Invariant: tensors of one `Operand` are neighbours in the layout, so that they are one matrix or vector to a layer, or one for
//! each expert.

use std::borrow::Cow;
use std::ops::{Index, Range};

use device::ops::heads::HeadShape;
use serde::{Deserialize, Serialize};

use crate::Config;
use crate::file_tensors::{FilePlace, FusedTensor};
use crate::ops::attention::AttentionRule;
use crate::rotary::Rotary;

/// What a decoder layer computes: a residual block of causal attention with grouped key-value heads (GQA, Ainslie et al. 2023,
/// arXiv 2305.13245), then one of a feed-forward network, both on a normalised input.
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
}

/// How queries attend to keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// The sliding window (Beltagy et al. 2020, arXiv 2004.05150): tokens that a query sees, the last of which is its own; `None` for
    /// all up to its own.
    pub window: Option<usize>,
    /// The rotary position embedding of queries and keys, if there is one.
    pub rotary: Option<Rotary>,
    /// Multiplies scores; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Whether the softmax of every head has a logit beside its keys, whose value is zero.
    pub sinks: bool,
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    /// `down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv 2002.05202).
    SwiGlu,
    /// The sum of the results of some gated networks, which a router chooses for each token and weighs.
    Experts(ExpertSpec),
}

/// Experts, and how they are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertSpec {
    /// Number of experts.
    pub count: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Width of an expert.
    pub width: usize,
    /// How experts are chosen and weighed.
    pub router: RouterKind,
    /// Width of the SwiGLU network that every token goes through besides its experts (DeepSeekMoE, Dai et al. 2024, arXiv
    /// 2401.06066); 0 for none.
    pub shared_width: usize,
    /// Whether the router and the projections of experts have a bias.
    pub bias: bool,
    /// Whether files have each projection of all experts as one tensor `[experts, in, out]`, gate and up in turns.
    pub fused_files: bool,
    /// The activation of experts.
    pub activation: ExpertActivation,
}

/// How the experts of a token are chosen, and what their results are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterKind {
    /// Those with the largest probabilities of a softmax over all, weighed by these.
    Softmax {
        /// Whether the weights are divided by their sum.
        normalized: bool,
    },
    /// Those with the largest sigmoids, after a correction of each expert that balances loads and has no gradient
    /// (DeepSeek-V3, arXiv 2412.19437; Wang et al. 2024, arXiv 2408.15664), weighed by the sigmoids without it.
    Sigmoid {
        /// Whether the weights are divided by their sum.
        normalized: bool,
        /// Groups of neighbouring experts; divides their number.
        groups: usize,
        /// Groups of a token: those with the largest sums of their two best experts.
        chosen_groups: usize,
        /// Multiplies the weights.
        scale: f32,
    },
    /// Those with the largest logits, weighed by a softmax over the chosen.
    SoftmaxOfChosen,
}

/// The activation of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) * up`
    SwiGlu,
    /// SwiGLU with bounded operands.
    Clamped(SwigluClamp),
}

/// The constants of SwiGLU with bounded operands; see `ops::clamped_swiglu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwigluClamp {
    /// Factor of the gate in the sigmoid.
    pub alpha: f32,
    /// Bound of every entry of the gate from above, and of `up` on both sides.
    pub limit: f32,
}

impl RouterKind {
    /// The Hugging Face name of the router within a layer.
    fn module(self) -> &'static str {
        match self {
            Self::Softmax { .. } | Self::Sigmoid { .. } => "mlp.gate",
            Self::SoftmaxOfChosen => "mlp.router",
        }
    }
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

/// The end of the name of the tensor that balances the loads of experts: it has no gradient, and no optimizer updates it.
pub(crate) const ROUTER_CORRECTION: &str = "e_score_correction_bias";

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
    /// `[heads]` logits of attention that have no key.
    Sinks,
    /// `[hidden, queries]`
    Output,
    /// `[hidden]`
    OutputBias,
    /// `[hidden]` weight of the feed-forward block's norm.
    FeedForwardNorm,
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

    /// What attention of layer `index` computes.
    pub(crate) fn attention_rule(&self, index: usize) -> AttentionRule<'static> {
        let AttentionSpec { window, scale, .. } = self.layers[index].attention;
        let full = AttentionRule::full(self.head_shape());
        AttentionRule { scale: scale.unwrap_or(full.scale), window: window.unwrap_or(full.window), ..full }
    }

    /// The tensors of layer `index`, in the order of the flat layout.
    pub(crate) fn layer_tensors(&self, index: usize) -> Vec<LayerTensor> {
        use Operand::{AttentionNorm, Down, FeedForwardNorm, GateUp, Output, OutputBias, Qkv, QkvBias};
        let LayerSpec { norm, attention, query_key_norm, qkv_bias, output_bias, feed_forward } =
            self.layers[index];
        let (hidden, inner, head) = (self.hidden_size, self.intermediate_size, self.head_dim);
        let (queries, keys) = (self.head_shape().query_width(), self.head_shape().kv_width());
        let mut tensors = Vec::new();
        let mut push = |name: &'static str, shape: &[usize], operand, sharding| {
            let shape = shape.to_vec();
            tensors.push(LayerTensor { name: name.into(), shape, operand, sharding, fused: None });
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
        if attention.sinks {
            push("self_attn.sinks", &[self.num_heads], Operand::Sinks, Sharding::Outputs);
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
            FeedForward::Experts(spec) => expert_tensors(&mut tensors, spec, hidden),
        }
        tensors
    }

    /// The experts of the first layer that has any.
    #[must_use]
    pub fn experts(&self) -> Option<ExpertSpec> {
        self.layers.iter().find_map(|layer| layer.feed_forward.experts())
    }

    /// Whether files have the projections of all experts of a layer as one tensor.
    #[must_use]
    pub fn has_fused_experts(&self) -> bool {
        self.experts().is_some_and(|experts| experts.fused_files)
    }

    /// Experts of a token in all layers.
    #[must_use]
    pub fn expert_slots(&self) -> usize {
        self.slots_before(self.num_layers())
    }

    /// Experts of a token in the layers before `index`.
    pub(crate) fn slots_before(&self, index: usize) -> usize {
        let experts = |layer: &LayerSpec| layer.feed_forward.experts().map_or(0, |experts| experts.per_token);
        self.layers[..index].iter().map(experts).sum()
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

impl FeedForward {
    /// Its experts, if it has any.
    #[must_use]
    pub fn experts(self) -> Option<ExpertSpec> {
        match self {
            Self::SwiGlu => None,
            Self::Experts(spec) => Some(spec),
        }
    }
}

/// Appends the tensors of a router and its experts.
fn expert_tensors(tensors: &mut Vec<LayerTensor>, spec: ExpertSpec, hidden: usize) {
    let ExpertSpec { count, width, router, shared_width, bias, .. } = spec;
    let mut push = |name: String, shape: &[usize], operand, sharding, fused| {
        tensors.push(LayerTensor { name: name.into(), shape: shape.to_vec(), operand, sharding, fused });
    };
    let module = router.module();
    push(format!("{module}.weight"), &[count, hidden], Operand::Router, Sharding::Replicated, None);
    if bias {
        push(format!("{module}.bias"), &[count], Operand::RouterBias, Sharding::Replicated, None);
    }
    if let RouterKind::Sigmoid { .. } = router {
        let name = format!("{module}.{ROUTER_CORRECTION}");
        push(name, &[count], Operand::RouterCorrection, Sharding::Replicated, None);
    }
    let gate_up = [("gate_proj", 0), ("up_proj", 1)];
    let each = move || (0..count).flat_map(move |expert| gate_up.map(|(part, turn)| (expert, part, turn)));
    for (expert, part, turn) in each() {
        let name = format!("mlp.experts.{expert}.{part}.weight");
        let start = expert * hidden * 2 * width + turn;
        let place = FilePlace { start, output_stride: 2, input_stride: 2 * width };
        let fused = spec.fused("mlp.experts.gate_up_proj", &[count, hidden, 2 * width], place);
        push(name, &[width, hidden], Operand::GateUp, Sharding::Outputs, fused);
    }
    for (expert, part, turn) in each().filter(|_| bias) {
        let name = format!("mlp.experts.{expert}.{part}.bias");
        let place = FilePlace { start: expert * 2 * width + turn, output_stride: 2, input_stride: 1 };
        let fused = spec.fused("mlp.experts.gate_up_proj_bias", &[count, 2 * width], place);
        push(name, &[width], Operand::GateUpBias, Sharding::Outputs, fused);
    }
    for expert in 0..count {
        let name = format!("mlp.experts.{expert}.down_proj.weight");
        let place = FilePlace { start: expert * width * hidden, output_stride: 1, input_stride: hidden };
        let fused = spec.fused("mlp.experts.down_proj", &[count, width, hidden], place);
        push(name, &[hidden, width], Operand::Down, Sharding::Inputs, fused);
    }
    for expert in (0..count).filter(|_| bias) {
        let name = format!("mlp.experts.{expert}.down_proj.bias");
        let place = FilePlace { start: expert * hidden, output_stride: 1, input_stride: 1 };
        let fused = spec.fused("mlp.experts.down_proj_bias", &[count, hidden], place);
        push(name, &[hidden], Operand::DownBias, Sharding::Replicated, fused);
    }
    if shared_width > 0 {
        for (part, _) in gate_up {
            let name = format!("mlp.shared_experts.{part}.weight");
            push(name, &[shared_width, hidden], Operand::SharedGateUp, Sharding::Outputs, None);
        }
        let name = "mlp.shared_experts.down_proj.weight".to_owned();
        push(name, &[hidden, shared_width], Operand::SharedDown, Sharding::Inputs, None);
    }
}

impl ExpertSpec {
    /// The tensor `name` of files that a projection of all experts is a part of, at `place`; `None` if it is a tensor itself.
    fn fused(&self, name: &'static str, shape: &[usize], place: FilePlace) -> Option<FusedTensor> {
        self.fused_files.then(|| FusedTensor { name, shape: shape.to_vec(), place })
    }
}

impl Operand {
    /// The bias of a matrix.
    fn bias(self) -> Option<Self> {
        match self {
            Self::Qkv => Some(Self::QkvBias),
            Self::Output => Some(Self::OutputBias),
            Self::Router => Some(Self::RouterBias),
            Self::GateUp => Some(Self::GateUpBias),
            Self::Down => Some(Self::DownBias),
            _ => None,
        }
    }
}

/// Ranges of the operands among the values of a layer; empty if the layer has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerRanges([Range<usize>; Operand::SharedDown as usize + 1]);

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
    use crate::Architecture;
    use crate::config::tests::tiny;

    /// Layers of every kind.
    fn all() -> impl Iterator<Item = Config> {
        let experts = [Architecture::Qwen3Moe, Architecture::Glm4Moe, Architecture::GptOss];
        let [tied, untied] = tiny();
        let experts = experts.map(|architecture| tied.clone().of_family(architecture));
        [tied, untied].into_iter().chain(experts)
    }

    #[test]
    fn tensors_of_an_operand_are_neighbours_and_ranges_cover_the_layer() {
        for config in all() {
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
        for config in all() {
            for LayerTensor { name, shape, sharding, .. } in config.layer_tensors(0) {
                let is_matrix = shape.len() == 2;
                let is_router = ["mlp.gate.weight", "mlp.router.weight"].contains(&&name[..]);
                assert_eq!(TargetModule::of_weight(&name).is_some(), is_matrix && !is_router, "{name}");
                assert!(!is_matrix || (sharding == Sharding::Replicated) == is_router, "{name}");
            }
        }
    }
}
