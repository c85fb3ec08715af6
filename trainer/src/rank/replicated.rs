//! One of several ranks that all have all weights: ZeRO stages 1 and 2, or an adapter. Every rank updates its shards of
//! the trained values and gathers the others.

use std::sync::Arc;

use collective::HostCollective;

use super::RankBase;
use super::membership::RankMembership;
use super::step::{HostExchange, StepInputs, finite, owned};
use super::whole::WholeWeights;
use crate::TrainerError;
use crate::learner::{LearnerStep, RowLoss};
use crate::norm::clip;
use crate::on_device::by_dtype;
use crate::pass::Pass;
use crate::rank_spans::RankPhase;
use crate::zero::{Shards, TreeSums};

pub(super) struct ReplicatedRank {
    pub(super) weights: WholeWeights,
    pub(super) membership: RankMembership,
    /// Sums of the gradients that this rank owns. The buffers stay allocated between steps.
    pub(super) sums: TreeSums,
}

impl ReplicatedRank {
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
        let _optimizer = clock.enter(RankPhase::Optimizer);
        let grad_norm = self.update(base, step)?;
        self.weights.refresh()?;
        Ok(LearnerStep { grad_norm, reports })
    }

    /// Writes the sums over all ranks of the gradients that this rank owns to its sums.
    fn reduce<L: RowLoss>(
        &mut self,
        base: &RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let Self { weights, membership, sums } = self;
        let Some(device) = &mut weights.device else {
            let adapter = weights.adapter.as_ref();
            let exchange = HostExchange { base, membership, adapter, weights: None };
            return exchange.reduce(sums, |_| weights.training(base), step);
        };
        let adapter = weights.adapter.as_ref();
        let exchange = HostExchange { base, membership, adapter, weights: None };
        let (accumulates, ranks) = (base.accumulates(), base.passes.on_devices()?);
        exchange.reduce(
            sums,
            move |_| Ok(Pass::Device(by_dtype!(device, device => device.pass(accumulates, adapter, ranks)?))),
            step,
        )
    }

    /// Updates the shards of this rank, and gathers the shards of the others. Returns the norm of the whole gradient.
    fn update<L>(
        &mut self,
        base: &mut RankBase,
        &StepInputs { task, learning_rate, pool, .. }: &StepInputs<'_, L>,
    ) -> Result<f32, TrainerError> {
        let Self { weights, membership, sums } = self;
        let gradients: &[f32] = sums.values();
        let norm = membership.norm(&membership.squares(gradients, pool))?;
        finite(norm, &base.optimizer, task.rows.len())?;
        if norm == 0.0 {
            return Ok(norm);
        }
        let scale = clip(norm, base.config.max_grad_norm);
        let collective = membership.collective()?;
        weights.change(pool, |specs, values| {
            let own = owned(specs, (membership, base.shard.as_ref()), values, false, gradients);
            base.optimizer.update_owned(specs, own, scale, learning_rate, pool);
            let gathers = || gather(&*collective, &membership.trained, values);
            membership.clock.during(RankPhase::Wait, gathers)
        })?;
        Ok(norm)
    }
}

/// Gathers the shards of the other ranks into `values`, `[trained values]`.
fn gather(collective: &dyn HostCollective, shards: &Shards, values: &mut [f32]) -> Result<(), TrainerError> {
    for unit in (0..shards.ranges()).filter(|unit| !shards.place(*unit).is_empty()) {
        let own = values[shards.owned(collective.rank(), unit)].to_vec();
        collective.all_gather(&own, shards.cuts(unit), &mut values[shards.place(unit)])?;
    }
    Ok(())
}
