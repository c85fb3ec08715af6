//! The arithmetic and the memory traffic that a piece of work needs at least.
//!
//! # Operations
//! A multiply-add counts two.
//! - A token costs `2 N` in a forward, `N` the weights of the matrices it goes through: those of all layers, and the
//!   head where its logits are wanted.
//! - Attention costs a token that sees `T` tokens `2 * 2 * T * d` per layer, `d` all query heads together: half for
//!   the scores, half for the mix of the values.
//! - A backward costs twice its forward, so training is three forwards. What is computed a second time to save memory
//!   does not count.
//!
//! # Traffic
//! What has to come from memory if no cache outlives one pass of the network: every matrix once per pass, in training
//! three times with its gradient written and read; keys and values once per token that sees them; and for AdamW four
//! reads and three writes of every number. What layers hand to each other is left out. A model that fits a cache can
//! therefore be above 100 % of the bandwidth.
//!
//! Invariant: a function of shapes alone.

use std::ops::{Add, Mul};

use model::{Config, Layout, Quantization};

/// Bytes of an f32.
const F32: f64 = 4.0;

/// Operations and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes from or to memory.
    pub bytes: f64,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { flops: self.flops + other.flops, bytes: self.bytes + other.bytes }
    }
}

impl Mul<f64> for Cost {
    type Output = Self;

    fn mul(self, factor: f64) -> Self {
        Self { flops: self.flops * factor, bytes: self.bytes * factor }
    }
}

/// The sizes of a model that determine its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// All weights.
    pub parameters: f64,
    /// Weights of the matrices of all layers.
    matrices: f64,
    /// Weights of the head.
    head: f64,
    /// Layers with attention.
    layers: f64,
    /// Operations of a token in all layers with a recurrence, beside their matrices.
    recurrence: f64,
    /// Values of the recurrent state of a sequence.
    state: f64,
    /// Width of all query heads.
    query_width: f64,
    /// Width of all key heads.
    kv_width: f64,
    /// Bytes of a number.
    number: f64,
}

/// Completions as the engine samples them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingWork {
    /// Prompts, each read once.
    pub prompts: f64,
    /// Tokens of each.
    pub prompt: f64,
    /// Completions of all prompts together.
    pub completions: f64,
    /// Tokens of each; the last is sampled and never read.
    pub new: f64,
    /// Passes of the network.
    pub passes: f64,
    /// Number format of the packed matrices of the layers; the head is always f32.
    pub quantization: Quantization,
}

impl Shape {
    /// The shape of a model.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let query_width = config.num_heads * config.head_dim;
        let kv_width = config.num_kv_heads * config.head_dim;
        Self {
            parameters: Layout::new(config).len() as f64,
            matrices: config.layer_multiply_adds() as f64,
            head: (config.vocab_size * config.hidden_size) as f64,
            layers: config.attention_layers() as f64,
            // A state is decayed, read, corrected and read again.
            recurrence: 7.0 * config.state_len() as f64,
            state: config.state_len() as f64,
            query_width: query_width as f64,
            kv_width: kv_width as f64,
            number: F32,
        }
    }

    /// The memory with numbers of so many bytes; those of an optimizer are always f32.
    #[must_use]
    pub fn stored_in(self, bytes: usize) -> Self {
        Self { number: bytes as f64, ..self }
    }

    /// Sampling with a cache.
    #[must_use]
    pub fn sampling(&self, work: &SamplingWork) -> Cost {
        let SamplingWork { prompts, prompt, completions, new, passes, quantization } = *work;
        let (weight, head) = self.weight_bytes(quantization);
        let seen_by_prompt = prompt * (prompt + 1.0) / 2.0;
        let decoded = (new - 1.0).max(0.0);
        let seen_by_completion = decoded * prompt + decoded * (decoded + 1.0) / 2.0;
        let tokens = prompts * prompt + completions * decoded;
        let logits = prompts + completions * decoded;
        let seen = prompts * seen_by_prompt + completions * seen_by_completion;
        Cost {
            flops: (2.0 * self.matrices + self.recurrence) * tokens
                + 2.0 * self.head * logits
                + self.attention(seen),
            bytes: passes * (weight * self.matrices + head * self.head)
                + self.number * 2.0 * self.layers * self.kv_width * completions * seen_by_completion
                // A state is read and written for every token.
                + F32 * 2.0 * self.state * completions * decoded,
        }
    }

    /// Least traffic of a pass that decodes one token of every sequence, when these have `positions` positions in the cache together,
    /// bytes.
    #[must_use]
    pub fn decoding_bytes(&self, positions: f64, quantization: Quantization) -> f64 {
        let (weight, head) = self.weight_bytes(quantization);
        weight * self.matrices
            + head * self.head
            + self.number * 2.0 * self.layers * self.kv_width * positions
    }

    /// Bytes of a weight of the layers, and of one of the head.
    fn weight_bytes(&self, quantization: Quantization) -> (f64, f64) {
        match quantization {
            Quantization::None => (self.number, self.number),
            Quantization::Int8 => (1.0, self.number),
            Quantization::Bf16 => (2.0, 2.0),
        }
    }

    /// One optimizer step on sequences of which `lengths` tokens go through the network and `logits` tokens are
    /// trained on, in `passes` micro-batches.
    #[must_use]
    pub fn training(&self, lengths: impl IntoIterator<Item = f64>, logits: f64, passes: f64) -> Cost {
        let (mut tokens, mut seen) = (0.0, 0.0);
        for length in lengths {
            tokens += length;
            seen += length * (length + 1.0) / 2.0;
        }
        let forward = (2.0 * self.matrices + self.recurrence) * tokens
            + 2.0 * self.head * logits
            + self.attention(seen);
        // Read in the forward and in the backward; gradients are f32.
        let matrices = (2.0 * self.number + 2.0 * F32) * (self.matrices + self.head);
        Cost { flops: 3.0 * forward, bytes: passes * matrices + F32 * 7.0 * self.parameters }
    }

    /// Operations of attention when tokens see `seen` tokens in all.
    fn attention(&self, seen: f64) -> f64 {
        4.0 * self.layers * self.query_width * seen
    }
}

#[cfg(test)]
mod tests {
    use model::Sizes;

    use super::*;

    /// Two layers: queries and output `4 x 4`, keys and values `4 x 2`, three matrices `4 x 6`; a head of `10 x 4`.
    fn shape() -> Shape {
        Shape::new(&Config::fresh(&Sizes {
            vocab_size: 10,
            hidden_size: 4,
            intermediate_size: 6,
            num_layers: 2,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 16,
        }))
    }

    #[test]
    fn training_agrees_with_a_count_by_hand() {
        // Per token and layer 16 + 8 + 8 + 16 + 72 = 120 weights; head 40. One sequence of 3 tokens, 2 trained:
        // 3 * 2 * 240 + 2 * 2 * 40 + 2 layers * 4 * 4 * (1 + 2 + 3) = 1440 + 160 + 192 = 1792, three times.
        let cost = shape().training([3.0], 2.0, 1.0);
        assert_eq!(cost.flops, 3.0 * 1792.0);
        assert_eq!(cost.bytes, 4.0 * (4.0 * 280.0 + 7.0 * shape().parameters));
        let two = shape().training([3.0, 1.0], 3.0, 2.0);
        assert_eq!(two.flops - cost.flops, 3.0 * (480.0 + 80.0 + 32.0), "a second sequence sees only itself");
        let narrow = shape().stored_in(2).training([3.0], 2.0, 1.0);
        assert_eq!(cost.bytes - narrow.bytes, 2.0 * 2.0 * 280.0, "gradients and optimizer stay f32");
    }

    #[test]
    fn sampling_agrees_with_a_count_by_hand() {
        // A prompt of 2 tokens, 2 completions of 3: each reads 2 of its tokens, which see 3 and 4 tokens.
        let quantization = Quantization::None;
        let work =
            SamplingWork { prompts: 1.0, prompt: 2.0, completions: 2.0, new: 3.0, passes: 3.0, quantization };
        let cost = shape().sampling(&work);
        let (matrices, logits, seen) = (6.0 * 480.0, 5.0 * 80.0, 32.0 * (3.0 + 2.0 * 7.0));
        assert_eq!(cost.flops, matrices + logits + seen);
        // Three passes over 280 weights; a key and a value of width 2 in 2 layers for each of the 14 tokens seen.
        assert_eq!(cost.bytes, 4.0 * (3.0 * 280.0 + 2.0 * 2.0 * 2.0 * 14.0));
        assert_eq!(shape().stored_in(2).sampling(&work).bytes, cost.bytes / 2.0);
        let quantized = shape().sampling(&SamplingWork { quantization: Quantization::Int8, ..work });
        assert_eq!(cost.bytes - quantized.bytes, 3.0 * 3.0 * 240.0, "a byte for a weight of a layer");
    }
}
