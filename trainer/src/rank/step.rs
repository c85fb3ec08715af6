//! What a rank does in a step.
//!
//! Invariant: a step that fails leaves the weights as they were, unless the error is one of a device or of another rank. A
//! gradient that is zero everywhere makes no update: weights, moments and the number of updates stay as they are, nothing
//! decays, with every optimizer and on every rank.

use std::sync::Arc;

use device::Buffer;
use model::{GradientSink, Gradients, ParameterSpec, Parameters, ThreadPool};

use super::{Place, Rank, Task, Weights};
use crate::TrainerError;
use crate::collective::Collective;
use crate::exchange::{Line, exchange};
use crate::learner::RowLoss;
use crate::norm::{clip, norm, sum_of_squares};
use crate::optimizer::{Optimizer, OwnedFragment, ScaledGradients};
use crate::packing::pack;
use crate::pass::Pass;
use crate::plan::MicroBatch;
use crate::shards::{Fragment, Shards};

/// An optimizer step on the sum of `loss` over all rows of `task`.
#[derive(Debug)]
pub(crate) struct Step<'a, L> {
    pub(crate) task: Task<'a>,
    pub(crate) loss: &'a L,
    pub(crate) learning_rate: f32,
    pub(crate) pool: &'a ThreadPool,
}

impl Rank {
    /// This rank's part of a step. Returns the norm of the gradient, and what this rank's rows report.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary, another rank does not take part, or the gradient is not finite; the weights
    /// are then as before.
    pub(crate) fn step<L: RowLoss>(&mut self, step: &Step<'_, L>) -> Result<(f32, L::Report), TrainerError> {
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
    fn step_on_host<L: RowLoss>(&mut self, step: &Step<'_, L>) -> Result<(f32, L::Report), TrainerError> {
        let mut gradients = self.gradients.take().unwrap_or_else(|| Gradients::zeros(&self.layout));
        let done = self.accumulate(&mut gradients, step).and_then(|report| {
            let norm = self.update_alone(gradients.values(), step)?;
            Ok((norm, report))
        });
        self.gradients = Some(gradients);
        done
    }

    /// Makes `gradients` those of all rows.
    fn accumulate<L: RowLoss>(
        &self,
        gradients: &mut Gradients,
        step: &Step<'_, L>,
    ) -> Result<L::Report, TrainerError> {
        gradients.clear(step.pool);
        let mut pass = self.pass(None, None)?;
        let mut report = L::Report::default();
        for batch in step.task.plan.iter().flatten() {
            step.reverse(&mut pass, batch, &mut report, Some(&mut *gradients))?;
        }
        Ok(report)
    }

    /// Updates all weights, or the adapter, on the host. Returns the norm of the gradient.
    pub(super) fn update_alone<L>(
        &mut self,
        gradients: &[f32],
        &Step { task, learning_rate, pool, .. }: &Step<'_, L>,
    ) -> Result<f32, TrainerError> {
        let Weights::Whole(parameters) = &mut self.weights else {
            unreachable!("weights that are updated on the host are there, all of a rank that is alone")
        };
        let adapted = self.adapter.as_ref().map(|adapter| adapter.gradients(gradients, pool));
        let gradients = adapted.as_deref().unwrap_or(gradients);
        let norm = norm(gradients, pool);
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
    ) -> Result<(f32, L::Report), TrainerError> {
        let mut own = std::mem::take(&mut self.own);
        let done = self.reduced((&mut own, sums), step).and_then(|report| {
            let norm = self.update_own(&own, step)?;
            Ok((norm, report))
        });
        self.own = own;
        let done = done?;
        self.refresh()?;
        Ok(done)
    }

    /// Makes `own` the sums over all ranks of the gradients that this rank owns.
    fn reduced<L: RowLoss>(
        &self,
        (own, sums): (&mut Vec<f32>, Option<&mut Buffer<f32>>),
        step: &Step<'_, L>,
    ) -> Result<L::Report, TrainerError> {
        let (Some(place), collective) = (&self.place, self.collective()?) else {
            unreachable!("a rank that is alone reduces nothing")
        };
        let Place { rank, trained, weights, .. } = place;
        own.resize(trained.len(*rank), 0.0);
        let shared = match &self.weights {
            Weights::Whole(_) | Weights::Device(_) | Weights::DeviceOwn(_) => None,
            Weights::Own(values) => Some((weights, &values[..])),
        };
        let line = Line { collective: &*collective, trained, weights: shared, pool: &self.pool };
        let (plan, pool) = (step.task.plan, step.pool);
        let rounds = Rounds::of(plan, *rank, !self.config.shares_gradients());
        // Gradients that stay do so where they are computed.
        let on_device = sums.is_some();
        exchange(&line, own, |ends| {
            let adapter = self.adapter.as_ref().map(|adapter| (adapter, pool));
            let mut sink = ends.reducing(&self.layout, &self.pool, adapter);
            let mut pass = self.pass(shared.is_some().then_some(ends), sums)?;
            let mut report = L::Report::default();
            for round in 0..rounds.count {
                (sink.leave, sink.first) = (rounds.leave(round), rounds.first(round));
                if let Some(batch) = plan[*rank].get(round) {
                    let to: Option<&mut dyn GradientSink> =
                        if sink.leave || !on_device { Some(&mut sink) } else { None };
                    step.reverse(&mut pass, batch, &mut report, to)?;
                } else {
                    pass.skip(Some(&mut sink))?;
                }
            }
            Ok(report)
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
        let norm = norm_of_all(&*collective, sum_of_squares(own, pool))?;
        finite(norm, &self.optimizer, task)?;
        if norm == 0.0 {
            return Ok(norm);
        }
        let scale = clip(norm, self.config.max_grad_norm);
        let fragments = trained.fragments(*rank);
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

/// The rounds of a step of a rank among others, in which it reverses a micro-batch or takes part in what others do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounds {
    pub(super) count: usize,
    /// Whether gradients stay until the last round. Every rank hands them on once then, however many micro-batches it has.
    accumulates: bool,
}

impl Rounds {
    pub(super) fn of(plan: &[Vec<MicroBatch>], rank: usize, accumulates: bool) -> Self {
        let most = plan.iter().map(Vec::len).max().unwrap_or(0);
        Self { count: if accumulates { plan[rank].len().max(1) } else { most }, accumulates }
    }

    /// Whether gradients leave at the end of a round.
    pub(super) fn leave(self, round: usize) -> bool {
        !self.accumulates || round + 1 == self.count
    }

    /// Whether they are the first of the step that do.
    pub(super) fn first(self, round: usize) -> bool {
        self.accumulates || round == 0
    }
}

/// The norm of the gradient of which every rank has a part with these `squares` as their sum.
pub(super) fn norm_of_all(collective: &dyn Collective, squares: f64) -> Result<f32, TrainerError> {
    let all = collective.all_gather_bytes(squares.to_le_bytes().to_vec())?;
    let number = |bytes: &Vec<u8>| <[u8; 8]>::try_from(&bytes[..]).map_or(f64::NAN, f64::from_le_bytes);
    Ok(all.iter().map(number).sum::<f64>().sqrt() as f32)
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
fn gather(collective: &dyn Collective, shards: &Shards, values: &mut [f32]) -> Result<(), TrainerError> {
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
