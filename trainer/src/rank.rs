//! One rank of a learner: its weights, its share of the optimizer, its part of every step.
//!
//! With several ranks (ZeRO, Rajbhandari et al. 2019, arXiv 1910.02054) each has the optimizer's state of its own shards
//! only and updates them alone. Stage 1: a rank sums the gradients of its leaves, and reduce-scatter overlaps the backward
//! pass of the last one. Stage 2: reduce-scatter follows every micro-batch, and a rank keeps its shards of the sums. Stage
//! 3: a rank also keeps its shards of the weights, and all-gather brings the layers as they are needed.
//!
//! Gradients are summed as a balanced binary tree over the leaves of a step ([`crate::plan`]), so weights and moments have
//! the same bits for every number of ranks that is a power of two. In stages 2 and 3 the tree is over one micro-batch of
//! each leaf, and these sums are a chain; with one micro-batch per leaf all stages have the same bits.
//!
//! Invariant: all ranks make the same calls with the same rows, plan and rate. What they have in common (weights after an
//! update, the norm of the gradient, whether it is finite) has the same bits on all of them.

mod memory;
mod on_device;
mod step;

pub(crate) use step::Step;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::Buffer;
use model::{Config, Decoder, Layout, ParameterSpec, Parameters, Prediction, ThreadPool};
use trajectory::Sample;

use crate::TrainerError;
use crate::exchange::{Ends, Line, Pool, exchange};
use crate::lead::{decode, encode};
use crate::learner::{Frozen, LearnerConfig, OwnedValues};
use crate::lora::Adapter;
use crate::on_device::Mirror;
use crate::optimizer::{Optimizer, TensorState};
use crate::packing::pack;
use crate::pass::Pass;
use crate::plan::MicroBatch;
use crate::shards::{Fragment, Shards};
use crate::tree::TreeSums;
use collective::HostCollective;

/// What a rank is made of, or all ranks of a learner.
#[derive(Debug)]
pub(crate) struct Seed {
    pub(crate) config: LearnerConfig,
    pub(crate) model: Config,
    pub(crate) parameters: Arc<Parameters>,
    /// What is trained in place of the weights, merged into them.
    pub(crate) adapter: Option<Adapter>,
    /// Of whole tensors.
    pub(crate) optimizer: Option<Optimizer>,
}

/// What a rank among others needs to know before it has any weights.
#[derive(Debug)]
pub(crate) struct Membership {
    config: LearnerConfig,
    model: Config,
    layout: Arc<Layout>,
    adapter: Option<Adapter>,
    collective: Arc<dyn HostCollective>,
    rank: usize,
    trained: Shards,
    weights: Shards,
}

/// One rank.
#[derive(Debug)]
pub(crate) struct Rank {
    config: LearnerConfig,
    model: Config,
    layout: Arc<Layout>,
    weights: Weights,
    optimizer: Optimizer,
    adapter: Option<Adapter>,
    /// Its place among others, if there are any.
    place: Option<Place>,
    /// Where it computes, if not on the processor.
    device: Option<on_device::OnDevice>,
    /// Sums of the gradients that this rank owns, kept from step to step because writing is cheaper than allocating.
    sums: TreeSums,
    pool: Pool,
}

/// The weights that a rank has.
#[derive(Debug)]
pub(crate) enum Weights {
    /// All of them. Nobody else holds them between two calls.
    Whole(Arc<Parameters>),
    /// The own shards, one after the other.
    Own(Vec<f32>),
    /// All of them, on the device.
    Device(Mirror<Parameters>),
    /// The own shards, one after the other, on the device.
    DeviceOwn(Mirror<Vec<f32>>),
}

#[derive(Debug)]
struct Place {
    rank: usize,
    /// `None` once something went wrong, which the others notice by that.
    collective: Mutex<Option<Arc<dyn HostCollective>>>,
    /// How what is trained is shared.
    trained: Shards,
    /// How the weights are shared.
    weights: Shards,
}

/// What a step or a score computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<'a> {
    pub(crate) rows: &'a [&'a Sample],
    /// The micro-batches of every leaf of a step, or of every rank that scores.
    pub(crate) plan: &'a [Vec<MicroBatch>],
}

/// Predictions of some rows, each with the index of its row.
pub(crate) type Scored = Vec<(usize, Vec<Prediction>)>;

impl Place {
    /// What this rank owns, which is `values` one after the other: where it lies in the flat parameters, and what it is.
    fn owned<'a>(&self, values: &'a [f32]) -> OwnedValues<'a> {
        let Self { rank, weights, .. } = self;
        let of = |unit| (weights.owned(*rank, unit), &values[weights.packed(*rank, unit)]);
        (0..weights.units()).map(of).collect()
    }
}

impl Seed {
    /// A learner of one rank.
    ///
    /// # Errors
    /// If its device is not there, or has no room.
    pub(crate) fn alone(self) -> Result<Rank, TrainerError> {
        let specs = self.adapter.as_ref().map_or(self.parameters.layout().specs(), Adapter::specs);
        let trained = specs.last().map_or(0, |spec| spec.range().end);
        let optimizer = self.optimizer.unwrap_or_else(|| Optimizer::new(self.config.optimizer, specs));
        let rank = Rank {
            layout: Arc::clone(self.parameters.layout()),
            weights: Weights::Whole(self.parameters),
            optimizer,
            adapter: self.adapter,
            place: None,
            device: None,
            sums: TreeSums::new(trained),
            pool: Pool::default(),
            config: self.config,
            model: self.model,
        };
        rank.on_device()
    }

    /// One of the ranks of `collective`.
    ///
    /// # Errors
    /// If its device is not there, or has no room.
    pub(crate) fn member(&self, collective: Arc<dyn HostCollective>) -> Result<Rank, TrainerError> {
        let (model, adapter, layout) = (self.model.clone(), self.adapter.clone(), self.parameters.layout());
        let member = Membership::new(self.config.clone(), model, layout, adapter, collective);
        let weights = if member.owns_weights() {
            Weights::Own(member.weights.pack(member.rank, self.parameters.values()))
        } else {
            Weights::Whole(Arc::new(Parameters::clone(&self.parameters)))
        };
        let optimizer = self.optimizer.as_ref().map(|optimizer| optimizer.cut(member.fragments()));
        member.rank(weights, optimizer)
    }
}

impl Membership {
    /// The place of this rank of `collective` in training a model, or its `adapter`.
    pub(crate) fn new(
        config: LearnerConfig,
        model: Config,
        layout: &Arc<Layout>,
        adapter: Option<Adapter>,
        collective: Arc<dyn HostCollective>,
    ) -> Self {
        let (rank, world) = (collective.rank(), collective.world());
        let weights = Shards::of_model(layout, world, &config.optimizer);
        let trained = match &adapter {
            Some(adapter) => Shards::of_adapter(layout, adapter, world, &config.optimizer),
            None => weights.clone(),
        };
        Self { config, model, layout: Arc::clone(layout), adapter, collective, rank, trained, weights }
    }

    /// Whether this rank has its own shards of the weights only. With an adapter, which is small, all weights are read
    /// to merge it, and every rank has them.
    pub(crate) fn owns_weights(&self) -> bool {
        self.config.shares_weights() && self.adapter.is_none()
    }

    /// What it owns of the values of a unit.
    pub(crate) fn own_of<'a>(&self, unit: usize, values: &'a [f32]) -> &'a [f32] {
        &values[self.weights.cuts(unit)[self.rank].clone()]
    }

    /// The tensors that are trained.
    pub(crate) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.layout.specs(), Adapter::specs)
    }

    /// What it owns of them.
    pub(crate) fn fragments(&self) -> &[Fragment] {
        self.trained.fragments(self.rank)
    }

    /// The adapter, to fill in what is in it.
    pub(crate) fn adapter_mut(&mut self) -> Option<&mut Adapter> {
        self.adapter.as_mut()
    }

    /// The rank with its weights and the optimizer of its fragments; `None` for a fresh one.
    ///
    /// # Errors
    /// If its device is not there, or has no room.
    pub(crate) fn rank(self, weights: Weights, optimizer: Option<Optimizer>) -> Result<Rank, TrainerError> {
        let fresh = || Optimizer::of_fragments(self.config.optimizer, self.trained(), self.fragments());
        let optimizer = optimizer.unwrap_or_else(fresh);
        let collective = Mutex::new(Some(self.collective));
        let owned = self.trained.len(self.rank);
        let place = Place { rank: self.rank, collective, trained: self.trained, weights: self.weights };
        let rank = Rank {
            config: self.config,
            model: self.model,
            layout: self.layout,
            weights,
            optimizer,
            adapter: self.adapter,
            place: Some(place),
            device: None,
            sums: TreeSums::new(owned),
            pool: Pool::default(),
        };
        rank.on_device()
    }
}

impl Rank {
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// All weights, if this rank has them.
    ///
    /// # Errors
    /// If they are on a device, and it fails.
    pub(crate) fn whole(&self) -> Result<Option<&Arc<Parameters>>, TrainerError> {
        match &self.weights {
            Weights::Whole(parameters) => Ok(Some(parameters)),
            Weights::Own(_) | Weights::DeviceOwn(_) => Ok(None),
            Weights::Device(mirror) => self.mirrored(mirror).map(Some),
        }
    }

    pub(crate) fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The tensors that are trained.
    pub(crate) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.layout.specs(), Adapter::specs)
    }

    /// The optimizer: of whole tensors, or of [`Self::fragments`]; without states that are on a device.
    pub(crate) fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// What the optimizer has states of; `None` for all tensors.
    pub(crate) fn fragments(&self) -> Option<&[Fragment]> {
        self.place.as_ref().map(|place| place.trained.fragments(place.rank))
    }

    /// The weights that this rank owns: where they lie in the flat parameters, and what they are.
    ///
    /// # Errors
    /// If they are on a device, and it fails.
    pub(crate) fn owned(&self) -> Result<OwnedValues<'_>, TrainerError> {
        Ok(match (&self.weights, &self.place) {
            (Weights::Device(mirror), _) => vec![(0..self.layout.len(), self.mirrored(mirror)?.values())],
            (Weights::Whole(parameters), None) => vec![(0..self.layout.len(), parameters.values())],
            (Weights::Whole(parameters), Some(place)) => {
                let owned = (0..place.weights.units()).map(|unit| place.weights.owned(place.rank, unit));
                owned.map(|range| (range.clone(), &parameters.values()[range])).collect()
            }
            (Weights::Own(values), Some(place)) => place.owned(values),
            (Weights::DeviceOwn(mirror), Some(place)) => place.owned(self.mirrored_own(mirror)?),
            (Weights::Own(_) | Weights::DeviceOwn(_), None) => {
                unreachable!("a rank that is alone has all weights")
            }
        })
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> usize {
        if self.place.is_some() { self.config.world } else { 1 }
    }

    pub(crate) fn config(&self) -> &LearnerConfig {
        &self.config
    }

    pub(crate) fn model(&self) -> &Config {
        &self.model
    }

    /// Collects the weights of all ranks into `all` of rank 0; the others give `None`.
    ///
    /// # Errors
    /// If another rank does not take part.
    pub(crate) fn gather_weights(&self, mut all: Option<&mut [f32]>) -> Result<(), TrainerError> {
        let own = match &self.weights {
            Weights::Own(own) => &own[..],
            Weights::DeviceOwn(mirror) => self.mirrored_own(mirror)?,
            Weights::Whole(_) | Weights::Device(_) => {
                unreachable!("weights that every rank has are not collected")
            }
        };
        let Some(Place { rank, weights, .. }) = &self.place else {
            unreachable!("a rank that is alone has all weights")
        };
        let collective = self.collective()?;
        for unit in 0..weights.units() {
            let all = all.as_deref_mut().map(|all| &mut all[weights.place(unit)]);
            collective.gather(0, &own[weights.packed(*rank, unit)], weights.cuts(unit), all)?;
        }
        Ok(())
    }

    /// The optimizer of whole tensors, collected from all ranks.
    ///
    /// # Errors
    /// If another rank does not take part.
    pub(crate) fn gather_optimizer(&self) -> Result<Optimizer, TrainerError> {
        let Some(Place { trained, .. }) = &self.place else {
            unreachable!("an optimizer that one rank has is not collected")
        };
        let all = self.collective()?.all_gather_bytes(encode(&&*self.states()?)?)?;
        let states: Vec<Vec<TensorState>> =
            all.iter().map(|bytes| decode(bytes)).collect::<Result<_, _>>()?;
        let ranks = states.iter().enumerate().map(|(rank, states)| (trained.fragments(rank), &states[..]));
        Ok(Optimizer::join(self.config.optimizer, self.optimizer.updates(), self.trained(), ranks))
    }

    /// What it does with others.
    ///
    /// # Errors
    /// If something went wrong before, or there are no others.
    pub(crate) fn collective(&self) -> Result<Arc<dyn HostCollective>, TrainerError> {
        let place = self.place.as_ref();
        let collective = place.and_then(|place| lock(&place.collective).clone());
        collective.ok_or(TrainerError::RanksEnded)
    }

    /// Lets the other ranks know that this one does not go on.
    pub(crate) fn leave(&self) {
        if let Some(place) = &self.place {
            lock(&place.collective).take();
        }
        if let Some(device) = &self.device {
            device.engine.leave();
        }
    }

    /// Predictions of this rank's rows under the current weights.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary, another rank does not take part, or the device fails.
    pub(crate) fn score(&self, task: Task<'_>, pool: &ThreadPool) -> Result<Scored, TrainerError> {
        match (&self.weights, &self.place) {
            (Weights::Own(values), Some(place)) => {
                let collective = self.collective()?;
                let line = Line {
                    collective: &*collective,
                    trained: &place.trained,
                    weights: Some((&place.weights, values)),
                    pool: &self.pool,
                };
                exchange(&line, &mut TreeSums::default(), |ends| {
                    score_with(&mut self.pass(Some(ends), None)?, place.rank, task, pool)
                })
            }
            (Weights::Whole(_) | Weights::Device(_) | Weights::DeviceOwn(_), place) => {
                let rank = place.as_ref().map_or(0, |place| place.rank);
                score_with(&mut self.pass(None, None)?, rank, task, pool)
            }
            (Weights::Own(_), None) => unreachable!("a rank that is alone has all weights"),
        }
    }

    /// The same under another network, whose weights are `parameters`.
    ///
    /// # Errors
    /// If a token lies beyond its vocabulary, or the device has no room for it.
    pub(crate) fn score_under(
        &self,
        frozen: &Frozen,
        parameters: &Arc<Parameters>,
        task: Task<'_>,
        pool: &ThreadPool,
    ) -> Result<Scored, TrainerError> {
        if let Some(device) = &self.device {
            return self.score_frozen(device, (frozen, parameters), task, pool);
        }
        let rank = self.place.as_ref().map_or(0, |place| place.rank);
        let decoder = Decoder::trainable(frozen.weights.config(), parameters, self.config.recompute);
        score_with(&mut Pass::Whole(decoder), rank, task, pool)
    }

    /// The network under the current weights, which come through `ends` if every rank has its own only. On a device
    /// gradients are added up in `sums`, if there is such a place.
    fn pass<'a>(
        &'a self,
        ends: Option<Ends>,
        sums: Option<&'a mut Buffer<f32>>,
    ) -> Result<Pass<'a>, TrainerError> {
        let gathering = ends.map(|ends| ends.gathering(&self.layout, &self.pool));
        Ok(match (&self.device, gathering, &self.weights) {
            (Some(device), None, _) => Pass::Device(device.engine.pass(sums, None)?),
            (Some(device), Some(gathering), _) => Pass::Device(device.engine.gathered(gathering, sums)?),
            (None, None, Weights::Whole(parameters)) => {
                Pass::whole(&self.model, parameters, self.config.recompute)
            }
            (None, Some(gathering), _) => {
                Pass::gathered(&self.model, &self.layout, gathering, self.config.recompute)?
            }
            (None, None, _) => unreachable!("weights that are not all on the host are gathered"),
        })
    }
}

/// Predictions of the rows of a rank, which takes part in the passes of the others.
fn score_with(
    pass: &mut Pass<'_>,
    rank: usize,
    task: Task<'_>,
    pool: &ThreadPool,
) -> Result<Scored, TrainerError> {
    let most = task.plan.iter().map(Vec::len).max().unwrap_or(0);
    let mut scored = Scored::new();
    for round in 0..most {
        let Some(batch) = task.plan.get(rank).and_then(|mine| mine.get(round)) else {
            pass.skip_forward()?;
            continue;
        };
        let packed = pack(batch.rows.iter().map(|row| task.rows[*row]));
        let all = pass.score(&packed, pool)?;
        let mut from = 0;
        for (row, trained) in batch.rows.iter().zip(&packed.trained) {
            scored.push((*row, all[from..from + trained].to_vec()));
            from += trained;
        }
    }
    Ok(scored)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
