//! Passes in parts of a pack, each a sequence or several, which the threads compute apart.
//!
//! Invariant: neither the number of threads nor activation recomputation changes a bit of any result.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::block::{
    AttentionTrace, FeedForwardReverse, KeptAttention, KeptStream, ReversedAttention, TransformerBlock,
};
use super::feed_forward::{FeedForwardOperands, FeedForwardTrace};
use super::pack::{Pack, PackPart};
use super::train::{Keep, PassForm, Recompute};
use super::{Decoder, GradientSink, LayerAngles, RoutedTokens, gather};
use crate::low_rank::{UnitFactors, carve};
use crate::ops::head::{Prediction, SampleSlopes, Target, TrainedTargets};
use crate::ops::norm::rms_norm;
use crate::ops::{matrix, values};
use crate::{ThreadPool, Unit};

/// Tokens of a feed-forward block that are in memory at a time with [`Recompute::Sequence`].
const CHUNK: usize = 256;

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
    pub(super) input: KeptStream,
    /// `None` if the backward computes them again.
    pub(super) kept: Option<KeptLayer>,
}

#[derive(Debug)]
pub(super) struct KeptLayer {
    pub(super) attention: KeptAttention,
    pub(super) feed_forward: FeedForwardTrace,
}

/// A pass whose parts see each other at no point.
pub(super) struct PartsPass<'a> {
    decoder: &'a Decoder,
    parts: Vec<PackPart<'a>>,
    pool: &'a ThreadPool,
}

impl<'a> PartsPass<'a> {
    pub(super) fn new(decoder: &'a Decoder, pack: &'a Pack, pool: &'a ThreadPool) -> Self {
        Self { decoder, parts: pack.parts(decoder.ranks.parts(pool.threads())), pool }
    }
}

impl PassForm for PartsPass<'_> {
    fn parts(&self) -> &[PackPart<'_>] {
        &self.parts
    }

    fn begin(&self, inputs: Vec<Option<Tensor>>) -> Result<Vec<PartTrace>> {
        let parts = self.parts.iter().zip(inputs).collect();
        self.pool.map(parts, |(part, input)| self.decoder.begin(part, input)).into_iter().collect()
    }

    fn advance(&self, blocks: &[TransformerBlock], traces: &mut [PartTrace], keep: Keep) -> Result<()> {
        let run = |(part, trace): (&PackPart<'_>, &mut PartTrace)| {
            blocks.iter().try_for_each(|block| advance(block, part, trace, keep))
        };
        self.pool.map(self.parts.iter().zip(traces).collect(), run).into_iter().collect()
    }

    fn predict(
        &self,
        outputs: &[&Tensor],
        rows: &[usize],
        targets: &[Target<'_>],
    ) -> Result<Vec<Prediction>> {
        let Self { decoder, pool, .. } = *self;
        let normed =
            rms_norm(&gather(outputs, rows)?, &decoder.final_norm, decoder.config.rms_norm_eps, pool)?;
        decoder.predict(&normed, targets, pool)
    }

    fn reverse_head(
        &self,
        outputs: &[&Tensor],
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<Tensor>> {
        let picked = gather(outputs, trained.rows)?;
        let d_picked = self.decoder.reverse_head(&picked, trained, slopes, gradients, self.pool)?;
        self.parts.iter().map(|part| scatter(&d_picked, trained.rows, &part.rows)).collect()
    }

    fn reverse_layer(
        &self,
        index: usize,
        block: &TransformerBlock,
        traces: &mut [PartTrace],
        d: Vec<Tensor>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<Tensor>> {
        let Self { decoder, parts, pool } = self;
        let layer: Vec<_> = parts.iter().zip(traces).zip(d).collect();
        let begin = |((part, trace), g)| begin_reversing(block, part, trace, g);
        let mut parts: Vec<Reversing<'_>> = pool.map(layer, begin).into_iter().collect::<Result<_>>()?;

        let (unit, factors) = (gradients.unit(Unit::Layer(index)), decoder.factors_of(Unit::Layer(index)));
        let mut routed = LayerRoutes::default();
        let d_middle = decoder.reverse_feed_forward(block, &parts, unit, &mut routed, factors, pool)?;
        block.shared_expert_gradients(&routed.operands, unit, pool)?;
        parts.iter_mut().for_each(|part| part.feed_forward = None);

        let reverse = |(reversing, d_middle): (&Reversing<'_>, Tensor)| {
            let Reversing { part, angles, input, attention, .. } = reversing;
            let mix_backward = |prepared: &Tensor, g: &Tensor| part.mix_backward(block.rule(), prepared, g);
            block.attention_backward(input, attention, angles, &d_middle, mix_backward)
        };
        let reversed = pool.map(parts.iter().zip(d_middle).collect(), reverse);
        let reversed: Vec<_> = reversed.into_iter().collect::<Result<_>>()?;
        let d = reversed.iter().map(|r| r.d_input.clone()).collect();
        let reversed = parts.iter().zip(reversed).map(|(part, reverse)| ReversedAttention {
            trace: &part.attention,
            reverse,
            angles: part.angles,
        });
        let done: Vec<_> = reversed.collect();
        block.attention_gradients(&done, unit, factors, pool)?;
        gradients.done(Unit::Layer(index));
        routed.report(index, gradients);
        Ok(d)
    }

    fn reverse_embedding(&self, d: &[Tensor], gradients: &mut dyn GradientSink) -> Result<()> {
        let table = 0..self.decoder.layout.unit(Unit::Embedding).len();
        let factors = self.decoder.factors_of(Unit::Embedding);
        let [mut table] = carve(gradients.unit(Unit::Embedding), [&table], factors);
        for (part, d) in self.parts.iter().zip(d) {
            self.decoder.add_embedded(&mut table, part, d)?;
        }
        gradients.done(Unit::Embedding);
        Ok(())
    }
}

impl Decoder {
    /// The activations before the first layer of a part: its residual stream `input [T, d]` if another rank has computed it, or its
    /// embedded tokens.
    pub(super) fn begin(&self, part: &PackPart<'_>, input: Option<Tensor>) -> Result<PartTrace> {
        let embed = || self.embed(part.token_ids(), part.rows.start, &[]);
        let output = input.map_or_else(embed, Ok)?;
        let layers = Vec::with_capacity(self.config.num_layers());
        Ok(PartTrace { angles: part.angles(self), layers, output })
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

/// Runs the next layer of a part.
fn advance(block: &TransformerBlock, part: &PackPart<'_>, trace: &mut PartTrace, keep: Keep) -> Result<()> {
    let PartTrace { angles, layers, output: x } = trace;
    let alone = ThreadPool::single();
    let mix = |prepared: &Tensor| part.mix(block.rule(), prepared);
    if keep != Keep::Activations {
        let output = block.forward(x, angles, part.given(), mix, &alone)?;
        let input = std::mem::replace(x, output);
        if keep == Keep::Inputs {
            layers.push(LayerTrace { input: block.kept(&input)?, kept: None });
        }
        return Ok(());
    }
    let attention = block.attention(x, angles, mix, &alone)?;
    let feed_forward = block.begin_feed_forward(&attention.middle, part.given(), &alone)?;
    let output = block.finish_feed_forward(&attention.middle, &feed_forward, &alone)?;
    let input = block.kept(&std::mem::replace(x, output))?;
    let kept = Some(KeptLayer { attention: block.kept_attention(attention)?, feed_forward });
    layers.push(LayerTrace { input, kept });
    Ok(())
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
    let input = input.whole()?;
    let (attention, feed_forward) = match kept {
        Some(KeptLayer { attention, feed_forward }) => (attention.whole()?, Some(feed_forward)),
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
