//! One rank of a learner: its weights, its shard of the optimizer state, its part of every step.
//!
//! Several ranks shard their state (ZeRO, Rajbhandari et al. 2019, arXiv 1910.02054). A rank has the optimizer state of
//! its own shards only, and updates only these. Stage 1: a rank sums the gradients of its leaves, and reduce-scatter
//! overlaps the backward pass of the last one. Stage 2: reduce-scatter follows every micro-batch, and a rank keeps its
//! shards of the sums. Stage 3: a rank also keeps its shards of the weights, and all-gather brings the layers as they are
//! needed.
//!
//! Gradients are summed as a balanced binary tree over the leaves of a step ([`crate::plan`]), so weights and moments have
//! the same bits for every number of ranks that is a power of two. In stages 2 and 3 the tree is over one micro-batch of
//! each leaf, and these sums are a chain; with one micro-batch per leaf all stages have the same bits.
//!
//! Invariant: all ranks make the same calls with the same rows, plan and learning rate. Replicated state (weights after an
//! update, the norm of the gradient, whether it is finite) has the same bits on all ranks.
//!
//! # Layout
//! - `seed`: the initial state, and the choice of the kind
//! - `single`, `replicated`, `sharded`: ranks that update their weights on the host; `whole`: all weights there, or an adapter over
//!   a base that stays quantised
//! - `on_device`: a single rank that updates its weights on a device, and passes on a device for the others; `group`: ranks of
//!   a device group
//! - `balance`: the update of routers; `membership`: a rank among several; `passes`: the ranks that share its passes; `step`: the passes
//!   of a step
//! - `stages`: the passes of a rank with some of the layers, `stage_network` these layers, `links` those to its neighbours
//! - `trained_values`: new ones from outside of the optimizer; `memory`: bytes, and leaving a device

mod balance;
mod group;
mod links;
mod membership;
mod memory;
mod on_device;
mod passes;
mod replicated;
mod seed;
mod sharded;
mod single;
mod stage_network;
mod stages;
mod step;
mod trained_values;
mod whole;

pub(crate) use seed::{LearnerSeed, MemberSeed, RankWeights};
pub(crate) use step::{StepInputs, UpdateInputs};

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use collective::{HostCollective, Position};
use device::{Device, bf16};
use model::{
    AdaptedBase, Config, Decoder, Layout, ModelShard, ParameterSpec, Parameters, Prediction, ThreadPool,
};
use trajectory::Sample;
use weights::direct::round::PushPlan;
use weights::{Digest, Hub, WeightsError};

use self::group::GroupRank;
use self::membership::{OwnShards, RankMembership};
use self::on_device::SingleDeviceRank;
use self::passes::PassCollectives;
use self::replicated::ReplicatedRank;
use self::sharded::ShardedRank;
use self::single::SingleRank;
use self::whole::WholeWeights;
use crate::TrainerError;
use crate::frozen::LoadedWeights;
use crate::lead::{decode, encode};
use crate::learner::{LearnerConfig, LearnerStep, OwnedValues, RowLoss};
use crate::lora::Adapter;
use crate::on_device::{ByDtype, LearnerWeights, NetworkWeights, by_dtype};
use crate::optimizer::{Optimizer, OptimizerConfig, TensorState};
use crate::packing::{Packed, pack};
use crate::pass::Pass;
use crate::plan::MicroBatch;
use crate::rank_spans::{RankClock, RankPhase, RankSpan};
use crate::zero::{BufferPool, Fragment, Shards};

/// One rank.
pub(crate) struct Rank {
    base: RankBase,
    kind: RankKind,
}

/// The state that every rank has.
struct RankBase {
    config: LearnerConfig,
    /// The model, or the shard of it that this rank trains.
    model: Config,
    /// Of the model, or of the shard.
    layout: Arc<Layout>,
    /// The shard of the model that this rank trains; `None` for all of it.
    shard: Option<ModelShard>,
    /// The optimizer of whole tensors, or of the fragments of a rank. States on a device are missing.
    optimizer: Optimizer,
    buffers: BufferPool,
    passes: PassCollectives,
}

/// Where a rank has its weights and updates them.
enum RankKind {
    /// The only rank, which updates its weights on the host.
    Single(SingleRank),
    /// The only rank, which updates its weights on its device.
    SingleOnDevice(Box<ByDtype<SingleDeviceRank<f32>, SingleDeviceRank<bf16>>>),
    /// One of several ranks with all weights each, which they update on the host.
    Replicated(ReplicatedRank),
    /// One of several ranks with their shards of the weights, which they update on the host.
    Sharded(ShardedRank),
    /// One of several ranks that update their shards of the weights on their devices.
    Group(Box<ByDtype<GroupRank<f32>, GroupRank<bf16>>>),
}

/// The rows of a step or a scoring pass, with their plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedRows<'a> {
    pub(crate) rows: &'a [&'a Sample],
    /// The micro-batches of every leaf of a step, or of every rank that scores.
    pub(crate) plan: &'a [Vec<MicroBatch>],
    /// `[rows][trained tokens]` what is predicted in place of the trained tokens; `None` for these.
    pub(crate) targets: Option<&'a [Vec<u32>]>,
}

impl<'a> PlannedRows<'a> {
    /// The rows of a micro-batch, whose tokens may have `slots` recorded experts.
    pub(crate) fn pack(&self, batch: &MicroBatch, slots: usize) -> Packed<'a> {
        let mut packed = pack(batch.rows.iter().map(|row| self.rows[*row]), slots);
        if let Some(targets) = self.targets {
            let tokens = batch.rows.iter().flat_map(|row| &targets[*row]);
            packed.targets.iter_mut().zip(tokens).for_each(|(target, token)| target.token = *token);
        }
        packed
    }
}

/// Predictions of rows, each with the index of its row.
pub(crate) type ScoredRows = Vec<(usize, Vec<Prediction>)>;

impl RankBase {
    /// Whether a rank sums its own gradients before reduce-scatter.
    fn accumulates(&self) -> bool {
        self.config.accumulates()
    }
}

impl Rank {
    /// The layout of the whole model.
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        self.shard().map_or(&self.base.layout, ModelShard::whole)
    }

    /// The shard of the model that this rank trains; `None` for all of it.
    pub(crate) fn shard(&self) -> Option<&ModelShard> {
        self.base.shard.as_ref()
    }

    /// The layout of the weights that this rank trains.
    pub(crate) fn own_layout(&self) -> &Layout {
        &self.base.layout
    }

    pub(crate) fn config(&self) -> &LearnerConfig {
        &self.base.config
    }

    /// The optimizer of whole tensors, or of [`Self::fragments`]. States on a device are missing.
    pub(crate) fn optimizer(&self) -> &Optimizer {
        &self.base.optimizer
    }

    /// All weights; `None` if this rank has only its shards.
    ///
    /// # Errors
    /// If the weights are on a device, and it fails, or the base is quantised.
    pub(crate) fn whole(&self) -> Result<Option<&Arc<Parameters>>, TrainerError> {
        if self.shard().is_some() { Ok(None) } else { self.own_weights() }
    }

    /// All weights of the model, or of the shard, that this rank trains; `None` if it has only its ZeRO shards.
    fn own_weights(&self) -> Result<Option<&Arc<Parameters>>, TrainerError> {
        match &self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => weights.values.whole().map(Some),
            RankKind::SingleOnDevice(rank) => Ok(Some(by_dtype!(&**rank, rank => rank.parameters()?))),
            RankKind::Sharded(_) | RankKind::Group(_) => Ok(None),
        }
    }

    /// The weights that this rank owns, if it does not have all weights.
    fn shards(&self) -> Result<Option<OwnShards<'_>>, TrainerError> {
        match &self.kind {
            RankKind::Single(_) | RankKind::SingleOnDevice(_) | RankKind::Replicated(_) => Ok(None),
            RankKind::Sharded(rank) => Ok(Some(rank.shards())),
            RankKind::Group(rank) => by_dtype!(&**rank, rank => rank.shards()).map(Some),
        }
    }

    /// The policy, if its base stays quantised.
    pub(crate) fn adapted(&self) -> Option<AdaptedBase> {
        self.whole_weights()?.adapted()
    }

    /// The weights, if this rank has all of them on the host.
    fn whole_weights(&self) -> Option<&WholeWeights> {
        match &self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => Some(weights),
            RankKind::SingleOnDevice(_) | RankKind::Sharded(_) | RankKind::Group(_) => None,
        }
    }

    pub(crate) fn adapter(&self) -> Option<&Adapter> {
        self.whole_weights()?.adapter.as_ref()
    }

    /// The trained tensors.
    pub(crate) fn trained(&self) -> &[ParameterSpec] {
        self.adapter().map_or(self.layout().specs(), Adapter::specs)
    }

    /// Number, collective and shards of one of several ranks.
    fn membership(&self) -> Option<&RankMembership> {
        match &self.kind {
            RankKind::Single(_) | RankKind::SingleOnDevice(_) => None,
            RankKind::Replicated(rank) => Some(&rank.membership),
            RankKind::Sharded(rank) => Some(&rank.membership),
            RankKind::Group(rank) => Some(by_dtype!(&**rank, rank => &rank.membership)),
        }
    }

    /// Does `work` as `phase` on the clock of one of several ranks.
    pub(crate) fn during<R>(&self, phase: RankPhase, work: impl FnOnce() -> R) -> R {
        match self.clock() {
            Some(clock) => clock.during(phase, work),
            None => work(),
        }
    }

    /// Starts its clock at second 0.
    pub(crate) fn restart_clock(&self, begin: Instant) {
        self.clock().into_iter().for_each(|clock| clock.restart(begin));
    }

    /// What it did since its clock was started; nothing for a single rank.
    pub(crate) fn take_spans(&self) -> Vec<RankSpan> {
        self.clock().map_or_else(Vec::new, RankClock::take)
    }

    fn clock(&self) -> Option<&RankClock> {
        self.membership().map(|membership| &*membership.clock)
    }

    /// The rank number among all ranks.
    pub(crate) fn number(&self) -> usize {
        self.membership().map_or(0, |membership| membership.number)
    }

    /// The parts of tensors whose optimizer state this rank has; `None` for whole tensors.
    pub(crate) fn fragments(&self) -> Option<&[Fragment]> {
        self.membership().map(RankMembership::fragments)
    }

    /// The weights that this rank owns, with their ranges in the flat parameters.
    ///
    /// # Errors
    /// If the weights are on a device, and it fails.
    pub(crate) fn owned(&self) -> Result<OwnedValues<'_>, TrainerError> {
        let own = if let Some(shards) = self.shards()? {
            shards.owned()
        } else {
            let values = self.own_weights()?.map_or(&[][..], |own| own.values());
            match self.membership() {
                None => vec![(0..values.len(), values)],
                Some(membership) => membership.owned().map(|range| (range.clone(), &values[range])).collect(),
            }
        };
        Ok(owned_in_whole(self.shard(), own))
    }

    /// Gathers the weights of all ranks into `all` of rank 0, `[weights]`: each value is sent once. `all` is `None` on the other
    /// ranks.
    ///
    /// # Errors
    /// If another rank does not make the call, or a device fails.
    pub(crate) fn gather_weights(&self, all: Option<&mut [f32]>) -> Result<(), TrainerError> {
        let membership = self.membership().ok_or(TrainerError::RanksEnded)?;
        membership.gather(&self.owned()?, all)
    }

    /// The optimizer of whole tensors, gathered from all ranks by rank 0: each state is sent once. `None` on the other ranks.
    ///
    /// # Errors
    /// If another rank does not make the call, or a device fails.
    pub(crate) fn gather_optimizer(&self) -> Result<Option<Optimizer>, TrainerError> {
        let membership = self.membership().ok_or(TrainerError::RanksEnded)?;
        let gathered = membership.all()?.gather_bytes(0, encode(&&*self.states()?)?)?;
        let Some(all) = gathered else { return Ok(None) };
        let states: Vec<Vec<TensorState>> =
            all.into_iter().map(|bytes| decode(&bytes)).collect::<Result<_, _>>()?;
        let parallel = self.base.config.parallel;
        let shard = |shard| parallel.shard(&membership.model, shard);
        let shards = (0..parallel.shards()).map(shard).collect::<Result<Vec<_>, _>>()?;
        let zero = |shard: &ModelShard| membership.shards_of(shard.layout(), &self.base.config.optimizer);
        let of_shards: Vec<Shards> = shards.iter().filter(|_| self.shard().is_some()).map(zero).collect();
        let ranks = states.iter().enumerate().map(|(rank, states)| {
            let [shard, zero] = parallel.shard_and_zero(rank);
            let trained = of_shards.get(shard).unwrap_or(&membership.trained);
            (trained.fragments(zero), &states[..], self.shard().map(|_| &shards[shard]))
        });
        let updates = self.base.optimizer.updates();
        Optimizer::join(self.base.config.optimizer, updates, self.trained(), ranks).map(Some)
    }

    /// The optimizer state of each tensor or fragment, from the host or the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn states(&self) -> Result<Cow<'_, [TensorState]>, TrainerError> {
        let on_device = match &self.kind {
            RankKind::Single(_) | RankKind::Replicated(_) | RankKind::Sharded(_) => None,
            RankKind::SingleOnDevice(rank) => by_dtype!(&**rank, rank => rank.states()?),
            RankKind::Group(rank) => Some(by_dtype!(&**rank, rank => rank.states()?)),
        };
        Ok(on_device.map_or(Cow::Borrowed(self.base.optimizer.states()), Cow::Owned))
    }

    /// The optimizer with its states, from the host or the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn whole_optimizer(&self) -> Result<Cow<'_, Optimizer>, TrainerError> {
        let RankBase { config, optimizer, .. } = &self.base;
        Ok(match self.states()? {
            Cow::Borrowed(_) => Cow::Borrowed(optimizer),
            Cow::Owned(states) => {
                Cow::Owned(Optimizer::from_states(config.optimizer, optimizer.updates(), states))
            }
        })
    }

    /// The collective of all ranks.
    ///
    /// # Errors
    /// If an earlier error has closed it, or there is a single rank.
    pub(crate) fn collective(&self) -> Result<Arc<dyn HostCollective>, TrainerError> {
        self.membership().ok_or(TrainerError::RanksEnded)?.all()
    }

    /// Closes the collective. The calls of the other ranks end with an error.
    pub(crate) fn leave(&self) {
        self.base.passes.leave();
        match &self.kind {
            RankKind::Single(_) | RankKind::SingleOnDevice(_) => {}
            RankKind::Replicated(rank) => rank.membership.leave(),
            RankKind::Sharded(rank) => rank.membership.leave(),
            RankKind::Group(rank) => by_dtype!(&**rank, rank => rank.leave()),
        }
    }

    /// This rank's part of a step. Returns the norm of the gradient, and the reports of this rank's leaves.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, another rank does not take part, or the gradient is not finite. The weights
    /// are then unchanged.
    pub(crate) fn step<L: RowLoss>(
        &mut self,
        step: &StepInputs<'_, L>,
    ) -> Result<LearnerStep<L::Report>, TrainerError> {
        let Self { base, kind } = self;
        match kind {
            RankKind::Single(rank) => rank.step(base, step),
            RankKind::SingleOnDevice(rank) => by_dtype!(&mut **rank, rank => rank.step(base, step)),
            RankKind::Replicated(rank) => rank.step(base, step),
            RankKind::Sharded(rank) => rank.step(base, step),
            RankKind::Group(rank) => by_dtype!(&mut **rank, rank => rank.step(base, step)),
        }
    }

    /// The gradients of `step`, `[trained values]`, without an update, and the reports of the leaves.
    ///
    /// # Errors
    /// As [`Self::step`], and if it is one of several ranks or updates its weights on a device.
    pub(crate) fn gradients<L: RowLoss>(
        &mut self,
        step: &StepInputs<'_, L>,
    ) -> Result<(Vec<f32>, Vec<L::Report>), TrainerError> {
        match &mut self.kind {
            RankKind::Single(rank) => rank.gradients(&self.base, step),
            _ => Err(TrainerError::SumsOfSeveral),
        }
    }

    /// Updates the weights with `gradients [trained values]` by an optimizer of the same kind with the hyperparameters `optimizer`.
    /// Returns the norm of the gradient.
    ///
    /// # Errors
    /// If the gradient is not finite, the kind is another, or as [`Self::gradients`]; the weights are then unchanged.
    pub(crate) fn update(
        &mut self,
        gradients: &[f32],
        optimizer: OptimizerConfig,
        update: UpdateInputs<'_>,
    ) -> Result<f32, TrainerError> {
        let RankKind::Single(rank) = &mut self.kind else { return Err(TrainerError::SumsOfSeveral) };
        self.base.optimizer.reconfigure(optimizer)?;
        rank.update(&mut self.base, gradients, update)
    }

    /// Predictions of this rank's rows under the current weights.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, another rank does not make the call, or the device fails.
    pub(crate) fn score(&self, task: PlannedRows<'_>, pool: &ThreadPool) -> Result<ScoredRows, TrainerError> {
        let mut pass = match &self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => weights.scoring(&self.base)?,
            RankKind::SingleOnDevice(rank) => Pass::Device(by_dtype!(&**rank, rank => rank.scoring()?)),
            RankKind::Group(rank) => Pass::Device(by_dtype!(&**rank, rank => rank.scoring()?)),
            RankKind::Sharded(rank) => return rank.score(&self.base, task, pool),
        };
        self.base.score(&mut pass, self.membership(), task, pool)
    }

    /// Predictions of this rank's rows under another network.
    ///
    /// # Errors
    /// If a token is outside its vocabulary, or the memory of the device is too small.
    pub(crate) fn score_under(
        &self,
        weights: &LoadedWeights<'_>,
        task: PlannedRows<'_>,
        pool: &ThreadPool,
    ) -> Result<ScoredRows, TrainerError> {
        let Position { rank, .. } = self.base.config.frozen_part(self.number());
        let ranks = |model: &Config| self.base.passes.passes(model, true);
        let (resident, parameters) = match weights {
            LoadedWeights::Whole(resident, parameters) => (*resident, parameters),
            LoadedWeights::Adapted(policy) => {
                let score = |mut pass: Pass<'_>| score_with(&mut pass, rank, task, 0, pool);
                let device =
                    self.whole_weights().and_then(|own| own.device.as_ref().zip(own.adapter.as_ref()));
                let Some((device, own)) = device else {
                    return score(Pass::Whole(policy.decoder().among(ranks(&self.base.model)?)));
                };
                let factors = [&**policy.factors(), &**own.factors()];
                return by_dtype!(device, device => device.score_under(factors, |pass| score(Pass::Device(pass))));
            }
        };
        let model = resident.config();
        let Some(on_device) = self.on_device() else {
            let decoder =
                Decoder::trainable(model, parameters, self.base.config.recompute).among(ranks(model)?);
            return score_with(&mut Pass::Whole(decoder), rank, task, 0, pool);
        };
        // A model that is swapped in is freed on the device as on the host.
        let keep = !resident.is_swapped();
        by_dtype!(on_device, on_device => {
            let network = on_device.network.frozen(model, parameters, keep)?;
            score_with(&mut Pass::Device(Box::new(network.pass()?)), rank, task, 0, pool)
        })
    }

    /// The network of this rank on its device, with its weights. `None` if the rank computes on the processor.
    fn on_device(&self) -> Option<ByDtype<NetworkWeights<'_, f32>, NetworkWeights<'_, bf16>>> {
        let device = match &self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => &weights.device,
            RankKind::Sharded(rank) => &rank.device,
            RankKind::SingleOnDevice(rank) => return Some(by_dtype!(map &**rank, rank => rank.on_device())),
            RankKind::Group(rank) => return Some(by_dtype!(map &**rank, rank => rank.on_device())),
        };
        device.as_ref().map(|device| by_dtype!(map device, device => device.on_device()))
    }

    /// Whether collective calls run from device to device. `None` on the processor and for a single rank.
    pub(crate) fn meets_on_devices(&self) -> Option<bool> {
        self.membership().and(self.on_device()).map(|_| matches!(self.kind, RankKind::Group(_)))
    }

    /// Whether the ranks of a pass exchange from device to device in it.
    pub(crate) fn passes_meet_on_devices(&self) -> bool {
        self.base.passes.meet_on_devices()
    }

    /// The device and its weights, if all of them are on it.
    pub(crate) fn device_weights(&self) -> Option<(&Device, LearnerWeights<'_>)> {
        // Of a shard they are a part.
        self.shard().is_none().then_some(())?;
        by_dtype!(self.on_device()?, on_device => on_device.erased())
    }

    /// Sends this rank's shard of the weights to all samplers of `plan`. Returns the digest of the shard.
    ///
    /// # Errors
    /// If a sampler is gone or late, or the device fails or does not have all weights.
    pub(crate) fn send(&self, plan: &PushPlan, hub: Option<&Hub>) -> Result<Digest, WeightsError> {
        let rank = self.number();
        let Some(on_device) = self.on_device() else {
            let reason = format!("rank {rank} computes on the processor");
            return Err(WeightsError::Device { what: "send weights", reason });
        };
        by_dtype!(on_device, on_device => on_device.send(plan, rank, hub))
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank").field("number", &self.number()).finish_non_exhaustive()
    }
}

/// The ranges in the whole model of those values among `own` of a `shard` that the rank owns, with their values.
fn owned_in_whole<'a>(shard: Option<&ModelShard>, own: OwnedValues<'a>) -> OwnedValues<'a> {
    let Some(shard) = shard else { return own };
    let of_range = |(range, values): &(Range<usize>, &'a [f32])| {
        let (start, values) = (range.start, *values);
        let owned = shard.owned(range.clone());
        owned
            .map(move |(own, whole)| (whole, &values[own.start - start..own.end - start]))
            .collect::<Vec<_>>()
    };
    own.iter().flat_map(of_range).collect()
}

/// Predictions of the rows of a rank, whose tokens have `slots` recorded experts. The rank also makes the all-gather calls of passes
/// that only other ranks have.
fn score_with(
    pass: &mut Pass<'_>,
    rank: usize,
    task: PlannedRows<'_>,
    slots: usize,
    pool: &ThreadPool,
) -> Result<ScoredRows, TrainerError> {
    let most = task.plan.iter().map(Vec::len).max().unwrap_or(0);
    let mut scored = ScoredRows::new();
    for round in 0..most {
        let Some(batch) = task.plan.get(rank).and_then(|mine| mine.get(round)) else {
            pass.skip_forward(pool)?;
            continue;
        };
        let packed = task.pack(batch, slots);
        add_scored(batch, &packed.trained, &pass.score(&packed, pool)?, &mut scored);
    }
    Ok(scored)
}

/// Adds the `predictions` of a micro-batch, whose rows have `trained [rows]` each.
fn add_scored(batch: &MicroBatch, trained: &[usize], predictions: &[Prediction], scored: &mut ScoredRows) {
    let mut rest = predictions;
    for (row, trained) in batch.rows.iter().zip(trained) {
        let (own, others) = rest.split_at(*trained);
        scored.push((*row, own.to_vec()));
        rest = others;
    }
}
