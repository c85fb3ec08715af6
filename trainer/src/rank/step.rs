//! The training step of a rank: forward, backward, gradient reduction, clipping, optimizer step.
//!
//! Invariant: a step that fails leaves the weights unchanged, unless the error is that of a device or of another rank. A
//! gradient of zeros makes no update on any rank with any optimizer: weights, moments and the number of updates stay
//! unchanged, and no weight decays.

use std::sync::Arc;

use device::DeviceBuffer;
use model::{GradientSink, ParameterSpec, Parameters, ThreadPool};

use super::{PlannedRows, Rank, RankMembership, RankWeights};
use crate::TrainerError;
use crate::learner::RowLoss;
use crate::lora::Adapter;
use crate::norm::{SquareSum, clip, squares};
use crate::optimizer::{Optimizer, OwnedFragment, ScaledGradients};
use crate::packing::pack;
use crate::pass::Pass;
use crate::plan::{MicroBatch, step_passes};
use crate::zero::{
    Communication, Fragment, GradientReduction, Shards, TrainedNetwork, TreeSums, with_communication,
};
use collective::{HostCollective, Position};

/// An optimizer step on the sum of `loss` over all rows of `task`.
#[derive(Debug)]
pub(crate) struct StepInputs<'a, L> {
    pub(crate) task: PlannedRows<'a>,
    pub(crate) loss: &'a L,
    pub(crate) learning_rate: f32,
    pub(crate) pool: &'a ThreadPool,
}

impl Rank {
    /// This rank's part of a step. Returns the norm of the gradient, and the reports of this rank's leaves.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, another rank does not take part, or the gradient is not finite. The weights
    /// are then unchanged.
    pub(crate) fn step<L: RowLoss>(
        &mut self,
        step: &StepInputs<'_, L>,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let mut sums = self.take_sums()?;
        let done = match &mut sums {
            sums if self.device.as_ref().is_some_and(|device| device.meets) => {
                self.step_on_devices(sums.as_mut(), step)
            }
            Some(sums) if self.membership.is_none() => self.step_on_device(sums, step),
            None if self.membership.is_none() => self.step_on_host(step),
            sums => self.step_among_others(sums.as_mut(), step),
        };
        self.put_sums(sums);
        done
    }

    /// A step of a single rank on the host.
    fn step_on_host<L: RowLoss>(
        &mut self,
        step: &StepInputs<'_, L>,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let mut sums = std::mem::take(&mut self.sums);
        let done = self.accumulate(&mut sums, step).and_then(|reports| {
            let norm = self.update_alone(sums.values(), step)?;
            Ok((norm, reports))
        });
        self.sums = sums;
        done
    }

    /// Writes the gradients of all rows to `sums`.
    fn accumulate<L: RowLoss>(
        &self,
        sums: &mut TreeSums,
        step: &StepInputs<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let StepInputs { task, pool, .. } = step;
        let mut pass = self.pass(None, None)?;
        let mut reports = step.reports(self.world());
        let network = TrainedNetwork {
            layout: &self.layout,
            adapter: self.adapter.as_ref(),
            buffers: &self.buffers,
            threads: pool,
        };
        let mut sink = GradientReduction::single(network, sums);
        let alone = Position { rank: 0, world: 1 };
        for current in step_passes(task.plan, alone, !self.config.shares_gradients()) {
            (sink.slot, sink.complete) = (current.slot, current.complete);
            match current.batch {
                Some(batch) => {
                    step.reverse(&mut pass, batch, &mut reports[current.slot.index], Some(&mut sink))?
                }
                None => pass.skip(Some(&mut sink))?,
            }
        }
        Ok(reports)
    }

    /// Updates all weights, or the adapter, on the host with their `gradients`, `[trained values]`. Returns the norm of the
    /// gradient.
    pub(super) fn update_alone<L>(
        &mut self,
        gradients: &[f32],
        &StepInputs { task, learning_rate, pool, .. }: &StepInputs<'_, L>,
    ) -> Result<f32, TrainerError> {
        let RankWeights::Whole(parameters) = &mut self.weights else {
            unreachable!("weights that are updated on the host are there, all of a rank that is alone")
        };
        let specs = self.adapter.as_ref().map_or(self.layout.specs(), Adapter::specs);
        let norm = squares(specs.iter().map(|spec| &gradients[spec.range()]), pool).norm();
        finite(norm, &self.optimizer, task)?;
        if norm == 0.0 {
            return Ok(norm);
        }
        let update = ScaledGradients { gradients, scale: clip(norm, self.config.max_grad_norm) };
        let parameters = unshared(parameters);
        if let Some(adapter) = &mut self.adapter {
            adapter.update(&mut self.optimizer, update, learning_rate, pool);
            adapter.merge(parameters.values_mut(), pool);
        } else {
            let layout = &self.layout;
            self.optimizer.update(layout.specs(), parameters.values_mut(), update, learning_rate, pool);
        }
        Ok(norm)
    }

    /// A step of one of several ranks. A device accumulates gradients in `sums` over several passes.
    fn step_among_others<L: RowLoss>(
        &mut self,
        sums: Option<&mut DeviceBuffer<f32>>,
        step: &StepInputs<'_, L>,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let mut own = std::mem::take(&mut self.sums);
        let done = self.reduced((&mut own, sums), step).and_then(|reports| {
            let norm = self.update_own(own.values(), step)?;
            Ok((norm, reports))
        });
        self.sums = own;
        let done = done?;
        self.refresh()?;
        Ok(done)
    }

    /// Writes the sums over all ranks of the gradients that this rank owns to `own`.
    fn reduced<L: RowLoss>(
        &self,
        (own, sums): (&mut TreeSums, Option<&mut DeviceBuffer<f32>>),
        step: &StepInputs<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let (Some(membership), collective) = (&self.membership, self.collective()?) else {
            unreachable!("a rank that is alone reduces nothing")
        };
        let RankMembership { trained, weights, .. } = membership;
        let shared = match &self.weights {
            RankWeights::Whole(_) | RankWeights::Device(_) | RankWeights::DeviceOwn(_) => None,
            RankWeights::Own(values) => Some((weights, &values[..])),
        };
        let communication =
            Communication { collective: &*collective, trained, weights: shared, buffers: &self.buffers };
        let (plan, pool) = (step.task.plan, step.pool);
        let accumulates = !self.config.shares_gradients();
        let position = collective.position();
        // Gradients are accumulated where they are computed.
        let on_device = sums.is_some();
        with_communication(&communication, own, |ends| {
            let adapter = self.adapter.as_ref();
            let network =
                TrainedNetwork { layout: &self.layout, adapter, buffers: &self.buffers, threads: pool };
            let mut sink = ends.reducing(network, accumulates);
            let mut pass = self.pass(shared.is_some().then_some(ends), sums)?;
            let mut reports = step.reports(self.world());
            for current in step_passes(plan, position, accumulates) {
                (sink.slot, sink.complete) = (current.slot, current.complete);
                if let Some(batch) = current.batch {
                    let to: Option<&mut dyn GradientSink> =
                        if current.complete || !on_device { Some(&mut sink) } else { None };
                    step.reverse(&mut pass, batch, &mut reports[current.slot.index], to)?;
                } else {
                    pass.skip(Some(&mut sink))?;
                }
            }
            Ok(reports)
        })
    }

    /// Updates the shards of this rank with their gradients `own`, and gathers the shards of the others. Returns the norm of
    /// the whole gradient.
    fn update_own<L>(
        &mut self,
        own: &[f32],
        &StepInputs { task, learning_rate, pool, .. }: &StepInputs<'_, L>,
    ) -> Result<f32, TrainerError> {
        let collective = self.collective()?;
        let Some(RankMembership { rank, trained, .. }) = &self.membership else {
            unreachable!("a rank that is alone owns everything")
        };
        let fragments = trained.fragments(*rank);
        let mut end = 0;
        let parts = fragments.iter().map(|fragment| {
            end += fragment.within.len();
            &own[end - fragment.within.len()..end]
        });
        let norm = norm_of_all(&*collective, &squares(parts, pool))?;
        finite(norm, &self.optimizer, task)?;
        if norm == 0.0 {
            return Ok(norm);
        }
        let scale = clip(norm, self.config.max_grad_norm);
        if let Some(adapter) = &mut self.adapter {
            let (specs, values) = adapter.parts_mut();
            let owned = owned(specs, fragments, values, false, own);
            self.optimizer.update_owned(specs, owned, scale, learning_rate, pool);
            gather(&*collective, trained, values)?;
            let RankWeights::Whole(parameters) = &mut self.weights else {
                unreachable!("with an adapter every rank has all weights")
            };
            adapter.merge(unshared(parameters).values_mut(), pool);
            return Ok(norm);
        }
        let specs = self.layout.specs();
        match &mut self.weights {
            RankWeights::Whole(parameters) => {
                let values = unshared(parameters).values_mut();
                let owned = owned(specs, fragments, values, false, own);
                self.optimizer.update_owned(specs, owned, scale, learning_rate, pool);
                gather(&*collective, trained, values)?;
            }
            RankWeights::Own(values) => {
                let owned = owned(specs, fragments, values, true, own);
                self.optimizer.update_owned(specs, owned, scale, learning_rate, pool);
            }
            RankWeights::Device(_) | RankWeights::DeviceOwn(_) => {
                unreachable!("ranks that exchange through the host update there")
            }
        }
        Ok(norm)
    }
}

impl<L: RowLoss> StepInputs<'_, L> {
    /// Empty reports, one for each leaf of one of `world` ranks.
    pub(super) fn reports(&self, world: usize) -> Vec<L::Report> {
        (0..self.task.plan.len() / world).map(|_| L::Report::default()).collect()
    }

    /// Adds the gradients of a micro-batch to `sink`, or to the sums on the device, and its losses to `report`.
    pub(super) fn reverse(
        &self,
        pass: &mut Pass<'_>,
        batch: &MicroBatch,
        report: &mut L::Report,
        sink: Option<&mut dyn GradientSink>,
    ) -> Result<(), TrainerError> {
        let packed = pack(batch.rows.iter().map(|row| self.task.rows[*row]));
        let (predictions, trace) = pass.forward(&packed, self.pool)?;
        let mut slopes = Vec::with_capacity(predictions.len());
        for (row, trained) in batch.rows.iter().zip(&packed.trained) {
            let from = slopes.len();
            slopes.extend(self.loss.row(*row, &predictions[from..from + trained], report));
        }
        pass.backward(&packed, trace, &slopes, sink, self.pool)
    }
}

/// The norm of the gradient over all ranks. `squares` is the sum of squares of this rank's part.
pub(super) fn norm_of_all(collective: &dyn HostCollective, squares: &SquareSum) -> Result<f32, TrainerError> {
    let mut sum = SquareSum::default();
    for (rank, bytes) in collective.all_gather_bytes(squares.to_bytes())?.iter().enumerate() {
        let Some(squares) = SquareSum::from_bytes(bytes) else {
            let reason = format!("rank {rank} sent {} bytes for a sum of squares", bytes.len());
            return Err(TrainerError::Message { reason });
        };
        sum.merge(&squares);
    }
    Ok(sum.norm())
}

/// The parts of `values` that an update changes: the `fragments`, concatenated if `packed`. `gradients` are always
/// concatenated.
fn owned<'a>(
    specs: &[ParameterSpec],
    fragments: &[Fragment],
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
        OwnedFragment { tensor: *tensor, offset: within.start, values: own, gradients: own_gradients }
    };
    fragments.iter().map(of).collect()
}

/// Gathers the shards of the other ranks into `values`, `[trained values]`.
fn gather(collective: &dyn HostCollective, shards: &Shards, values: &mut [f32]) -> Result<(), TrainerError> {
    for unit in 0..shards.units() {
        let own = values[shards.owned(collective.rank(), unit)].to_vec();
        collective.all_gather(&own, shards.cuts(unit), &mut values[shards.place(unit)])?;
    }
    Ok(())
}

pub(super) fn finite(norm: f32, optimizer: &Optimizer, task: PlannedRows<'_>) -> Result<(), TrainerError> {
    if norm.is_finite() {
        return Ok(());
    }
    Err(TrainerError::GradientNotFinite { update: optimizer.updates(), rows: task.rows.len() })
}

/// Mutable parameters, from their only reference.
fn unshared(parameters: &mut Arc<Parameters>) -> &mut Parameters {
    let Some(parameters) = Arc::get_mut(parameters) else {
        unreachable!("the decoders of this step are dropped, and the rank has the only other reference")
    };
    parameters
}
