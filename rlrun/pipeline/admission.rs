//! Admission follows what the trainer waits for: how far they run ahead (`buffer.adapt_staleness`), and how many get
//! slots (`placement.adapt_samplers`).
//!
//! Invariant: at most one of the two is decided on after a step, and every decision is one event.

use buffer::{AdmissionControl, AdmissionLimit, Buffer, Consumer, StepObservation};
use serde_json::json;
use trainer::StepReport;

use crate::failure::Failure;
use crate::observe::{AdmissionLimits, Observer};
use crate::recipe::Recipe;

/// See the module.
pub(super) struct AdaptedAdmission<'a> {
    buffer: &'a Buffer,
    samplers: Option<AdmissionControl>,
    /// Samplers that get slots.
    limit: usize,
    lead: Option<AdmissionControl>,
}

/// How many samplers get slots while nothing limits their number, so that one that joins is used at once.
const ALL: usize = usize::MAX;

impl<'a> AdaptedAdmission<'a> {
    /// What the recipe asks for. Counts the samplers of `buffer` from now on if their number adapts.
    ///
    /// # Errors
    /// A buffer that has failed.
    pub(super) fn of(recipe: &Recipe, buffer: &'a Buffer) -> Result<Self, Failure> {
        let groups = recipe.buffer.batch_groups;
        let lead = AdmissionControl::new(AdmissionLimit::Lead, groups, recipe.buffer.max_staleness);
        let samplers = AdmissionControl::new(AdmissionLimit::Samplers, groups, 1);
        if recipe.placement.adapt_samplers {
            buffer.limit_samplers(ALL)?;
        }
        Ok(Self {
            buffer,
            samplers: recipe.placement.adapt_samplers.then_some(samplers),
            limit: ALL,
            lead: recipe.buffer.adapt_staleness.then_some(lead),
        })
    }

    /// Takes a step of `step_s` seconds into account. Returns what holds from now on.
    ///
    /// # Errors
    /// A buffer that has failed, an event that cannot be written.
    pub(super) fn after(
        &mut self,
        step: &StepReport,
        step_s: f64,
        observer: &mut Observer<'_>,
    ) -> Result<AdmissionLimits, Failure> {
        if self.samplers.is_none() && self.lead.is_none() {
            return Ok(AdmissionLimits::default());
        }
        let stats = self.buffer.stats()?;
        let wait_s = step.time.wait_for_batch;
        let (ready_groups, free_slots) = (stats.finalized, stats.slots_free);
        let observed = StepObservation { wait_s, step_s, ready_groups, free_slots };
        // Fewer samplers save machines, which a smaller lead does not.
        let changed = self.adapt_samplers(step, observed, observer)?;
        self.adapt_lead(step, observed, changed, observer)?;
        let amount = |control: &Option<AdmissionControl>| control.as_ref().map(AdmissionControl::amount);
        Ok(AdmissionLimits { ahead: amount(&self.lead), samplers: amount(&self.samplers) })
    }

    /// Whether the number of samplers has changed.
    fn adapt_samplers(
        &mut self,
        step: &StepReport,
        observed: StepObservation,
        observer: &mut Observer<'_>,
    ) -> Result<bool, Failure> {
        let there = self.buffer.counted_samplers()?;
        let Some(control) = self.samplers.as_mut().filter(|_| there > 0) else { return Ok(false) };
        control.set_most(there as u64);
        let before = control.amount();
        let changed = control.observe(observed);
        let limit = control.limit().map_or(ALL, |samplers| samplers as usize);
        if limit != self.limit {
            self.buffer.limit_samplers(limit)?;
            self.limit = limit;
        }
        let Some(samplers) = changed else { return Ok(false) };
        let StepObservation { ready_groups, free_slots, .. } = observed;
        let fields = json!({
            "version": step.version,
            "samplers_before": before,
            "samplers": samplers,
            "joined": there,
            "ready_groups": ready_groups,
            "free_slots": free_slots,
        });
        observer.event("active_samplers", &fields)?;
        Ok(true)
    }

    fn adapt_lead(
        &mut self,
        step: &StepReport,
        observed: StepObservation,
        other_changed: bool,
        observer: &mut Observer<'_>,
    ) -> Result<(), Failure> {
        let Some(control) = &mut self.lead else { return Ok(()) };
        if other_changed {
            control.skip(observed);
            return Ok(());
        }
        let before = control.amount();
        if let Some(ahead) = control.observe(observed) {
            self.buffer.run_ahead(ahead)?;
            self.samplers.iter_mut().for_each(AdmissionControl::start_again);
            let (version, groups) = (step.version, observed.ready_groups);
            let fields =
                json!({ "version": version, "ahead_before": before, "ahead": ahead, "ready_groups": groups });
            observer.event("admission", &fields)?;
        }
        Ok(())
    }
}
