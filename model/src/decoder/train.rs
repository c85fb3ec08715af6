//! Whole sequences: packs, the forward that remembers and the backward that adds up gradients.
//!
//! Invariant: no padding. A pack is one stream of tokens with offsets; a sequence sees only itself.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::block::BlockTrace;
use super::{Decoder, gather};
use crate::Layout;
use crate::ops::head::{self, Prediction, PredictionGradient, Target};
use crate::ops::heads::{Angles, HeadShape};
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::{attention, embedding, matrix, values};

/// Sequences one after the other, without padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pack {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    offsets: Vec<usize>,
}

/// Why a sequence cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// There is nothing in it.
    #[error("a sequence of a pack needs at least one token")]
    Empty,
}

impl Pack {
    /// A pack without sequences.
    #[must_use]
    pub fn new() -> Self {
        Self { offsets: vec![0], ..Self::default() }
    }

    /// Appends a sequence and returns the row of its first token.
    ///
    /// # Errors
    /// If the sequence is empty.
    pub fn push(&mut self, sequence: &[u32]) -> std::result::Result<usize, PackError> {
        if sequence.is_empty() {
            return Err(PackError::Empty);
        }
        let start = self.token_ids.len();
        self.token_ids.extend_from_slice(sequence);
        self.positions.extend(0..sequence.len() as u32);
        self.offsets.push(self.token_ids.len());
        Ok(start)
    }

    /// `[T]` tokens of all sequences.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// `[T]` position of each token in its sequence.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// `[S + 1]` where the sequences begin, then the number of tokens.
    #[must_use]
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    pub(super) fn attend(&self, qkv: &Tensor, shape: HeadShape) -> Result<Tensor> {
        attention::packed(qkv, &self.offsets, shape)
    }
}

/// What a forward computed on the way, for its backward.
#[derive(Debug)]
pub struct Trace {
    angles: Angles,
    blocks: Vec<BlockTrace>,
    /// Rows of the pack that predict something.
    rows: Vec<usize>,
    /// `[rows, d]` before and after the final norm.
    picked: Tensor,
    normed: Tensor,
}

/// Gradients of all weights as one flat buffer, laid out as the parameters are.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    layout: Arc<Layout>,
    values: Vec<f32>,
}

impl Gradients {
    /// No gradient yet.
    #[must_use]
    pub fn zeros(layout: &Arc<Layout>) -> Self {
        Self { layout: Arc::clone(layout), values: vec![0.0; layout.len()] }
    }

    /// All values in canonical order.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The same, to scale or clip.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Gradient of the tensor of this Hugging Face name, if the model has it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        self.layout.spec(name).map(|spec| &self.values[spec.range()])
    }

    /// Adds another rank's gradients.
    ///
    /// # Panics
    /// If they are of another model.
    pub fn add(&mut self, other: &Self) {
        assert_eq!(self.values.len(), other.values.len(), "gradients of one model are added");
        self.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += b);
    }
}

impl Decoder {
    /// Runs the pack and predicts `targets`, each from the hidden state at its row of the pack.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    ///
    /// # Panics
    /// If there are not as many rows as targets.
    pub fn forward(
        &self,
        pack: &Pack,
        rows: &[usize],
        targets: &[Target<'_>],
    ) -> Result<(Vec<Prediction>, Trace)> {
        assert_eq!(rows.len(), targets.len(), "every target is predicted from a row");
        let angles = Angles::new(pack.positions(), &self.inv_freq);
        let embedded = self.embed(pack.token_ids())?;
        let mut blocks: Vec<BlockTrace> = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let x = blocks.last().map_or(&embedded, BlockTrace::output);
            blocks.push(block.forward(x, &angles, |qkv| pack.attend(qkv, self.shape))?);
        }
        let last = blocks.last().map_or(&embedded, BlockTrace::output);
        let picked = gather(last, rows)?;
        let normed = rms_norm(&picked, &self.final_norm, self.config.rms_norm_eps)?;
        let predictions = head::predict(&normed, &self.head, targets)?;
        Ok((predictions, Trace { angles, blocks, rows: rows.to_vec(), picked, normed }))
    }

    /// Adds to `gradients` those of `sum(prediction_gradients * predictions)`, for the forward that left `trace`.
    ///
    /// # Errors
    /// If the trace is of another pack.
    ///
    /// # Panics
    /// If the decoder was not packed for training.
    pub fn backward(
        &self,
        pack: &Pack,
        mut trace: Trace,
        targets: &[Target<'_>],
        prediction_gradients: &[PredictionGradient],
        gradients: &mut Gradients,
    ) -> Result<()> {
        let g = gradients.values_mut();
        let head_gradient = &mut g[self.layout.head()];
        let d_normed =
            head::predict_backward(&trace.normed, &self.head, targets, prediction_gradients, head_gradient)?;
        let norm_place =
            self.layout.spec("model.norm.weight").map(crate::ParameterSpec::range).unwrap_or_default();
        let eps = self.config.rms_norm_eps;
        let d_picked =
            rms_norm_backward(&trace.picked, &self.final_norm, eps, &d_normed, &mut g[norm_place])?;
        let mut d = scatter(&d_picked, &trace.rows, pack.token_ids().len())?;
        for block in self.blocks.iter().rev() {
            // The trace of a layer is freed as soon as the layer is reversed.
            let Some(layer) = trace.blocks.pop() else { break };
            let attend_backward =
                |qkv: &Tensor, d: &Tensor| attention::packed_backward(qkv, pack.offsets(), self.shape, d);
            d = block.backward(&layer, &trace.angles, &d, attend_backward, g)?;
        }
        embedding::embed_backward(pack.token_ids(), &d, &mut g[..self.embedding.len()])
    }
}

/// `[tokens, d]` with `g [rows, d]` added at `rows`, zero elsewhere.
fn scatter(g: &Tensor, rows: &[usize], tokens: usize) -> Result<Tensor> {
    let (_, width) = g.dims2()?;
    let mut out = vec![0.0; tokens * width];
    for (row, g) in rows.iter().zip(values(g)?.chunks_exact(width)) {
        out[row * width..(row + 1) * width].iter_mut().zip(g).for_each(|(out, g)| *out += g);
    }
    matrix(out, width)
}
