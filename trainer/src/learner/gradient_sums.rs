//! Gradients that are summed over several calls before an update, and updates with hyperparameters of their own.
//!
//! Invariant: one call and an update are [`Learner::step`], bit for bit. The sum over calls is a chain in their order.

use std::sync::Arc;

use model::Prediction;
use trajectory::Sample;

use super::{Learner, RowLoss};
use crate::TrainerError;
use crate::optimizer::OptimizerConfig;
use crate::packing::recorded_slots;
use crate::rank::{PlannedRows, StepInputs, UpdateInputs};
use crate::zero::add;

/// Rows of a pass, with what is predicted.
#[derive(Clone, Copy, Debug)]
pub struct TargetRows<'a> {
    /// The rows.
    pub rows: &'a [&'a Sample],
    /// `[rows][trained tokens]` the tokens that are predicted in place of the trained ones; `None` for these.
    pub targets: Option<&'a [Vec<u32>]>,
}

/// The sum of gradients since the last update.
#[derive(Clone, Debug, Default)]
pub struct GradientSums {
    /// `[trained values]`; empty if there are none.
    values: Vec<f32>,
    rows: usize,
}

/// Hyperparameters of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateParameters {
    /// Learning rate.
    pub learning_rate: f32,
    /// Those of the optimizer, whose kind stays.
    pub optimizer: OptimizerConfig,
    /// Gradients are scaled down to this norm; infinite for no limit.
    pub max_grad_norm: f32,
}

impl GradientSums {
    /// Rows that the gradients are of.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Learner {
    /// Adds the gradients of the sum of `loss` over `rows` to `sums`. Returns the reports of the leaves, in order.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or the targets are not those of the rows; `sums` are then unchanged. If there are several
    /// ranks, or the weights are updated on a device.
    pub fn add_gradients<L: RowLoss>(
        &mut self,
        rows: TargetRows<'_>,
        loss: &L,
        sums: &mut GradientSums,
    ) -> Result<Vec<L::Report>, TrainerError> {
        rows.check(self.model.vocab_size)?;
        if rows.rows.is_empty() {
            return Ok(Vec::new());
        }
        let plan = self.plan(rows.rows, self.config.step_leaves());
        let pool = Arc::clone(&self.pool);
        let task = PlannedRows { rows: rows.rows, plan: &plan, targets: rows.targets };
        let recorded_slots = recorded_slots(&self.model);
        let step = StepInputs { task, loss, learning_rate: 0.0, recorded_slots, pool: &pool };
        let (gradients, reports) = self.first.gradients(&step)?;
        match sums.values.is_empty() {
            true => sums.values = gradients,
            false => add(&mut sums.values, &gradients, &pool),
        }
        sums.rows += rows.rows.len();
        Ok(reports)
    }

    /// Predictions of the targets of each row under the current weights, with the bits of [`Self::add_gradients`].
    ///
    /// # Errors
    /// As there.
    pub fn score_targets(&self, rows: TargetRows<'_>) -> Result<Vec<Vec<Prediction>>, TrainerError> {
        rows.check(self.model.vocab_size)?;
        let plan = self.plan(rows.rows, 1);
        let task = PlannedRows { rows: rows.rows, plan: &plan, targets: rows.targets };
        let mut scored = vec![Vec::new(); rows.rows.len()];
        for (row, predictions) in self.first.score(task, &self.pool)? {
            scored[row] = predictions;
        }
        Ok(scored)
    }

    /// Updates the weights with the gradients of `sums`, which are empty then. Without a gradient, or with one of zero, there is no
    /// update: no moments, no weight decay. Returns the norm of the gradient before clipping.
    ///
    /// # Errors
    /// If the gradient is not finite, or the optimizer is of another kind; the weights are then unchanged, and `sums` are empty.
    pub fn update(
        &mut self,
        sums: &mut GradientSums,
        parameters: UpdateParameters,
    ) -> Result<f32, TrainerError> {
        let GradientSums { values, rows } = std::mem::take(sums);
        if values.is_empty() {
            return Ok(0.0);
        }
        let UpdateParameters { learning_rate, optimizer, max_grad_norm } = parameters;
        let update = UpdateInputs { rows, learning_rate, max_grad_norm, pool: &Arc::clone(&self.pool) };
        self.first.update(&values, optimizer, update)
    }
}

impl TargetRows<'_> {
    /// Checks that every trained token has a target of a model with `vocabulary` tokens.
    fn check(&self, vocabulary: usize) -> Result<(), TrainerError> {
        let Some(targets) = self.targets else { return Ok(()) };
        let wanted = self.rows.iter().map(|row| row.trained_tokens());
        let fits = wanted.eq(targets.iter().map(Vec::len));
        let foreign = targets.iter().flatten().find(|token| **token as usize >= vocabulary);
        match (fits, foreign) {
            (true, None) => Ok(()),
            (false, _) => Err(TrainerError::Targets {
                reason: "a row has another number of them than of trained tokens".to_owned(),
            }),
            (true, Some(token)) => {
                let reason = format!("token {token} is outside the vocabulary of {vocabulary}");
                Err(TrainerError::Targets { reason })
            }
        }
    }
}
