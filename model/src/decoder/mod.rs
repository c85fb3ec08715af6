//! The network: one decoder for prefill, decode, training and scoring.
//!
//! [`Decoder`] is immutable: one policy version, its weights packed once. [`Decoder::forward`] runs a [`Pack`] of whole
//! sequences and keeps what the backward needs, [`Decoder::backward`] reverses it layer by layer, [`Decoder::step`]
//! continues sequences whose keys and values are in a [`KvCache`]. All three run the same blocks.
//!
//! # Layout
//! - `block`: one layer, forward and backward
//! - `train`: packs and gradients
//! - `decode`: the paged cache and the decode step

mod block;
mod decode;
mod train;

use std::sync::Arc;

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::ops::head::{self, Prediction, Target};
use crate::ops::heads::{Angles, HeadShape};
use crate::ops::linear::Linear;
use crate::ops::norm::rms_norm;
use crate::ops::{embedding, matrix, values};
use crate::{Config, Parameters};
use block::Block;
pub use decode::{KvCache, StepRow};
pub use train::{Gradients, Pack, PackError, Trace};

/// What a decoder is packed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Sampling and scoring: half the memory.
    Inference,
    /// Also the gradients.
    Training,
}

/// How coarsely the weights are represented that a sampler computes with.
///
/// Quantised, it samples from a policy close to the one that is trained, and says so: its log-probabilities are those of
/// what it samples from. Embedding, norms, attention and head are f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantization {
    /// Not at all: f32, the same bits as in training.
    #[default]
    None,
    /// The matrices of the layers in 8 bits, with a scale per output; activations in 8 bits with a range per token.
    Int8,
}

/// One policy version, ready to compute.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: Config,
    shape: HeadShape,
    inv_freq: Vec<f32>,
    /// `[V, d]`
    embedding: Vec<f32>,
    blocks: Vec<Block>,
    final_norm: Vec<f32>,
    head: Linear,
    layout: Arc<crate::Layout>,
}

impl Decoder {
    /// Packs `parameters`.
    ///
    /// # Panics
    /// If the parameters are not those of `config`.
    #[must_use]
    pub fn new(config: &Config, parameters: &Parameters, purpose: Purpose) -> Self {
        Self::pack(config, parameters, purpose, Quantization::None)
    }

    /// Packs `parameters` to sample from them, or from an approximation of them.
    ///
    /// # Panics
    /// If the parameters are not those of `config`.
    #[must_use]
    pub fn sampler(config: &Config, parameters: &Parameters, quantization: Quantization) -> Self {
        Self::pack(config, parameters, Purpose::Inference, quantization)
    }

    fn pack(config: &Config, parameters: &Parameters, purpose: Purpose, quantization: Quantization) -> Self {
        let layout = parameters.layout();
        let all = parameters.values();
        let trainable = purpose == Purpose::Training;
        Self {
            config: config.clone(),
            shape: HeadShape {
                heads: config.num_heads,
                kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
            },
            inv_freq: config.inv_freq(),
            embedding: parameters.get("model.embed_tokens.weight").to_vec(),
            blocks: (0..config.num_layers)
                .map(|i| Block::new(config, parameters, i, (purpose, quantization)))
                .collect(),
            final_norm: parameters.get("model.norm.weight").to_vec(),
            head: Linear::new(&all[layout.head()], config.hidden_size, None, trainable),
            layout: Arc::clone(layout),
        }
    }

    /// The configuration that the decoder was made for.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Predictions of `targets`, each from the hidden state at its row of the pack.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    pub fn score(&self, pack: &Pack, rows: &[usize], targets: &[Target<'_>]) -> Result<Vec<Prediction>> {
        let angles = Angles::new(pack.positions(), &self.inv_freq);
        let mut x = self.embed(pack.token_ids())?;
        for block in &self.blocks {
            x = block.forward(&x, &angles, |qkv| pack.attend(qkv, self.shape))?.into_output();
        }
        head::predict(&self.normed_rows(&x, rows)?, &self.head, targets)
    }

    /// Logits `[T, V]` of every token of the pack: for tests and small inputs, they are all in memory.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    pub fn logits(&self, pack: &Pack) -> Result<Tensor> {
        let angles = Angles::new(pack.positions(), &self.inv_freq);
        let mut x = self.embed(pack.token_ids())?;
        for block in &self.blocks {
            x = block.forward(&x, &angles, |qkv| pack.attend(qkv, self.shape))?.into_output();
        }
        self.head.apply(&rms_norm(&x, &self.final_norm, self.config.rms_norm_eps)?)
    }

    fn embed(&self, token_ids: &[u32]) -> Result<Tensor> {
        embedding::embed(token_ids, &self.embedding, self.config.hidden_size)
    }

    /// `[rows, d]` hidden states after the final norm.
    fn normed_rows(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
        rms_norm(&gather(x, rows)?, &self.final_norm, self.config.rms_norm_eps)
    }
}

/// `rows` of `x [T, d]`, in their order.
fn gather(x: &Tensor, rows: &[usize]) -> Result<Tensor> {
    let (_, width) = x.dims2()?;
    let x = values(x)?;
    matrix(rows.iter().flat_map(|row| &x[row * width..(row + 1) * width]).copied().collect(), width)
}
