//! One transformer block: attention and gated feed-forward, each on a normalised input and added to the residual stream.
//!
//! Invariant: the backward of each half is its exact vector-Jacobian product and needs no other layer, so that gradients can
//! be reduced, and activations freed, layer by layer. `gradients` computes those of weights.

mod attention;
mod gradients;
mod kept;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use collective::Collective;

pub(super) use self::gradients::{GradientJob, OperandGradients, weight_jobs};
pub(super) use self::kept::{KeptAttention, KeptStream};
use super::LayerAngles;
use super::feed_forward::{
    ExpertWeights, FeedForwardOperands, FeedForwardPiece, FeedForwardTrace, FeedForwardWeights,
    GatedActivation, GatedWeights,
};
use super::mixer::{
    AttentionWeights, DeltaNetWeights, LatentOperands, LatentPiece, LatentWeights, MixerReverse, MixerTrace,
    MixerWeights, MixingRule,
};
use crate::layer::{
    DeltaNetSpec, FeedForward, LatentSpec, LayerRanges, LayerSpec, LinearSpec, Norm, Operand, QueryKeyNorm,
    Sharding,
};
use crate::ops::adapters::LinearPass;
use crate::ops::causal_convolution::transposed;
use crate::ops::experts::{ExpertRoutes, GivenExperts};
use crate::ops::gated_unit::GateActivation;
use crate::ops::gemm::{CHUNKS, TreePart};
use crate::ops::int8::MAX_INPUT;
use crate::ops::linear::{FlatValues, Linear, TreeSum};
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::residual::{add_multiple, multiple};
use crate::ops::simd::exp;
use crate::{
    Config, FrozenParameters, Layout, Parameters, Quantization, Reduction, TensorRanks, ThreadPool, Unit,
};

/// Weights of one layer.
#[derive(Clone, Debug)]
pub(super) struct TransformerBlock {
    eps: f32,
    /// Empty if the layer has none, as the other norms.
    attention_norm: Vec<f32>,
    mixer: MixerWeights,
    output: Linear,
    /// Of the result of attention.
    attention_after: Vec<f32>,
    feed_forward_norm: Vec<f32>,
    /// Of the result of the feed-forward network.
    feed_forward_after: Vec<f32>,
    /// Multiplies the result of a half.
    multiplier: f32,
    feed_forward: FeedForwardWeights,
    ranges: LayerRanges,
    /// Heads of queries and of keys whose gradients of norms are summed apart, as leaves of a tree; 1 for all in one chain.
    head_groups: [usize; 2],
    /// The ranks that share its weights.
    ranks: Option<TensorRanks>,
}

/// Activations of the attention half, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct AttentionTrace {
    mixer: MixerTrace,
    /// `[T, d]` the residual stream after this half.
    pub(super) middle: Tensor,
}

/// Backward of the attention half: the gradient of its input, and the operands of its weight gradients.
#[derive(Debug)]
pub(super) struct AttentionReverse {
    /// `[T, d]` gradient of the layer's input.
    pub(super) d_input: Tensor,
    input: Tensor,
    normed: Tensor,
    mixer: MixerReverse,
    branch: BranchReverse,
}

/// Backward of a sum of the residual stream with the result of a half.
#[derive(Debug)]
struct BranchReverse {
    /// `[T, d]` gradient of the result.
    d_result: Tensor,
    /// The result before its norm, and the gradient after it, if it is normalised.
    normed: Option<[Tensor; 2]>,
}

/// Forward and backward of the attention half for one part of a pack.
pub(super) struct ReversedAttention<'a> {
    pub(super) trace: &'a AttentionTrace,
    pub(super) reverse: AttentionReverse,
    pub(super) angles: &'a LayerAngles,
}

impl LatentPiece for ReversedAttention<'_> {
    fn normed(&self) -> &Tensor {
        &self.reverse.normed
    }

    fn d_projected(&self) -> &Tensor {
        &self.reverse.mixer.d_projected
    }

    fn operands(&self) -> Option<&LatentOperands> {
        self.reverse.mixer.latent()
    }
}

/// Backward of the feed-forward half: the gradient of its input, and the operands of its weight gradients.
#[derive(Debug)]
pub(super) struct FeedForwardReverse {
    /// `[T, d]` gradient of the residual stream between the halves.
    pub(super) d_middle: Tensor,
    middle: Tensor,
    normed: Tensor,
    operands: FeedForwardOperands,
    d_normed: Tensor,
    branch: BranchReverse,
}

impl FeedForwardReverse {
    /// The routes of the tokens, if the layer has experts.
    pub(super) fn routes(&self) -> Option<&ExpertRoutes> {
        self.operands.routes()
    }

    /// What gradients of the weights of experts are computed from.
    pub(super) fn into_operands(self) -> FeedForwardOperands {
        self.operands
    }
}

impl FeedForwardPiece for FeedForwardReverse {
    fn normed(&self) -> &Tensor {
        &self.normed
    }

    fn operands(&self) -> &FeedForwardOperands {
        &self.operands
    }
}

/// Where the values of a linear operation are among those of a layer.
struct LinearRanges {
    weight: Range<usize>,
    /// Absent if the operation has none.
    bias: Option<Range<usize>>,
}

impl TransformerBlock {
    /// How its tokens are mixed.
    pub(super) fn rule(&self) -> MixingRule<'_> {
        self.mixer.rule()
    }

    /// Memory of the linear layers, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.mixer.bytes() + self.output.bytes() + self.feed_forward.bytes()
    }

    /// Calls `change` for every linear layer.
    pub(super) fn change_linears(&mut self, change: &mut impl FnMut(&mut Linear)) {
        self.mixer.change_linears(change);
        change(&mut self.output);
        self.feed_forward.change_linears(change);
    }

    /// Makes it the part of one of the `tensor` ranks that share its weights.
    pub(super) fn share(&mut self, tensor: &TensorRanks) {
        let TensorRanks { ranks, same_keys, .. } = tensor;
        let copies = same_keys.as_ref().map_or(1, |ranks| ranks.world());
        self.mixer.change_linears(&mut |linear| {
            linear.share(ranks, true);
            if copies > 1 {
                linear.copy_keys(copies);
            }
        });
        self.output.share(ranks, true);
        self.feed_forward.share(ranks);
        self.ranks = Some(tensor.clone());
    }

    /// Makes its experts those of one of `ranks` that divide them.
    pub(super) fn divide_experts(&mut self, ranks: &Arc<dyn Collective>) {
        self.feed_forward.divide(ranks);
    }

    /// Layer `index` to sample with, of its values `layer`.
    pub(super) fn sampler(
        config: &Config,
        layout: &Layout,
        layer: &[f32],
        index: usize,
        quantization: Quantization,
    ) -> Self {
        let linear = |spec: &LinearSpec, LinearRanges { weight, bias }: LinearRanges| {
            let (weight, bias) = (&layer[weight], bias.map(|bias| &layer[bias]));
            match quantization {
                // Another route is another network, and gates are small.
                _ if spec.weight.is_exact() => Linear::packed(weight, spec.input, bias),
                Quantization::Int8 if spec.input <= MAX_INPUT => Linear::int8(weight, spec.input, bias),
                Quantization::Bf16 => Linear::bf16(weight, spec.input, bias),
                Quantization::None | Quantization::Int8 => Linear::packed(weight, spec.input, bias),
            }
        };
        Self::new(config, index, layout, |range| layer[range].to_vec(), linear)
    }

    /// Layer `index` of frozen weights, to train factors and to sample with.
    pub(super) fn frozen(base: &FrozenParameters, index: usize) -> Self {
        let (layout, config) = (base.layout(), base.config());
        let start = layout.unit(Unit::Layer(index)).start;
        let moved = |range: &Range<usize>| start + range.start..start + range.end;
        let linear = |spec: &LinearSpec, LinearRanges { weight, bias }: LinearRanges| {
            let bias = bias.map_or(Vec::new(), |bias| base.vector(&moved(&bias)));
            Linear::frozen(base.matrices(&moved(&weight)), spec.input, bias)
        };
        Self::new(config, index, layout, |range| base.vector(&moved(&range)), linear)
    }

    /// A layer to train, of the values of the whole model.
    pub(super) fn trainable(config: &Config, parameters: &Arc<Parameters>, index: usize) -> Self {
        let layout = parameters.layout();
        let values = layout.unit(Unit::Layer(index));
        Self::flat(config, layout, index, &FlatValues::Model(Arc::clone(parameters)), &values)
    }

    /// A layer to train, of values of its own.
    pub(super) fn of_unit(
        config: &Config,
        layout: &Layout,
        index: usize,
        values: &Arc<Vec<f32>>,
    ) -> Result<Self> {
        let (expected, found) = (layout.unit(Unit::Layer(index)).len(), values.len());
        if expected != found {
            candle_core::bail!("layer {index} has {expected} values, {found} were given");
        }
        Ok(Self::flat(config, layout, index, &FlatValues::Unit(Arc::clone(values)), &(0..found)))
    }

    /// Layer `index` to train, of `values` of `flat`.
    fn flat(
        config: &Config,
        layout: &Layout,
        index: usize,
        flat: &FlatValues,
        values: &Range<usize>,
    ) -> Self {
        let moved = |range: &Range<usize>| values.start + range.start..values.start + range.end;
        let linear = |spec: &LinearSpec, LinearRanges { weight, bias }: LinearRanges| {
            let bias = bias.map_or(0..0, |bias| moved(&bias));
            Linear::flat(flat, moved(&weight), spec.input, &bias)
        };
        let vector = |range: Range<usize>| flat.values()[moved(&range)].to_vec();
        Self::new(config, index, layout, vector, linear)
    }

    /// Layer `index`, whose vectors `values` gives, and whose matrices `linear` makes, of ranges of its values.
    fn new(
        config: &Config,
        index: usize,
        layout: &Layout,
        values: impl Fn(Range<usize>) -> Vec<f32>,
        linear: impl Fn(&LinearSpec, LinearRanges) -> Linear,
    ) -> Self {
        // Another kind of layer does not compile until its operations are here.
        let LayerSpec {
            norm: Norm::RmsBefore | Norm::RmsAfter | Norm::RmsAround,
            attention: _,
            delta_net: _,
            feed_forward: _,
            query_key_norm: _,
            residual_multiplier,
            qkv_bias: _,
            output_bias: _,
        } = config.layers[index];
        let (ranges, start) = (layout.ranges(index), layout.unit(Unit::Layer(index)).start);
        let vector = |operand: Operand| values(ranges[operand].clone());
        let norm_weights = |operand: Operand| {
            vector(operand).into_iter().map(|weight| weight + config.norm_offset).collect::<Vec<_>>()
        };
        // Part `part` of `parts` equal ones of an operation: with experts that of one of them.
        let linear_of = |spec: &LinearSpec, part: usize, parts: usize| {
            let tree = match (config.reduction, spec.sharding) {
                (Reduction::Chain, _) | (_, Sharding::Replicated) => TreeSum::None,
                (Reduction::Tree, Sharding::Inputs) => TreeSum::Inputs,
                (Reduction::Tree, Sharding::Outputs) => {
                    TreeSum::Outputs(spec.outputs.iter().copied().map(TreePart::of).collect())
                }
            };
            let cut = |operand: Operand| {
                let Range { start, end } = ranges[operand].clone();
                let each = (end - start) / parts;
                start + part * each..start + (part + 1) * each
            };
            let weight = cut(spec.weight);
            let place = start + weight.start..start + weight.end;
            linear(spec, LinearRanges { weight, bias: spec.bias.map(cut) }).with_tree(tree).at(place)
        };
        let linear = |operand: Operand| linear_of(&config.linear_spec(index, operand), 0, 1);
        Self {
            eps: config.rms_norm_eps,
            attention_norm: norm_weights(Operand::AttentionNorm),
            mixer: mixer_weights(config, index, vector, linear),
            output: linear(Operand::Output),
            attention_after: norm_weights(Operand::AttentionAfterNorm),
            feed_forward_norm: norm_weights(Operand::FeedForwardNorm),
            feed_forward_after: norm_weights(Operand::FeedForwardAfterNorm),
            multiplier: residual_multiplier,
            feed_forward: feed_forward_weights(config, index, vector, linear_of),
            ranges: ranges.clone(),
            head_groups: match (config.reduction, config.layers[index].query_key_norm) {
                (Reduction::Tree, QueryKeyNorm::PerHead) => {
                    [config.num_heads, config.num_kv_heads].map(|heads| 1 << heads.trailing_zeros())
                }
                _ => [1; 2],
            },
            ranks: None,
        }
    }

    /// Forward on `x [T, d]` without activations; `mix` mixes what the mixer prepared, and the experts of the tokens may be
    /// `given`.
    pub(super) fn forward<'a>(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        given: Option<GivenExperts<'_>>,
        mix: impl FnOnce(&Tensor) -> Result<Tensor>,
        on: impl Into<LinearPass<'a>>,
    ) -> Result<Tensor> {
        Ok(self.forward_routed(x, angles, given, mix, on.into())?.0)
    }

    /// The same, with what the feed-forward half computed up to its activation, which has the routes of the tokens.
    pub(super) fn forward_routed(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        given: Option<GivenExperts<'_>>,
        mix: impl FnOnce(&Tensor) -> Result<Tensor>,
        on: LinearPass<'_>,
    ) -> Result<(Tensor, FeedForwardTrace)> {
        let AttentionTrace { middle, .. } = self.attention(x, angles, mix, on)?;
        let trace = self.begin_feed_forward(&middle, given, on)?;
        Ok((self.finish_feed_forward(&middle, &trace, on)?, trace))
    }

    /// The feed-forward half up to its activation, for its input `middle [T, d]`.
    pub(super) fn begin_feed_forward<'a>(
        &self,
        middle: &Tensor,
        given: Option<GivenExperts<'_>>,
        on: impl Into<LinearPass<'a>>,
    ) -> Result<FeedForwardTrace> {
        let on = on.into();
        self.feed_forward.begin(&self.normed(middle, &self.feed_forward_norm, on.pool)?, given, on)
    }

    /// `[T, d]` the residual stream after the feed-forward half.
    pub(super) fn finish_feed_forward<'a>(
        &self,
        middle: &Tensor,
        trace: &FeedForwardTrace,
        on: impl Into<LinearPass<'a>>,
    ) -> Result<Tensor> {
        let on = on.into();
        if self.adds_plainly() {
            return self.feed_forward.finish(middle, trace, on);
        }
        let result = self.feed_forward.finish(&middle.zeros_like()?, trace, on)?;
        self.join(middle, &result, &self.feed_forward_after, on.pool)
    }

    /// Whether the result of a half is added to the residual stream as it is.
    fn adds_plainly(&self) -> bool {
        self.attention_after.is_empty() && self.multiplier == 1.0
    }

    /// `x [T, d]` normalised by `weight`, which is empty for none.
    fn normed(&self, x: &Tensor, weight: &[f32], pool: &ThreadPool) -> Result<Tensor> {
        if weight.is_empty() { Ok(x.clone()) } else { rms_norm(x, weight, self.eps, pool) }
    }

    /// `base [T, d]` plus the gradient of `x [T, d]`, for that of [`TransformerBlock::normed`], `g [T, d]`.
    fn normed_backward(&self, x: &Tensor, weight: &[f32], g: &Tensor, base: &Tensor) -> Result<Tensor> {
        if weight.is_empty() {
            add_multiple(base, g, 1.0)
        } else {
            rms_norm_backward(x, weight, self.eps, g, Some(base))
        }
    }

    /// `base [T, d]` plus the result `x [T, d]` of a half, normalised by `after` and multiplied.
    fn join(&self, base: &Tensor, x: &Tensor, after: &[f32], pool: &ThreadPool) -> Result<Tensor> {
        add_multiple(base, &self.normed(x, after, pool)?, self.multiplier)
    }

    /// Backward of [`TransformerBlock::join`] for its gradient `g [T, d]`; `result` computes the result again.
    fn join_backward(
        &self,
        after: &[f32],
        g: &Tensor,
        result: impl FnOnce() -> Result<Tensor>,
    ) -> Result<BranchReverse> {
        let d_normed = multiple(g, self.multiplier)?;
        if after.is_empty() {
            return Ok(BranchReverse { d_result: d_normed, normed: None });
        }
        let result = result()?;
        let d_result = rms_norm_backward(&result, after, self.eps, &d_normed, None)?;
        Ok(BranchReverse { d_result, normed: Some([result, d_normed]) })
    }

    /// Backward of the feed-forward half for the gradient `g [T, d]` of its result. The trace is computed again if `None`, with the
    /// experts that are `given`.
    pub(super) fn feed_forward_backward(
        &self,
        middle: &Tensor,
        trace: Option<&FeedForwardTrace>,
        given: Option<GivenExperts<'_>>,
        g: &Tensor,
    ) -> Result<FeedForwardReverse> {
        let alone = ThreadPool::single();
        let normed = self.normed(middle, &self.feed_forward_norm, &alone)?;
        let computed;
        let trace = match trace {
            Some(kept) => kept,
            None => {
                computed = self.feed_forward.begin(&normed, given, (&alone).into())?;
                &computed
            }
        };
        let again = || self.feed_forward.finish(&middle.zeros_like()?, trace, (&alone).into());
        let branch = self.join_backward(&self.feed_forward_after, g, again)?;
        let (d_normed, operands) = self.feed_forward.backward(&normed, trace, &branch.d_result)?;
        let d_middle = self.normed_backward(middle, &self.feed_forward_norm, &d_normed, g)?;
        Ok(FeedForwardReverse { d_middle, middle: middle.clone(), normed, operands, d_normed, branch })
    }
}

/// The mixer of layer `index`, of the vectors and linear operations that it is made of.
fn mixer_weights(
    config: &Config,
    index: usize,
    vector: impl Fn(Operand) -> Vec<f32>,
    linear: impl Fn(Operand) -> Linear,
) -> MixerWeights {
    let LayerSpec { attention, delta_net, query_key_norm, .. } = config.layers[index];
    let (rule, rotary) = (config.attention_rule(index), config.rotaries());
    let rotary = rotary.iter().position(|rotary| attention.rotary == Some(*rotary));
    let head_norm = || {
        let weights = vector(Operand::QueryKeyNorm).into_iter();
        weights.map(|weight| weight + config.norm_offset).collect()
    };
    let of_delta_net = |spec: DeltaNetSpec| DeltaNetWeights {
        spec,
        projection: linear(Operand::Qkv),
        gates: linear(Operand::DeltaGates),
        kernel: transposed(&vector(Operand::Convolution), spec.taps),
        rates: vector(Operand::DecayRate).into_iter().map(exp).collect(),
        time_bias: vector(Operand::TimeBias),
        result_norm: vector(Operand::ResultNorm),
        eps: config.rms_norm_eps,
    };
    let of_latents = |latent: LatentSpec| {
        let shape = latent.shape(config.num_heads);
        LatentWeights::new(shape, (rule, rotary), latent.query_rank.is_some(), &vector, &linear)
    };
    let of_attention = || AttentionWeights {
        shape: config.head_shape(),
        rule,
        rotary,
        eps: config.rms_norm_eps,
        qkv: linear(Operand::Qkv),
        sinks: vector(Operand::Sinks),
        head_norm: match query_key_norm {
            QueryKeyNorm::None => None,
            QueryKeyNorm::PerHead | QueryKeyNorm::Whole => Some(head_norm()),
        },
        gated: attention.gated,
    };
    match (delta_net, attention.latent) {
        (None, None) => MixerWeights::Attention(Box::new(of_attention())),
        (None, Some(latent)) => MixerWeights::Latent(Box::new(of_latents(latent))),
        (Some(spec), _) => MixerWeights::DeltaNet(Box::new(of_delta_net(spec))),
    }
}

/// The feed-forward network of layer `index`, of the vectors and the parts of linear operations that it is made of.
fn feed_forward_weights(
    config: &Config,
    index: usize,
    vector: impl Fn(Operand) -> Vec<f32>,
    linear_of: impl Fn(&LinearSpec, usize, usize) -> Linear,
) -> FeedForwardWeights {
    let linear = |operand: Operand| linear_of(&config.linear_spec(index, operand), 0, 1);
    let gated = |activation: GatedActivation, gate_up: Operand, down: Operand| GatedWeights {
        activation,
        gate_up: linear(gate_up),
        down: linear(down),
    };
    let spec = match config.layers[index].feed_forward {
        FeedForward::SwiGlu => {
            return FeedForwardWeights::Gated(gated(
                GatedActivation::Unit(GateActivation::Silu),
                Operand::GateUp,
                Operand::Down,
            ));
        }
        FeedForward::GeGlu => {
            return FeedForwardWeights::Gated(gated(
                GatedActivation::Unit(GateActivation::Gelu),
                Operand::GateUp,
                Operand::Down,
            ));
        }
        FeedForward::Experts(spec) => spec,
    };
    let [gate_up, down] = [Operand::GateUp, Operand::Down].map(|operand| config.linear_spec(index, operand));
    let expert = |expert: usize| GatedWeights {
        activation: spec.activation.into(),
        gate_up: linear_of(&gate_up, expert, spec.count),
        down: linear_of(&down, expert, spec.count),
    };
    let shared =
        || gated(GatedActivation::Unit(GateActivation::Silu), Operand::SharedGateUp, Operand::SharedDown);
    FeedForwardWeights::Experts(ExpertWeights {
        spec,
        first_slot: config.slots_before(index),
        router: linear(Operand::Router),
        correction: vector(Operand::RouterCorrection),
        experts: (0..spec.count).map(expert).collect(),
        shared: (spec.shared_width > 0).then(|| Box::new(shared())),
        shared_gate: spec.shared_gate.then(|| linear(Operand::SharedGate)),
        ranks: None,
        divided: None,
        chunks: match config.reduction {
            Reduction::Chain => 1,
            Reduction::Tree => CHUNKS,
        },
    })
}
