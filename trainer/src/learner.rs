//! A learner trains one model: forward and backward passes over micro-batches, gradient clipping, optimizer steps. With
//! an adapter the weights are frozen, and the adapter is clipped and updated.
//!
//! Invariant: a step is a function of the rows, the weights and the optimizer state. It has the same bits for every number
//! of threads of its [`ThreadPool`]. Gradients are summed as a balanced binary tree over the leaves of the step, so it also has
//! the same bits for every number of ranks on the processor that is a power of two and at most [`LearnerConfig::leaves`];
//! other numbers of ranks differ by rounding.

mod balance;
mod frozen;
mod gradient_sums;
mod memory;
mod microbatch;
mod push;
mod scoring;
mod spans;
mod trained_values;

pub(crate) use self::balance::RouterStep;
pub use self::gradient_sums::{GradientSums, TargetRows, UpdateParameters};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device::Device;
use model::{
    Config, ParameterSpec, Parameters, Prediction, PredictionGradient, Recompute, RoutedTokens, ThreadPool,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use trajectory::Sample;
use weights::Values;

use crate::TrainerError;
use crate::lead::{Followers, RankCommand, decode, encode};
use crate::lora::Adapter;
use crate::microbatch::UpdateTime;
use crate::on_device::{DeviceConfig, LearnerWeights};
use crate::optimizer::{Optimizer, OptimizerConfig};
use crate::packing::recorded_slots;
use crate::parallel::{ParallelConfig, RankGroups};
use crate::plan::{MicroBatch, in_order_of_leaf, leaves, plan, row_tokens};
use crate::rank::{LearnerSeed, PlannedRows, Rank, StepInputs};
use crate::rank_spans::RankPhase;
use crate::ranks::{make, on_each};
use crate::report::ExpertLoads;
use collective::{HostCollective, Position};

/// How the learner computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearnerConfig {
    /// Hyperparameters of the optimizer.
    pub optimizer: OptimizerConfig,
    /// Gradients are scaled down to this norm.
    pub max_grad_norm: f32,
    /// Step of what balances the loads of experts; 0 if it is frozen.
    #[serde(default)]
    pub router_correction_rate: f32,
    /// Tokens of a micro-batch.
    pub microbatch_tokens: usize,
    /// Activations that the backward pass computes again instead of storing them.
    pub recompute: Recompute,
    /// Ranks that share a step.
    pub world: usize,
    /// How they divide the work.
    #[serde(default)]
    pub parallel: ParallelConfig,
    /// Least number of leaves that the gradients of a step are summed from, a power of two. Ranks on devices have one leaf
    /// each.
    pub leaves: usize,
    /// ZeRO stage, the state that ranks shard: 1 optimizer state, 2 gradients too, 3 weights too.
    pub zero: usize,
    /// Longest wait of one rank for another.
    pub wait: Duration,
    /// Device on which ranks compute; `None` for the processor.
    #[serde(default)]
    pub device: Option<DeviceConfig>,
}

/// A policy or a critic in training.
#[derive(Debug)]
pub struct Learner {
    config: LearnerConfig,
    model: Config,
    /// The first rank of this process.
    first: Rank,
    /// The other ranks of this process, if all ranks are threads.
    others: Vec<Rank>,
    pool: Arc<ThreadPool>,
    /// The other processes, if every rank is a process.
    spread: Option<LearnerProcesses>,
    update_time: UpdateTime,
}

/// The other processes of a learner.
#[derive(Debug)]
struct LearnerProcesses {
    collective: Arc<dyn HostCollective>,
    /// The followers, if this process is the leader.
    remote: Option<Followers>,
}

/// Result of an optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LearnerStep<R> {
    /// Norm of the gradient before clipping.
    pub grad_norm: f32,
    /// Reports of the leaves, in order.
    pub reports: Vec<R>,
}

/// Ranges of the flat parameters with their values.
pub type OwnedValues<'a> = Vec<(Range<usize>, &'a [f32])>;

/// A loss over the predictions of one row.
pub trait RowLoss: Sync {
    /// Report on the tokens of a leaf; merged in order of leaf.
    type Report: Default + Send + Serialize + DeserializeOwned;

    /// Derivatives of the loss with respect to `predictions`, the predictions of the trained tokens of row `index`.
    fn row(
        &self,
        index: usize,
        predictions: &[Prediction],
        report: &mut Self::Report,
    ) -> Vec<PredictionGradient>;

    /// Reports the tokens that a micro-batch had in the experts of each layer.
    fn routed(&self, _layers: &[RoutedTokens], _report: &mut Self::Report) {}

    /// The tokens of experts in a report; `None` if it has none.
    fn loads(_report: &Self::Report) -> Option<&ExpertLoads> {
        None
    }
}

impl LearnerConfig {
    /// Number of leaves of the sum of a step's gradients.
    #[must_use]
    pub fn step_leaves(&self) -> usize {
        let data = self.data(0).world;
        if self.device.is_some() { data } else { leaves(self.leaves, data) }
    }

    /// The position of rank `rank` among those that have micro-batches of their own.
    pub(crate) fn data(&self, rank: usize) -> Position {
        self.parallel.place(Position { rank, world: self.world }).data
    }

    /// The part of the rows that rank `rank` scores under a frozen network. Ranks with different shards all have all of it, so they
    /// have parts of their own; on devices so have context ranks.
    pub(crate) fn frozen_part(&self, rank: usize) -> Position {
        if self.device.is_some() {
            return Position { rank, world: self.world };
        }
        let (data, shards) = (self.data(rank), self.parallel.shards());
        let [shard, _] = self.parallel.shard_and_zero(rank);
        Position { rank: data.rank * shards + shard, world: data.world * shards }
    }

    /// Whether a rank sums its own gradients before reduce-scatter: in ZeRO stage 1. On the processor sections are summed for every
    /// micro-batch, which gives every number of ranks the same bits; on a device a rank has one.
    pub(crate) fn accumulates(&self) -> bool {
        !self.shares_gradients() && (self.parallel.context.sections() == 1 || self.device.is_some())
    }

    /// Whether a rank keeps only its shards of the gradients.
    pub(crate) fn shares_gradients(&self) -> bool {
        self.zero >= 2
    }

    /// Whether a rank keeps only its shards of the weights.
    pub(crate) fn shares_weights(&self) -> bool {
        self.zero >= 3
    }
}

impl Learner {
    /// A learner of all `parameters`. Several ranks are threads. `optimizer` is the restored state; `None` for a new one.
    ///
    /// # Errors
    /// If a device of the configuration is not available, or its memory is too small.
    pub fn new(
        config: LearnerConfig,
        model: Config,
        parameters: Parameters,
        optimizer: Option<Optimizer>,
    ) -> Result<Self, TrainerError> {
        Self::with(LearnerSeed { config, model, weights: parameters.into(), adapter: None, optimizer })
    }

    /// A learner of `adapter`. `parameters` are the base weights, into which the adapter is merged. `optimizer` is the
    /// restored state; `None` for a new one.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn adapting(
        config: LearnerConfig,
        model: Config,
        mut parameters: Parameters,
        adapter: Adapter,
        optimizer: Option<Optimizer>,
    ) -> Result<Self, TrainerError> {
        adapter.merge(parameters.values_mut(), &ThreadPool::single());
        let weights = parameters.into();
        Self::with(LearnerSeed { config, model, weights, adapter: Some(adapter), optimizer })
    }

    fn with(seed: LearnerSeed) -> Result<Self, TrainerError> {
        let (config, model, update_time) = (seed.config.clone(), seed.model.clone(), UpdateTime::default());
        let pool = Arc::new(ThreadPool::single());
        config.check_parallel(&model, seed.adapter.is_some())?;
        if config.world <= 1 {
            return Ok(Self {
                config,
                model,
                first: seed.alone()?,
                others: Vec::new(),
                pool,
                spread: None,
                update_time,
            });
        }
        let group = collective::threads::group(config.world, config.wait);
        let member = |rank| seed.member(RankGroups::new(Arc::new(rank), config.parallel)?);
        let mut ranks = make(group, member)?.into_iter();
        let first = ranks.next().ok_or(TrainerError::RanksEnded)?;
        Ok(Self { config, model, first, others: ranks.collect(), pool, spread: None, update_time })
    }

    /// The learner of one of several processes. `remote` is `None` on followers.
    pub(crate) fn spread(
        rank: Rank,
        model: Config,
        collective: Arc<dyn HostCollective>,
        remote: Option<Followers>,
    ) -> Self {
        let config = rank.config().clone();
        let spread = Some(LearnerProcesses { collective, remote });
        let pool = Arc::new(ThreadPool::single());
        Self {
            config,
            model,
            first: rank,
            others: Vec::new(),
            pool,
            spread,
            update_time: UpdateTime::default(),
        }
    }

    /// The learner with the thread pool `pool`. Ranks that are threads compute on one thread each.
    #[must_use]
    pub fn on(self, pool: Arc<ThreadPool>) -> Self {
        Self { pool, ..self }
    }

    /// The configuration; its world is the number of ranks.
    pub(crate) fn config(&self) -> &LearnerConfig {
        &self.config
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.config.world
    }

    /// The thread pool of the computation.
    #[must_use]
    pub fn pool(&self) -> &Arc<ThreadPool> {
        &self.pool
    }

    /// All weights: shared with the first rank, which copies them before it changes them while they are referenced, or gathered
    /// from all ranks if the weights are sharded.
    ///
    /// # Errors
    /// If a rank has failed.
    pub fn parameters(&self) -> Result<Arc<Parameters>, TrainerError> {
        if let Some(whole) = self.first.whole()? {
            return Ok(Arc::clone(whole));
        }
        let mut parameters = Parameters::zeros(Arc::clone(self.first.layout()));
        self.write(parameters.values_mut())?;
        Ok(Arc::new(parameters))
    }

    /// All weights, if a rank of this process has them. Weights that are trained on a device are copied to the host once
    /// per version.
    ///
    /// # Errors
    /// If a device fails.
    pub fn whole(&self) -> Result<Option<&Arc<Parameters>>, TrainerError> {
        self.first.whole()
    }

    /// The device of the first rank and its weights. `None` if the rank computes on the processor, or has only its shards.
    #[must_use]
    pub fn device_weights(&self) -> Option<(&Device, LearnerWeights<'_>)> {
        self.first.device_weights()
    }

    /// Whether the collective runs from device to device and not through the host. `None` for ranks on the processor and
    /// for a single rank.
    #[must_use]
    pub fn meets_on_devices(&self) -> Option<bool> {
        self.first.meets_on_devices()
    }

    /// Whether the ranks of a pass exchange from device to device in it.
    #[must_use]
    pub fn passes_meet_on_devices(&self) -> bool {
        self.first.passes_meet_on_devices()
    }

    /// A shared copy of all weights. Each rank writes its shards into the copy directly.
    ///
    /// # Errors
    /// If a rank has failed.
    pub fn snapshot(&self) -> Result<Arc<[f32]>, TrainerError> {
        if let Some(whole) = self.whole()? {
            return Ok(Arc::from(whole.values()));
        }
        let mut values: Arc<[f32]> = std::iter::repeat_n(0.0, self.first.layout().len()).collect();
        if let Some(values) = Arc::get_mut(&mut values) {
            self.write(values)?;
        }
        Ok(values)
    }

    /// A copy of all weights by owner: every rank copies its shards to memory of its own, and none has all. `None` if one has all
    /// already ([`Self::whole`]), or some are in other processes.
    ///
    /// # Errors
    /// If a device fails.
    pub fn snapshot_in_parts(&self) -> Result<Option<Values>, TrainerError> {
        Ok(self.owned_by_rank()?.map(Values::copied))
    }

    /// What every rank owns. `None` if one has all, or some are in other processes.
    pub(crate) fn owned_by_rank(&self) -> Result<Option<Vec<OwnedValues<'_>>>, TrainerError> {
        if self.is_spread() || self.whole()?.is_some() {
            return Ok(None);
        }
        self.ranks().map(Rank::owned).collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// Writes the weights to `values`, `[weights]`: every rank writes its shards.
    ///
    /// # Errors
    /// If a rank has failed.
    ///
    /// # Panics
    /// If `values` has another length.
    pub fn write(&self, values: &mut [f32]) -> Result<(), TrainerError> {
        if let Some(whole) = self.first.whole()? {
            values.copy_from_slice(whole.values());
            return Ok(());
        }
        if self.send_command(|network| RankCommand::GatherWeights { network })? {
            return self.first.gather_weights(Some(values));
        }
        for (range, own) in self.owned()? {
            values[range].copy_from_slice(own);
        }
        Ok(())
    }

    /// A follower's part of the leader's [`Self::write`].
    pub(crate) fn give_weights(&self) -> Result<(), TrainerError> {
        self.first.gather_weights(None)
    }

    /// A follower's part of the leader's [`Self::optimizer`].
    pub(crate) fn give_optimizer(&self) -> Result<(), TrainerError> {
        self.first.gather_optimizer().map(drop)
    }

    /// Whether every rank is a process.
    pub(crate) fn is_spread(&self) -> bool {
        self.spread.is_some()
    }

    /// The followers, if this process is the leader.
    pub(crate) fn remote(&self) -> Option<&Followers> {
        self.spread.as_ref().and_then(|spread| spread.remote.as_ref())
    }

    /// Sends `command` to the followers, if this process is the leader. Returns whether it is.
    pub(crate) fn send_command<'a>(
        &self,
        command: impl FnOnce(u32) -> RankCommand<'a>,
    ) -> Result<bool, TrainerError> {
        let Some(remote) = self.remote() else { return Ok(false) };
        remote.send_command(&command(remote.network))?;
        Ok(true)
    }

    /// The weights that the ranks of this process own, with their ranges in the flat parameters. All processes together
    /// own every value once.
    ///
    /// # Errors
    /// If a device fails.
    pub fn owned(&self) -> Result<OwnedValues<'_>, TrainerError> {
        let owned = self.ranks().map(Rank::owned).collect::<Result<Vec<_>, _>>()?;
        Ok(owned.into_iter().flatten().collect())
    }

    /// Number of updates of the optimizer.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.first.optimizer().updates()
    }

    /// The optimizer with its whole state, which is gathered from all ranks.
    ///
    /// # Errors
    /// If a rank has failed.
    pub fn optimizer(&self) -> Result<Cow<'_, Optimizer>, TrainerError> {
        if self.first.fragments().is_none() {
            return self.first.whole_optimizer();
        }
        if self.send_command(|network| RankCommand::GatherOptimizer { network })? {
            let reason = "the leader is not rank 0 of its ranks";
            let gathered = self.first.gather_optimizer()?.ok_or(TrainerError::State { reason })?;
            return Ok(Cow::Owned(gathered));
        }
        let states = self.ranks().map(Rank::states).collect::<Result<Vec<_>, _>>()?;
        let fragments = self.ranks().filter_map(|rank| Some((rank.fragments()?, rank.shard())));
        let states = fragments.zip(&states).map(|((fragments, shard), states)| (fragments, &**states, shard));
        let joined = Optimizer::join(self.config.optimizer, self.updates(), self.trained(), states)?;
        Ok(Cow::Owned(joined))
    }

    /// The adapter, if one is trained in place of the weights.
    #[must_use]
    pub fn adapter(&self) -> Option<&Adapter> {
        self.first.adapter()
    }

    /// The trained tensors, in the order of the optimizer's states.
    #[must_use]
    pub fn trained(&self) -> &[ParameterSpec] {
        self.first.trained()
    }

    /// Configuration of the model.
    #[must_use]
    pub fn model(&self) -> &Config {
        &self.model
    }

    /// Drops the learner and returns its weights.
    ///
    /// # Errors
    /// If a rank has failed.
    pub fn into_parameters(self) -> Result<Parameters, TrainerError> {
        Ok(Arc::unwrap_or_clone(self.parameters()?))
    }

    /// One optimizer step on the sum of `loss` over `rows`. Without a row, or with a gradient of zero, there is no update: no
    /// moments, no weight decay.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or the gradient is not finite; the weights are then unchanged. If one of
    /// several ranks fails; the learner is then unusable.
    pub fn step<L: RowLoss>(
        &mut self,
        rows: &[&Sample],
        loss: &L,
        learning_rate: f32,
    ) -> Result<LearnerStep<L::Report>, TrainerError> {
        let plan = self.plan(rows, self.config.step_leaves());
        if rows.is_empty() {
            return Ok(LearnerStep { grad_norm: 0.0, reports: Vec::new() });
        }
        let pool = &self.rank_pool(&self.pool);
        let task = PlannedRows { rows, plan: &plan, targets: None };
        let recorded_slots = recorded_slots(&self.model);
        let step = StepInputs { task, loss, learning_rate, recorded_slots, pool };
        let work = |rank: &mut &mut Rank| {
            rank.during(RankPhase::ForwardBackward, || rank_failpoint(rank));
            rank.step(&step)
        };
        let clock = Instant::now();
        let done = on_each(self.ranks_mut().collect(), work)?;
        self.update_time.seconds += clock.elapsed().as_secs_f64();
        // Of the rows and not of the plan, which computes a prompt again in every micro-batch with rows of its group.
        self.update_time.tokens += rows.iter().map(|row| row_tokens(row) as u64).sum::<u64>();
        let grad_norm = done.first().map_or(0.0, |step| step.grad_norm);
        let mut reports: Vec<Vec<L::Report>> = done.into_iter().map(|step| step.reports).collect();
        if let (Some(LearnerProcesses { collective, .. }), Some(own)) = (&self.spread, reports.first()) {
            let own = encode(own)?;
            let all = self.first.during(RankPhase::Wait, || collective.all_gather_bytes(own))?;
            reports = all.iter().map(|reports| decode(reports)).collect::<Result<_, _>>()?;
        }
        // The first rank of a pass has its report.
        let reports: Vec<_> = reports.into_iter().step_by(self.config.parallel.of_pass()).collect();
        self.balance::<L>(grad_norm, &reports)?;
        let reports = in_order_of_leaf(reports, self.config.accumulates());
        Ok(LearnerStep { grad_norm, reports })
    }

    /// The plan of `rows` for `parts` leaves or ranks.
    fn plan(&self, rows: &[&Sample], parts: usize) -> Vec<Vec<MicroBatch>> {
        plan(rows, &self.model, self.config.microbatch_tokens, parts)
    }

    /// The thread pool of a rank: `pool`, or one thread if this process has several ranks.
    fn rank_pool(&self, pool: &Arc<ThreadPool>) -> Arc<ThreadPool> {
        if self.others.is_empty() { Arc::clone(pool) } else { Arc::new(ThreadPool::single()) }
    }

    /// The ranks of this process.
    fn ranks(&self) -> impl Iterator<Item = &Rank> {
        std::iter::once(&self.first).chain(&self.others)
    }

    fn ranks_mut(&mut self) -> impl Iterator<Item = &mut Rank> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }
}

/// Where tests delay or end a rank.
fn rank_failpoint(rank: &Rank) {
    fail::fail_point!("rank-step");
    fail::fail_point!(&format!("rank-step:{}", rank.number()));
    let _ = rank;
}
