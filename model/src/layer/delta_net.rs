//! A gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) as data: its sizes, and the tensors that it is made of.
//!
//! Invariant: as in `layer`: everything else reads these, and knows no family.

use super::{LayerSpec, LayerTensor, Operand, QueryKeyNorm, Sharding};
use crate::Config;
use crate::file_tensors::{FilePlace, FusedTensor};
use crate::ops::delta_rule::{self, CHUNK};

/// The sizes of a gated DeltaNet, a recurrence in place of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNetSpec {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, each with a state of its own; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Tokens that the convolution before the recurrence sees, the last of which is its own.
    pub taps: usize,
    /// How files have its projections.
    pub files: DeltaNetFiles,
}

/// How files have the projections of a DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaNetFiles {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` (Qwen3.5).
    Apart,
    /// `in_proj_qkvz` and `in_proj_ba`, both by key head (Qwen3-Next).
    ByKeyHead,
}

impl DeltaNetSpec {
    /// Width of all queries, and of all keys.
    pub(crate) fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all values, and of the result.
    pub(crate) fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub(crate) fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Values of a token that the recurrence reads: the channels, and two gates of every value head.
    pub(crate) fn input_width(&self) -> usize {
        self.channels() + 2 * self.value_heads
    }

    /// Values of the inputs before the next token that the convolution sees.
    pub(crate) fn tail_len(&self) -> usize {
        (self.taps - 1) * self.channels()
    }

    /// Values of the states of all heads.
    pub(crate) fn heads_len(&self) -> usize {
        self.value_width() * self.key_dim
    }

    /// Values of what a sequence keeps of the tokens before the next one.
    pub(crate) fn state_len(&self) -> usize {
        self.tail_len() + delta_rule::state_len(*self)
    }

    /// Values of a backward beside its activations: of each token, and in all.
    pub(super) fn scratch(&self) -> [usize; 2] {
        let state = self.key_dim * self.value_dim;
        // What the convolution sees, its sums, heads and activations, and the gradients of them; of one head all that the backward of
        // its chunks reads, with the state before each.
        let of_head = 2 * self.key_dim + 4 * self.value_dim + 3 * CHUNK + 1 + state.div_ceil(CHUNK);
        [
            7 * self.channels() + 6 * self.value_heads + of_head,
            2 * state + 3 * self.heads_len() + self.state_len(),
        ]
    }

    /// Value heads of a key head.
    pub(crate) fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }
}

/// Appends the tensors of a DeltaNet without the norms of its block.
pub(super) fn push_tensors(tensors: &mut Vec<LayerTensor>, spec: &DeltaNetSpec, hidden: usize) {
    let (keys, values) = (spec.key_width(), spec.value_width());
    let mut push = |name: &'static str, shape: &[usize], operand, sharding| {
        tensors.push(LayerTensor::new(name, shape, operand, sharding));
    };
    push("linear_attn.in_proj_q.weight", &[keys, hidden], Operand::Qkv, Sharding::Outputs);
    push("linear_attn.in_proj_k.weight", &[keys, hidden], Operand::Qkv, Sharding::Outputs);
    push("linear_attn.in_proj_v.weight", &[values, hidden], Operand::Qkv, Sharding::Outputs);
    push("linear_attn.in_proj_z.weight", &[values, hidden], Operand::Qkv, Sharding::Outputs);
    for name in ["linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"] {
        push(name, &[spec.value_heads, hidden], Operand::DeltaGates, Sharding::Replicated);
    }
    let kernel = [spec.channels(), 1, spec.taps];
    push("linear_attn.conv1d.weight", &kernel, Operand::Convolution, Sharding::Replicated);
    push("linear_attn.A_log", &[spec.value_heads], Operand::DecayRate, Sharding::Replicated);
    push("linear_attn.dt_bias", &[spec.value_heads], Operand::TimeBias, Sharding::Replicated);
    push("linear_attn.norm.weight", &[spec.value_dim], Operand::ResultNorm, Sharding::Replicated);
    push("linear_attn.out_proj.weight", &[hidden, values], Operand::Output, Sharding::Inputs);
    for tensor in tensors.iter_mut() {
        tensor.fused = spec.fused(&tensor.name, hidden).or(tensor.fused.take());
    }
}

impl DeltaNetSpec {
    /// The tensor of files that the projection `name` is a part of.
    fn fused(&self, name: &str, hidden: usize) -> Option<FusedTensor> {
        let (keys, values) = (self.key_width(), self.value_width());
        let name = name.strip_prefix("linear_attn.in_proj_")?.strip_suffix(".weight")?;
        let of = |name, rows: usize, place| FusedTensor { name, shape: vec![rows, hidden], place };
        // Outputs of a key head, and where they begin among all of it.
        let by_head = |name, each: usize, start: usize, all: usize| {
            let rows = FilePlace::rows(start, hidden);
            of(name, all * self.key_heads, rows.in_blocks(each, all * hidden))
        };
        let (key, value) = (self.key_dim, self.group() * self.value_dim);
        let (qkvz, ba) = ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight");
        match (self.files, name) {
            (DeltaNetFiles::Apart, "q" | "k" | "v") => {
                let start = ["q", "k", "v"].iter().position(|part| *part == name)? * keys;
                let place = FilePlace::rows(start, hidden);
                Some(of("linear_attn.in_proj_qkv.weight", 2 * keys + values, place))
            }
            (DeltaNetFiles::Apart, _) => None,
            (DeltaNetFiles::ByKeyHead, "q") => Some(by_head(qkvz, key, 0, 2 * (key + value))),
            (DeltaNetFiles::ByKeyHead, "k") => Some(by_head(qkvz, key, key, 2 * (key + value))),
            (DeltaNetFiles::ByKeyHead, "v") => Some(by_head(qkvz, value, 2 * key, 2 * (key + value))),
            (DeltaNetFiles::ByKeyHead, "z") => Some(by_head(qkvz, value, 2 * key + value, 2 * (key + value))),
            (DeltaNetFiles::ByKeyHead, "b") => Some(by_head(ba, self.group(), 0, 2 * self.group())),
            (DeltaNetFiles::ByKeyHead, _) => Some(by_head(ba, self.group(), self.group(), 2 * self.group())),
        }
    }
}

impl Config {
    /// Number of layers with attention: those that have keys and values.
    #[must_use]
    pub fn attention_layers(&self) -> usize {
        self.layers.iter().filter(|layer| layer.delta_net.is_none()).count()
    }

    /// The recurrence of the first layer that has one.
    #[must_use]
    pub fn delta_net(&self) -> Option<DeltaNetSpec> {
        self.layers.iter().find_map(|layer| layer.delta_net)
    }

    /// Values of what a sequence keeps in all layers with a recurrence, whatever its length; 0 without such layers.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.layers.iter().filter_map(|layer| layer.delta_net).map(|of| of.state_len()).sum()
    }

    /// Values that the backward of the first layer with a recurrence has beside its activations: of each token, and in all.
    #[must_use]
    pub fn recurrence_scratch(&self) -> [usize; 2] {
        self.delta_net().map_or([0; 2], |spec| spec.scratch())
    }

    /// Values of a token that a layer keeps between its projections, the wider of attention and recurrence: before the mixing, and
    /// after it.
    #[must_use]
    pub fn mixer_widths(&self) -> [usize; 2] {
        let shape = self.head_shape();
        let of = |layer: &LayerSpec| match layer.delta_net {
            // With the gate of the result; before and after it.
            Some(spec) => [spec.input_width() + spec.value_width(), 2 * spec.value_width()],
            None => {
                let raw = if layer.query_key_norm == QueryKeyNorm::None { 0 } else { shape.width() };
                let (gate, results) = if layer.attention.gated { (shape.query_width(), 2) } else { (0, 1) };
                [raw + shape.width() + gate, results * shape.query_width()]
            }
        };
        let widest = |a: [usize; 2], b: [usize; 2]| if a[0] + a[1] < b[0] + b[1] { b } else { a };
        self.layers.iter().map(of).fold([0; 2], widest)
    }
}
