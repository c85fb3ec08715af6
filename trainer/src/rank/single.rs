//! The only rank of a learner, which updates its weights on the host. Its passes are on the host or on a device.

use collective::Position;

use super::RankBase;
use super::step::{StepInputs, UpdateInputs};
use super::whole::WholeWeights;
use crate::TrainerError;
use crate::learner::{LearnerStep, RowLoss};
use crate::on_device::by_dtype;
use crate::zero::{GradientReduction, TrainedNetwork, TreeSums};

pub(super) struct SingleRank {
    pub(super) weights: WholeWeights,
    /// Sums of the gradients of passes on the host. The buffers stay allocated between steps.
    pub(super) sums: TreeSums,
}

impl SingleRank {
    /// A step.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a device fails, or the gradient is not finite.
    pub(super) fn step<L: RowLoss>(
        &mut self,
        base: &mut RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<LearnerStep<L::Report>, TrainerError> {
        let Some(device) = &mut self.weights.device else {
            let reports = self.accumulate(base, step)?;
            let update = step.update(&base.config);
            let grad_norm = self.weights.update(base, self.sums.values(), update)?;
            return Ok(LearnerStep { grad_norm, reports });
        };
        let adapter = self.weights.adapter.as_ref();
        let trained = adapter.map_or(base.layout.len(), |adapter| adapter.values().len());
        let mut gradients = base.buffers.take(trained);
        let report = by_dtype!(device, device => device.gradients(step, adapter, &mut gradients));
        let done = report.and_then(|report| {
            let update = step.update(&base.config);
            let grad_norm = self.weights.update(base, &gradients, update)?;
            Ok(LearnerStep { grad_norm, reports: vec![report] })
        });
        base.buffers.put(gradients);
        let done = done?;
        self.weights.refresh()?;
        Ok(done)
    }

    /// The gradients of all rows, `[trained values]`, and the reports of the leaves. The weights stay as they are.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or a device fails.
    pub(super) fn gradients<L: RowLoss>(
        &mut self,
        base: &RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<(Vec<f32>, Vec<L::Report>), TrainerError> {
        let adapter = self.weights.adapter.as_ref();
        let Some(device) = &mut self.weights.device else {
            let reports = self.accumulate(base, step)?;
            return Ok((self.sums.take_values(), reports));
        };
        let mut gradients = vec![0.0; adapter.map_or(base.layout.len(), |adapter| adapter.values().len())];
        let report = by_dtype!(device, device => device.gradients(step, adapter, &mut gradients))?;
        Ok((gradients, vec![report]))
    }

    /// Updates the weights with `gradients [trained values]`. Returns their norm.
    ///
    /// # Errors
    /// If the gradient is not finite; the weights are then unchanged. If a device fails.
    pub(super) fn update(
        &mut self,
        base: &mut RankBase,
        gradients: &[f32],
        update: UpdateInputs<'_>,
    ) -> Result<f32, TrainerError> {
        let norm = self.weights.update(base, gradients, update)?;
        self.weights.refresh()?;
        Ok(norm)
    }

    /// Writes the gradients of all rows to the sums.
    fn accumulate<L: RowLoss>(
        &mut self,
        base: &RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<Vec<L::Report>, TrainerError> {
        let alone = Position { rank: 0, world: 1 };
        let mut pass = self.weights.training(base)?;
        let network = TrainedNetwork {
            layout: &base.layout,
            adapter: self.weights.adapter.as_ref(),
            buffers: &base.buffers,
            threads: step.pool,
            sections: base.passes.own_sections(),
        };
        let mut sink = GradientReduction::single(network, &mut self.sums);
        step.passes(&mut pass, &mut sink, (base, alone))
    }
}
