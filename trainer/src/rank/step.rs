//! What a rank does in a step.
//!
//! Invariant: a step that fails leaves the weights as they were, unless the error is one of a device or of another rank. A
//! gradient that is zero everywhere makes no update: weights, moments and the number of updates stay as they are, nothing
//! decays, with every optimizer and on every rank.

use std::sync::Arc;

use device::Buffer;
use model::{GradientSink, ParameterSpec, Parameters, ThreadPool};

use super::{Place, Rank, Task, Weights};
use crate::TrainerError;
use crate::exchange::{Line, Network, Reducing, exchange};
use crate::learner::RowLoss;
use crate::lora::Adapter;
use crate::norm::{SquareSum, clip, squares};
use crate::optimizer::{Optimizer, OwnedFragment, ScaledGradients};
use crate::packing::pack;
use crate::pass::Pass;
use crate::plan::{MicroBatch, turns};
use crate::shards::{Fragment, Shards};
use crate::tree::TreeSums;
use collective::{Collective as _, HostCollective, Position};

/// An optimizer step on the sum of `loss` over all rows of `task`.
#[derive(Debug)]
pub(crate) struct Step<'a, L> {
    pub(crate) task: Task<'a>,
    pub(crate) loss: &'a L,
    pub(crate) learning_rate: f32,
    pub(crate) pool: &'a ThreadPool,
}

impl Rank {
    /// This rank's part of a step. Returns the norm of the gradient, and the reports of this rank's leaves.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary, another rank does not take part, or the gradient is not finite; the weights
    /// are then as before.
    pub(crate) fn step<L: RowLoss>(
        &mut self,
        step: &Step<'_, L>,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let mut sums = self.take_sums()?;
        let done = match &mut sums {
            sums if self.device.as_ref().is_some_and(|device| device.meets) => {
                self.step_on_devices(sums.as_mut(), step)
            }
            Some(sums) if self.place.is_none() => self.step_on_device(sums, step),
            None if self.place.is_none() => self.step_on_host(step),
            sums => self.step_among_others(sums.as_mut(), step),
        };
        self.put_sums(sums);
        done
    }

    /// A step of a rank that is alone.
    fn step_on_host<L: RowLoss>(
        &mut self,
        step: &Step<'_, L>,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let mut sums = std::mem::take(&mut self.sums);
        let done = self.accumulate(&mut sums, step).and_then(|reports| {
            let norm = self.update_alone(sums.values(), step)?;
            Ok((norm, reports))
        });
        self.sums = sums;
        done
    }

    /// Makes `sums` the gradients of all rows.
    fn accumulate<L: RowLoss>(
        &self,
        sums: &mut TreeSums,
        step: &Step<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let Step { task, pool, .. } = step;
        let mut pass = self.pass(None, None)?;
        let mut reports = step.reports(self.world());
        let network =
            Network { layout: &self.layout, adapter: self.adapter.as_ref(), pool: &self.pool, threads: pool };
        let mut sink = Reducing::alone(network, sums);
        let alone = Position { rank: 0, world: 1 };
        for turn in turns(task.plan, alone, !self.config.shares_gradients()) {
            (sink.slot, sink.complete) = (turn.slot, turn.complete);
            match turn.batch {
                Some(batch) => {
                    step.reverse(&mut pass, batch, &mut reports[turn.slot.index], Some(&mut sink))?
                }
                None => pass.skip(Some(&mut sink))?,
            }
        }
        Ok(reports)
    }

    /// Updates all weights, or the adapter, on the host for the `gradients` of what is trained, `[trained values]`. Returns
    /// the norm of the gradient.
    pub(super) fn update_alone<L>(
        &mut self,
        gradients: &[f32],
        &Step { task, learning_rate, pool, .. }: &Step<'_, L>,
    ) -> Result<f32, TrainerError> {
        let Weights::Whole(parameters) = &mut self.weights else {
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

    /// A step of a rank among others, whose device has `sums` for gradients that stay for longer than a pass.
    fn step_among_others<L: RowLoss>(
        &mut self,
        sums: Option<&mut Buffer<f32>>,
        step: &Step<'_, L>,
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

    /// Makes `own` the sums over all ranks of the gradients that this rank owns.
    fn reduced<L: RowLoss>(
        &self,
        (own, sums): (&mut TreeSums, Option<&mut Buffer<f32>>),
        step: &Step<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let (Some(place), collective) = (&self.place, self.collective()?) else {
            unreachable!("a rank that is alone reduces nothing")
        };
        let Place { rank, trained, weights, .. } = place;
        let shared = match &self.weights {
            Weights::Whole(_) | Weights::Device(_) | Weights::DeviceOwn(_) => None,
            Weights::Own(values) => Some((weights, &values[..])),
        };
        let line = Line { collective: &*collective, trained, weights: shared, pool: &self.pool };
        let (plan, pool) = (step.task.plan, step.pool);
        let accumulates = !self.config.shares_gradients();
        let position = collective.position();
        // Gradients that stay do so where they are computed.
        let on_device = sums.is_some();
        exchange(&line, own, |ends| {
            let adapter = self.adapter.as_ref();
            let network = Network { layout: &self.layout, adapter, pool: &self.pool, threads: pool };
            let mut sink = ends.reducing(network, accumulates);
            let mut pass = self.pass(shared.is_some().then_some(ends), sums)?;
            let mut reports = step.reports(self.world());
            for turn in turns(plan, position, accumulates) {
                (sink.slot, sink.complete) = (turn.slot, turn.complete);
                if let Some(batch) = turn.batch {
                    let to: Option<&mut dyn GradientSink> =
                        if turn.complete || !on_device { Some(&mut sink) } else { None };
                    step.reverse(&mut pass, batch, &mut reports[turn.slot.index], to)?;
                } else {
                    pass.skip(Some(&mut sink))?;
                }
            }
            Ok(reports)
        })
    }

    /// Updates what this rank owns for its gradients `own`, and gets what the others own. Returns the norm of the whole
    /// gradient.
    fn update_own<L>(
        &mut self,
        own: &[f32],
        &Step { task, learning_rate, pool, .. }: &Step<'_, L>,
    ) -> Result<f32, TrainerError> {
        let collective = self.collective()?;
        let Some(Place { rank, trained, .. }) = &self.place else {
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
            let Weights::Whole(parameters) = &mut self.weights else {
                unreachable!("with an adapter every rank has all weights")
            };
            adapter.merge(unshared(parameters).values_mut(), pool);
            return Ok(norm);
        }
        let specs = self.layout.specs();
        match &mut self.weights {
            Weights::Whole(parameters) => {
                let values = unshared(parameters).values_mut();
                let owned = owned(specs, fragments, values, false, own);
                self.optimizer.update_owned(specs, owned, scale, learning_rate, pool);
                gather(&*collective, trained, values)?;
            }
            Weights::Own(values) => {
                let owned = owned(specs, fragments, values, true, own);
                self.optimizer.update_owned(specs, owned, scale, learning_rate, pool);
            }
            Weights::Device(_) | Weights::DeviceOwn(_) => {
                unreachable!("ranks that exchange through the host update there")
            }
        }
        Ok(norm)
    }
}

impl<L: RowLoss> Step<'_, L> {
    /// Empty reports of the leaves of one of `world` ranks.
    pub(super) fn reports(&self, world: usize) -> Vec<L::Report> {
        (0..self.task.plan.len() / world).map(|_| L::Report::default()).collect()
    }

    /// Adds the gradients of a micro-batch to `sink`, or to what the device sums up, and what its loss says to `report`.
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

/// The norm of the gradient of which every rank has a part with these `squares` as their sum.
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

/// What an update changes: of `values` those of `fragments`, which are all that is there if it is `packed`. `gradients`
/// are packed.
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

/// Gets into `values` what the other ranks own of them.
fn gather(collective: &dyn HostCollective, shards: &Shards, values: &mut [f32]) -> Result<(), TrainerError> {
    for unit in 0..shards.units() {
        let own = values[shards.owned(collective.rank(), unit)].to_vec();
        collective.all_gather(&own, shards.cuts(unit), &mut values[shards.place(unit)])?;
    }
    Ok(())
}

pub(super) fn finite(norm: f32, optimizer: &Optimizer, task: Task<'_>) -> Result<(), TrainerError> {
    if norm.is_finite() {
        return Ok(());
    }
    Err(TrainerError::GradientNotFinite { update: optimizer.updates(), rows: task.rows.len() })
}

/// The parameters, to change.
fn unshared(parameters: &mut Arc<Parameters>) -> &mut Parameters {
    let Some(parameters) = Arc::get_mut(parameters) else {
        unreachable!("the decoders of this step are gone, and nobody else is given the parameters")
    };
    parameters
}
