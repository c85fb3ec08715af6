//! One layer: attention and gated feed-forward, each behind a norm and added to the residual stream.
//!
//! Invariant: the backward of each half is its exact vector-Jacobian product; it needs no other layer, so that gradients
//! can be handed on, and activations freed, one layer at a time. Gradients of weights are taken apart from those of
//! inputs: over all tokens in their order, one range of rows of a weight per thread, so that their bits do not depend on
//! how tokens were shared among threads.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::places::Places;
use crate::ops::heads::{self, Angles, HeadNorm, HeadShape};
use crate::ops::int8::MAX_INPUT;
use crate::ops::linear::{Flat, Linear, TreeSum, bias_gradient, weight_gradient};
use crate::ops::norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
use crate::ops::swiglu::{swiglu, swiglu_backward};
use crate::ops::{matrix, row_ranges};
use crate::{Config, Layout, Parameters, Quantization, Reduction, ThreadPool, Unit};

/// Weights of one layer.
#[derive(Clone, Debug)]
pub(super) struct Block {
    shape: HeadShape,
    eps: f32,
    attention_norm: Vec<f32>,
    qkv: Linear,
    /// `[2, head_dim]` scales of queries and keys, where the architecture has them.
    head_norm: Option<Vec<f32>>,
    output: Linear,
    feed_forward_norm: Vec<f32>,
    gate_up: Linear,
    down: Linear,
    places: Places,
}

/// What the attention half computed on the way, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct AttentionTrace {
    /// `[T, width]` the projection before norm and rotation, where heads are normalised.
    raw: Option<Tensor>,
    /// `[T, width]`
    prepared: Tensor,
    /// `[T, heads * head_dim]`
    attended: Tensor,
    /// `[T, d]` the residual stream after this half.
    pub(super) middle: Tensor,
}

/// What came back through the attention half: the gradients of its inputs, and what those of its weights are made of.
#[derive(Debug)]
pub(super) struct AttentionReverse {
    /// `[T, d]` gradient of the layer's input.
    pub(super) d_input: Tensor,
    input: Tensor,
    normed: Tensor,
    d_prepared: Option<Tensor>,
    d_qkv: Tensor,
    d_normed: Tensor,
    d_middle: Tensor,
}

/// What came back through the feed-forward half.
#[derive(Debug)]
pub(super) struct FeedForwardReverse {
    /// `[T, d]` gradient of the residual stream between the halves.
    pub(super) d_middle: Tensor,
    middle: Tensor,
    normed: Tensor,
    activated: Tensor,
    d_gate_up: Tensor,
    d_normed: Tensor,
    g: Tensor,
}

/// A gradient of weights that can be taken by itself.
type Job<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;

impl Block {
    /// Memory of its linear layers, bytes.
    pub(super) fn bytes(&self) -> usize {
        [&self.qkv, &self.output, &self.gate_up, &self.down].map(Linear::bytes).iter().sum()
    }

    /// A layer to sample with.
    pub(super) fn sampler(
        config: &Config,
        parameters: &Parameters,
        index: usize,
        quantization: Quantization,
    ) -> Self {
        let layer = &parameters.values()[parameters.layout().unit(Unit::Layer(index))];
        let at = |range: &Range<usize>| &layer[range.clone()];
        let linear = |weight: &Range<usize>, input, bias: &Range<usize>| {
            let bias = (!bias.is_empty()).then(|| at(bias));
            match quantization {
                Quantization::Int8 if input <= MAX_INPUT => Linear::int8(at(weight), input, bias),
                _ => Linear::packed(at(weight), input, bias),
            }
        };
        Self::new(config, (parameters.layout(), index), layer, linear)
    }

    /// A layer to train, of the values of the whole model.
    pub(super) fn trainable(config: &Config, parameters: &Arc<Parameters>, index: usize) -> Self {
        let place = parameters.layout().unit(Unit::Layer(index));
        Self::flat(config, (parameters.layout(), index), &Flat::Model(Arc::clone(parameters)), place.start)
    }

    /// A layer to train, of values of its own.
    pub(super) fn of_unit(
        config: &Config,
        (layout, index): (&Layout, usize),
        values: &Arc<Vec<f32>>,
    ) -> Result<Self> {
        let (expected, found) = (layout.unit(Unit::Layer(index)).len(), values.len());
        if expected != found {
            candle_core::bail!("layer {index} has {expected} values, {found} came");
        }
        Ok(Self::flat(config, (layout, index), &Flat::Unit(Arc::clone(values)), 0))
    }

    /// A layer to train whose first value is number `start` of `flat`.
    fn flat(config: &Config, (layout, index): (&Layout, usize), flat: &Flat, start: usize) -> Self {
        let moved = |range: &Range<usize>| match range.is_empty() {
            true => 0..0,
            false => start + range.start..start + range.end,
        };
        let linear = |weight: &Range<usize>, input, bias: &Range<usize>| {
            Linear::flat(flat, moved(weight), input, &moved(bias))
        };
        let values = &flat.values()[start..start + layout.unit(Unit::Layer(index)).len()];
        Self::new(config, (layout, index), values, linear)
    }

    fn new(
        config: &Config,
        (layout, index): (&Layout, usize),
        values: &[f32],
        linear: impl Fn(&Range<usize>, usize, &Range<usize>) -> Linear,
    ) -> Self {
        let places = Places::new(layout, index);
        let at = |range: &Range<usize>| values[range.clone()].to_vec();
        let hidden = config.hidden_size;
        let shape = HeadShape::of(config);
        let (queries, keys, inner) = (shape.query_width(), shape.kv_width(), config.intermediate_size);
        let tree = |sum| if config.reduction == Reduction::Tree { sum } else { TreeSum::None };
        Self {
            shape,
            eps: config.rms_norm_eps,
            attention_norm: at(&places.attention_norm),
            qkv: linear(&places.qkv, hidden, &places.qkv_bias)
                .with_tree(tree(TreeSum::Outputs(vec![queries, keys, keys]))),
            head_norm: (!places.head_norm.is_empty()).then(|| at(&places.head_norm)),
            output: linear(&places.output, queries, &places.output_bias).with_tree(tree(TreeSum::Inputs)),
            feed_forward_norm: at(&places.feed_forward_norm),
            gate_up: linear(&places.gate_up, hidden, &(0..0))
                .with_tree(tree(TreeSum::Outputs(vec![inner, inner]))),
            down: linear(&places.down, inner, &(0..0)).with_tree(tree(TreeSum::Inputs)),
            places,
        }
    }

    /// Runs the layer on `x [T, d]` and keeps nothing; `attend` turns prepared queries, keys and values into attention
    /// results.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        angles: &Angles,
        attend: impl FnOnce(&Tensor) -> Result<Tensor>,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        let AttentionTrace { middle, .. } = self.attention(x, angles, attend, pool)?;
        self.feed_forward(&middle, &self.gate_up(&middle, pool)?, pool)
    }

    /// The first half on `x [T, d]`.
    pub(super) fn attention(
        &self,
        x: &Tensor,
        angles: &Angles,
        attend: impl FnOnce(&Tensor) -> Result<Tensor>,
        pool: &ThreadPool,
    ) -> Result<AttentionTrace> {
        let mut qkv = self.qkv.apply_values(&rms_norm(x, &self.attention_norm, self.eps)?, pool)?;
        let width = self.shape.width();
        let raw = self.head_norm.is_some().then(|| matrix(qkv.clone(), width)).transpose()?;
        heads::prepare(&mut qkv, self.shape, self.norm_of_heads(), angles);
        let prepared = matrix(qkv, width)?;
        let attended = attend(&prepared)?;
        let middle = self.output.add_to(x, &attended, pool)?;
        Ok(AttentionTrace { raw, prepared, attended, middle })
    }

    /// `[T, 2 m]` gate and up of the second half, for its input `middle [T, d]`.
    pub(super) fn gate_up(&self, middle: &Tensor, pool: &ThreadPool) -> Result<Tensor> {
        self.gate_up.apply(&rms_norm(middle, &self.feed_forward_norm, self.eps)?, pool)
    }

    /// `[T, d]` the residual stream after the second half.
    pub(super) fn feed_forward(
        &self,
        middle: &Tensor,
        gate_up: &Tensor,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        self.down.add_to(middle, &swiglu(gate_up, pool)?, pool)
    }

    /// Reverses the second half for the gradient `g [T, d]` of its result. `gate_up` is computed again if it was not kept.
    pub(super) fn feed_forward_backward(
        &self,
        middle: &Tensor,
        gate_up: Option<&Tensor>,
        g: &Tensor,
    ) -> Result<FeedForwardReverse> {
        let alone = ThreadPool::single();
        let normed = rms_norm(middle, &self.feed_forward_norm, self.eps)?;
        let again = if gate_up.is_none() { Some(self.gate_up.apply(&normed, &alone)?) } else { None };
        let Some(gate_up) = gate_up.or(again.as_ref()) else { unreachable!("one of the two is there") };
        let activated = swiglu(gate_up, &alone)?;
        let d_gate_up = swiglu_backward(gate_up, &self.down.input_gradient(g)?)?;
        let d_normed = self.gate_up.input_gradient(&d_gate_up)?;
        let d_middle = rms_norm_backward(middle, &self.feed_forward_norm, self.eps, &d_normed, Some(g))?;
        let (middle, g) = (middle.clone(), g.clone());
        Ok(FeedForwardReverse { d_middle, middle, normed, activated, d_gate_up, d_normed, g })
    }

    /// Reverses the first half for the gradient `d_middle [T, d]` of its result. `attend_backward` reverses what `attend`
    /// did.
    pub(super) fn attention_backward(
        &self,
        input: &Tensor,
        trace: &AttentionTrace,
        angles: &Angles,
        d_middle: &Tensor,
        attend_backward: impl FnOnce(&Tensor, &Tensor) -> Result<Vec<f32>>,
    ) -> Result<AttentionReverse> {
        let normed = rms_norm(input, &self.attention_norm, self.eps)?;
        let d_prepared = attend_backward(&trace.prepared, &self.output.input_gradient(d_middle)?)?;
        let kept = match &trace.raw {
            Some(_) => Some(matrix(d_prepared.clone(), self.shape.width())?),
            None => None,
        };
        let norm = self.norm_of_heads();
        let d_qkv = heads::prepare_backward(trace.raw.as_ref(), self.shape, norm, angles, d_prepared)?;
        let d_normed = self.qkv.input_gradient(&d_qkv)?;
        let d_input = rms_norm_backward(input, &self.attention_norm, self.eps, &d_normed, Some(d_middle))?;
        let (input, d_middle) = (input.clone(), d_middle.clone());
        Ok(AttentionReverse { d_input, input, normed, d_prepared: kept, d_qkv, d_normed, d_middle })
    }

    /// Adds the gradients of the second half's weights to `gradients`, which are those of the layer; `pieces` are in the order of their
    /// tokens.
    pub(super) fn feed_forward_gradients(
        &self,
        pieces: &[FeedForwardReverse],
        gradients: &mut [f32],
        pool: &ThreadPool,
    ) -> Result<()> {
        let places = &self.places;
        let [norm, gate_up, down] =
            carve(gradients, [&places.feed_forward_norm, &places.gate_up, &places.down]);
        let mut jobs: Vec<Job<'_>> = Vec::new();
        weight_jobs(&mut jobs, pieces, gate_up, |p| (&p.normed, &p.d_gate_up), pool);
        weight_jobs(&mut jobs, pieces, down, |p| (&p.activated, &p.g), pool);
        jobs.push(Box::new(|| {
            pieces.iter().try_for_each(|p| rms_norm_weight_gradient(&p.middle, self.eps, &p.d_normed, norm))
        }));
        pool.map(jobs, |job| job()).into_iter().collect()
    }

    /// Adds the gradients of the first half's weights to `gradients`, which are those of the layer, for `parts` in the order of their
    /// tokens.
    pub(super) fn attention_gradients(
        &self,
        parts: &[(&AttentionTrace, AttentionReverse, &Angles)],
        gradients: &mut [f32],
        pool: &ThreadPool,
    ) -> Result<()> {
        let places = &self.places;
        let [norm, qkv, qkv_bias, head_norm, output, output_bias] = carve(
            gradients,
            [
                &places.attention_norm,
                &places.qkv,
                &places.qkv_bias,
                &places.head_norm,
                &places.output,
                &places.output_bias,
            ],
        );
        let mut jobs: Vec<Job<'_>> = Vec::new();
        weight_jobs(&mut jobs, parts, qkv, |(_, r, _)| (&r.normed, &r.d_qkv), pool);
        weight_jobs(&mut jobs, parts, output, |(trace, r, _)| (&trace.attended, &r.d_middle), pool);
        jobs.push(Box::new(|| {
            for (trace, r, angles) in parts {
                rms_norm_weight_gradient(&r.input, self.eps, &r.d_normed, norm)?;
                if !qkv_bias.is_empty() {
                    bias_gradient(&r.d_qkv, qkv_bias)?;
                }
                if !output_bias.is_empty() {
                    bias_gradient(&r.d_middle, output_bias)?;
                }
                if let (Some(raw), Some(g)) = (&trace.raw, &r.d_prepared) {
                    heads::head_norm_gradient(raw, self.shape, self.eps, angles, g, head_norm)?;
                }
            }
            Ok(())
        }));
        pool.map(jobs, |job| job()).into_iter().collect()
    }

    fn norm_of_heads(&self) -> Option<HeadNorm<'_>> {
        let (query, key) = self.head_norm.as_ref()?.split_at(self.shape.head_dim);
        Some(HeadNorm { query, key, eps: self.eps })
    }
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

/// The gradient of one weight `[out, in]`, as one job for each thread: a range of its rows over all `pieces`, whose
/// inputs `[T, in]` and gradients `[T, out]` `operands` names.
fn weight_jobs<'a, P: Sync>(
    jobs: &mut Vec<Job<'a>>,
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
