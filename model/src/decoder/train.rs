//! Training passes over whole sequences: the forward with its activations, and the backward that accumulates gradients.
//!
//! Invariant: neither the number of threads nor activation recomputation changes a bit of any result.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::block::{AttentionTrace, FeedForwardReverse, ReversedAttention, TransformerBlock};
use super::feed_forward::{FeedForwardOperands, FeedForwardTrace};
use super::pack::{Pack, PackPart};
use super::sections::{PassLayers, SectionedPass};
use super::{Decoder, GradientSink, LayerAngles, LayerSource, RoutedTokens, gather, logit_factor};
use crate::low_rank::{UnitFactors, WeightGradient, carve};
use crate::ops::head::{self, HeadReverse, Prediction, SampleSlopes, SharedHead, Target, TrainedTargets};
use crate::ops::norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
use crate::ops::residual::multiple;
use crate::ops::{matrix, value, values};
use crate::{Head, ThreadPool, Unit};

/// The row of a token `id` among the `own` rows of the embedding, if it is one of these.
fn own_id(id: u32, own: &Range<usize>) -> Option<u32> {
    let id = (id as usize).checked_sub(own.start).filter(|id| *id < own.len())?;
    u32::try_from(id).ok()
}

/// Tokens of a feed-forward block that are in memory at a time with [`Recompute::Sequence`].
const CHUNK: usize = 256;

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

/// Activations of the rows of one thread.
#[derive(Debug)]
pub(super) struct PartTrace {
    pub(super) angles: LayerAngles,
    pub(super) layers: Vec<LayerTrace>,
    /// `[T, d]` the residual stream after the last layer.
    pub(super) output: Tensor,
}

#[derive(Debug)]
pub(super) struct LayerTrace {
    pub(super) input: Tensor,
    /// `None` if the backward computes them again.
    pub(super) kept: Option<KeptLayer>,
}

#[derive(Debug)]
pub(super) struct KeptLayer {
    pub(super) attention: AttentionTrace,
    pub(super) feed_forward: FeedForwardTrace,
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
        if self.ranks.context.is_some() || self.calls_by_section(pack) {
            return SectionedPass::new(self, pack, pool).score(&mut PassLayers::Own, rows, targets);
        }
        self.score_of(&self.outputs(pack, pool)?, rows, targets, pool)
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
        if self.ranks.context.is_some() || self.calls_by_section(pack) {
            return SectionedPass::new(self, pack, pool).score(
                &mut PassLayers::Source(source),
                rows,
                targets,
            );
        }
        let parts = pack.parts(self.ranks.parts(pool.threads()));
        let angles: Vec<LayerAngles> = parts.iter().map(|part| part.angles(self)).collect();
        let embed = |part: &PackPart<'_>| self.embed(part.token_ids(), part.rows.start, &[]);
        let mut outputs = parts.iter().map(embed).collect::<Result<Vec<_>>>()?;
        for index in 0..self.config.num_layers() {
            let block = self.block_of(source, index)?;
            let run = |((part, angles), x): ((&PackPart<'_>, &LayerAngles), Tensor)| {
                block.forward(
                    &x,
                    angles,
                    part.given(),
                    |prepared| part.mix(block.rule(), prepared),
                    &ThreadPool::single(),
                )
            };
            let all = parts.iter().zip(&angles).zip(outputs).collect();
            outputs = pool.map(all, run).into_iter().collect::<Result<_>>()?;
        }
        self.score_of(&outputs, rows, targets, pool)
    }

    /// Whether a pass makes the calls of ranks that divide experts by section: without tokens it makes no others.
    fn calls_by_section(&self, pack: &Pack) -> bool {
        self.divides_experts() && (self.ranks.sections > 1 || pack.token_ids().is_empty())
    }

    /// Predictions from the residual stream after the last layer, part by part.
    fn score_of(
        &self,
        outputs: &[Tensor],
        rows: &[usize],
        targets: &[Target<'_>],
        pool: &ThreadPool,
    ) -> Result<Vec<Prediction>> {
        assert_eq!(rows.len(), targets.len(), "one row per target");
        let picked = gather(&outputs.iter().collect::<Vec<_>>(), rows)?;
        let normed = rms_norm(&picked, &self.final_norm, self.config.rms_norm_eps, pool)?;
        self.predict(&normed, targets, pool)
    }

    /// Predictions from the hidden states `[targets, d]` after the final norm.
    pub(super) fn predict(
        &self,
        normed: &Tensor,
        targets: &[Target<'_>],
        pool: &ThreadPool,
    ) -> Result<Vec<Prediction>> {
        let mut predictions = match self.config.head {
            Head::Value => vec![Prediction::default(); targets.len()],
            Head::Language | Head::LanguageAndValue => {
                head::predict(normed, self.shared_head(), targets, pool)?
            }
        };
        value::predict(normed, &self.value_head, &mut predictions)?;
        Ok(predictions)
    }

    /// Logits `[tokens, vocab_size]` of every token of the pack. All are in memory at once: for tests and small inputs.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    pub fn logits(&self, pack: &Pack) -> Result<Tensor> {
        let outputs = self.outputs(pack, &ThreadPool::single())?;
        let rows: Vec<usize> = (0..pack.token_ids().len()).collect();
        let all = gather(&outputs.iter().collect::<Vec<_>>(), &rows)?;
        let alone = ThreadPool::single();
        self.head.apply(&rms_norm(&all, &self.final_norm, self.config.rms_norm_eps, &alone)?, &alone)
    }

    /// The head, with the ranks that share its vocabulary.
    fn shared_head(&self) -> SharedHead<'_> {
        SharedHead { weight: &self.head, tensor: self.ranks.tensor.as_ref() }
    }

    /// `[T, hidden]` residual stream after the last layer, of each part.
    fn outputs(&self, pack: &Pack, pool: &ThreadPool) -> Result<Vec<Tensor>> {
        let run = |part: PackPart<'_>| {
            let angles = part.angles(self);
            let alone = ThreadPool::single();
            let mut x = self.embed(part.token_ids(), part.rows.start, &[])?;
            for block in &self.blocks {
                x = block.forward(
                    &x,
                    &angles,
                    part.given(),
                    |prepared| part.mix(block.rule(), prepared),
                    &alone,
                )?;
            }
            Ok(x)
        };
        pool.map(pack.parts(self.ranks.parts(pool.threads())), run).into_iter().collect()
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
        if self.ranks.sections > 1 || self.calls_by_section(pack) {
            return SectionedPass::new(self, pack, pool).train(
                &mut PassLayers::Own,
                trained,
                slopes,
                gradients,
            );
        }
        let run = |part: PackPart<'_>| -> Result<PartTrace> {
            let mut trace = self.begin(&part)?;
            self.blocks.iter().try_for_each(|block| self.advance(block, &part, &mut trace))?;
            Ok(trace)
        };
        let parts =
            pool.map(pack.parts(self.ranks.parts(pool.threads())), run).into_iter().collect::<Result<_>>()?;
        let mut reversing = self.train_head(pack, parts, trained, slopes, gradients, pool)?;
        for (index, block) in self.blocks.iter().enumerate().rev() {
            self.reverse_layer(index, block, &mut reversing, gradients, pool)?;
        }
        self.reverse_embedding(&reversing, gradients)
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
        if self.ranks.sections > 1 || self.calls_by_section(pack) {
            let layers = &mut PassLayers::Source(source);
            return SectionedPass::new(self, pack, pool).train(layers, trained, slopes, gradients);
        }
        let parts = pack.parts(self.ranks.parts(pool.threads()));
        let begin = |part: &PackPart<'_>| self.begin(part);
        let mut traces: Vec<PartTrace> =
            pool.map(parts.iter().collect(), begin).into_iter().collect::<Result<_>>()?;
        for index in 0..self.config.num_layers() {
            let block = self.block_of(source, index)?;
            let advance = |(part, trace): (&PackPart<'_>, &mut PartTrace)| self.advance(&block, part, trace);
            pool.map(parts.iter().zip(&mut traces).collect(), advance).into_iter().collect::<Result<()>>()?;
        }
        let mut reversing = self.train_head(pack, traces, trained, slopes, gradients, pool)?;
        source.reverse();
        for index in (0..self.config.num_layers()).rev() {
            let block = self.block_of(source, index)?;
            self.reverse_layer(index, &block, &mut reversing, gradients, pool)?;
        }
        self.reverse_embedding(&reversing, gradients)
    }

    pub(super) fn begin(&self, part: &PackPart<'_>) -> Result<PartTrace> {
        let output = self.embed(part.token_ids(), part.rows.start, &[])?;
        let layers = Vec::with_capacity(self.config.num_layers());
        Ok(PartTrace { angles: part.angles(self), layers, output })
    }

    /// Runs the next layer of a part.
    fn advance(&self, block: &TransformerBlock, part: &PackPart<'_>, trace: &mut PartTrace) -> Result<()> {
        let PartTrace { angles, layers, output: x } = trace;
        let alone = ThreadPool::single();
        let (kept, output) = if self.recompute == Recompute::None {
            let attention =
                block.attention(x, angles, |prepared| part.mix(block.rule(), prepared), &alone)?;
            let feed_forward = block.begin_feed_forward(&attention.middle, part.given(), &alone)?;
            let output = block.finish_feed_forward(&attention.middle, &feed_forward, &alone)?;
            (Some(KeptLayer { attention, feed_forward }), output)
        } else {
            (
                None,
                block.forward(
                    x,
                    angles,
                    part.given(),
                    |prepared| part.mix(block.rule(), prepared),
                    &alone,
                )?,
            )
        };
        layers.push(LayerTrace { input: std::mem::replace(x, output), kept });
        Ok(())
    }

    pub(super) fn block_of(&self, source: &mut dyn LayerSource, index: usize) -> Result<TransformerBlock> {
        let mut block = TransformerBlock::of_unit(&self.config, &self.layout, index, &source.layer(index)?)?;
        self.ranks.tensor.iter().for_each(|tensor| block.share(&tensor.ranks));
        self.ranks.expert.iter().for_each(|expert| block.divide_experts(expert));
        Ok(block)
    }

    /// Forward and backward of the final norm and the head.
    fn train_head<'a>(
        &self,
        pack: &'a Pack,
        parts: Vec<PartTrace>,
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
        pool: &ThreadPool,
    ) -> Result<ReversingPack<'a>> {
        assert_eq!(trained.rows.len(), trained.targets.len(), "one row per target");
        let picked = gather(&parts.iter().map(|part| &part.output).collect::<Vec<_>>(), trained.rows)?;
        let d_picked = self.reverse_head(&picked, trained, slopes, gradients, pool)?;
        // The backward keeps the parts of the forward: the number of threads may have changed since.
        let cuts = pack.parts_of(&parts.iter().map(|part| part.output.dim(0)).collect::<Result<Vec<_>>>()?);
        let d =
            cuts.iter().map(|part| scatter(&d_picked, trained.rows, &part.rows)).collect::<Result<_>>()?;
        Ok(ReversingPack { cuts, parts, d })
    }

    /// Forward and backward of the final norm and the head for the rows `picked [targets, d]`. Returns their gradient.
    pub(super) fn reverse_head(
        &self,
        picked: &Tensor,
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        let TrainedTargets { targets, samples, .. } = trained;
        let normed = rms_norm(picked, &self.final_norm, self.config.rms_norm_eps, pool)?;
        let mut predictions = vec![Prediction::default(); targets.len()];
        value::predict(&normed, &self.value_head, &mut predictions)?;

        let start = self.layout.unit(Unit::Tail).start;
        let in_tail = |range: Range<usize>| range.start - start..range.end - start;
        let HeadReverse { slopes, d_hidden } = match self.config.head {
            Head::Value => {
                let slopes = slopes(0..samples.len(), &predictions);
                HeadReverse { slopes, d_hidden: vec![0.0; values(&normed)?.len()] }
            }
            Head::Language | Head::LanguageAndValue => {
                let place = self.layout.head();
                let (unit, place) =
                    if place.start < start { (Unit::Embedding, place) } else { (Unit::Tail, in_tail(place)) };
                let [mut gradient] = carve(gradients.unit(unit), [&place], self.factors_of(unit));
                head::train(
                    &normed,
                    self.shared_head(),
                    trained,
                    &mut predictions,
                    slopes,
                    &mut gradient,
                    pool,
                )?
            }
        };
        let mut d_normed = matrix(d_hidden, self.config.hidden_size)?;
        let factors = self.factors_of(Unit::Tail);
        if let Some(place) = self.layout.value_head() {
            let [gradient] = carve(gradients.unit(Unit::Tail), [&in_tail(place)], factors);
            d_normed = value::backward(&normed, &self.value_head, &slopes, gradient.vector(), d_normed)?;
        }
        let norm = self.layout.spec("model.norm.weight").map_or(start..start, crate::ParameterSpec::range);
        let eps = self.config.rms_norm_eps;
        let [norm_gradient] = carve(gradients.unit(Unit::Tail), [&in_tail(norm)], factors);
        let norm_gradient = norm_gradient.vector();
        if !norm_gradient.is_empty() {
            let d_normed = multiple(&d_normed, logit_factor(&self.config))?;
            rms_norm_weight_gradient(picked, eps, &d_normed, norm_gradient)?;
        }
        gradients.done(Unit::Tail);
        rms_norm_backward(picked, &self.final_norm, eps, &d_normed, None)
    }

    /// Backward of the embedding lookup.
    fn reverse_embedding(
        &self,
        reversing: &ReversingPack<'_>,
        gradients: &mut dyn GradientSink,
    ) -> Result<()> {
        let table = 0..self.layout.unit(Unit::Embedding).len();
        let [mut table] = carve(gradients.unit(Unit::Embedding), [&table], self.factors_of(Unit::Embedding));
        for (part, d) in reversing.cuts.iter().zip(&reversing.d) {
            self.add_embedded(&mut table, part, d)?;
        }
        gradients.done(Unit::Embedding);
        Ok(())
    }

    /// Adds the gradient of the embedding `table` for the gradient `d [T, d]` of the embedded tokens of a part.
    pub(super) fn add_embedded(
        &self,
        table: &mut WeightGradient<'_>,
        part: &PackPart<'_>,
        d: &Tensor,
    ) -> Result<()> {
        let d = multiple(d, self.config.embedding_multiplier)?;
        if self.ranks.tensor.is_none() {
            return table.add_embedded(part.token_ids(), &d);
        }
        let own = self.own_tokens();
        let tokens = part.token_ids().iter().enumerate();
        let (rows, ids): (Vec<usize>, Vec<u32>) =
            tokens.filter_map(|(row, id)| Some((row, own_id(*id, &own)?))).unzip();
        table.add_embedded(&ids, &gather(&[&d], &rows)?)
    }

    /// Backward of one layer. Frees its activations, and turns the gradient of its output into that of its input.
    fn reverse_layer(
        &self,
        index: usize,
        block: &TransformerBlock,
        reversing: &mut ReversingPack<'_>,
        gradients: &mut dyn GradientSink,
        pool: &ThreadPool,
    ) -> Result<()> {
        let ReversingPack { cuts, parts, d } = reversing;
        let layer: Vec<_> = cuts.iter().zip(parts).zip(std::mem::take(d)).collect();
        let begin = |((part, trace), g)| begin_reversing(block, part, trace, g);
        let mut parts: Vec<Reversing<'_>> = pool.map(layer, begin).into_iter().collect::<Result<_>>()?;

        let (unit, factors) = (gradients.unit(Unit::Layer(index)), self.factors_of(Unit::Layer(index)));
        let mut routed = LayerRoutes::default();
        let d_middle = self.reverse_feed_forward(block, &parts, unit, &mut routed, factors, pool)?;
        block.shared_expert_gradients(&routed.operands, unit, pool)?;
        parts.iter_mut().for_each(|part| part.feed_forward = None);

        let reverse = |(reversing, d_middle): (&Reversing<'_>, Tensor)| {
            let Reversing { part, angles, input, attention, .. } = reversing;
            let mix_backward = |prepared: &Tensor, g: &Tensor| part.mix_backward(block.rule(), prepared, g);
            block.attention_backward(input, attention, angles, &d_middle, mix_backward)
        };
        let reversed = pool.map(parts.iter().zip(d_middle).collect(), reverse);
        let reversed: Vec<_> = reversed.into_iter().collect::<Result<_>>()?;
        *d = reversed.iter().map(|r| r.d_input.clone()).collect();
        let reversed = parts.iter().zip(reversed).map(|(part, reverse)| ReversedAttention {
            trace: &part.attention,
            reverse,
            angles: part.angles,
        });
        let done: Vec<_> = reversed.collect();
        block.attention_gradients(&done, unit, factors, pool)?;
        gradients.done(Unit::Layer(index));
        routed.report(index, gradients);
        Ok(())
    }

    /// Backward of the feed-forward block, in chunks of tokens, which are counted in `routed`. Returns the gradient of its input for
    /// each part. Those of experts that ranks divide are left to [`TransformerBlock::shared_expert_gradients`].
    pub(super) fn reverse_feed_forward(
        &self,
        block: &TransformerBlock,
        parts: &[Reversing<'_>],
        gradients: &mut [f32],
        routed: &mut LayerRoutes,
        factors: Option<UnitFactors<'_>>,
        pool: &ThreadPool,
    ) -> Result<Vec<Tensor>> {
        let whole = parts.iter().enumerate();
        let whole: Vec<_> = whole.map(|(part, of)| PartRows { part, rows: 0..of.part.rows.len() }).collect();
        let chunks = match self.recompute {
            Recompute::None | Recompute::Block => vec![whole],
            Recompute::Sequence => chunks(&whole, pool.threads()),
        };
        let mut d_middle: Vec<Vec<Tensor>> = vec![Vec::new(); parts.len()];
        for pieces in chunks {
            let reverse = |PartRows { part, rows }: &PartRows| -> Result<FeedForwardReverse> {
                let cut = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len());
                let Reversing { part, attention, feed_forward, g, .. } = &parts[*part];
                let given = part.given().map(|given| given.after(rows.start));
                // What is kept is of all rows of a part, which then are one piece.
                block.feed_forward_backward(&cut(&attention.middle)?, feed_forward.as_ref(), given, &cut(g)?)
            };
            let reversed: Vec<_> =
                pool.map(pieces.iter().collect(), reverse).into_iter().collect::<Result<_>>()?;
            for (of, piece) in pieces.iter().zip(&reversed) {
                d_middle[of.part].push(piece.d_middle.clone());
            }
            block.feed_forward_gradients(&reversed, gradients, factors, pool)?;
            let routes = reversed.iter().filter_map(FeedForwardReverse::routes);
            routes.for_each(|routes| routed.tokens.count(routes));
            if self.divides_experts() {
                routed.operands.extend(reversed.into_iter().map(FeedForwardReverse::into_operands));
            }
        }
        let join = |pieces: Vec<Tensor>| match &pieces[..] {
            [only] => Ok(only.clone()),
            _ => Tensor::cat(&pieces, 0),
        };
        d_middle.into_iter().map(join).collect()
    }
}

impl LayerRoutes {
    /// Reports the tokens of layer `index`, if it has experts.
    pub(super) fn report(&self, index: usize, gradients: &mut dyn GradientSink) {
        if !self.tokens.of_expert.is_empty() {
            gradients.routed(index, &self.tokens);
        }
    }
}

/// Takes the activations of a part in this layer; those of the attention block are computed again if they were not kept.
fn begin_reversing<'a>(
    block: &TransformerBlock,
    part: &'a PackPart<'a>,
    trace: &'a mut PartTrace,
    g: Tensor,
) -> Result<Reversing<'a>> {
    let Some(LayerTrace { input, kept }) = trace.layers.pop() else {
        candle_core::bail!("a layer has no activations: the trace is of another decoder or pack")
    };
    let (attention, feed_forward) = match kept {
        Some(KeptLayer { attention, feed_forward }) => (attention, Some(feed_forward)),
        None => {
            let mix = |prepared: &Tensor| part.mix(block.rule(), prepared);
            (block.attention(&input, &trace.angles, mix, &ThreadPool::single())?, None)
        }
    };
    Ok(Reversing { part, angles: &trace.angles, input, attention, feed_forward, g })
}

/// What the backward of a layer leaves of its routes.
#[derive(Debug, Default)]
pub(super) struct LayerRoutes {
    tokens: RoutedTokens,
    /// What the gradients of experts that ranks divide are computed from, by section.
    pub(super) operands: Vec<FeedForwardOperands>,
}

/// State of a backward.
struct ReversingPack<'a> {
    /// Its parts as the forward cut them.
    cuts: Vec<PackPart<'a>>,
    parts: Vec<PartTrace>,
    /// Of each part, `[T, d]` gradient of the residual stream.
    d: Vec<Tensor>,
}

/// Inputs of the backward of one layer for one part.
pub(super) struct Reversing<'a> {
    pub(super) part: &'a PackPart<'a>,
    pub(super) angles: &'a LayerAngles,
    pub(super) input: Tensor,
    pub(super) attention: AttentionTrace,
    pub(super) feed_forward: Option<FeedForwardTrace>,
    /// Gradient of the layer's output.
    pub(super) g: Tensor,
}

/// Rows of one part of a pack.
#[derive(Clone)]
struct PartRows {
    part: usize,
    rows: Range<usize>,
}

/// Cuts rows of parts into chunks of [`CHUNK`] tokens in all, each into a piece for every thread, in the order of the
/// tokens.
fn chunks(parts: &[PartRows], threads: usize) -> Vec<Vec<PartRows>> {
    let each = CHUNK.div_ceil(threads);
    let mut pieces = Vec::new();
    for PartRows { part, rows } in parts {
        let starts = rows.clone().step_by(each);
        pieces
            .extend(starts.map(|start| PartRows { part: *part, rows: start..(start + each).min(rows.end) }));
    }
    pieces.chunks(threads).map(<[_]>::to_vec).collect()
}

/// `[rows of the part, d]` with those rows of `g [rows, d]` added that lie in the part, zero elsewhere.
pub(super) fn scatter(g: &Tensor, rows: &[usize], part: &Range<usize>) -> Result<Tensor> {
    let (_, width) = g.dims2()?;
    let mut out = vec![0.0; part.len() * width];
    for (row, g) in rows.iter().zip(values(g)?.chunks_exact(width)) {
        if part.contains(row) {
            let row = row - part.start;
            out[row * width..(row + 1) * width].iter_mut().zip(g).for_each(|(out, g)| *out += g);
        }
    }
    matrix(out, width)
}
