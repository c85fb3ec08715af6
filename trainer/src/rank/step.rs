//! The training step of a rank: forward, backward, gradient reduction, clipping, optimizer step.
//!
//! Invariant: a step that fails leaves the weights unchanged, unless the error is that of a device or of another rank. A
//! gradient of zeros makes no update on any rank with any optimizer: weights, moments and the number of updates stay
//! unchanged, and no weight decays.

use std::ops::Range;

use collective::Position;
use model::{
    GradientSink, ModelShard, ParameterSpec, Prediction, PredictionGradient, RoutedTokens, ThreadPool, Unit,
};

use super::membership::RankMembership;
use super::{PlannedRows, RankBase};
use crate::TrainerError;
use crate::learner::{LearnerConfig, RowLoss};
use crate::lora::Adapter;
use crate::on_device::DevicePass;
use crate::optimizer::{Optimizer, OwnedFragment, number_of};
use crate::packing::Packed;
use crate::parallel::RankGroups;
use crate::pass::Pass;
use crate::plan::{MicroBatch, step_passes};
use crate::zero::{
    Communication, Fragment, GradientReduction, Requests, TrainedNetwork, TreeSums, WeightShards,
    with_communication,
};

/// An optimizer step on the sum of `loss` over all rows of `task`.
#[derive(Debug)]
pub(crate) struct StepInputs<'a, L> {
    pub(crate) task: PlannedRows<'a>,
    pub(crate) loss: &'a L,
    pub(crate) learning_rate: f32,
    /// Experts of a token that the rows may have recorded.
    pub(crate) recorded_slots: usize,
    pub(crate) pool: &'a ThreadPool,
}

/// How gradients become an update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateInputs<'a> {
    /// Rows that the gradients are of.
    pub(crate) rows: usize,
    pub(crate) learning_rate: f32,
    /// Gradients are scaled down to this norm.
    pub(crate) max_grad_norm: f32,
    pub(crate) pool: &'a ThreadPool,
}

/// Counts the tokens of experts on the way to a sink.
pub(super) struct RouteCounter<'a> {
    pub(super) sink: &'a mut dyn GradientSink,
    /// By layer.
    pub(super) layers: Vec<RoutedTokens>,
}

impl GradientSink for RouteCounter<'_> {
    fn section(&mut self, index: usize) {
        self.sink.section(index);
    }

    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        self.sink.unit(unit)
    }

    fn done(&mut self, unit: Unit) {
        self.sink.done(unit);
    }

    fn routed(&mut self, index: usize, tokens: &RoutedTokens) {
        self.layers.resize(self.layers.len().max(index + 1), RoutedTokens::default());
        self.layers[index].merge(tokens);
    }
}

/// The exchange of gradients and weights between ranks through the host.
pub(super) struct HostExchange<'a> {
    pub(super) base: &'a RankBase,
    pub(super) membership: &'a RankMembership,
    /// The adapter that is trained in place of the weights.
    pub(super) adapter: Option<&'a Adapter>,
    /// The weights of this rank; `None` if every rank has all weights.
    pub(super) weights: Option<WeightShards<'a>>,
}

impl HostExchange<'_> {
    /// Runs `body` with a communication thread. `sums` receives the sums of the gradients that this rank owns.
    ///
    /// # Errors
    /// If another rank does not take part, or the error of `body`.
    pub(super) fn communicate<R>(
        &self,
        sums: &mut TreeSums,
        body: impl FnOnce(Requests) -> Result<R, TrainerError>,
    ) -> Result<R, TrainerError> {
        let RankGroups { zero, same_experts, .. } = self.membership.groups()?;
        let communication = Communication {
            collective: &*zero,
            same_experts: same_experts.as_deref(),
            trained: &self.membership.trained,
            weights: self.weights,
            buffers: &self.base.buffers,
            clock: &self.membership.clock,
        };
        with_communication(&communication, sums, |requests| self.base.passes.during(|| body(requests)))
    }

    /// Makes the passes of a step. Writes the sums over all ranks of the gradients that this rank owns to `sums`.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or another rank does not take part.
    pub(super) fn reduce<'p, L: RowLoss>(
        &self,
        sums: &mut TreeSums,
        open: impl FnOnce(Requests) -> Result<Pass<'p>, TrainerError>,
        step: &StepInputs<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let Self { base, membership, adapter, .. } = *self;
        let position = membership.place.data;
        let accumulates = base.accumulates();
        self.communicate(sums, |requests| {
            let network = TrainedNetwork {
                layout: &base.layout,
                adapter,
                buffers: &base.buffers,
                threads: step.pool,
                sections: base.passes.own_sections(),
            };
            let mut sink = requests.reducing(network, accumulates);
            let mut pass = open(requests)?;
            match base.passes.stages()? {
                Some(calls) => step.staged_passes(&mut pass, &mut sink, (base, membership), calls),
                None => step.passes(&mut pass, &mut sink, (base, position)),
            }
        })
    }
}

impl<L: RowLoss> StepInputs<'_, L> {
    /// The update of this step under `config`.
    pub(super) fn update(&self, config: &LearnerConfig) -> UpdateInputs<'_> {
        let (rows, learning_rate, pool) = (self.task.rows.len(), self.learning_rate, self.pool);
        UpdateInputs { rows, learning_rate, max_grad_norm: config.max_grad_norm, pool }
    }

    /// Empty reports, one for each leaf of one of `world` ranks.
    pub(super) fn reports(&self, world: usize) -> Vec<L::Report> {
        (0..self.task.plan.len() / world).map(|_| L::Report::default()).collect()
    }

    /// Makes the passes of the rank at `position`, whose gradients go to `sink`. Returns the reports of its leaves.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or the reduction fails.
    pub(super) fn passes(
        &self,
        pass: &mut Pass<'_>,
        sink: &mut GradientReduction<'_>,
        (base, position): (&RankBase, Position),
    ) -> Result<Vec<L::Report>, TrainerError> {
        let mut reports = self.reports(position.world);
        for current in step_passes(self.task.plan, position, base.accumulates()) {
            (sink.slot, sink.complete) = (current.slot, current.complete);
            match current.batch {
                Some(batch) => {
                    let report = &mut reports[current.slot.index];
                    let layers = self.reverse(pass, batch, report, sink, current.complete)?;
                    self.loss.routed(&base.passes.merged(layers, &base.model)?, report);
                }
                None => pass.skip(sink, base.passes.own_sections(), self.pool)?,
            }
        }
        Ok(reports)
    }

    /// Adds the gradients of a micro-batch to `sink`, and its losses to `report`. A device keeps the gradients until those
    /// of a slot are `complete`. Returns the tokens of experts, by layer.
    fn reverse(
        &self,
        pass: &mut Pass<'_>,
        batch: &MicroBatch,
        report: &mut L::Report,
        sink: &mut dyn GradientSink,
        complete: bool,
    ) -> Result<Vec<RoutedTokens>, TrainerError> {
        let packed = self.pack(batch);
        let mut slopes = |samples: Range<usize>, predictions: &[Prediction]| {
            self.slopes(&batch.rows[samples.clone()], &packed.trained[samples], predictions, report)
        };
        let mut sink = RouteCounter { sink, layers: Vec::new() };
        pass.train(&packed, &mut slopes, &mut sink, complete, self.pool)?;
        Ok(sink.layers)
    }

    /// Adds the gradients of a micro-batch to the sums on the device, and its losses to `report`.
    pub(super) fn reverse_on_device(
        &self,
        pass: &mut dyn DevicePass,
        batch: &MicroBatch,
        report: &mut L::Report,
    ) -> Result<(), TrainerError> {
        let packed = self.pack(batch);
        let mut slopes = |samples: Range<usize>, predictions: &[Prediction]| {
            self.slopes(&batch.rows[samples.clone()], &packed.trained[samples], predictions, report)
        };
        let layers = pass.train(&packed, &mut slopes, None)?;
        self.loss.routed(&layers, report);
        Ok(())
    }

    /// Adds the gradients of all rows to the sums on the device of a single rank. Returns the report.
    pub(super) fn sum_on_device(&self, pass: &mut dyn DevicePass) -> Result<L::Report, TrainerError> {
        let mut report = L::Report::default();
        for batch in self.task.plan.iter().flatten() {
            self.reverse_on_device(pass, batch, &mut report)?;
        }
        Ok(report)
    }

    pub(super) fn pack(&self, batch: &MicroBatch) -> Packed<'_> {
        self.task.pack(batch, self.recorded_slots)
    }

    /// Derivatives of the loss with respect to the `predictions` of `rows`, which have `trained` tokens each.
    pub(super) fn slopes(
        &self,
        rows: &[usize],
        trained: &[usize],
        predictions: &[Prediction],
        report: &mut L::Report,
    ) -> Vec<PredictionGradient> {
        let mut slopes = Vec::with_capacity(predictions.len());
        for (row, trained) in rows.iter().zip(trained) {
            let from = slopes.len();
            slopes.extend(self.loss.row(*row, &predictions[from..from + trained], report));
        }
        slopes
    }
}

/// The parts of `values` that an update changes, those of the rank of `membership`: concatenated if `packed`. `gradients` are always
/// concatenated.
pub(super) fn owned<'a>(
    specs: &[ParameterSpec],
    (membership, shard): (&RankMembership, Option<&ModelShard>),
    mut values: &'a mut [f32],
    packed: bool,
    mut gradients: &'a [f32],
) -> Vec<OwnedFragment<'a>> {
    let mut passed = 0;
    let of = |Fragment { tensor, within }: &Fragment| {
        let start = if packed { passed } else { specs[*tensor].offset + within.start };
        let (_, rest) = std::mem::take(&mut values).split_at_mut(start - passed);
        let (own, rest) = rest.split_at_mut(within.len());
        let (own_gradients, others) = gradients.split_at(within.len());
        (values, gradients, passed) = (rest, others, start + within.len());
        let number = number_of(*tensor, shard);
        OwnedFragment { tensor: *tensor, number, offset: within.start, values: own, gradients: own_gradients }
    };
    membership.fragments().iter().map(of).collect()
}

/// Checks the norm of the gradient of a step.
///
/// # Errors
/// If it is not finite.
pub(super) fn finite(norm: f32, optimizer: &Optimizer, rows: usize) -> Result<(), TrainerError> {
    if norm.is_finite() {
        return Ok(());
    }
    Err(TrainerError::GradientNotFinite { update: optimizer.updates(), rows })
}
