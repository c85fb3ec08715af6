//! How many versions sampling may run ahead of the trainer, adapted to what the trainer waits for.
//!
//! A trainer that always finds batches ready trains on groups that have waited, and a smaller lead gives it fresher ones at the same
//! speed. A trainer that waits while no slot is free needs a larger lead. Between both nothing changes.
//!
//! Invariant: the lead is at least 0 and at most the bound on staleness, which holds whatever this decides. A decision depends on the
//! steps since the last one alone.

/// Steps that a larger lead is decided on.
const WAITING_STEPS: usize = 4;
/// Steps that a smaller lead is decided on.
const READY_STEPS: usize = 8;
/// Share of the time of the steps from which the trainer counts as waiting.
const WAITS: f64 = 0.05;
/// Batches that are ready after every step if the lead can be one version less without a wait.
const RESERVE_BATCHES: usize = 2;
/// Steps without a smaller lead after a larger one was needed; doubled each time, up to [`LONGEST_HOLD_STEPS`].
const HOLD_STEPS: u64 = 32;
/// See [`HOLD_STEPS`].
const LONGEST_HOLD_STEPS: u64 = 1024;

/// What a step of the trainer shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepObservation {
    /// Time that the trainer waited for its batch, seconds.
    pub wait_s: f64,
    /// Time of the step, seconds.
    pub step_s: f64,
    /// Groups that were ready for the next step at its end.
    pub ready_groups: usize,
    /// Free slots at its end.
    pub free_slots: usize,
}

/// Decides how many versions sampling may run ahead.
#[derive(Clone, Debug, PartialEq)]
pub struct AdmissionControl {
    batch_groups: usize,
    max_staleness: u64,
    ahead: u64,
    /// The steps since the last decision.
    steps: Vec<StepObservation>,
    /// Whether a batch was ready at the end of the last step.
    was_ready: bool,
    /// Steps until a smaller lead may be tried, and how many there will be after the next larger one.
    fixed_steps: u64,
    hold_steps: u64,
}

impl AdmissionControl {
    /// For batches of `batch_groups` and a bound on staleness, from which it begins.
    #[must_use]
    pub fn new(batch_groups: usize, max_staleness: u64) -> Self {
        Self {
            batch_groups,
            max_staleness,
            ahead: max_staleness,
            steps: Vec::new(),
            was_ready: false,
            fixed_steps: 0,
            hold_steps: HOLD_STEPS,
        }
    }

    /// The lead, versions.
    #[must_use]
    pub fn ahead(&self) -> u64 {
        self.ahead
    }

    /// Takes a step into account; the new lead in versions, if it changes.
    pub fn observe(&mut self, step: StepObservation) -> Option<u64> {
        self.fixed_steps = self.fixed_steps.saturating_sub(1);
        if self.steps.len() == READY_STEPS {
            self.steps.remove(0);
        }
        // With a batch ready the lease itself takes the time, or waits for one slow group, which a larger lead does not change.
        let wait_s = if self.was_ready { 0.0 } else { step.wait_s };
        self.was_ready = step.ready_groups >= self.batch_groups;
        self.steps.push(StepObservation { wait_s, ..step });
        let next = if self.needs_more() {
            self.fixed_steps = self.hold_steps;
            self.hold_steps = (2 * self.hold_steps).min(LONGEST_HOLD_STEPS);
            self.ahead + 1
        } else if self.can_do_with_less() {
            self.ahead - 1
        } else {
            return None;
        };
        self.ahead = next;
        self.steps.clear();
        Some(next)
    }

    /// Whether the trainer waits for batches that samplers may not begin.
    fn needs_more(&self) -> bool {
        let Some(first) = self.steps.len().checked_sub(WAITING_STEPS) else { return false };
        let steps = &self.steps[first..];
        let [waited, all] = [|step: &StepObservation| step.wait_s, |step: &StepObservation| step.step_s]
            .map(|of| steps.iter().map(of).sum::<f64>());
        // What has just been leased has freed slots that samplers have not taken yet.
        let is_full = |step: &&StepObservation| step.free_slots <= self.batch_groups;
        let full = steps.iter().filter(is_full).count();
        self.ahead < self.max_staleness && waited > WAITS * all && 2 * full >= WAITING_STEPS
    }

    /// Whether batches have waited for the trainer after every step.
    fn can_do_with_less(&self) -> bool {
        let ready = |step: &StepObservation| step.ready_groups >= RESERVE_BATCHES * self.batch_groups;
        self.ahead > 0
            && self.fixed_steps == 0
            && self.steps.len() == READY_STEPS
            && self.steps.iter().all(ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(wait_s: f64, ready_groups: usize, free_slots: usize) -> StepObservation {
        StepObservation { wait_s, step_s: 1.0, ready_groups, free_slots }
    }

    /// The leads after each of `steps`.
    fn leads(control: &mut AdmissionControl, steps: impl IntoIterator<Item = StepObservation>) -> Vec<u64> {
        steps
            .into_iter()
            .map(|step| {
                control.observe(step);
                control.ahead()
            })
            .collect()
    }

    #[test]
    fn a_trainer_that_finds_batches_ready_needs_less() {
        let mut control = AdmissionControl::new(8, 4);
        assert_eq!(leads(&mut control, vec![step(0.0, 32, 0); 8]), [4, 4, 4, 4, 4, 4, 4, 3]);
        // One step without a reserve, and none of the eight counts.
        let steps = [vec![step(0.0, 24, 0); 7], vec![step(0.0, 15, 0)], vec![step(0.0, 24, 0); 7]].concat();
        assert_eq!(leads(&mut control, steps).last(), Some(&3));
        assert_eq!(leads(&mut control, vec![step(0.0, 24, 0); 100]).last(), Some(&0));
    }

    #[test]
    fn a_trainer_that_waits_without_a_free_slot_needs_more_and_is_not_tried_with_less_for_long() {
        let mut control = AdmissionControl::new(8, 4);
        leads(&mut control, vec![step(0.0, 64, 0); 32]);
        assert_eq!(control.ahead(), 0);
        // A batch was ready before the first of them.
        assert_eq!(leads(&mut control, vec![step(0.2, 0, 8); 8]), [0, 0, 0, 1, 1, 1, 1, 2]);
        let after = leads(&mut control, vec![step(0.0, 64, 0); 200]);
        let tried = after.iter().position(|lead| *lead < 2).unwrap();
        assert_eq!(tried as u64 + 1, 2 * HOLD_STEPS, "the second hold is twice the first");
    }

    #[test]
    fn a_wait_for_slow_samplers_changes_nothing() {
        let mut control = AdmissionControl::new(8, 4);
        leads(&mut control, vec![step(0.0, 64, 0); 8]);
        assert_eq!(leads(&mut control, vec![step(0.5, 0, 20); 50]), [3; 50], "slots are free");
        assert_eq!(leads(&mut AdmissionControl::new(8, 1), vec![step(0.5, 0, 0); 50]), [1; 50], "the bound");
        leads(&mut control, vec![step(0.0, 8, 20); 4]);
        assert_eq!(leads(&mut control, vec![step(0.5, 8, 0); 50]), [3; 50], "a batch is ready");
    }
}
