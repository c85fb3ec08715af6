//! The passes of a rank that has the layers of one stage of a pipeline.
//!
//! Invariant: the gradients of every unit are added in the order of one rank. Of a table that is embedding and head the head's part is
//! computed before the embedding's part of earlier micro-batches, so it is kept apart until its own embedding's part follows. With several
//! micro-batches of one slot its bits are those of one rank only if each adds to zero: with ZeRO stage 2 or 3.

use std::ops::Range;
use std::sync::Arc;

use model::{
    Decoder, GradientSink, LayerSource, PackPass, PassLayers, Prediction, RoutedTokens, ThreadPool,
    TrainedTargets, Unit,
};

use super::links::{StageCalls, StageLinks};
use super::membership::RankMembership;
use super::step::{RouteCounter, StepInputs};
use super::{PlannedRows, RankBase, ScoredRows, add_scored, score_with};
use crate::TrainerError;
use crate::lead::{decode, encode};
use crate::learner::RowLoss;
use crate::packing::{Packed, recorded_slots};
use crate::pass::Pass;
use crate::pipeline::{StageWork, scoring, training};
use crate::plan::{MicroBatch, StepPass, step_passes};
use crate::zero::{GradientReduction, add};

/// The tables `[embedding]` of head gradients of a micro-batch, of each section of its tokens; `None` if the head has weights of its own.
type HeadTables = Vec<Option<Vec<f32>>>;

/// Receives the gradients of a head, of which those of the embedding's table are kept apart.
struct HeadSink<'a> {
    sink: &'a mut dyn GradientSink,
    /// Values of the embedding.
    len: usize,
    section: usize,
    tables: HeadTables,
}

impl GradientSink for HeadSink<'_> {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        if unit != Unit::Embedding {
            return self.sink.unit(unit);
        }
        let table = &mut self.tables[self.section];
        table.get_or_insert_with(|| vec![0.0; self.len])
    }

    fn done(&mut self, unit: Unit) {
        self.sink.done(unit);
    }

    fn section(&mut self, index: usize) {
        self.section = index;
        self.sink.section(index);
    }
}

/// A micro-batch on its way through a stage.
#[derive(Default)]
struct StageBatch<'a> {
    pass: Option<PackPass<'a>>,
    tables: HeadTables,
}

/// The passes of a step of one stage.
struct StagePasses<'a, L: RowLoss> {
    step: &'a StepInputs<'a, L>,
    base: &'a RankBase,
    links: &'a StageLinks<'a>,
    first: bool,
    passes: &'a [StepPass<'a>],
    packs: &'a [Option<Packed<'a>>],
    reports: Vec<L::Report>,
    /// Tokens of the experts of each own layer, by slot of this rank.
    routed: Vec<Vec<RoutedTokens>>,
}

impl<L: RowLoss> StepInputs<'_, L> {
    /// Makes the passes of the rank of `membership`, whose layers are those of a stage and whose gradients go to `sink`. Returns the
    /// reports of its leaves, which are complete on the first stage.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, another stage fails, or the reduction fails.
    pub(super) fn staged_passes(
        &self,
        pass: &mut Pass<'_>,
        sink: &mut GradientReduction<'_>,
        (base, membership): (&RankBase, &RankMembership),
        calls: StageCalls,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let (stage, all) = (calls.stage, Arc::clone(&calls.all));
        let passes = step_passes(self.task.plan, membership.place.data, base.accumulates());
        let divides = pass.divides_experts();
        let packs: Vec<Option<Packed<'_>>> = passes
            .iter()
            .map(|current| match current.batch {
                Some(batch) => Some(base.of_layers(self.pack(batch))),
                None => divides.then(Packed::empty),
            })
            .collect();
        let reports = self.reports(membership.place.data.world);
        let routed = vec![vec![RoutedTokens::default(); base.model.num_layers()]; reports.len()];
        let (mut reports, routed) = calls.linked(&base.passes, &membership.clock, |links| {
            let first = stage.rank == 0;
            let (passes, packs) = (&passes[..], &packs[..]);
            let mut all = StagePasses { step: self, base, links, first, passes, packs, reports, routed };
            all.run(pass, sink, &training(stage, passes.len()))?;
            Ok((all.reports, all.routed))
        })?;
        if membership.model.expert_slots() > 0 {
            let of_stages = all.all_gather_bytes(encode(&routed)?)?;
            let of_stages: Vec<Vec<Vec<RoutedTokens>>> =
                of_stages.iter().map(|bytes| decode(bytes)).collect::<Result<_, _>>()?;
            for (slot, report) in reports.iter_mut().enumerate() {
                let layers = of_stages.iter().flat_map(|slots| slots.get(slot).into_iter().flatten());
                self.loss.routed(&layers.cloned().collect::<Vec<_>>(), report);
            }
        }
        Ok(reports)
    }
}

impl<'a, L: RowLoss> StagePasses<'a, L> {
    fn run(
        &mut self,
        pass: &mut Pass<'_>,
        sink: &mut GradientReduction<'_>,
        work: &[StageWork],
    ) -> Result<(), TrainerError> {
        let sections = self.base.passes.own_sections();
        let (decoder, layers) = pass.stage()?;
        let mut layers = StageLayers { decoder, layers };
        let mut batches: Vec<StageBatch<'_>> = self.packs.iter().map(|_| StageBatch::default()).collect();
        for work in work {
            let (StageWork::Forward(at) | StageWork::Head(at) | StageWork::Backward(at)) = *work;
            let StepPass { slot, complete, .. } = self.passes[at];
            (sink.slot, sink.complete) = (slot, complete);
            let packs = self.packs;
            let Some(packed) = &packs[at] else {
                layers.skip(*work, sink, sections)?;
                continue;
            };
            let batch = &mut batches[at];
            match work {
                StageWork::Forward(_) => {
                    let mut pass = decoder.pass(&packed.pack, self.step.pool);
                    let len = pass.rows() * decoder.config().hidden_size;
                    let input = if self.first { None } else { Some(self.links.receive_forward(len)?) };
                    let output = pass.advance(&mut layers.layers, input.as_deref(), true)?;
                    self.links.send_forward(output);
                    batch.pass = Some(pass);
                }
                StageWork::Head(_) => self.head(at, packed, batch, sink)?,
                StageWork::Backward(_) => {
                    let StageBatch { pass: Some(pass), tables } = std::mem::take(batch) else {
                        let reason = "a stage has no forward of a micro-batch that comes back".to_owned();
                        return Err(TrainerError::Message { reason });
                    };
                    add_tables(&tables, sink, self.step.pool);
                    let d = self.links.receive_backward(pass.rows() * decoder.config().hidden_size)?;
                    let mut counter = RouteCounter { sink, layers: Vec::new() };
                    let d_input = pass.backward(&mut layers.layers, &d, &mut counter)?;
                    let of_pass = self.base.passes.merged(counter.layers, &self.base.model)?;
                    let all = &mut self.routed[slot.index];
                    all.iter_mut().zip(&of_pass).for_each(|(all, tokens)| all.merge(tokens));
                    if !self.first {
                        self.links.send_backward(d_input);
                    }
                }
            }
        }
        Ok(())
    }

    /// The head of a micro-batch that has been through all stages.
    fn head(
        &mut self,
        at: usize,
        packed: &Packed<'_>,
        batch: &mut StageBatch<'_>,
        sink: &mut GradientReduction<'_>,
    ) -> Result<(), TrainerError> {
        let Self { step, base, links, passes, reports, .. } = self;
        let (Some(pass), slot) = (&batch.pass, passes[at].slot) else {
            let reason = "a stage has no forward of a micro-batch whose head is due".to_owned();
            return Err(TrainerError::Message { reason });
        };
        let x = links.receive_forward(pass.rows() * base.model.hidden_size)?;
        let rows = passes[at].batch.map_or(&[][..], |batch| &batch.rows);
        let report = &mut reports[slot.index];
        let mut slopes = |samples: Range<usize>, predictions: &[Prediction]| {
            step.slopes(&rows[samples.clone()], &packed.trained[samples], predictions, report)
        };
        let Packed { positions, targets, trained, .. } = packed;
        let trained = TrainedTargets { rows: positions, targets, samples: trained };
        let len = base.layout.unit(Unit::Embedding).len();
        let tables = vec![None; base.passes.own_sections()];
        let mut of_head = HeadSink { sink, len, section: 0, tables };
        let d = pass.reverse_head(&x, trained, &mut slopes, &mut of_head)?;
        batch.tables = of_head.tables;
        links.send_backward(d);
        Ok(())
    }
}

/// The layers of a stage.
struct StageLayers<'a, 'p> {
    decoder: &'a Decoder,
    layers: PassLayers<'p>,
}

impl StageLayers<'_, '_> {
    /// Takes part in the work of other ranks with the same layers on a micro-batch, with gradients of zero of `sections` sections.
    fn skip(
        &mut self,
        work: StageWork,
        sink: &mut dyn GradientSink,
        sections: usize,
    ) -> Result<(), TrainerError> {
        let mut zeros = |unit| {
            for section in 0..sections {
                sink.section(section);
                sink.unit(unit);
                sink.done(unit);
            }
        };
        match work {
            StageWork::Forward(_) => return self.skip_forward(),
            StageWork::Head(_) => zeros(Unit::Tail),
            StageWork::Backward(_) => {
                self.source().into_iter().for_each(|source| source.reverse());
                for index in (0..self.decoder.config().num_layers()).rev() {
                    self.skip_layer(index)?;
                    zeros(Unit::Layer(index));
                }
                zeros(Unit::Embedding);
            }
        }
        Ok(())
    }

    /// Takes part in a forward of other ranks.
    fn skip_forward(&mut self) -> Result<(), TrainerError> {
        self.source().into_iter().for_each(|source| source.begin());
        (0..self.decoder.config().num_layers()).try_for_each(|index| self.skip_layer(index))
    }

    fn skip_layer(&mut self, index: usize) -> Result<(), TrainerError> {
        Ok(self.source().map_or(Ok(()), |source| source.layer(index).map(drop))?)
    }

    fn source(&mut self) -> Option<&mut dyn LayerSource> {
        match &mut self.layers {
            PassLayers::Own => None,
            PassLayers::Source(source) => Some(&mut **source),
        }
    }
}

/// Adds what the head has left for the table of the embedding.
fn add_tables(tables: &HeadTables, sink: &mut dyn GradientSink, pool: &ThreadPool) {
    for (section, table) in tables.iter().enumerate() {
        let Some(table) = table else { continue };
        sink.section(section);
        add(sink.unit(Unit::Embedding), table, pool);
    }
}

impl RankBase {
    /// What `packed` is to the layers of this rank.
    fn of_layers<'p>(&self, packed: Packed<'p>) -> Packed<'p> {
        match &self.shard {
            Some(shard) => Packed { pack: packed.pack.of_layers(shard.slots()), ..packed },
            None => packed,
        }
    }

    /// Predictions of the rows of the rank of `membership`, or of a single rank: on every rank of its passes.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or another rank of the passes fails.
    pub(super) fn score(
        &self,
        pass: &mut Pass<'_>,
        membership: Option<&RankMembership>,
        task: PlannedRows<'_>,
        pool: &ThreadPool,
    ) -> Result<ScoredRows, TrainerError> {
        let of_rank = |membership: &RankMembership| membership.place.data.rank;
        let rank = membership.map_or(0, of_rank);
        let slots = recorded_slots(membership.map_or(&self.model, |membership| &membership.model));
        let (Some(calls), Some(membership)) = (self.passes.stages()?, membership) else {
            return score_with(pass, rank, task, slots, pool);
        };
        let all = Arc::clone(&calls.all);
        let own = task.plan.get(rank).map_or(&[][..], |own| &own[..]);
        let most = task.plan.iter().map(Vec::len).max().unwrap_or(0);
        let packs = self.scored_packs(own, most, (task, slots), pass.divides_experts());
        let mut predicted = self.staged_scores(pass, &packs, (calls, membership), pool)?;
        predicted
            .resize(packs.iter().flatten().map(|packed| packed.targets.len()).sum(), Prediction::default());
        let mut numbers: Vec<f32> = predicted.iter().flat_map(|p| [p.logprob, p.entropy, p.value]).collect();
        all.broadcast(0, &mut numbers)?;
        let predicted = numbers.as_chunks::<3>().0.iter().copied();
        let mut predicted = predicted.map(|[logprob, entropy, value]| Prediction { logprob, entropy, value });
        let mut scored = ScoredRows::new();
        for (batch, packed) in own.iter().zip(packs.iter().flatten()) {
            let own: Vec<Prediction> = predicted.by_ref().take(packed.targets.len()).collect();
            add_scored(batch, &packed.trained, &own, &mut scored);
        }
        Ok(scored)
    }

    /// The micro-batches `own` of this rank, of the `most` of a rank.
    fn scored_packs<'p>(
        &self,
        own: &[MicroBatch],
        most: usize,
        (task, slots): (PlannedRows<'p>, usize),
        divides_experts: bool,
    ) -> Vec<Option<Packed<'p>>> {
        let of_batch = |batch: &MicroBatch| self.of_layers(task.pack(batch, slots));
        let none = || divides_experts.then(Packed::empty);
        (0..most).map(|at| own.get(at).map(of_batch).or_else(none)).collect()
    }

    /// The predictions of `packs` on the first stage; none on the others.
    fn staged_scores(
        &self,
        pass: &mut Pass<'_>,
        packs: &[Option<Packed<'_>>],
        (calls, membership): (StageCalls, &RankMembership),
        pool: &ThreadPool,
    ) -> Result<Vec<Prediction>, TrainerError> {
        let (decoder, layers) = pass.stage()?;
        let (mut layers, stage) = (StageLayers { decoder, layers }, calls.stage);
        calls.linked(&self.passes, &membership.clock, |links| {
            let mut passes: Vec<Option<PackPass<'_>>> = packs.iter().map(|_| None).collect();
            let mut predicted = Vec::new();
            for work in scoring(stage, packs.len()) {
                let (StageWork::Forward(at) | StageWork::Head(at) | StageWork::Backward(at)) = work;
                let forward = matches!(work, StageWork::Forward(_));
                let Some(packed) = &packs[at] else {
                    if forward {
                        layers.skip_forward()?;
                    }
                    continue;
                };
                let mut pass = passes[at].take().unwrap_or_else(|| decoder.pass(&packed.pack, pool));
                let len = pass.rows() * decoder.config().hidden_size;
                if !forward {
                    let x = links.receive_forward(len)?;
                    predicted.extend(pass.predict(Some(&x), &packed.positions, &packed.targets)?);
                    continue;
                }
                let input = if stage.rank == 0 { None } else { Some(links.receive_forward(len)?) };
                links.send_forward(pass.advance(&mut layers.layers, input.as_deref(), false)?);
                passes[at] = (stage.rank == 0).then_some(pass);
            }
            Ok(predicted)
        })
    }
}
