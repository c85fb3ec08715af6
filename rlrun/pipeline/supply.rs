//! What samplers may deliver follows what the trainer waits for: how far they run ahead (`buffer.adapt_staleness`), and how many get
//! slots (`placement.adapt_samplers`).
//!
//! Invariant: at most one of the two changes after a step, and every change is one event.

use buffer::{Buffer, Consumer, StepObservation, Supply, SupplyControl};
use serde_json::json;
use trainer::StepReport;

use crate::failure::Failure;
use crate::observe::{Observer, SupplyLimits};
use crate::recipe::Recipe;

/// See the module.
pub(super) struct AdaptedSupply<'a> {
    buffer: &'a Buffer,
    samplers: Option<SupplyControl>,
    /// Samplers that get slots.
    limit: usize,
    lead: Option<SupplyControl>,
}

/// How many samplers get slots while nothing has been taken away.
const ALL: usize = usize::MAX;

impl<'a> AdaptedSupply<'a> {
    /// What the recipe asks for. Counts the samplers of `buffer` from now on if their number adapts.
    ///
    /// # Errors
    /// A buffer that has failed.
    pub(super) fn of(recipe: &Recipe, buffer: &'a Buffer) -> Result<Self, Failure> {
        let groups = recipe.buffer.batch_groups;
        let lead = SupplyControl::new(Supply::Lead, groups, recipe.buffer.max_staleness);
        let samplers = SupplyControl::new(Supply::Samplers, groups, 1);
        if recipe.placement.adapt_samplers {
            buffer.limit_holders(ALL)?;
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
    ) -> Result<SupplyLimits, Failure> {
        if self.samplers.is_none() && self.lead.is_none() {
            return Ok(SupplyLimits::default());
        }
        let stats = self.buffer.stats()?;
        let wait_s = step.time.wait_for_batch;
        let (ready_groups, free_slots) = (stats.finalized, stats.slots_free);
        let observed = StepObservation { wait_s, step_s, ready_groups, free_slots };
        // Fewer samplers save machines, which a smaller lead does not.
        let changed = self.adapt_samplers(step, observed, observer)?;
        self.adapt_lead(step, observed, changed, observer)?;
        let amount = |control: &Option<SupplyControl>| control.as_ref().map(SupplyControl::amount);
        Ok(SupplyLimits { ahead: amount(&self.lead), samplers: amount(&self.samplers) })
    }

    /// Whether the number of samplers has changed.
    fn adapt_samplers(
        &mut self,
        step: &StepReport,
        observed: StepObservation,
        observer: &mut Observer<'_>,
    ) -> Result<bool, Failure> {
        let there = self.buffer.holders()?;
        let Some(control) = self.samplers.as_mut().filter(|_| there > 0) else { return Ok(false) };
        control.set_most(there as u64);
        let before = control.amount();
        let changed = control.observe(observed);
        // All of them are no limit, so that one that joins is used at once.
        let limit = if control.amount() == there as u64 { ALL } else { control.amount() as usize };
        if limit != self.limit {
            self.buffer.limit_holders(limit)?;
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
            control.start_again();
            return Ok(());
        }
        let before = control.amount();
        if let Some(ahead) = control.observe(observed) {
            self.buffer.run_ahead(ahead)?;
            self.samplers.iter_mut().for_each(SupplyControl::start_again);
            let (version, groups) = (step.version, observed.ready_groups);
            let fields =
                json!({ "version": version, "ahead_before": before, "ahead": ahead, "ready_groups": groups });
            observer.event("admission", &fields)?;
        }
        Ok(())
    }
}
