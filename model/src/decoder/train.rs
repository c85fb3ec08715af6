//! Passes over whole sequences: the forward with its activations, and the backward that accumulates gradients.
//!
//! There is one walk over the layers, [`PackPass`], whatever the layers come from and however a pass is divided ([`PassForm`]).
//!
//! Invariant: neither the number of threads nor activation recomputation changes a bit of any result.

use candle_core::{Result, Tensor};

use super::block::TransformerBlock;
use super::pack::{Pack, PackPart};
use super::parts::{PartTrace, PartsPass};
use super::sections::SectionedPass;
use super::{Decoder, GradientSink, LayerSource, gather};
use crate::ops::head::{Prediction, SampleSlopes, Target, TrainedTargets};
use crate::ops::norm::rms_norm;
use crate::ops::{matrix, values};
use crate::{ThreadPool, Unit};

/// Activation recomputation: what the backward computes again instead of keeping it from the forward (Chen et al. 2016, arXiv
/// 1604.06174). The bits of results do not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// None but norms and activation functions: all products are kept.
    #[default]
    None,
    /// Per layer: only the input of a layer is kept. A third more compute.
    Block,
    /// Per layer, and the feed-forward block for 256 tokens at a time, as StreamBP does (arXiv 2506.03077).
    Sequence,
}

/// Where the layers of a pass come from.
pub enum PassLayers<'a> {
    /// Those of the decoder.
    Own,
    /// Those that a source supplies.
    Source(&'a mut dyn LayerSource),
}

impl std::fmt::Debug for PassLayers<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Own => "Own",
            Self::Source(_) => "Source",
        })
    }
}

/// What a forward keeps of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// Nothing: there is no backward.
    Nothing,
    /// The input, from which the backward computes the rest again.
    Inputs,
    /// All that the backward needs.
    Activations,
}

/// How a pass over a pack is divided among threads and ranks. A residual stream is that of the parts of this rank, `[T, d]` each.
pub(super) trait PassForm {
    /// The parts of this rank, which follow one another.
    fn parts(&self) -> &[PackPart<'_>];

    /// The activations of all parts before the first layer, of the residual stream of each in `inputs`, or of its embedded tokens.
    fn begin(&self, inputs: Vec<Option<Tensor>>) -> Result<Vec<PartTrace>>;

    /// Runs the next layers, `blocks`, of all parts.
    fn advance(&self, blocks: &[TransformerBlock], traces: &mut [PartTrace], keep: Keep) -> Result<()>;

    /// Predictions of `targets [n]`, each from the residual stream `outputs` after the last layer at its row of `rows [n]` of the
    /// pack.
    fn predict(&self, outputs: &[&Tensor], rows: &[usize], targets: &[Target<'_>])
    -> Result<Vec<Prediction>>;

    /// Forward and backward of the final norm and the head. Returns the gradient of the residual stream.
    fn reverse_head(
        &self,
        outputs: &[&Tensor],
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<Tensor>>;

    /// Backward of one layer. Frees its activations, and turns the gradient `d` of its output into that of its input.
    fn reverse_layer(
        &self,
        index: usize,
        block: &TransformerBlock,
        traces: &mut [PartTrace],
        d: Vec<Tensor>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<Tensor>>;

    /// Backward of the embedding lookup for the gradient `d` of the embedded tokens.
    fn reverse_embedding(&self, d: &[Tensor], gradients: &mut dyn GradientSink) -> Result<()>;
}

/// A pass over a pack: what the forward leaves to the backward.
///
/// A decoder of some layers, those of a stage of a pipeline, takes and returns residual streams `[rows, d]` of the rows that this rank
/// computes ([`PackPass::rows`]).
pub struct PackPass<'a> {
    decoder: &'a Decoder,
    form: Box<dyn PassForm + 'a>,
    traces: Vec<PartTrace>,
}

impl std::fmt::Debug for PackPass<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackPass").field("rows", &self.rows()).finish_non_exhaustive()
    }
}

impl Decoder {
    /// Predictions of `targets [n]`, each from the hidden state at its row of `rows [n]` of the pack.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    ///
    /// # Panics
    /// If the numbers of rows and targets differ.
    pub fn score(
        &self,
        pack: &Pack,
        rows: &[usize],
        targets: &[Target<'_>],
        pool: &ThreadPool,
    ) -> Result<Vec<Prediction>> {
        let mut pass = self.pass(pack, pool);
        pass.forward(&mut PassLayers::Own, None, Keep::Nothing)?;
        pass.predict(None, rows, targets)
    }

    /// The same, with layers from `source`.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, or the source fails.
    ///
    /// # Panics
    /// If the numbers of rows and targets differ.
    pub fn score_through(
        &self,
        source: &mut dyn LayerSource,
        pack: &Pack,
        rows: &[usize],
        targets: &[Target<'_>],
        pool: &ThreadPool,
    ) -> Result<Vec<Prediction>> {
        let mut pass = self.pass(pack, pool);
        pass.forward(&mut PassLayers::Source(source), None, Keep::Nothing)?;
        pass.predict(None, rows, targets)
    }

    /// Logits `[tokens, vocab_size]` of every token of the pack. All are in memory at once: for tests and small inputs.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    pub fn logits(&self, pack: &Pack) -> Result<Tensor> {
        let alone = ThreadPool::single();
        let mut pass = self.pass(pack, &alone);
        pass.forward(&mut PassLayers::Own, None, Keep::Nothing)?;
        let rows: Vec<usize> = (0..pack.token_ids().len()).collect();
        let all = gather(&pass.outputs(), &rows)?;
        self.head.apply(&rms_norm(&all, &self.final_norm, self.config.rms_norm_eps, &alone)?, &alone)
    }

    /// Forward and backward of a training step: predicts the targets, and adds the gradients of a loss to `gradients`, whose
    /// derivatives by the predictions of some consecutive samples `slopes` returns.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    ///
    /// # Panics
    /// If the decoder was packed to sample, or the numbers of rows and targets differ.
    pub fn train(
        &self,
        pack: &Pack,
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
        pool: &ThreadPool,
    ) -> Result<()> {
        self.train_with(&mut PassLayers::Own, pack, trained, slopes, gradients, pool)
    }

    /// The same, with layers from `source`.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, or the source fails.
    ///
    /// # Panics
    /// If the numbers of rows and targets differ.
    pub fn train_through(
        &self,
        source: &mut dyn LayerSource,
        pack: &Pack,
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
        pool: &ThreadPool,
    ) -> Result<()> {
        self.train_with(&mut PassLayers::Source(source), pack, trained, slopes, gradients, pool)
    }

    fn train_with(
        &self,
        layers: &mut PassLayers<'_>,
        pack: &Pack,
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
        pool: &ThreadPool,
    ) -> Result<()> {
        let mut pass = self.pass(pack, pool);
        pass.forward(layers, None, self.keep())?;
        let d = pass.head_reversed(None, trained, slopes, gradients)?;
        pass.reverse(layers, d, gradients).map(drop)
    }

    /// A pass over `pack` on the threads of `pool`.
    #[must_use]
    pub fn pass<'a>(&'a self, pack: &'a Pack, pool: &'a ThreadPool) -> PackPass<'a> {
        // Without tokens a pass of parts makes no calls, and ranks that divide experts make those of every section.
        let by_section = self.divides_experts() && pack.token_ids().is_empty();
        let form: Box<dyn PassForm + 'a> = if self.ranks.sections > 1 || by_section {
            Box::new(SectionedPass::new(self, pack, pool))
        } else {
            Box::new(PartsPass::new(self, pack, pool))
        };
        PackPass { decoder: self, form, traces: Vec::new() }
    }

    /// What a forward of training keeps.
    fn keep(&self) -> Keep {
        if self.recompute == Recompute::None { Keep::Activations } else { Keep::Inputs }
    }

    pub(super) fn block_of(&self, source: &mut dyn LayerSource, index: usize) -> Result<TransformerBlock> {
        let mut block = TransformerBlock::of_unit(&self.config, &self.layout, index, &source.layer(index)?)?;
        self.ranks.tensor.iter().for_each(|tensor| block.share(tensor));
        self.ranks.expert.iter().for_each(|expert| block.divide_experts(expert));
        Ok(block)
    }
}

impl PackPass<'_> {
    /// Rows of the pack that this rank computes.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.form.parts().iter().map(|part| part.rows.len()).sum()
    }

    /// Runs the layers of the decoder, of the residual stream `input [rows, d]` before them, or of the embedded tokens, and keeps
    /// what the backward needs. Returns the residual stream after them, `[rows, d]`.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, or a source of layers fails.
    pub fn advance(
        &mut self,
        layers: &mut PassLayers<'_>,
        input: Option<&[f32]>,
        backward: bool,
    ) -> Result<Vec<f32>> {
        let keep = if backward { self.decoder.keep() } else { Keep::Nothing };
        self.forward(layers, input, keep)?;
        joined(&self.outputs())
    }

    /// Predictions of `targets [n]`, each from its row of `rows [n]` of the pack of the residual stream `outputs [rows, d]` after the last
    /// layer of the model; `None` for that after the last layer of this decoder.
    ///
    /// # Errors
    /// If a rank of the pass fails.
    ///
    /// # Panics
    /// If the numbers of rows and targets differ.
    pub fn predict(
        &self,
        outputs: Option<&[f32]>,
        rows: &[usize],
        targets: &[Target<'_>],
    ) -> Result<Vec<Prediction>> {
        assert_eq!(rows.len(), targets.len(), "one row per target");
        match outputs {
            None => self.form.predict(&self.outputs(), rows, targets),
            Some(outputs) => {
                let parts = self.divided(outputs)?;
                self.form.predict(&parts.iter().collect::<Vec<_>>(), rows, targets)
            }
        }
    }

    /// Forward and backward of the final norm and the head for the residual stream `outputs [rows, d]` after the last layer of the model.
    /// Returns its gradient `[rows, d]`. See [`Decoder::train`].
    ///
    /// # Errors
    /// If a rank of the pass fails.
    ///
    /// # Panics
    /// If the numbers of rows and targets differ.
    pub fn reverse_head(
        &self,
        outputs: &[f32],
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<f32>> {
        let d = self.head_reversed(Some(outputs), trained, slopes, gradients)?;
        joined(&d.iter().collect::<Vec<_>>())
    }

    /// Backward of the layers for the gradient `d [rows, d]` of the residual stream after them, and of the embedding if the decoder has
    /// one. Returns the gradient of the residual stream before them, `[rows, d]`.
    ///
    /// # Errors
    /// If a source of layers fails.
    pub fn backward(
        self,
        layers: &mut PassLayers<'_>,
        d: &[f32],
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<f32>> {
        let d = self.divided(d)?;
        let d = self.reverse(layers, d, gradients)?;
        joined(&d.iter().collect::<Vec<_>>())
    }

    fn forward(&mut self, layers: &mut PassLayers<'_>, input: Option<&[f32]>, keep: Keep) -> Result<()> {
        let Self { decoder, form, .. } = &*self;
        let inputs = match input {
            Some(input) => self.divided(input)?.into_iter().map(Some).collect(),
            None => form.parts().iter().map(|_| None).collect(),
        };
        let mut traces = form.begin(inputs)?;
        match layers {
            PassLayers::Own => form.advance(&decoder.blocks, &mut traces, keep)?,
            PassLayers::Source(source) => {
                source.begin();
                for index in 0..decoder.config.num_layers() {
                    let block = decoder.block_of(*source, index)?;
                    form.advance(std::slice::from_ref(&block), &mut traces, keep)?;
                }
            }
        }
        self.traces = traces;
        Ok(())
    }

    fn head_reversed(
        &self,
        outputs: Option<&[f32]>,
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<Tensor>> {
        assert_eq!(trained.rows.len(), trained.targets.len(), "one row per target");
        match outputs {
            None => self.form.reverse_head(&self.outputs(), trained, slopes, gradients),
            Some(outputs) => {
                let parts = self.divided(outputs)?;
                self.form.reverse_head(&parts.iter().collect::<Vec<_>>(), trained, slopes, gradients)
            }
        }
    }

    fn reverse(
        mut self,
        layers: &mut PassLayers<'_>,
        mut d: Vec<Tensor>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<Tensor>> {
        let Self { decoder, form, traces } = &mut self;
        if let PassLayers::Source(source) = layers {
            source.reverse();
        }
        for index in (0..decoder.config.num_layers()).rev() {
            d = match layers {
                PassLayers::Own => form.reverse_layer(index, &decoder.blocks[index], traces, d, gradients)?,
                PassLayers::Source(source) => {
                    let block = decoder.block_of(*source, index)?;
                    form.reverse_layer(index, &block, traces, d, gradients)?
                }
            };
        }
        // Of the stages of a pipeline the first alone has an embedding.
        if !decoder.layout.unit(Unit::Embedding).is_empty() {
            form.reverse_embedding(&d, gradients)?;
        }
        Ok(d)
    }

    fn outputs(&self) -> Vec<&Tensor> {
        self.traces.iter().map(|trace| &trace.output).collect()
    }

    /// The parts of a residual stream `[rows, d]`.
    fn divided(&self, x: &[f32]) -> Result<Vec<Tensor>> {
        let width = self.decoder.config.hidden_size;
        let expected = self.rows() * width;
        if x.len() != expected {
            candle_core::bail!(
                "a residual stream has {} values, and the rows of this rank {expected}",
                x.len()
            );
        }
        let mut rest = x;
        let part = |part: &PackPart<'_>| {
            let (own, others) = rest.split_at(part.rows.len() * width);
            rest = others;
            matrix(own.to_vec(), width)
        };
        self.form.parts().iter().map(part).collect()
    }
}

/// The values of a residual stream, from its parts.
fn joined(parts: &[&Tensor]) -> Result<Vec<f32>> {
    let mut all = Vec::new();
    for part in parts {
        all.extend_from_slice(&values(part)?);
    }
    Ok(all)
}
