//! Admission that follows what the trainer waits for (`buffer.adapt_staleness`).

use buffer::{AdmissionControl, Buffer, Consumer, StepObservation};
use serde_json::json;
use trainer::StepReport;

use crate::failure::Failure;
use crate::observe::Observer;
use crate::recipe::Recipe;

/// Admission that follows what the trainer waits for.
pub(super) struct AdaptedAdmission<'a> {
    buffer: &'a Buffer,
    control: AdmissionControl,
}

impl<'a> AdaptedAdmission<'a> {
    /// `None` unless the recipe asks for it.
    pub(super) fn of(recipe: &Recipe, buffer: &'a Buffer) -> Option<Self> {
        let control = AdmissionControl::new(recipe.buffer.batch_groups, recipe.buffer.max_staleness);
        recipe.buffer.adapt_staleness.then_some(Self { buffer, control })
    }

    /// Takes a step of `step_s` seconds into account. Returns by how many versions samplers run ahead from now on.
    pub(super) fn after(
        &mut self,
        step: &StepReport,
        step_s: f64,
        observer: &mut Observer<'_>,
    ) -> Result<u64, Failure> {
        let stats = self.buffer.stats()?;
        let wait_s = step.time.wait_for_batch;
        let (ready_groups, free_slots) = (stats.finalized, stats.slots_free);
        let before = self.control.ahead();
        let observed = StepObservation { wait_s, step_s, ready_groups, free_slots };
        if let Some(ahead) = self.control.observe(observed) {
            self.buffer.run_ahead(ahead)?;
            let (version, groups) = (step.version, ready_groups);
            let fields =
                json!({ "version": version, "ahead_before": before, "ahead": ahead, "ready_groups": groups });
            observer.event("admission", &fields)?;
        }
        Ok(self.control.ahead())
    }
}
