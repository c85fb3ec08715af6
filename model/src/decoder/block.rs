//! One layer: attention and gated feed-forward, each behind a norm and added to the residual stream.
//!
//! Invariant: [`Block::backward`] is the exact vector-Jacobian product of [`Block::forward`]; it needs no other layer,
//! so that gradients can be handed on, and activations freed, one layer at a time.

use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::ops::heads::{self, Angles, HeadNorm, HeadShape};
use crate::ops::int8::MAX_INPUT;
use crate::ops::linear::Linear;
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::swiglu::{swiglu, swiglu_backward};
use crate::{Config, Layout, Parameters, Purpose, Quantization};

/// Weights of one layer, packed.
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

/// Where the weights of a layer lie in the flat buffers of parameters and gradients.
#[derive(Clone, Debug)]
struct Places {
    attention_norm: Range<usize>,
    /// Queries, keys and values one after the other, then their biases.
    qkv: Range<usize>,
    qkv_bias: Range<usize>,
    head_norm: Range<usize>,
    output: Range<usize>,
    output_bias: Range<usize>,
    feed_forward_norm: Range<usize>,
    /// Gate and up, one after the other.
    gate_up: Range<usize>,
    down: Range<usize>,
}

/// What a layer computed on the way, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct BlockTrace {
    input: Tensor,
    normed: Tensor,
    qkv: Tensor,
    prepared: Tensor,
    attended: Tensor,
    middle: Tensor,
    middle_normed: Tensor,
    gate_up: Tensor,
    activated: Tensor,
    output: Tensor,
}

impl BlockTrace {
    /// `[T, d]` the residual stream after the layer.
    pub(super) fn output(&self) -> &Tensor {
        &self.output
    }

    /// The same, giving up the rest.
    pub(super) fn into_output(self) -> Tensor {
        self.output
    }
}

impl Block {
    pub(super) fn new(
        config: &Config,
        parameters: &Parameters,
        index: usize,
        (purpose, quantization): (Purpose, Quantization),
    ) -> Self {
        let places = Places::new(parameters.layout(), index);
        let at = |range: &Range<usize>| &parameters.values()[range.clone()];
        let some = |range: &Range<usize>| (!range.is_empty()).then(|| at(range));
        let linear = |weight: &Range<usize>, input, bias: Option<&[f32]>| match quantization {
            Quantization::Int8 if input <= MAX_INPUT => Linear::int8(at(weight), input, bias),
            _ => Linear::new(at(weight), input, bias, purpose == Purpose::Training),
        };
        let hidden = config.hidden_size;
        let query_width = config.num_heads * config.head_dim;
        Self {
            shape: HeadShape {
                heads: config.num_heads,
                kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
            },
            eps: config.rms_norm_eps,
            attention_norm: at(&places.attention_norm).to_vec(),
            qkv: linear(&places.qkv, hidden, some(&places.qkv_bias)),
            head_norm: some(&places.head_norm).map(<[f32]>::to_vec),
            output: linear(&places.output, query_width, some(&places.output_bias)),
            feed_forward_norm: at(&places.feed_forward_norm).to_vec(),
            gate_up: linear(&places.gate_up, hidden, None),
            down: linear(&places.down, config.intermediate_size, None),
            places,
        }
    }

    /// Runs the layer on `x [T, d]`; `attend` turns prepared queries, keys and values into attention results.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        angles: &Angles,
        attend: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<BlockTrace> {
        let normed = rms_norm(x, &self.attention_norm, self.eps)?;
        let qkv = self.qkv.apply(&normed)?;
        let prepared = heads::prepare(&qkv, self.shape, self.norm_of_heads(), angles)?;
        let attended = attend(&prepared)?;
        let middle = self.output.add_to(x, &attended)?;
        let middle_normed = rms_norm(&middle, &self.feed_forward_norm, self.eps)?;
        let gate_up = self.gate_up.apply(&middle_normed)?;
        let activated = swiglu(&gate_up)?;
        let output = self.down.add_to(&middle, &activated)?;
        let input = x.clone();
        Ok(BlockTrace {
            input,
            normed,
            qkv,
            prepared,
            attended,
            middle,
            middle_normed,
            gate_up,
            activated,
            output,
        })
    }

    /// Gradient `[T, d]` of the layer's input for the gradient `g [T, d]` of its output; adds the gradients of the
    /// weights to the flat buffer `gradients`. `attend_backward` reverses what `attend` did.
    pub(super) fn backward(
        &self,
        trace: &BlockTrace,
        angles: &Angles,
        g: &Tensor,
        attend_backward: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
        gradients: &mut [f32],
    ) -> Result<Tensor> {
        let places = &self.places;
        let d_activated =
            self.down.backward(&trace.activated, g, &mut gradients[places.down.clone()], None)?;
        let d_gate_up = swiglu_backward(&trace.gate_up, &d_activated)?;
        let gate_up_gradient = &mut gradients[places.gate_up.clone()];
        let d_normed = self.gate_up.backward(&trace.middle_normed, &d_gate_up, gate_up_gradient, None)?;
        let norm_gradient = &mut gradients[places.feed_forward_norm.clone()];
        let through =
            rms_norm_backward(&trace.middle, &self.feed_forward_norm, self.eps, &d_normed, norm_gradient)?;
        let d_middle = (g + through)?;

        let (weight, bias) = adjacent(gradients, &places.output, &places.output_bias);
        let d_attended = self.output.backward(&trace.attended, &d_middle, weight, bias)?;
        let d_prepared = attend_backward(&trace.prepared, &d_attended)?;
        let norm = self.norm_of_heads().map(|norm| (norm, &mut gradients[places.head_norm.clone()]));
        let d_qkv = heads::prepare_backward(&trace.qkv, self.shape, norm, angles, &d_prepared)?;
        let (weight, bias) = adjacent(gradients, &places.qkv, &places.qkv_bias);
        let d_normed = self.qkv.backward(&trace.normed, &d_qkv, weight, bias)?;
        let norm_gradient = &mut gradients[places.attention_norm.clone()];
        let through =
            rms_norm_backward(&trace.input, &self.attention_norm, self.eps, &d_normed, norm_gradient)?;
        d_middle + through
    }

    fn norm_of_heads(&self) -> Option<HeadNorm<'_>> {
        let (query, key) = self.head_norm.as_ref()?.split_at(self.shape.head_dim);
        Some(HeadNorm { query, key, eps: self.eps })
    }
}

impl Places {
    fn new(layout: &Layout, index: usize) -> Self {
        let range = |name: &str| {
            layout
                .spec(&format!("model.layers.{index}.{name}"))
                .map(crate::ParameterSpec::range)
                .unwrap_or_default()
        };
        let span = |first: &str, last: &str| range(first).start..range(last).end;
        Self {
            attention_norm: range("input_layernorm.weight"),
            qkv: span("self_attn.q_proj.weight", "self_attn.v_proj.weight"),
            qkv_bias: span("self_attn.q_proj.bias", "self_attn.v_proj.bias"),
            head_norm: span("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
            output: range("self_attn.o_proj.weight"),
            output_bias: range("self_attn.o_proj.bias"),
            feed_forward_norm: range("post_attention_layernorm.weight"),
            gate_up: span("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down: range("mlp.down_proj.weight"),
        }
    }
}

/// A weight and the bias that directly follows it, if there is one.
fn adjacent<'a>(
    gradients: &'a mut [f32],
    weight: &Range<usize>,
    bias: &Range<usize>,
) -> (&'a mut [f32], Option<&'a mut [f32]>) {
    if bias.is_empty() {
        return (&mut gradients[weight.clone()], None);
    }
    assert_eq!(weight.end, bias.start, "a bias lies directly behind its weight");
    let (weight_gradient, bias_gradient) = gradients[weight.start..bias.end].split_at_mut(weight.len());
    (weight_gradient, Some(bias_gradient))
}
