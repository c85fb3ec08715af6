//! Passes over sections of the token stream of a pack, on one rank or among context ranks.
//!
//! A rank computes neighbouring sections, each in parts for its threads. Between the projections and the rest of a layer all ranks
//! exchange what attention needs. The predictions of all sections are gathered, because the loss of a sample needs all of its own; the
//! derivatives are then the same on every rank.
//!
//! Invariant: gradients are summed apart for every section, in the order of its tokens, so that their bits do not depend on which rank
//! computes it.
//!
//! # Layout
//! - `cuts`: where sections begin; `rows`: rows that queries need
//! - `exchange`: what ranks send each other; `mixing`: attention of the tokens of a rank

mod cuts;
mod exchange;
mod mixing;
mod rows;

use std::ops::Range;

use candle_core::{Result, Tensor};

use self::cuts::{TokenCost, section_rows};
use self::exchange::RankRows;
use self::mixing::SectionMixing;
use super::block::{AttentionTrace, ReversedAttention, TransformerBlock};
use super::mixer::MixingReverse;
use super::pack::{Pack, PackPart};
use super::parts::{KeptLayer, LayerRoutes, LayerTrace, PartTrace, Reversing, scatter};
use super::train::{Keep, PassForm, Recompute};
use super::{Decoder, GradientSink, gather};
use crate::low_rank::carve;
use crate::ops::attention::Segment;
use crate::ops::head::{Prediction, PredictionGradient, SampleSlopes, Target, TrainedTargets};
use crate::ops::norm::rms_norm;
use crate::ops::row_ranges;
use crate::{Config, ThreadPool, Unit};

/// Fewest rows of a part, so that it is worth a thread.
const LEAST_ROWS: usize = 32;

/// The rows of all sections, and of every rank.
struct SectionRows {
    sections: Vec<Range<usize>>,
    /// Of each context rank.
    ranks: Vec<Range<usize>>,
    /// The sections of this rank.
    own: Range<usize>,
}

/// A pass over a pack.
pub(super) struct SectionedPass<'a> {
    decoder: &'a Decoder,
    pack: &'a Pack,
    rows: SectionRows,
    /// The parts of this rank.
    parts: Vec<PackPart<'a>>,
    /// The parts of each of its sections.
    of_sections: Vec<Range<usize>>,
    pool: &'a ThreadPool,
    /// A single thread that computes all parts, if they make calls.
    alone: Option<ThreadPool>,
}

/// The tokens of a pack of these `segments` that each of `world` ranks computes of a model of this `config`, one of `tensor` equal shards.
pub(crate) fn context_rows(
    config: &Config,
    segments: &[Segment],
    world: usize,
    tensor: usize,
) -> Vec<Range<usize>> {
    section_rows(segments, TokenCost::of(config, tensor), world)
}

impl SectionRows {
    fn new(decoder: &Decoder, pack: &Pack) -> Self {
        let ranks = &decoder.ranks;
        let config = ranks.all_layers.as_deref().unwrap_or(&decoder.config);
        let cost = TokenCost::of(config, ranks.tensor_position().world);
        let sections = section_rows(pack.segments(), cost, ranks.sections);
        let (rank, world) = ranks.context.as_ref().map_or((0, 1), |ranks| (ranks.rank(), ranks.world()));
        let each = sections.len() / world;
        let of = |rank: usize| sections[rank * each].start..sections[(rank + 1) * each - 1].end;
        Self { ranks: (0..world).map(of).collect(), own: rank * each..(rank + 1) * each, sections }
    }
}

impl<'a> SectionedPass<'a> {
    pub(super) fn new(decoder: &'a Decoder, pack: &'a Pack, pool: &'a ThreadPool) -> Self {
        let rows = SectionRows::new(decoder, pack);
        let (mut parts, mut of_sections) = (Vec::new(), Vec::new());
        for section in &rows.sections[rows.own.clone()] {
            let first = parts.len();
            let cuts = row_ranges(section.len(), decoder.ranks.parts(pool.threads()), LEAST_ROWS);
            // Ranks that divide experts make the calls of every section.
            let cuts = cuts.into_iter().filter(|cut| !cut.is_empty() || decoder.ranks.expert.is_some());
            parts.extend(cuts.map(|cut| pack.part(section.start + cut.start..section.start + cut.end)));
            of_sections.push(first..parts.len());
        }
        let alone = decoder.ranks.calls_in_parts().then(ThreadPool::single);
        Self { decoder, pack, rows, parts, of_sections, pool, alone }
    }

    /// The threads that compute parts.
    fn threads(&self) -> &ThreadPool {
        self.alone.as_ref().unwrap_or(self.pool)
    }

    /// Runs the next layer of all parts.
    fn advance_layer(&self, block: &TransformerBlock, traces: &mut [PartTrace], keep: Keep) -> Result<()> {
        let inputs: Vec<Tensor> = traces.iter().map(|trace| trace.output.clone()).collect();
        let attention = self.attention(block, &inputs, traces)?;
        let finish = |(((part, trace), input), attention): (_, AttentionTrace)| {
            let (part, trace, input): (&PackPart<'_>, &mut PartTrace, Tensor) = (part, trace, input);
            let alone = ThreadPool::single();
            let feed_forward = block.begin_feed_forward(&attention.middle, part.given(), &alone)?;
            trace.output = block.finish_feed_forward(&attention.middle, &feed_forward, &alone)?;
            if keep != Keep::Nothing {
                let keep_all =
                    || block.kept_attention(attention).map(|attention| KeptLayer { attention, feed_forward });
                let kept = (keep == Keep::Activations).then(keep_all).transpose()?;
                trace.layers.push(LayerTrace { input: block.kept(&input)?, kept });
            }
            Ok(())
        };
        let parts = self.parts.iter().zip(traces).zip(inputs).zip(attention).collect();
        self.threads().map(parts, finish).into_iter().collect()
    }

    /// The attention half of all parts.
    fn attention(
        &self,
        block: &TransformerBlock,
        inputs: &[Tensor],
        traces: &[PartTrace],
    ) -> Result<Vec<AttentionTrace>> {
        let begin = |(x, trace): (&Tensor, &PartTrace)| {
            block.begin_attention(x, &trace.angles, &ThreadPool::single())
        };
        let projected = self.threads().map(inputs.iter().zip(traces).collect(), begin);
        let projected = projected.into_iter().collect::<Result<Vec<_>>>()?;
        let prepared: Vec<&Tensor> = projected.iter().map(|projected| &projected.prepared).collect();
        let mixed = self.mixing().mix(block.rule(), &prepared)?;
        let parts = inputs.iter().zip(projected.into_iter().zip(mixed)).collect();
        let finished = self.threads().map(parts, |(x, (projected, mixed))| {
            block.finish_attention(x, projected, mixed, &ThreadPool::single())
        });
        finished.into_iter().collect()
    }

    fn mixing(&self) -> SectionMixing<'_> {
        SectionMixing {
            segments: self.pack.segments(),
            sections: &self.rows.sections,
            ranks: self.ranks(),
            exchange: self.decoder.ranks.exchange,
            parts: self.parts.iter().map(|part| part.rows.clone()).collect(),
            pool: self.pool,
        }
    }

    fn ranks(&self) -> Option<RankRows<'_>> {
        let ranks = self.decoder.ranks.context.as_deref()?;
        Some(RankRows { ranks, rows: &self.rows.ranks })
    }

    /// The rows of one of the sections of this rank.
    fn section(&self, section: usize) -> Range<usize> {
        self.rows.sections[self.rows.own.start + section].clone()
    }

    /// Those of the targets with these rows that each section of this rank predicts.
    fn targets(&self, rows: &[usize]) -> Vec<Vec<usize>> {
        let inside =
            |section: Range<usize>| (0..rows.len()).filter(|at| section.contains(&rows[*at])).collect();
        (0..self.of_sections.len()).map(|section| inside(self.section(section))).collect()
    }

    /// `[targets, d]` residual stream that `targets` of a section are predicted from, of that of all parts, `outputs`.
    fn picked(
        &self,
        outputs: &[&Tensor],
        section: usize,
        rows: &[usize],
        targets: &[usize],
    ) -> Result<Tensor> {
        let first = self.section(section).start;
        let rows: Vec<usize> = targets.iter().map(|at| rows[*at] - first).collect();
        gather(&outputs[self.of_sections[section].clone()], &rows)
    }

    /// Predictions from the residual stream `picked [targets, d]`.
    fn predict_picked(&self, picked: &Tensor, targets: &[Target<'_>]) -> Result<Vec<Prediction>> {
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let eps = self.decoder.config.rms_norm_eps;
        let normed = rms_norm(picked, &self.decoder.final_norm, eps, self.pool)?;
        self.decoder.predict(&normed, targets, self.pool)
    }

    /// The predictions of all targets, of which this rank has those of its sections, one section after the other.
    fn gather_predictions(&self, own: &[Prediction], rows: &[usize]) -> Result<Vec<Prediction>> {
        let mut of_sections = vec![Vec::new(); self.rows.sections.len()];
        for (at, row) in rows.iter().enumerate() {
            of_sections[self.rows.sections.partition_point(|section| section.end <= *row)].push(at);
        }
        let numbers = Prediction::to_numbers(own);
        let all = match self.ranks() {
            None => numbers,
            Some(ranks) => {
                let each = of_sections.len() / ranks.rows.len();
                let count = |sections: &[Vec<usize>]| sections.iter().map(Vec::len).sum();
                let counts: Vec<usize> = of_sections.chunks(each).map(count).collect();
                ranks.gather(&numbers, Prediction::NUMBERS, &counts)?
            }
        };
        let mut predictions = vec![Prediction::default(); rows.len()];
        for (at, prediction) in of_sections.iter().flatten().zip(Prediction::of_numbers(&all)) {
            predictions[*at] = prediction;
        }
        Ok(predictions)
    }

    /// Takes the activations of all parts in a layer; those of the attention half are computed again if they were not kept. `d` are the
    /// gradients of its output.
    fn begin_reversing<'t>(
        &'t self,
        block: &TransformerBlock,
        traces: &'t mut [PartTrace],
        d: Vec<Tensor>,
    ) -> Result<Vec<Reversing<'t>>> {
        let (mut inputs, mut kept) = (Vec::new(), Vec::new());
        for trace in &mut *traces {
            let Some(LayerTrace { input, kept: of_part }) = trace.layers.pop() else {
                candle_core::bail!("a layer has no activations: the trace is of another decoder or pack")
            };
            inputs.push(input.whole()?);
            let of_part =
                of_part.map(|kept| kept.attention.whole().map(|attention| (attention, kept.feed_forward)));
            kept.extend(of_part.transpose()?);
        }
        let halves: Vec<_> = if self.decoder.recompute == Recompute::None {
            kept.into_iter().map(|(attention, feed_forward)| (attention, Some(feed_forward))).collect()
        } else {
            self.attention(block, &inputs, traces)?.into_iter().map(|attention| (attention, None)).collect()
        };
        let of_parts = self.parts.iter().zip(&*traces).zip(inputs).zip(halves.into_iter().zip(d));
        let reversing = of_parts.map(|(((part, trace), input), ((attention, feed_forward), g))| Reversing {
            part,
            angles: &trace.angles,
            input,
            attention,
            feed_forward,
            g,
        });
        Ok(reversing.collect())
    }
}

impl PassForm for SectionedPass<'_> {
    fn parts(&self) -> &[PackPart<'_>] {
        &self.parts
    }

    fn begin(&self, inputs: Vec<Option<Tensor>>) -> Result<Vec<PartTrace>> {
        let parts = self.parts.iter().zip(inputs).collect();
        self.threads().map(parts, |(part, input)| self.decoder.begin(part, input)).into_iter().collect()
    }

    fn advance(&self, blocks: &[TransformerBlock], traces: &mut [PartTrace], keep: Keep) -> Result<()> {
        blocks.iter().try_for_each(|block| self.advance_layer(block, traces, keep))
    }

    fn predict(
        &self,
        outputs: &[&Tensor],
        rows: &[usize],
        targets: &[Target<'_>],
    ) -> Result<Vec<Prediction>> {
        let mut own = Vec::new();
        for (section, of_section) in self.targets(rows).into_iter().enumerate() {
            let picked = self.picked(outputs, section, rows, &of_section)?;
            own.extend(self.predict_picked(&picked, &pick(targets, &of_section))?);
        }
        self.gather_predictions(&own, rows)
    }

    /// With several sections of this rank their logits are computed twice: before and after the derivatives are known.
    fn reverse_head(
        &self,
        outputs: &[&Tensor],
        trained: TrainedTargets<'_>,
        slopes: &mut SampleSlopes<'_>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<Tensor>> {
        let TrainedTargets { rows, targets, samples } = trained;
        let of_sections = self.targets(rows);
        let mut slopes = |own: &[Prediction]| -> Result<Vec<PredictionGradient>> {
            let all = slopes(0..samples.len(), &self.gather_predictions(own, rows)?);
            Ok(of_sections.iter().flatten().map(|at| all[*at]).collect())
        };
        let picked: Vec<Tensor> = of_sections
            .iter()
            .enumerate()
            .map(|(section, of_section)| self.picked(outputs, section, rows, of_section))
            .collect::<Result<_>>()?;
        let mut known = match &of_sections[..] {
            [only] if !only.is_empty() => None,
            _ => {
                let mut own = Vec::new();
                for (picked, of_section) in picked.iter().zip(&of_sections) {
                    own.extend(self.predict_picked(picked, &pick(targets, of_section))?);
                }
                Some(slopes(&own)?.into_iter())
            }
        };
        let mut d = Vec::with_capacity(self.parts.len());
        for (section, (picked, of_section)) in picked.iter().zip(&of_sections).enumerate() {
            gradients.section(section);
            let (rows, targets) = (pick(rows, of_section), pick(targets, of_section));
            let mut failure = None;
            let mut of_section = |_: Range<usize>, predictions: &[Prediction]| match &mut known {
                Some(known) => known.take(predictions.len()).collect(),
                None => slopes(predictions).unwrap_or_else(|error| {
                    failure = Some(error);
                    vec![PredictionGradient::default(); predictions.len()]
                }),
            };
            let samples = [targets.len()];
            let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &samples };
            let d_picked = if targets.is_empty() {
                gradients.done(Unit::Tail);
                picked.clone()
            } else {
                self.decoder.reverse_head(picked, trained, &mut of_section, gradients, self.pool)?
            };
            if let Some(error) = failure {
                return Err(error);
            }
            for part in &self.parts[self.of_sections[section].clone()] {
                d.push(scatter(&d_picked, &rows, &part.rows)?);
            }
        }
        Ok(d)
    }

    fn reverse_layer(
        &self,
        index: usize,
        block: &TransformerBlock,
        traces: &mut [PartTrace],
        d: Vec<Tensor>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Vec<Tensor>> {
        let mut parts = self.begin_reversing(block, traces, d)?;
        let (unit, factors) = (Unit::Layer(index), self.decoder.factors_of(Unit::Layer(index)));
        let (mut routed, mut d_middle) = (LayerRoutes::default(), Vec::new());
        for (section, of_section) in self.of_sections.iter().enumerate() {
            gradients.section(section);
            let (parts, own) = (&parts[of_section.clone()], gradients.unit(unit));
            if !parts.is_empty() {
                let d =
                    self.decoder.reverse_feed_forward(block, parts, own, &mut routed, factors, self.pool)?;
                d_middle.extend(d);
            }
        }
        // Of the tokens of all sections: they are in the sum of the last one.
        block.shared_expert_gradients(&routed.operands, gradients.unit(unit), self.pool)?;
        drop(std::mem::take(&mut routed.operands));
        parts.iter_mut().for_each(|part| part.feed_forward = None);

        let begin = |(part, d_middle): (&Reversing<'_>, &Tensor)| {
            block.begin_attention_backward(&part.input, &part.attention, d_middle)
        };
        let begun = self.threads().map(parts.iter().zip(&d_middle).collect(), begin);
        let begun = begun.into_iter().collect::<Result<Vec<_>>>()?;
        let prepared: Vec<&Tensor> = parts.iter().map(|part| part.attention.prepared()).collect();
        let d_mixed: Vec<&Tensor> = begun.iter().map(|begun| &begun.gate.d_mixed).collect();
        let mixing = self.mixing().mix_backward(block.rule(), &prepared, &d_mixed)?;
        let rest = parts.iter().zip(d_middle).zip(begun.into_iter().zip(mixing)).collect();
        let reverse =
            |((part, d_middle), (begun, mixing)): ((&Reversing<'_>, Tensor), (_, MixingReverse))| {
                let Reversing { input, attention, angles, .. } = part;
                block.finish_attention_backward(input, attention, angles, &d_middle, begun, mixing)
            };
        let reversed = self.threads().map(rest, reverse).into_iter().collect::<Result<Vec<_>>>()?;
        let d = reversed.iter().map(|reverse| reverse.d_input.clone()).collect();
        let of_parts = parts.iter().zip(reversed);
        let done: Vec<_> = of_parts
            .map(|(part, reverse)| ReversedAttention { trace: &part.attention, reverse, angles: part.angles })
            .collect();
        for (section, of_section) in self.of_sections.iter().enumerate() {
            gradients.section(section);
            let own = gradients.unit(unit);
            block.attention_gradients(&done[of_section.clone()], own, factors, self.pool)?;
            gradients.done(unit);
        }
        routed.report(index, gradients);
        Ok(d)
    }

    fn reverse_embedding(&self, d: &[Tensor], gradients: &mut dyn GradientSink) -> Result<()> {
        let table = 0..self.decoder.layout.unit(Unit::Embedding).len();
        for (section, of_section) in self.of_sections.iter().enumerate() {
            gradients.section(section);
            let factors = self.decoder.factors_of(Unit::Embedding);
            let [mut table] = carve(gradients.unit(Unit::Embedding), [&table], factors);
            for (part, d) in self.parts[of_section.clone()].iter().zip(&d[of_section.clone()]) {
                self.decoder.add_embedded(&mut table, part, d)?;
            }
            gradients.done(Unit::Embedding);
        }
        Ok(())
    }
}

/// Those of `all` at some places.
fn pick<T: Copy>(all: &[T], places: &[usize]) -> Vec<T> {
    places.iter().map(|at| all[*at]).collect()
}
