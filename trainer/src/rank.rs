//! One rank of a learner: its weights, its shard of the optimizer state, its part of every step.
//!
//! Several ranks shard their state (ZeRO, Rajbhandari et al. 2019, arXiv 1910.02054). A rank has the optimizer state of
//! its own shards only, and updates only these. Stage 1: a rank sums the gradients of its leaves, and reduce-scatter overlaps the backward
//! pass of the last one. Stage 2: reduce-scatter follows every micro-batch, and a rank keeps its shards of the sums. Stage
//! 3: a rank also keeps its shards of the weights, and all-gather brings the layers as they are needed.
//!
//! Gradients are summed as a balanced binary tree over the leaves of a step ([`crate::plan`]), so weights and moments have
//! the same bits for every number of ranks that is a power of two. In stages 2 and 3 the tree is over one micro-batch of
//! each leaf, and these sums are a chain; with one micro-batch per leaf all stages have the same bits.
//!
//! Invariant: all ranks make the same calls with the same rows, plan and learning rate. Replicated state (weights after an
//! update, the norm of the gradient, whether it is finite) has the same bits on all ranks.

mod memory;
mod on_device;
mod step;

pub(crate) use step::StepInputs;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::DeviceBuffer;
use model::{Config, Decoder, Layout, ParameterSpec, Parameters, Prediction, ThreadPool};
use trajectory::Sample;

use crate::TrainerError;
use crate::lead::{decode, encode};
use crate::learner::{Frozen, LearnerConfig, OwnedValues};
use crate::lora::Adapter;
use crate::on_device::Mirror;
use crate::optimizer::{Optimizer, TensorState};
use crate::packing::pack;
use crate::pass::Pass;
use crate::plan::MicroBatch;
use crate::zero::{BufferPool, Communication, Fragment, Requests, Shards, TreeSums, with_communication};
use collective::HostCollective;

/// Initial state of a single rank, or of all ranks of a learner.
#[derive(Debug)]
pub(crate) struct LearnerSeed {
    pub(crate) config: LearnerConfig,
    pub(crate) model: Config,
    pub(crate) parameters: Arc<Parameters>,
    /// The adapter that is trained in place of the weights. It is merged into them.
    pub(crate) adapter: Option<Adapter>,
    /// Optimizer state of whole tensors.
    pub(crate) optimizer: Option<Optimizer>,
}

/// Configuration and shards of one of several ranks, before it receives its weights.
#[derive(Debug)]
pub(crate) struct MemberSeed {
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
    weights: RankWeights,
    optimizer: Optimizer,
    adapter: Option<Adapter>,
    /// Rank number, collective and shards; `None` for a single rank.
    membership: Option<RankMembership>,
    /// The device; `None` if the rank computes on the processor.
    device: Option<on_device::RankDevice>,
    /// Sums of the gradients that this rank owns. The buffers stay allocated between steps.
    sums: TreeSums,
    buffers: BufferPool,
}

/// The weights of a rank.
#[derive(Debug)]
pub(crate) enum RankWeights {
    /// All weights. Between two calls this is the only reference.
    Whole(Arc<Parameters>),
    /// The shards of this rank, concatenated.
    Own(Vec<f32>),
    /// All weights, on the device.
    Device(Mirror<Parameters>),
    /// The shards of this rank, concatenated, on the device.
    DeviceOwn(Mirror<Vec<f32>>),
}

#[derive(Debug)]
struct RankMembership {
    rank: usize,
    /// `None` after an error; dropping it ends the calls of the other ranks.
    collective: Mutex<Option<Arc<dyn HostCollective>>>,
    /// Shards of the trained tensors.
    trained: Shards,
    /// Shards of the weights.
    weights: Shards,
}

/// The rows of a step or a scoring pass, with their plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedRows<'a> {
    pub(crate) rows: &'a [&'a Sample],
    /// The micro-batches of every leaf of a step, or of every rank that scores.
    pub(crate) plan: &'a [Vec<MicroBatch>],
}

/// Predictions of rows, each with the index of its row.
pub(crate) type ScoredRows = Vec<(usize, Vec<Prediction>)>;

impl RankMembership {
    /// Ranges in the flat parameters and values of this rank's shards. `values` are the concatenated shards,
    /// `[owned weights]`.
    fn owned<'a>(&self, values: &'a [f32]) -> OwnedValues<'a> {
        let Self { rank, weights, .. } = self;
        let of = |unit| (weights.owned(*rank, unit), &values[weights.packed(*rank, unit)]);
        (0..weights.units()).map(of).collect()
    }
}

impl LearnerSeed {
    /// The only rank of a learner.
    ///
    /// # Errors
    /// If its device is not available, or its memory is too small.
    pub(crate) fn alone(self) -> Result<Rank, TrainerError> {
        let specs = self.adapter.as_ref().map_or(self.parameters.layout().specs(), Adapter::specs);
        let trained = specs.last().map_or(0, |spec| spec.range().end);
        let optimizer = self.optimizer.unwrap_or_else(|| Optimizer::new(self.config.optimizer, specs));
        let rank = Rank {
            layout: Arc::clone(self.parameters.layout()),
            weights: RankWeights::Whole(self.parameters),
            optimizer,
            adapter: self.adapter,
            membership: None,
            device: None,
            sums: TreeSums::new(trained),
            buffers: BufferPool::default(),
            config: self.config,
            model: self.model,
        };
        rank.on_device()
    }

    /// One rank of `collective`.
    ///
    /// # Errors
    /// If its device is not available, or its memory is too small.
    pub(crate) fn member(&self, collective: Arc<dyn HostCollective>) -> Result<Rank, TrainerError> {
        let (model, adapter, layout) = (self.model.clone(), self.adapter.clone(), self.parameters.layout());
        let member = MemberSeed::new(self.config.clone(), model, layout, adapter, collective);
        let weights = if member.owns_weights() {
            RankWeights::Own(member.weights.pack(member.rank, self.parameters.values()))
        } else {
            RankWeights::Whole(Arc::new(Parameters::clone(&self.parameters)))
        };
        let optimizer = self.optimizer.as_ref().map(|optimizer| optimizer.cut(member.fragments()));
        member.rank(weights, optimizer)
    }
}

impl MemberSeed {
    /// The seed of this rank of `collective`, which trains a model or its `adapter`.
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

    /// Whether this rank has only its shards of the weights. With an adapter every rank has all weights, because merging
    /// reads them.
    pub(crate) fn owns_weights(&self) -> bool {
        self.config.shares_weights() && self.adapter.is_none()
    }

    /// This rank's shard of the values of a unit, `[unit values]`.
    pub(crate) fn own_of<'a>(&self, unit: usize, values: &'a [f32]) -> &'a [f32] {
        &values[self.weights.cuts(unit)[self.rank].clone()]
    }

    /// The trained tensors.
    pub(crate) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.layout.specs(), Adapter::specs)
    }

    /// The parts of the trained tensors that this rank owns.
    pub(crate) fn fragments(&self) -> &[Fragment] {
        self.trained.fragments(self.rank)
    }

    /// The adapter, whose values are received later.
    pub(crate) fn adapter_mut(&mut self) -> Option<&mut Adapter> {
        self.adapter.as_mut()
    }

    /// The rank with its weights and the optimizer of its fragments; `None` for a new optimizer.
    ///
    /// # Errors
    /// If its device is not available, or its memory is too small.
    pub(crate) fn rank(
        self,
        weights: RankWeights,
        optimizer: Option<Optimizer>,
    ) -> Result<Rank, TrainerError> {
        let fresh = || Optimizer::of_fragments(self.config.optimizer, self.trained(), self.fragments());
        let optimizer = optimizer.unwrap_or_else(fresh);
        let collective = Mutex::new(Some(self.collective));
        let owned = self.trained.len(self.rank);
        let membership =
            RankMembership { rank: self.rank, collective, trained: self.trained, weights: self.weights };
        let rank = Rank {
            config: self.config,
            model: self.model,
            layout: self.layout,
            weights,
            optimizer,
            adapter: self.adapter,
            membership: Some(membership),
            device: None,
            sums: TreeSums::new(owned),
            buffers: BufferPool::default(),
        };
        rank.on_device()
    }
}

impl Rank {
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// All weights; `None` if this rank has only its shards.
    ///
    /// # Errors
    /// If the weights are on a device, and it fails.
    pub(crate) fn whole(&self) -> Result<Option<&Arc<Parameters>>, TrainerError> {
        match &self.weights {
            RankWeights::Whole(parameters) => Ok(Some(parameters)),
            RankWeights::Own(_) | RankWeights::DeviceOwn(_) => Ok(None),
            RankWeights::Device(mirror) => self.mirrored(mirror).map(Some),
        }
    }

    pub(crate) fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The trained tensors.
    pub(crate) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.layout.specs(), Adapter::specs)
    }

    /// The optimizer of whole tensors, or of [`Self::fragments`]. States on a device are missing.
    pub(crate) fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The parts of tensors whose optimizer state this rank has; `None` for whole tensors.
    pub(crate) fn fragments(&self) -> Option<&[Fragment]> {
        self.membership.as_ref().map(|membership| membership.trained.fragments(membership.rank))
    }

    /// The weights that this rank owns, with their ranges in the flat parameters.
    ///
    /// # Errors
    /// If the weights are on a device, and it fails.
    pub(crate) fn owned(&self) -> Result<OwnedValues<'_>, TrainerError> {
        Ok(match (&self.weights, &self.membership) {
            (RankWeights::Device(mirror), _) => vec![(0..self.layout.len(), self.mirrored(mirror)?.values())],
            (RankWeights::Whole(parameters), None) => vec![(0..self.layout.len(), parameters.values())],
            (RankWeights::Whole(parameters), Some(membership)) => {
                let owned = (0..membership.weights.units())
                    .map(|unit| membership.weights.owned(membership.rank, unit));
                owned.map(|range| (range.clone(), &parameters.values()[range])).collect()
            }
            (RankWeights::Own(values), Some(membership)) => membership.owned(values),
            (RankWeights::DeviceOwn(mirror), Some(membership)) => {
                membership.owned(self.mirrored_own(mirror)?)
            }
            (RankWeights::Own(_) | RankWeights::DeviceOwn(_), None) => {
                unreachable!("a rank that is alone has all weights")
            }
        })
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> usize {
        if self.membership.is_some() { self.config.world } else { 1 }
    }

    pub(crate) fn config(&self) -> &LearnerConfig {
        &self.config
    }

    pub(crate) fn model(&self) -> &Config {
        &self.model
    }

    /// Gathers the weights of all ranks into `all` of rank 0, `[weights]`. `all` is `None` on the other ranks.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(crate) fn gather_weights(&self, mut all: Option<&mut [f32]>) -> Result<(), TrainerError> {
        let own = match &self.weights {
            RankWeights::Own(own) => &own[..],
            RankWeights::DeviceOwn(mirror) => self.mirrored_own(mirror)?,
            RankWeights::Whole(_) | RankWeights::Device(_) => {
                unreachable!("weights that every rank has are not collected")
            }
        };
        let Some(RankMembership { rank, weights, .. }) = &self.membership else {
            unreachable!("a rank that is alone has all weights")
        };
        let collective = self.collective()?;
        for unit in 0..weights.units() {
            let all = all.as_deref_mut().map(|all| &mut all[weights.place(unit)]);
            collective.gather(0, &own[weights.packed(*rank, unit)], weights.cuts(unit), all)?;
        }
        Ok(())
    }

    /// The optimizer of whole tensors, gathered from all ranks.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(crate) fn gather_optimizer(&self) -> Result<Optimizer, TrainerError> {
        let Some(RankMembership { trained, .. }) = &self.membership else {
            unreachable!("an optimizer that one rank has is not collected")
        };
        let all = self.collective()?.all_gather_bytes(encode(&&*self.states()?)?)?;
        let states: Vec<Vec<TensorState>> =
            all.iter().map(|bytes| decode(bytes)).collect::<Result<_, _>>()?;
        let ranks = states.iter().enumerate().map(|(rank, states)| (trained.fragments(rank), &states[..]));
        Ok(Optimizer::join(self.config.optimizer, self.optimizer.updates(), self.trained(), ranks))
    }

    /// The collective of the ranks.
    ///
    /// # Errors
    /// If an earlier error has closed it, or there is a single rank.
    pub(crate) fn collective(&self) -> Result<Arc<dyn HostCollective>, TrainerError> {
        let membership = self.membership.as_ref();
        let collective = membership.and_then(|membership| lock(&membership.collective).clone());
        collective.ok_or(TrainerError::RanksEnded)
    }

    /// Closes the collective. The calls of the other ranks end with an error.
    pub(crate) fn leave(&self) {
        if let Some(membership) = &self.membership {
            lock(&membership.collective).take();
        }
        if let Some(device) = &self.device {
            device.engine.leave();
        }
    }

    /// Predictions of this rank's rows under the current weights.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, another rank does not make the call, or the device fails.
    pub(crate) fn score(&self, task: PlannedRows<'_>, pool: &ThreadPool) -> Result<ScoredRows, TrainerError> {
        match (&self.weights, &self.membership) {
            (RankWeights::Own(values), Some(membership)) => {
                let collective = self.collective()?;
                let communication = Communication {
                    collective: &*collective,
                    trained: &membership.trained,
                    weights: Some((&membership.weights, values)),
                    buffers: &self.buffers,
                };
                with_communication(&communication, &mut TreeSums::default(), |ends| {
                    score_with(&mut self.pass(Some(ends), None)?, membership.rank, task, pool)
                })
            }
            (RankWeights::Whole(_) | RankWeights::Device(_) | RankWeights::DeviceOwn(_), membership) => {
                let rank = membership.as_ref().map_or(0, |membership| membership.rank);
                score_with(&mut self.pass(None, None)?, rank, task, pool)
            }
            (RankWeights::Own(_), None) => unreachable!("a rank that is alone has all weights"),
        }
    }

    /// Predictions of this rank's rows under another network, whose weights are `parameters`.
    ///
    /// # Errors
    /// If a token is outside its vocabulary, or the memory of the device is too small.
    pub(crate) fn score_under(
        &self,
        frozen: &Frozen,
        parameters: &Arc<Parameters>,
        task: PlannedRows<'_>,
        pool: &ThreadPool,
    ) -> Result<ScoredRows, TrainerError> {
        if let Some(device) = &self.device {
            return self.score_frozen(device, (frozen, parameters), task, pool);
        }
        let rank = self.membership.as_ref().map_or(0, |membership| membership.rank);
        let decoder = Decoder::trainable(frozen.weights.config(), parameters, self.config.recompute);
        score_with(&mut Pass::Whole(decoder), rank, task, pool)
    }

    /// A pass of the network under the current weights. Sharded weights are gathered over `ends`. On a device the gradients
    /// are accumulated in `sums`, if there is such a buffer.
    fn pass<'a>(
        &'a self,
        ends: Option<Requests>,
        sums: Option<&'a mut DeviceBuffer<f32>>,
    ) -> Result<Pass<'a>, TrainerError> {
        let gathering = ends.map(|ends| ends.gathering(&self.layout, &self.buffers));
        Ok(match (&self.device, gathering, &self.weights) {
            (Some(device), None, _) => Pass::Device(device.engine.pass(sums, None)?),
            (Some(device), Some(gathering), _) => Pass::Device(device.engine.gathered(gathering, sums)?),
            (None, None, RankWeights::Whole(parameters)) => {
                Pass::whole(&self.model, parameters, self.config.recompute)
            }
            (None, Some(gathering), _) => {
                Pass::gathered(&self.model, &self.layout, gathering, self.config.recompute)?
            }
            (None, None, _) => unreachable!("weights that are not all on the host are gathered"),
        })
    }
}

/// Predictions of the rows of a rank. The rank also makes the all-gather calls of passes that only other ranks have.
fn score_with(
    pass: &mut Pass<'_>,
    rank: usize,
    task: PlannedRows<'_>,
    pool: &ThreadPool,
) -> Result<ScoredRows, TrainerError> {
    let most = task.plan.iter().map(Vec::len).max().unwrap_or(0);
    let mut scored = ScoredRows::new();
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
