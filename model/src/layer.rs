//! One decoder layer as data: what it computes, and the tensors that it is made of.
//!
//! A family of models is a row of the table in `config/families.rs`, which gives the [`LayerSpec`] of each layer: layers of a model
//! may differ. The tensors follow from it (`Config::layer_tensors`). Everything else reads these two and knows no family: the flat
//! layout and the weight files, initialisation, LoRA, the sums that tensor-parallel ranks would share, the memory plan, and the
//! code of the processor and of devices.
//!
//! Invariant: tensors of one `Operand` are neighbours in the layout, so that they are one matrix or vector to a layer, or one for
//! each expert.

mod delta_net;
mod experts;
mod latent;
mod operands;

use device::ops::heads::HeadShape;
use serde::{Deserialize, Serialize};

pub use self::delta_net::{DeltaNetFiles, DeltaNetSpec};
pub(crate) use self::experts::ROUTER_CORRECTION;
pub use self::experts::{ExpertActivation, ExpertSpec, RouterKind, SwigluClamp};
pub(crate) use self::latent::LATENT_EPS;
pub use self::latent::LatentSpec;
pub(crate) use self::operands::{LayerRanges, LayerTensor, LinearSpec, Operand, Sharding};
use crate::file_tensors::{FilePlace, FusedTensor, matrix_shape};
use crate::ops::attention::AttentionRule;
use crate::rotary::Rotary;
use crate::{Config, Reduction};

/// What a decoder layer computes: a residual block of causal attention with grouped key-value heads (GQA, Ainslie et al. 2023,
/// arXiv 2305.13245) or of a recurrence, then one of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSpec {
    /// The norm of a block.
    pub norm: Norm,
    /// How queries attend to keys.
    pub attention: AttentionSpec,
    /// The recurrence that the layer has in place of attention, if it is one. Then nothing of attention applies.
    pub delta_net: Option<DeltaNetSpec>,
    /// The norm of queries and keys before the rotary embedding.
    pub query_key_norm: QueryKeyNorm,
    /// Whether the query, key and value projections have a bias; with latents, those to the latents.
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
    /// The sliding window (Beltagy et al. 2020, arXiv 2004.05150): tokens that a query sees, the last of which is its own; `None` for
    /// all up to its own.
    pub window: Option<usize>,
    /// The rotary position embedding of queries and keys, if there is one.
    pub rotary: Option<Rotary>,
    /// Multiplies scores; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Whether the softmax of every head has a logit beside its keys, whose value is zero.
    pub sinks: bool,
    /// Queries, keys and values through latents; `None` if they are projections of the input.
    pub latent: Option<LatentSpec>,
    /// Whether every value of the result is multiplied with a sigmoid of the token's own (Qiu et al. 2025, arXiv 2505.06708): the
    /// second half of each head of the query projection, which is twice as wide.
    pub gated: bool,
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    /// `down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv 2002.05202).
    SwiGlu,
    /// `down(gelu(gate(x)) * up(x))` with the approximation of GELU by a hyperbolic tangent (Shazeer 2020, arXiv 2002.05202).
    GeGlu,
    /// The sum of the results of some gated networks, which a router chooses for each token and weighs.
    Experts(ExpertSpec),
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
    /// Projection to the latent of queries.
    QAProj,
    /// Projection from the latent of queries.
    QBProj,
    /// Projection to the latent of keys and values, and to what is rotated of the keys.
    KvAProjWithMqa,
    /// Projection from the latent of keys and values.
    KvBProj,
    /// Queries, keys and values of a recurrence.
    InProjQkv,
    /// The gate of the result of a recurrence.
    InProjZ,
    /// The strength of updates of a recurrence.
    InProjB,
    /// The decay of a recurrence.
    InProjA,
    /// Queries, keys, values and the gate of the result of a recurrence, in one.
    InProjQkvz,
    /// Strength of updates and decay of a recurrence, in one.
    InProjBa,
    /// Output projection of a recurrence.
    OutProj,
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
    /// The linear layers of a block without latents and without a recurrence; with experts those of every expert.
    pub const BLOCK: [Self; 7] =
        [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

    /// All layers.
    pub const ALL: [Self; 20] = [
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::OProj,
        Self::QAProj,
        Self::QBProj,
        Self::KvAProjWithMqa,
        Self::KvBProj,
        Self::InProjQkv,
        Self::InProjZ,
        Self::InProjB,
        Self::InProjA,
        Self::InProjQkvz,
        Self::InProjBa,
        Self::OutProj,
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
            Self::QAProj => "q_a_proj",
            Self::QBProj => "q_b_proj",
            Self::KvAProjWithMqa => "kv_a_proj_with_mqa",
            Self::KvBProj => "kv_b_proj",
            Self::InProjQkv => "in_proj_qkv",
            Self::InProjZ => "in_proj_z",
            Self::InProjB => "in_proj_b",
            Self::InProjA => "in_proj_a",
            Self::InProjQkvz => "in_proj_qkvz",
            Self::InProjBa => "in_proj_ba",
            Self::OutProj => "out_proj",
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

impl Config {
    /// The heads of attention.
    pub(crate) fn head_shape(&self) -> HeadShape {
        HeadShape { heads: self.num_heads, kv_heads: self.num_kv_heads, head_dim: self.head_dim }
    }

    /// What attention of layer `index` computes.
    pub(crate) fn attention_rule(&self, index: usize) -> AttentionRule<'static> {
        let AttentionSpec { window, scale, .. } = self.layers[index].attention;
        let full = AttentionRule::full(self.head_shape());
        let per_key = self.num_heads / self.num_kv_heads.max(1);
        let leaves = if self.reduction == Reduction::Tree { 1 << per_key.trailing_zeros() } else { 1 };
        let (scale, window) = (scale.unwrap_or(full.scale), window.unwrap_or(full.window));
        AttentionRule { scale, window, leaves, ..full }
    }

    /// The tensors of layer `index`, in the order of the flat layout.
    pub(crate) fn layer_tensors(&self, index: usize) -> Vec<LayerTensor> {
        use Operand::{
            AttentionAfterNorm, AttentionNorm, Down, FeedForwardAfterNorm, FeedForwardNorm, GateUp,
        };
        let spec = self.layers[index];
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let mut tensors = Vec::new();
        let norm =
            |name: &'static str, operand| LayerTensor::new(name, &[hidden], operand, Sharding::Replicated);
        if spec.norm.is_before() {
            tensors.push(norm("input_layernorm.weight", AttentionNorm));
        }
        match &spec.delta_net {
            None => self.push_attention(&mut tensors, &spec),
            Some(delta_net) => delta_net::push_tensors(&mut tensors, delta_net, hidden),
        }
        if spec.norm.is_after() {
            tensors.push(norm("post_attention_layernorm.weight", AttentionAfterNorm));
        }
        match spec.norm {
            Norm::RmsBefore => tensors.push(norm("post_attention_layernorm.weight", FeedForwardNorm)),
            Norm::RmsAround => tensors.push(norm("pre_feedforward_layernorm.weight", FeedForwardNorm)),
            Norm::RmsAfter => {}
        }
        match spec.feed_forward {
            FeedForward::SwiGlu | FeedForward::GeGlu => {
                let gate_up = |name| LayerTensor::new(name, &[inner, hidden], GateUp, Sharding::Outputs);
                tensors.extend(["mlp.gate_proj.weight", "mlp.up_proj.weight"].map(gate_up));
                let down = LayerTensor::new("mlp.down_proj.weight", &[hidden, inner], Down, Sharding::Inputs);
                tensors.push(down);
            }
            FeedForward::Experts(spec) => experts::push_tensors(&mut tensors, spec, hidden),
        }
        if spec.norm.is_after() {
            tensors.push(norm("post_feedforward_layernorm.weight", FeedForwardAfterNorm));
        }
        if self.architecture.has_fused_files() {
            fuse_rows(&mut tensors, Operand::Qkv, "self_attn.qkv_proj.weight");
            fuse_rows(&mut tensors, GateUp, "mlp.gate_up_proj.weight");
        }
        tensors
    }

    /// Appends the tensors of attention without the norms of its block.
    fn push_attention(&self, tensors: &mut Vec<LayerTensor>, spec: &LayerSpec) {
        use Operand::{Qkv, QkvBias};
        let LayerSpec { attention, query_key_norm, qkv_bias, output_bias, .. } = *spec;
        let (hidden, head) = (self.hidden_size, self.head_dim);
        let (queries, keys) = (self.head_shape().query_width(), self.head_shape().kv_width());
        if let Some(latent) = attention.latent {
            latent.push_tensors(tensors, self, spec);
            return self.push_output(tensors, self.num_heads * latent.value, output_bias);
        }
        let mut push = |name: &'static str, shape: &[usize], operand, sharding| {
            tensors.push(LayerTensor::new(name, shape, operand, sharding));
        };
        let of_queries = if attention.gated { 2 * queries } else { queries };
        push("self_attn.q_proj.weight", &[of_queries, hidden], Qkv, Sharding::Outputs);
        push("self_attn.k_proj.weight", &[keys, hidden], Qkv, Sharding::Outputs);
        push("self_attn.v_proj.weight", &[keys, hidden], Qkv, Sharding::Outputs);
        if qkv_bias {
            push("self_attn.q_proj.bias", &[of_queries], QkvBias, Sharding::Outputs);
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
        self.push_output(tensors, queries, output_bias);
    }

    /// Appends the output projection of results of attention that are `width` wide.
    fn push_output(&self, tensors: &mut Vec<LayerTensor>, width: usize, bias: bool) {
        let (hidden, name) = (self.hidden_size, "self_attn.o_proj.weight");
        tensors.push(LayerTensor::new(name, &[hidden, width], Operand::Output, Sharding::Inputs));
        if bias {
            let (name, own) = ("self_attn.o_proj.bias", Sharding::Replicated);
            tensors.push(LayerTensor::new(name, &[hidden], Operand::OutputBias, own));
        }
    }

    /// The experts of the first layer that has any.
    #[must_use]
    pub fn experts(&self) -> Option<ExpertSpec> {
        self.layers.iter().find_map(|layer| layer.feed_forward.experts())
    }

    /// Whether files have the weights of `module` in one tensor with others.
    #[must_use]
    pub fn is_fused_in_files(&self, module: TargetModule) -> bool {
        use TargetModule::{DownProj, GateProj, KProj, QProj, UpProj, VProj};
        let fused: &[TargetModule] = if self.architecture.has_fused_files() {
            &[QProj, KProj, VProj, GateProj, UpProj]
        } else if self.experts().is_some_and(|experts| experts.fused_files) {
            &[GateProj, UpProj, DownProj]
        } else {
            &[]
        };
        fused.contains(&module)
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
        self.multiply_adds_of_shards(1)
    }

    /// The same of the model that `ranks` shards of this configuration make up; matrices that every rank has count once.
    pub(crate) fn multiply_adds_of_shards(&self, ranks: usize) -> usize {
        (0..self.num_layers()).map(|index| self.multiply_adds_of_layer(index, ranks)).sum()
    }

    /// The same of layer `index`.
    pub(crate) fn multiply_adds_of_layer(&self, index: usize, ranks: usize) -> usize {
        let experts = self.layers[index].feed_forward.experts();
        let weights = |tensor: &LayerTensor| {
            let shards = if tensor.sharding == Sharding::Replicated { 1 } else { ranks };
            let weights = shards * tensor.shape.iter().product::<usize>();
            match (tensor.operand, experts) {
                (Operand::GateUp | Operand::Down, Some(ExpertSpec { count, per_token, .. })) => {
                    weights * per_token / count
                }
                _ => weights,
            }
        };
        let tensors = self.layer_tensors(index);
        tensors.iter().filter(|tensor| tensor.shape.len() == 2).map(weights).sum()
    }
}

/// Makes the tensors of `operand` the rows of one tensor `name` of files, one after the other.
fn fuse_rows(tensors: &mut [LayerTensor], operand: Operand, name: &'static str) {
    let of_operand = tensors.iter().filter(|tensor| tensor.operand == operand);
    let rows = of_operand.map(|tensor| matrix_shape(&tensor.shape)[0]).sum();
    let mut before = 0;
    for tensor in tensors.iter_mut().filter(|tensor| tensor.operand == operand) {
        let [outputs, inputs] = matrix_shape(&tensor.shape);
        let place = FilePlace::rows(before, inputs);
        tensor.fused = Some(FusedTensor { name, shape: vec![rows, inputs], place });
        before += outputs;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::of_every_family;

    #[test]
    fn every_matrix_is_shared_but_small_ones_and_those_to_latents() {
        for config in of_every_family() {
            for LayerTensor { name, shape, sharding, .. } in
                (0..2).flat_map(|index| config.layer_tensors(index))
            {
                let small = ["mlp.gate.weight", "mlp.router.weight", "mlp.shared_expert_gate.weight"];
                let gates = ["linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"];
                let is_small = small.contains(&&name[..]) || gates.contains(&&name[..]);
                let replicated = is_small || name.contains("_a_proj");
                assert!(shape.len() != 2 || (sharding == Sharding::Replicated) == replicated, "{name}");
            }
        }
    }
}
