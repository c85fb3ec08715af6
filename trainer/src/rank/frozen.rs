//! The only rank of a learner whose base stays quantised (QLoRA, Dettmers et al. 2023, arXiv 2305.14314). It trains an adapter
//! that is not merged.
//!
//! Invariant: there are no weights in f32. The base has the memory of its file, and a sampler of the same base and factors
//! computes the bits of the passes here.

use std::sync::Arc;

use collective::Position;
use model::{FrozenParameters, ParameterSpec};

use super::RankBase;
use super::step::{StepInputs, finite};
use crate::TrainerError;
use crate::learner::{LearnerStep, RowLoss};
use crate::lora::Adapter;
use crate::norm::{clip, squares};
use crate::optimizer::ScaledGradients;
use crate::pass::Pass;
use crate::zero::{GradientReduction, TrainedNetwork, TreeSums};

pub(super) struct FrozenRank {
    pub(super) weights: Arc<FrozenParameters>,
    pub(super) adapter: Adapter,
    /// Sums of the gradients. The buffers stay allocated between steps.
    pub(super) sums: TreeSums,
}

impl FrozenRank {
    pub(super) fn new(weights: Arc<FrozenParameters>, adapter: Adapter) -> Self {
        let sums = TreeSums::new(adapter.values().len());
        Self { weights, adapter, sums }
    }

    /// A pass with the current factors. It is dropped before the next update.
    pub(super) fn pass(&self, base: &RankBase) -> Pass<'static> {
        Pass::frozen(&self.weights, &self.adapter, base.config.recompute)
    }

    /// A step.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or the gradient is not finite; the factors are then unchanged.
    pub(super) fn step<L: RowLoss>(
        &mut self,
        base: &mut RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<LearnerStep<L::Report>, TrainerError> {
        let reports = self.accumulate(base, step)?;
        let gradients: &[f32] = self.sums.values();
        let own = |spec: &ParameterSpec| &gradients[spec.range()];
        let grad_norm = squares(self.adapter.specs().iter().map(own), step.pool).norm();
        finite(grad_norm, &base.optimizer, step.task)?;
        if grad_norm > 0.0 {
            let update = ScaledGradients { gradients, scale: clip(grad_norm, base.config.max_grad_norm) };
            self.adapter.update(&mut base.optimizer, update, step.learning_rate, step.pool);
        }
        Ok(LearnerStep { grad_norm, reports })
    }

    /// Writes the gradients of all rows to the sums.
    fn accumulate<L: RowLoss>(
        &mut self,
        base: &RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let mut pass = self.pass(base);
        let network = TrainedNetwork {
            layout: &base.layout,
            adapter: Some(&self.adapter),
            buffers: &base.buffers,
            threads: step.pool,
        };
        let mut sink = GradientReduction::single(network, &mut self.sums);
        step.passes(&mut pass, &mut sink, Position { rank: 0, world: 1 }, base.accumulates())
    }
}
