//! One of several ranks that each have their shards of the weights (ZeRO stage 3), and gather layers through the host.

use std::sync::Arc;

use model::ThreadPool;

use super::membership::{OwnShards, RankMembership};
use super::on_device::AnyPassDevice;
use super::step::{HostExchange, StepInputs, finite, owned};
use super::{PlannedRows, RankBase, ScoredRows};
use crate::TrainerError;
use crate::learner::{LearnerStep, RowLoss};
use crate::norm::clip;
use crate::on_device::by_dtype;
use crate::pass::Pass;
use crate::rank_spans::RankPhase;
use crate::zero::{Requests, TreeSums, WeightShards};

pub(super) struct ShardedRank {
    /// The weights of this rank: its shards, concatenated.
    pub(super) own: Vec<f32>,
    pub(super) membership: RankMembership,
    /// The device of the passes; `None` for the processor.
    pub(super) device: Option<AnyPassDevice>,
    /// Sums of the gradients that this rank owns. The buffers stay allocated between steps.
    pub(super) sums: TreeSums,
}

impl ShardedRank {
    /// The weights of this rank.
    pub(super) fn shards(&self) -> OwnShards<'_> {
        OwnShards { membership: &self.membership, values: &self.own }
    }

    /// Predictions of this rank's rows.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, another rank does not make the call, or the device fails.
    pub(super) fn score(
        &self,
        base: &RankBase,
        task: PlannedRows<'_>,
        pool: &ThreadPool,
    ) -> Result<ScoredRows, TrainerError> {
        let Self { own, membership, device, .. } = self;
        let weights = Some(WeightShards { shards: &membership.weights, own });
        let exchange = HostExchange { base, membership, adapter: None, weights };
        exchange.communicate(&mut TreeSums::default(), |requests| {
            let mut pass = gathered(base, device.as_ref(), requests)?;
            base.score(&mut pass, Some(membership), task, pool)
        })
    }

    /// This rank's part of a step.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, another rank does not take part, or the gradient is not finite.
    pub(super) fn step<L: RowLoss>(
        &mut self,
        base: &mut RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<LearnerStep<L::Report>, TrainerError> {
        let clock = Arc::clone(&self.membership.clock);
        let reports = clock.during(RankPhase::ForwardBackward, || self.reduce(base, step))?;
        let grad_norm = clock.during(RankPhase::Optimizer, || self.update(base, step))?;
        Ok(LearnerStep { grad_norm, reports })
    }

    /// Writes the sums over all ranks of the gradients that this rank owns to its sums.
    fn reduce<L: RowLoss>(
        &mut self,
        base: &RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let Self { own, membership, device, sums } = self;
        let (own, device) = (&own[..], &*device);
        let weights = Some(WeightShards { shards: &membership.weights, own });
        let exchange = HostExchange { base, membership, adapter: None, weights };
        exchange.reduce(sums, |requests| gathered(base, device.as_ref(), requests), step)
    }

    /// Updates the shards of this rank. Returns the norm of the whole gradient.
    fn update<L>(
        &mut self,
        base: &mut RankBase,
        &StepInputs { task, learning_rate, pool, .. }: &StepInputs<'_, L>,
    ) -> Result<f32, TrainerError> {
        let Self { own, membership, sums, .. } = self;
        let gradients: &[f32] = sums.values();
        let norm = membership.norm(&membership.squares(gradients, pool))?;
        finite(norm, &base.optimizer, task.rows.len())?;
        if norm == 0.0 {
            return Ok(norm);
        }
        let (specs, scale) = (base.layout.specs(), clip(norm, base.config.max_grad_norm));
        let own = owned(specs, (membership, base.shard.as_ref()), own, true, gradients);
        base.optimizer.update_owned(specs, own, scale, learning_rate, pool);
        Ok(norm)
    }
}

/// A pass whose layers are gathered from all ranks.
fn gathered<'a>(
    base: &'a RankBase,
    device: Option<&'a AnyPassDevice>,
    requests: Requests,
) -> Result<Pass<'a>, TrainerError> {
    let buffers = (base.config.parallel.expert == 1).then_some(&base.buffers);
    let gathering = requests.gathering(&base.layout, buffers);
    match device {
        Some(device) => {
            let ranks = base.passes.on_devices()?;
            Ok(Pass::Device(by_dtype!(device, device => device.gathered(gathering, ranks)?)))
        }
        None => {
            let ranks = base.passes.passes(&base.model, false)?;
            Pass::gathered(&base.model, &base.layout, gathering, base.config.recompute, ranks)
        }
    }
}
