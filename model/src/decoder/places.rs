//! Where the tensors of a layer lie among its values.

use std::ops::Range;

use crate::{Layout, Unit};

/// Where the weights of a layer lie among its values, and their gradients among its gradients.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    pub(crate) attention_norm: Range<usize>,
    /// Queries, keys and values one after the other, then their biases.
    pub(crate) qkv: Range<usize>,
    pub(crate) qkv_bias: Range<usize>,
    pub(crate) head_norm: Range<usize>,
    pub(crate) output: Range<usize>,
    pub(crate) output_bias: Range<usize>,
    pub(crate) feed_forward_norm: Range<usize>,
    /// Gate and up, one after the other.
    pub(crate) gate_up: Range<usize>,
    pub(crate) down: Range<usize>,
}

impl Places {
    /// Those of layer `index`.
    pub(crate) fn new(layout: &Layout, index: usize) -> Self {
        let start = layout.unit(Unit::Layer(index)).start;
        let range = |name: &str| {
            let spec = layout.spec(&format!("model.layers.{index}.{name}"));
            spec.map_or(0..0, |spec| spec.offset - start..spec.range().end - start)
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
