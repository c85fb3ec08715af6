//! One transformer block: attention and gated feed-forward, each on a normalised input and added to the residual stream.
//!
//! Invariant: the backward of each half is its exact vector-Jacobian product and needs no other layer, so that gradients can
//! be reduced, and activations freed, layer by layer. Gradients of weights are computed apart from those of inputs: over all
//! tokens in their order, one range of rows of a weight per thread, so that their bits do not depend on how tokens were
//! shared among threads.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::LayerAngles;
use super::feed_forward::{
    ExpertWeights, FeedForwardGradients, FeedForwardOperands, FeedForwardPiece, FeedForwardTrace,
    FeedForwardWeights, GatedWeights,
};
use crate::layer::{FeedForward, LayerRanges, LayerSpec, LinearSpec, Norm, Operand, QueryKeyNorm, Sharding};
use crate::low_rank::{LowRank, UnitFactors, WeightGradient, carve};
use crate::ops::attention::{AttentionRule, PackedReverse};
use crate::ops::experts::{ExpertRoutes, GivenExperts};
use crate::ops::heads::{self, HeadNormWeights, HeadShape};
use crate::ops::int8::MAX_INPUT;
use crate::ops::linear::{FlatValues, Linear, TreeSum, bias_gradient, weight_gradient};
use crate::ops::norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
use crate::ops::{matrix, row_ranges};
use crate::{Config, FrozenParameters, Layout, Parameters, Quantization, Reduction, ThreadPool, Unit};

/// Weights of one layer.
#[derive(Clone, Debug)]
pub(super) struct TransformerBlock {
    shape: HeadShape,
    /// Without its sinks.
    rule: AttentionRule<'static>,
    /// Number of its rotary embedding among [`Config::rotaries`].
    rotary: Option<usize>,
    eps: f32,
    attention_norm: Vec<f32>,
    qkv: Linear,
    /// `[heads]` logits of attention that have no key; empty for none.
    sinks: Vec<f32>,
    /// Weights of the norms of queries and keys, if the layer has them.
    head_norm: Option<Vec<f32>>,
    output: Linear,
    feed_forward_norm: Vec<f32>,
    feed_forward: FeedForwardWeights,
    ranges: LayerRanges,
}

/// Activations of the attention half, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct AttentionTrace {
    /// `[T, width]` the projection before norm and rotation, if heads are normalised.
    raw: Option<Tensor>,
    /// `[T, width]`
    prepared: Tensor,
    /// `[T, heads * head_dim]`
    attended: Tensor,
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
    d_prepared: Option<Tensor>,
    d_qkv: Tensor,
    /// `[T, heads]` what each token adds to the gradient of the sinks; absent without sinks.
    d_sinks: Option<Tensor>,
    d_normed: Tensor,
    d_middle: Tensor,
}

/// Forward and backward of the attention half for one part of a pack.
pub(super) struct ReversedAttention<'a> {
    pub(super) trace: &'a AttentionTrace,
    pub(super) reverse: AttentionReverse,
    pub(super) angles: &'a LayerAngles,
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
}

impl FeedForwardReverse {
    /// The routes of the tokens, if the layer has experts.
    pub(super) fn routes(&self) -> Option<&ExpertRoutes> {
        self.operands.routes()
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

/// The computation of one range of weight gradients, independent of the others.
pub(super) type GradientJob<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;

impl TransformerBlock {
    /// What its attention computes.
    pub(super) fn rule(&self) -> AttentionRule<'_> {
        AttentionRule { sinks: &self.sinks, ..self.rule }
    }

    /// Memory of the linear layers, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.output.bytes() + self.feed_forward.bytes()
    }

    /// A layer to sample with, of the `values [layout.len()]` of a model.
    pub(super) fn sampler(
        config: &Config,
        layout: &Layout,
        values: &[f32],
        index: usize,
        quantization: Quantization,
    ) -> Self {
        let layer = &values[layout.unit(Unit::Layer(index))];
        let ranges = layout.ranges(index);
        let linear = |spec: &LinearSpec, LinearRanges { weight, bias }: LinearRanges| {
            let (weight, bias) = (&layer[weight], bias.map(|bias| &layer[bias]));
            match quantization {
                // Another route is another network.
                _ if spec.weight == Operand::Router => Linear::packed(weight, spec.input, bias),
                Quantization::Int8 if spec.input <= MAX_INPUT => Linear::int8(weight, spec.input, bias),
                Quantization::Bf16 => Linear::bf16(weight, spec.input, bias),
                Quantization::None | Quantization::Int8 => Linear::packed(weight, spec.input, bias),
            }
        };
        Self::new(config, index, ranges, |range| layer[range].to_vec(), linear)
    }

    /// Layer `index` of frozen weights with factors, to train and to sample with.
    pub(super) fn frozen(base: &FrozenParameters, factors: &Arc<LowRank>, index: usize) -> Self {
        let (layout, config) = (base.layout(), base.config());
        let (start, ranges) = (layout.unit(Unit::Layer(index)).start, layout.ranges(index));
        let moved = |range: &Range<usize>| start + range.start..start + range.end;
        let linear = |spec: &LinearSpec, LinearRanges { weight, bias }: LinearRanges| {
            let bias = bias.map_or(Vec::new(), |bias| base.vector(&moved(&bias)));
            let weight = moved(&weight);
            Linear::frozen(base.matrices(&weight), spec.input, bias, LowRank::linear(factors, &weight))
        };
        Self::new(config, index, ranges, |range| base.vector(&moved(&range)), linear)
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
        let ranges = layout.ranges(index);
        let moved = |range: &Range<usize>| values.start + range.start..values.start + range.end;
        let linear = |spec: &LinearSpec, LinearRanges { weight, bias }: LinearRanges| {
            let bias = bias.map_or(0..0, |bias| moved(&bias));
            Linear::flat(flat, moved(&weight), spec.input, &bias)
        };
        let vector = |range: Range<usize>| flat.values()[moved(&range)].to_vec();
        Self::new(config, index, ranges, vector, linear)
    }

    /// Layer `index`, whose vectors `values` gives, and whose matrices `linear` makes, of ranges of its values.
    fn new(
        config: &Config,
        index: usize,
        ranges: &LayerRanges,
        values: impl Fn(Range<usize>) -> Vec<f32>,
        linear: impl Fn(&LinearSpec, LinearRanges) -> Linear,
    ) -> Self {
        // Another kind of layer does not compile until its operations are here.
        let LayerSpec { norm: Norm::RmsBefore, attention, feed_forward, query_key_norm, .. } =
            config.layers[index];
        let vector = |operand: Operand| values(ranges[operand].clone());
        // Part `part` of `parts` equal ones of an operation: with experts that of one of them.
        let linear_of = |spec: &LinearSpec, part: usize, parts: usize| {
            let tree = match (config.reduction, spec.sharding) {
                (Reduction::Chain, _) | (_, Sharding::Replicated) => TreeSum::None,
                (Reduction::Tree, Sharding::Inputs) => TreeSum::Inputs,
                (Reduction::Tree, Sharding::Outputs) => TreeSum::Outputs(spec.outputs.clone()),
            };
            let cut = |operand: Operand| {
                let Range { start, end } = ranges[operand].clone();
                let each = (end - start) / parts;
                start + part * each..start + (part + 1) * each
            };
            linear(spec, LinearRanges { weight: cut(spec.weight), bias: spec.bias.map(cut) }).with_tree(tree)
        };
        let linear = |operand: Operand| linear_of(&config.linear_spec(index, operand), 0, 1);
        let gated =
            |gate_up: Operand, down: Operand| GatedWeights { gate_up: linear(gate_up), down: linear(down) };
        let feed_forward = match feed_forward {
            FeedForward::SwiGlu => FeedForwardWeights::Gated(gated(Operand::GateUp, Operand::Down)),
            FeedForward::Experts(spec) => {
                let [gate_up, down] =
                    [Operand::GateUp, Operand::Down].map(|operand| config.linear_spec(index, operand));
                let expert = |expert: usize| GatedWeights {
                    gate_up: linear_of(&gate_up, expert, spec.count),
                    down: linear_of(&down, expert, spec.count),
                };
                FeedForwardWeights::Experts(ExpertWeights {
                    spec,
                    first_slot: config.slots_before(index),
                    router: linear(Operand::Router),
                    correction: vector(Operand::RouterCorrection),
                    experts: (0..spec.count).map(expert).collect(),
                    shared: (spec.shared_width > 0)
                        .then(|| Box::new(gated(Operand::SharedGateUp, Operand::SharedDown))),
                })
            }
        };
        Self {
            shape: config.head_shape(),
            rule: config.attention_rule(index),
            rotary: config.rotaries().iter().position(|rotary| attention.rotary == Some(*rotary)),
            eps: config.rms_norm_eps,
            attention_norm: vector(Operand::AttentionNorm),
            qkv: linear(Operand::Qkv),
            sinks: vector(Operand::Sinks),
            head_norm: match query_key_norm {
                QueryKeyNorm::None => None,
                QueryKeyNorm::PerHead | QueryKeyNorm::Whole => Some(vector(Operand::QueryKeyNorm)),
            },
            output: linear(Operand::Output),
            feed_forward_norm: vector(Operand::FeedForwardNorm),
            feed_forward,
            ranges: ranges.clone(),
        }
    }

    /// Forward on `x [T, d]` without activations; `attend` computes attention for prepared queries, keys and values, and the
    /// experts of the tokens may be `given`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        given: Option<GivenExperts<'_>>,
        attend: impl FnOnce(&Tensor) -> Result<Tensor>,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        Ok(self.forward_routed(x, angles, given, attend, pool)?.0)
    }

    /// The same, with what the feed-forward half computed up to its activation, which has the routes of the tokens.
    pub(super) fn forward_routed(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        given: Option<GivenExperts<'_>>,
        attend: impl FnOnce(&Tensor) -> Result<Tensor>,
        pool: &ThreadPool,
    ) -> Result<(Tensor, FeedForwardTrace)> {
        let AttentionTrace { middle, .. } = self.attention(x, angles, attend, pool)?;
        let trace = self.begin_feed_forward(&middle, given, pool)?;
        Ok((self.finish_feed_forward(&middle, &trace, pool)?, trace))
    }

    /// Forward of the attention half on `x [T, d]`.
    pub(super) fn attention(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        attend: impl FnOnce(&Tensor) -> Result<Tensor>,
        pool: &ThreadPool,
    ) -> Result<AttentionTrace> {
        let mut qkv = self.qkv.apply_values(&rms_norm(x, &self.attention_norm, self.eps, pool)?, pool)?;
        let width = self.shape.width();
        let raw = self.head_norm.is_some().then(|| matrix(qkv.clone(), width)).transpose()?;
        heads::prepare(&mut qkv, self.shape, self.norm_of_heads(), angles.of(self.rotary), pool);
        let prepared = matrix(qkv, width)?;
        let attended = attend(&prepared)?;
        let middle = self.output.add_to(x, &attended, pool)?;
        Ok(AttentionTrace { raw, prepared, attended, middle })
    }

    /// The feed-forward half up to its activation, for its input `middle [T, d]`.
    pub(super) fn begin_feed_forward(
        &self,
        middle: &Tensor,
        given: Option<GivenExperts<'_>>,
        pool: &ThreadPool,
    ) -> Result<FeedForwardTrace> {
        self.feed_forward.begin(&rms_norm(middle, &self.feed_forward_norm, self.eps, pool)?, given, pool)
    }

    /// `[T, d]` the residual stream after the feed-forward half.
    pub(super) fn finish_feed_forward(
        &self,
        middle: &Tensor,
        trace: &FeedForwardTrace,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        self.feed_forward.finish(middle, trace, pool)
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
        let normed = rms_norm(middle, &self.feed_forward_norm, self.eps, &alone)?;
        let computed;
        let trace = match trace {
            Some(kept) => kept,
            None => {
                computed = self.feed_forward.begin(&normed, given, &alone)?;
                &computed
            }
        };
        let (d_normed, operands) = self.feed_forward.backward(&normed, trace, g)?;
        let d_middle = rms_norm_backward(middle, &self.feed_forward_norm, self.eps, &d_normed, Some(g))?;
        Ok(FeedForwardReverse { d_middle, middle: middle.clone(), normed, operands, d_normed })
    }

    /// Backward of the attention half for the gradient `d_middle [T, d]` of its result. `attend_backward` is the backward of
    /// `attend`.
    pub(super) fn attention_backward(
        &self,
        input: &Tensor,
        trace: &AttentionTrace,
        angles: &LayerAngles,
        d_middle: &Tensor,
        attend_backward: impl FnOnce(&Tensor, &Tensor) -> Result<PackedReverse>,
    ) -> Result<AttentionReverse> {
        let normed = rms_norm(input, &self.attention_norm, self.eps, &ThreadPool::single())?;
        let d_attended = self.output.input_gradient(d_middle)?;
        let PackedReverse { d_qkv: d_prepared, d_sinks } = attend_backward(&trace.prepared, &d_attended)?;
        let d_sinks = match self.sinks.len() {
            0 => None,
            heads => Some(matrix(d_sinks, heads)?),
        };
        let kept = match &trace.raw {
            Some(_) => Some(matrix(d_prepared.clone(), self.shape.width())?),
            None => None,
        };
        let norm = self.norm_of_heads();
        let angles = angles.of(self.rotary);
        let d_qkv = heads::prepare_backward(trace.raw.as_ref(), self.shape, norm, angles, d_prepared)?;
        let d_normed = self.qkv.input_gradient(&d_qkv)?;
        let d_input = rms_norm_backward(input, &self.attention_norm, self.eps, &d_normed, Some(d_middle))?;
        let (input, d_middle) = (input.clone(), d_middle.clone());
        Ok(AttentionReverse { d_input, input, normed, d_prepared: kept, d_qkv, d_sinks, d_normed, d_middle })
    }

    /// Adds the weight gradients of the feed-forward half to the layer's `gradients`, or to those of its `factors`; `pieces` are
    /// in the order of tokens.
    pub(super) fn feed_forward_gradients(
        &self,
        pieces: &[FeedForwardReverse],
        gradients: &mut [f32],
        factors: Option<UnitFactors<'_>>,
        pool: &ThreadPool,
    ) -> Result<()> {
        let ranges = &self.ranges;
        let operands = [
            Operand::FeedForwardNorm,
            Operand::Router,
            Operand::RouterBias,
            Operand::GateUp,
            Operand::GateUpBias,
            Operand::Down,
            Operand::DownBias,
            Operand::SharedGateUp,
            Operand::SharedDown,
        ];
        let [norm, router, router_bias, gate_up, gate_up_bias, down, down_bias, shared_gate_up, shared_down] =
            carve(gradients, operands.map(|of| &ranges[of]), factors);
        let [norm, router_bias, gate_up_bias, down_bias] =
            [norm, router_bias, gate_up_bias, down_bias].map(WeightGradient::vector);
        let of_network = FeedForwardGradients {
            router,
            router_bias,
            gate_up,
            gate_up_bias,
            down,
            down_bias,
            shared_gate_up,
            shared_down,
        };
        let mut jobs = self.feed_forward.gradient_jobs(pieces, of_network, pool);
        // Only matrices have factors.
        if factors.is_none() {
            jobs.push(Box::new(|| {
                pieces
                    .iter()
                    .try_for_each(|p| rms_norm_weight_gradient(&p.middle, self.eps, &p.d_normed, norm))
            }));
        }
        pool.map(jobs, |job| job()).into_iter().collect()
    }

    /// Adds the weight gradients of the attention half to the layer's `gradients`, or to those of its `factors`; `parts` are in
    /// the order of tokens.
    pub(super) fn attention_gradients(
        &self,
        parts: &[ReversedAttention<'_>],
        gradients: &mut [f32],
        factors: Option<UnitFactors<'_>>,
        pool: &ThreadPool,
    ) -> Result<()> {
        let ranges = &self.ranges;
        let [norm, qkv, qkv_bias, head_norm, sinks, output, output_bias] = carve(
            gradients,
            [
                &ranges[Operand::AttentionNorm],
                &ranges[Operand::Qkv],
                &ranges[Operand::QkvBias],
                &ranges[Operand::QueryKeyNorm],
                &ranges[Operand::Sinks],
                &ranges[Operand::Output],
                &ranges[Operand::OutputBias],
            ],
            factors,
        );
        let [norm, qkv_bias, head_norm, sinks, output_bias] =
            [norm, qkv_bias, head_norm, sinks, output_bias].map(WeightGradient::vector);
        let mut jobs: Vec<GradientJob<'_>> = Vec::new();
        weight_jobs(&mut jobs, parts, qkv, |part| Some((&part.reverse.normed, &part.reverse.d_qkv)), pool);
        weight_jobs(
            &mut jobs,
            parts,
            output,
            |part| Some((&part.trace.attended, &part.reverse.d_middle)),
            pool,
        );
        if factors.is_some() {
            return pool.map(jobs, |job| job()).into_iter().collect();
        }
        jobs.push(Box::new(|| {
            for ReversedAttention { trace, reverse: r, angles } in parts {
                rms_norm_weight_gradient(&r.input, self.eps, &r.d_normed, norm)?;
                if !qkv_bias.is_empty() {
                    bias_gradient(&r.d_qkv, qkv_bias)?;
                }
                if let Some(d_sinks) = &r.d_sinks {
                    bias_gradient(d_sinks, sinks)?;
                }
                if !output_bias.is_empty() {
                    bias_gradient(&r.d_middle, output_bias)?;
                }
                if let (Some(raw), Some(g), Some(norm)) = (&trace.raw, &r.d_prepared, self.norm_of_heads()) {
                    heads::head_norm_gradient(raw, self.shape, norm, angles.of(self.rotary), g, head_norm)?;
                }
            }
            Ok(())
        }));
        pool.map(jobs, |job| job()).into_iter().collect()
    }

    fn norm_of_heads(&self) -> Option<HeadNormWeights<'_>> {
        let both = self.head_norm.as_ref()?;
        // Of the same width each if heads are normalised apart, and of their own otherwise.
        let apart = both.len() == 2 * self.shape.head_dim;
        let (query, key) = both.split_at(if apart { self.shape.head_dim } else { self.shape.query_width() });
        Some(HeadNormWeights { query, key, eps: self.eps })
    }
}

/// The gradient of one weight `[out, in]` over all `pieces`: a job per thread for a range of its rows, or a job for each pair of
/// factors. `operands` gives the input `[T, in]` and the gradient `[T, out]` of a piece, or nothing in a layer without the weight.
pub(super) fn weight_jobs<'a, P: Sync>(
    jobs: &mut Vec<GradientJob<'a>>,
    pieces: &'a [P],
    gradient: WeightGradient<'a>,
    operands: impl Fn(&P) -> Option<(&Tensor, &Tensor)> + Send + Sync + Copy + 'a,
    pool: &ThreadPool,
) {
    let Some(output) = pieces.first().and_then(operands).and_then(|(_, g)| g.dims().last().copied()) else {
        return;
    };
    let mut rest = match gradient {
        WeightGradient::Whole(gradient) => gradient,
        WeightGradient::Factors(all) => {
            for mut factors in all {
                jobs.push(Box::new(move || {
                    pieces.iter().filter_map(operands).try_for_each(|(x, g)| factors.add(x, g))
                }));
            }
            return;
        }
    };
    let input = rest.len() / output;
    for rows in row_ranges(output, pool.threads(), 8) {
        let (own, after) = rest.split_at_mut(rows.len() * input);
        rest = after;
        jobs.push(Box::new(move || {
            pieces.iter().filter_map(operands).try_for_each(|(x, g)| weight_gradient(x, g, rows.clone(), own))
        }));
    }
}
