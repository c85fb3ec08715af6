//! The passes of a rank that has the layers of one stage of a pipeline.
//!
//! Invariant: the gradients of every unit are added in the order of one rank. Of a table that is embedding and head the head's part is
//! computed before the embedding's part of earlier micro-batches, so it is kept apart until its own embedding's part follows. With several
//! micro-batches of one slot its bits are those of one rank only if each adds to zero: with ZeRO stage 2 or 3.

use std::ops::Range;
use std::sync::Arc;

use model::{Prediction, RoutedTokens, ThreadPool};

use super::links::{StageCalls, StageLinks};
use super::membership::RankMembership;
use super::stage_network::StageNetwork;
use super::step::StepInputs;
use super::{PlannedRows, RankBase, ScoredRows, add_scored, score_with};
use crate::TrainerError;
use crate::lead::{decode, encode};
use crate::learner::RowLoss;
use crate::packing::{Packed, recorded_slots};
use crate::pass::Pass;
use crate::pipeline::{StageWork, scoring, training};
use crate::plan::{MicroBatch, StepPass, step_passes};
use crate::zero::GradientReduction;

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
        let mut network = StageNetwork::new(pass, self.base, self.step.pool);
        for work in work {
            let (StageWork::Forward(at) | StageWork::Head(at) | StageWork::Backward(at)) = *work;
            let StepPass { slot, complete, .. } = self.passes[at];
            (sink.slot, sink.complete) = (slot, complete);
            let packs = self.packs;
            let Some(packed) = &packs[at] else {
                network.skip(*work, sink, sections)?;
                continue;
            };
            let len = network.stream_len(at, packed);
            match work {
                StageWork::Forward(_) => {
                    let input = if self.first { None } else { Some(self.links.receive_forward(len)?) };
                    self.links.send_forward(network.advance(at, packed, input.as_deref(), true)?);
                }
                StageWork::Head(_) => {
                    let x = self.links.receive_forward(len)?;
                    self.head(&mut network, (at, packed), &x, sink)?;
                }
                StageWork::Backward(_) => {
                    let d = self.links.receive_backward(len)?;
                    let (d_input, layers) = network.reverse(at, &d, sink)?;
                    let of_pass = self.base.passes.merged(layers, &self.base.model)?;
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

    /// The head of a micro-batch whose residual stream `x` has been through all stages.
    fn head(
        &mut self,
        network: &mut StageNetwork<'_>,
        (at, packed): (usize, &Packed<'_>),
        x: &[f32],
        sink: &mut GradientReduction<'_>,
    ) -> Result<(), TrainerError> {
        let Self { step, links, passes, reports, .. } = self;
        let rows = passes[at].batch.map_or(&[][..], |batch| &batch.rows);
        let report = &mut reports[passes[at].slot.index];
        let mut slopes = |samples: Range<usize>, predictions: &[Prediction]| {
            step.slopes(&rows[samples.clone()], &packed.trained[samples], predictions, report)
        };
        links.send_backward(network.train_head(at, packed, x, &mut slopes, sink)?);
        Ok(())
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
        let mut numbers = Prediction::to_numbers(&predicted);
        all.broadcast(0, &mut numbers)?;
        let mut predicted = Prediction::of_numbers(&numbers);
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
        let (mut network, stage) = (StageNetwork::new(pass, self, pool), calls.stage);
        calls.linked(&self.passes, &membership.clock, |links| {
            let mut predicted = Vec::new();
            for work in scoring(stage, packs.len()) {
                let (StageWork::Forward(at) | StageWork::Head(at) | StageWork::Backward(at)) = work;
                let forward = matches!(work, StageWork::Forward(_));
                let Some(packed) = &packs[at] else {
                    if forward {
                        network.skip_forward()?;
                    }
                    continue;
                };
                let len = network.stream_len(at, packed);
                if !forward {
                    let x = links.receive_forward(len)?;
                    predicted.extend(network.predict(packed, &x)?);
                    continue;
                }
                let input = if stage.rank == 0 { None } else { Some(links.receive_forward(len)?) };
                links.send_forward(network.advance(at, packed, input.as_deref(), false)?);
            }
            Ok(predicted)
        })
    }
}
