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
    FeedForwardWeights, GatedActivation, GatedWeights,
};
use crate::layer::{FeedForward, LayerRanges, LayerSpec, LinearSpec, Norm, Operand, QueryKeyNorm, Sharding};
use crate::ops::attention::AttentionRule;
use crate::ops::heads::{self, HeadNormWeights, HeadShape};
use crate::ops::int8::MAX_INPUT;
use crate::ops::linear::{FlatValues, Linear, TreeSum, bias_gradient, weight_gradient};
use crate::ops::norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
use crate::ops::residual::{add_multiple, multiple};
use crate::ops::{matrix, row_ranges};
use crate::{Config, Layout, Parameters, Quantization, Reduction, ThreadPool, Unit};

/// Weights of one layer.
#[derive(Clone, Debug)]
pub(super) struct TransformerBlock {
    shape: HeadShape,
    rule: AttentionRule,
    /// Number of its rotary embedding among [`Config::rotaries`].
    rotary: Option<usize>,
    eps: f32,
    /// Empty if the layer has none, as the other norms.
    attention_norm: Vec<f32>,
    qkv: Linear,
    /// Weights of the norms of queries and keys, if the layer has them.
    head_norm: Option<Vec<f32>>,
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
    d_normed: Tensor,
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

impl FeedForwardPiece for FeedForwardReverse {
    fn normed(&self) -> &Tensor {
        &self.normed
    }

    fn operands(&self) -> &FeedForwardOperands {
        &self.operands
    }
}

/// The computation of one range of weight gradients, independent of the others.
pub(super) type GradientJob<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;

impl TransformerBlock {
    /// What its attention computes.
    pub(super) fn rule(&self) -> AttentionRule {
        self.rule
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
        let linear = |spec: &LinearSpec, weight: Range<usize>| {
            let weight = &layer[weight];
            let bias = spec.bias.map(|bias| &layer[ranges[bias].clone()]);
            match quantization {
                // Another route is another network.
                _ if spec.weight == Operand::Router => Linear::packed(weight, spec.input, bias),
                Quantization::Int8 if spec.input <= MAX_INPUT => Linear::int8(weight, spec.input, bias),
                Quantization::Bf16 => Linear::bf16(weight, spec.input, bias),
                Quantization::None | Quantization::Int8 => Linear::packed(weight, spec.input, bias),
            }
        };
        Self::new(config, index, ranges, layer, linear)
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
        let linear = |spec: &LinearSpec, weight: Range<usize>| {
            let bias = spec.bias.map_or(0..0, |bias| moved(&ranges[bias]));
            Linear::flat(flat, moved(&weight), spec.input, &bias)
        };
        Self::new(config, index, ranges, &flat.values()[values.clone()], linear)
    }

    /// Layer `index`, of `values`, whose matrices `linear` makes of a range of them.
    fn new(
        config: &Config,
        index: usize,
        ranges: &LayerRanges,
        values: &[f32],
        linear: impl Fn(&LinearSpec, Range<usize>) -> Linear,
    ) -> Self {
        // Another kind of layer does not compile until its operations are here.
        let LayerSpec {
            norm: Norm::RmsBefore | Norm::RmsAfter | Norm::RmsAround,
            attention,
            feed_forward,
            query_key_norm,
            residual_multiplier,
            qkv_bias: _,
            output_bias: _,
        } = config.layers[index];
        let norm_weights = |operand: Operand| {
            values[ranges[operand].clone()]
                .iter()
                .map(|weight| weight + config.norm_offset)
                .collect::<Vec<_>>()
        };
        let linear_of = |operand: Operand, weight: Range<usize>| {
            let spec = config.linear_spec(index, operand);
            let tree = match (config.reduction, spec.sharding) {
                (Reduction::Chain, _) | (_, Sharding::Replicated) => TreeSum::None,
                (Reduction::Tree, Sharding::Inputs) => TreeSum::Inputs,
                (Reduction::Tree, Sharding::Outputs) => TreeSum::Outputs(spec.outputs.clone()),
            };
            linear(&spec, weight).with_tree(tree)
        };
        let linear = |operand: Operand| linear_of(operand, ranges[operand].clone());
        let feed_forward = match feed_forward {
            FeedForward::SwiGlu | FeedForward::GeGlu => FeedForwardWeights::Gated(GatedWeights {
                activation: match feed_forward {
                    FeedForward::GeGlu => GatedActivation::Gelu,
                    FeedForward::SwiGlu | FeedForward::Experts(_) => GatedActivation::Silu,
                },
                gate_up: linear(Operand::GateUp),
                down: linear(Operand::Down),
            }),
            FeedForward::Experts(spec) => {
                let part = |operand: Operand, expert: usize| {
                    let Range { start, end } = ranges[operand].clone();
                    let each = (end - start) / spec.count;
                    linear_of(operand, start + expert * each..start + (expert + 1) * each)
                };
                let expert = |expert: usize| GatedWeights {
                    activation: GatedActivation::Silu,
                    gate_up: part(Operand::GateUp, expert),
                    down: part(Operand::Down, expert),
                };
                let (router, experts) = (linear(Operand::Router), (0..spec.count).map(expert).collect());
                FeedForwardWeights::Experts(ExpertWeights { spec, router, experts })
            }
        };
        Self {
            shape: config.head_shape(),
            rule: config.attention_rule(index),
            rotary: config.rotaries().iter().position(|rotary| attention.rotary == Some(*rotary)),
            eps: config.rms_norm_eps,
            attention_norm: norm_weights(Operand::AttentionNorm),
            qkv: linear(Operand::Qkv),
            head_norm: match query_key_norm {
                QueryKeyNorm::None => None,
                QueryKeyNorm::PerHead | QueryKeyNorm::Whole => Some(norm_weights(Operand::QueryKeyNorm)),
            },
            output: linear(Operand::Output),
            attention_after: norm_weights(Operand::AttentionAfterNorm),
            feed_forward_norm: norm_weights(Operand::FeedForwardNorm),
            feed_forward_after: norm_weights(Operand::FeedForwardAfterNorm),
            multiplier: residual_multiplier,
            feed_forward,
            ranges: ranges.clone(),
        }
    }

    /// Forward on `x [T, d]` without activations; `attend` computes attention for prepared queries, keys and values.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        attend: impl FnOnce(&Tensor) -> Result<Tensor>,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        let AttentionTrace { middle, .. } = self.attention(x, angles, attend, pool)?;
        self.finish_feed_forward(&middle, &self.begin_feed_forward(&middle, pool)?, pool)
    }

    /// Forward of the attention half on `x [T, d]`.
    pub(super) fn attention(
        &self,
        x: &Tensor,
        angles: &LayerAngles,
        attend: impl FnOnce(&Tensor) -> Result<Tensor>,
        pool: &ThreadPool,
    ) -> Result<AttentionTrace> {
        let mut qkv = self.qkv.apply_values(&self.normed(x, &self.attention_norm, pool)?, pool)?;
        let width = self.shape.width();
        let raw = self.head_norm.is_some().then(|| matrix(qkv.clone(), width)).transpose()?;
        heads::prepare(&mut qkv, self.shape, self.norm_of_heads(), angles.of(self.rotary), pool);
        let prepared = matrix(qkv, width)?;
        let attended = attend(&prepared)?;
        let middle = if self.adds_plainly() {
            self.output.add_to(x, &attended, pool)?
        } else {
            self.join(x, &self.output.apply(&attended, pool)?, &self.attention_after, pool)?
        };
        Ok(AttentionTrace { raw, prepared, attended, middle })
    }

    /// The feed-forward half up to its activation, for its input `middle [T, d]`.
    pub(super) fn begin_feed_forward(&self, middle: &Tensor, pool: &ThreadPool) -> Result<FeedForwardTrace> {
        self.feed_forward.begin(&self.normed(middle, &self.feed_forward_norm, pool)?, pool)
    }

    /// `[T, d]` the residual stream after the feed-forward half.
    pub(super) fn finish_feed_forward(
        &self,
        middle: &Tensor,
        trace: &FeedForwardTrace,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        if self.adds_plainly() {
            return self.feed_forward.finish(middle, trace, pool);
        }
        let result = self.feed_forward.finish(&middle.zeros_like()?, trace, pool)?;
        self.join(middle, &result, &self.feed_forward_after, pool)
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

    /// Backward of the feed-forward half for the gradient `g [T, d]` of its result. The trace is computed again if `None`.
    pub(super) fn feed_forward_backward(
        &self,
        middle: &Tensor,
        trace: Option<&FeedForwardTrace>,
        g: &Tensor,
    ) -> Result<FeedForwardReverse> {
        let alone = ThreadPool::single();
        let normed = self.normed(middle, &self.feed_forward_norm, &alone)?;
        let computed;
        let trace = match trace {
            Some(kept) => kept,
            None => {
                computed = self.feed_forward.begin(&normed, &alone)?;
                &computed
            }
        };
        let again = || self.feed_forward.finish(&middle.zeros_like()?, trace, &alone);
        let branch = self.join_backward(&self.feed_forward_after, g, again)?;
        let (d_normed, operands) = self.feed_forward.backward(&normed, trace, &branch.d_result)?;
        let d_middle = self.normed_backward(middle, &self.feed_forward_norm, &d_normed, g)?;
        Ok(FeedForwardReverse { d_middle, middle: middle.clone(), normed, operands, d_normed, branch })
    }

    /// Backward of the attention half for the gradient `d_middle [T, d]` of its result. `attend_backward` is the backward of
    /// `attend`.
    pub(super) fn attention_backward(
        &self,
        input: &Tensor,
        trace: &AttentionTrace,
        angles: &LayerAngles,
        d_middle: &Tensor,
        attend_backward: impl FnOnce(&Tensor, &Tensor) -> Result<Vec<f32>>,
    ) -> Result<AttentionReverse> {
        let alone = ThreadPool::single();
        let normed = self.normed(input, &self.attention_norm, &alone)?;
        let again = || self.output.apply(&trace.attended, &alone);
        let branch = self.join_backward(&self.attention_after, d_middle, again)?;
        let d_attended = self.output.input_gradient(&branch.d_result)?;
        let d_prepared = attend_backward(&trace.prepared, &d_attended)?;
        let kept = match &trace.raw {
            Some(_) => Some(matrix(d_prepared.clone(), self.shape.width())?),
            None => None,
        };
        let norm = self.norm_of_heads();
        let d_qkv = heads::prepare_backward(
            trace.raw.as_ref(),
            self.shape,
            norm,
            angles.of(self.rotary),
            d_prepared,
        )?;
        let d_normed = self.qkv.input_gradient(&d_qkv)?;
        let d_input = self.normed_backward(input, &self.attention_norm, &d_normed, d_middle)?;
        let input = input.clone();
        Ok(AttentionReverse { d_input, input, normed, d_prepared: kept, d_qkv, d_normed, branch })
    }

    /// Adds the weight gradients of the feed-forward half to the layer's `gradients`; `pieces` are in the order of tokens.
    pub(super) fn feed_forward_gradients(
        &self,
        pieces: &[FeedForwardReverse],
        gradients: &mut [f32],
        pool: &ThreadPool,
    ) -> Result<()> {
        let ranges = &self.ranges;
        let [norm, router, gate_up, down, after] = carve(
            gradients,
            [
                Operand::FeedForwardNorm,
                Operand::Router,
                Operand::GateUp,
                Operand::Down,
                Operand::FeedForwardAfterNorm,
            ]
            .map(|of| &ranges[of]),
        );
        let of_network = FeedForwardGradients { router, gate_up, down };
        let mut jobs = self.feed_forward.gradient_jobs(pieces, of_network, pool);
        jobs.push(Box::new(|| {
            pieces.iter().try_for_each(|p| {
                p.branch.add_norm_gradient(self.eps, after)?;
                norm_gradient(&p.middle, self.eps, &p.d_normed, norm)
            })
        }));
        pool.map(jobs, |job| job()).into_iter().collect()
    }

    /// Adds the weight gradients of the attention half to the layer's `gradients`; `parts` are in the order of tokens.
    pub(super) fn attention_gradients(
        &self,
        parts: &[ReversedAttention<'_>],
        gradients: &mut [f32],
        pool: &ThreadPool,
    ) -> Result<()> {
        let ranges = &self.ranges;
        let [norm, qkv, qkv_bias, head_norm, output, output_bias, after] = carve(
            gradients,
            [
                &ranges[Operand::AttentionNorm],
                &ranges[Operand::Qkv],
                &ranges[Operand::QkvBias],
                &ranges[Operand::QueryKeyNorm],
                &ranges[Operand::Output],
                &ranges[Operand::OutputBias],
                &ranges[Operand::AttentionAfterNorm],
            ],
        );
        let mut jobs: Vec<GradientJob<'_>> = Vec::new();
        weight_jobs(&mut jobs, parts, qkv, |part| (&part.reverse.normed, &part.reverse.d_qkv), pool);
        weight_jobs(
            &mut jobs,
            parts,
            output,
            |part| (&part.trace.attended, &part.reverse.branch.d_result),
            pool,
        );
        jobs.push(Box::new(|| {
            for ReversedAttention { trace, reverse: r, angles } in parts {
                norm_gradient(&r.input, self.eps, &r.d_normed, norm)?;
                r.branch.add_norm_gradient(self.eps, after)?;
                if !qkv_bias.is_empty() {
                    bias_gradient(&r.d_qkv, qkv_bias)?;
                }
                if !output_bias.is_empty() {
                    bias_gradient(&r.branch.d_result, output_bias)?;
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

impl BranchReverse {
    /// Adds the gradient of the weight of the result's norm, if it is normalised.
    fn add_norm_gradient(&self, eps: f32, gradient: &mut [f32]) -> Result<()> {
        let Some([result, g]) = &self.normed else { return Ok(()) };
        rms_norm_weight_gradient(result, eps, g, gradient)
    }
}

/// Adds the gradient of the weight of a norm to `gradient`, which is empty if there is no norm.
fn norm_gradient(x: &Tensor, eps: f32, g: &Tensor, gradient: &mut [f32]) -> Result<()> {
    if gradient.is_empty() { Ok(()) } else { rms_norm_weight_gradient(x, eps, g, gradient) }
}

/// Cuts ascending, disjoint ranges out of a flat buffer.
fn carve<'a, const N: usize>(mut buffer: &'a mut [f32], ranges: [&Range<usize>; N]) -> [&'a mut [f32]; N] {
    let mut passed = 0;
    ranges.map(|range| {
        if range.is_empty() {
            return &mut [][..];
        }
        let (_, rest) = std::mem::take(&mut buffer).split_at_mut(range.start - passed);
        let (cut, rest) = rest.split_at_mut(range.len());
        (buffer, passed) = (rest, range.end);
        cut
    })
}

/// The gradient of one weight `[out, in]`, as one job per thread for a range of its rows over all `pieces`. `operands`
/// gives the input `[T, in]` and the gradient `[T, out]` of a piece.
pub(super) fn weight_jobs<'a, P: Sync>(
    jobs: &mut Vec<GradientJob<'a>>,
    pieces: &'a [P],
    gradient: &'a mut [f32],
    operands: impl Fn(&P) -> (&Tensor, &Tensor) + Send + Sync + Copy + 'a,
    pool: &ThreadPool,
) {
    let Some(output) = pieces.first().and_then(|piece| operands(piece).1.dims().last().copied()) else {
        return;
    };
    let input = gradient.len() / output;
    let mut rest = gradient;
    for rows in row_ranges(output, pool.threads(), 8) {
        let (own, after) = rest.split_at_mut(rows.len() * input);
        rest = after;
        jobs.push(Box::new(move || {
            pieces.iter().try_for_each(|piece| {
                let (x, g) = operands(piece);
                weight_gradient(x, g, rows.clone(), own)
            })
        }));
    }
}
