//! Limits of admission, adapted to what the trainer waits for: by how many versions samplers run ahead, and how many of them get slots.
//!
//! A trainer that always finds batches ready trains on groups that have waited. A smaller lead gives it fresher ones at the same speed,
//! and so do fewer samplers. A trainer that waits needs more samplers, which have fewer sequences each and end slow groups sooner, or, while
//! no slot is free, a larger lead. Between both nothing changes.
//!
//! Invariant: a limit is between its bounds, and the bound on staleness holds whatever this decides. A decision depends on the steps since
//! the last one, and on how long ago a trial of less failed.

use std::collections::VecDeque;

use crate::trial_pause::TrialPause;

/// Steps that more is decided on.
const WAITING_STEPS: usize = 4;
/// Steps that less is decided on.
const READY_STEPS: usize = 8;
/// Share of the time of the steps from which the trainer counts as waiting.
const WAITS: f64 = 0.05;
/// Batches that are ready after every step if less may be enough.
const RESERVE_BATCHES: usize = 2;
/// Steps without a trial of less after more was needed; doubled each time, up to [`LONGEST_PAUSE_STEPS`].
const PAUSE_STEPS: u64 = 32;
/// See [`PAUSE_STEPS`].
const LONGEST_PAUSE_STEPS: u64 = 1024;

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

/// What a control limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionLimit {
    /// By how many versions samplers run ahead: a trainer that waits needs more if no slot is free.
    Lead,
    /// How many samplers get slots: a trainer that waits needs more.
    Samplers,
}

/// Decides about one limit.
#[derive(Clone, Debug, PartialEq)]
pub struct AdmissionControl {
    of: AdmissionLimit,
    batch_groups: usize,
    most: u64,
    amount: u64,
    /// Whether the amount is one that was decided on, and not all that there is.
    is_limited: bool,
    /// The steps since the last decision.
    steps: VecDeque<StepObservation>,
    /// Whether a batch was ready at the end of the last step.
    was_ready: bool,
    /// Steps until less may be tried.
    pause: TrialPause,
}

impl AdmissionControl {
    /// For batches of `batch_groups`, beginning with `most`: the bound on staleness, or the samplers that there are.
    #[must_use]
    pub fn new(of: AdmissionLimit, batch_groups: usize, most: u64) -> Self {
        Self {
            of,
            batch_groups,
            most,
            amount: most,
            is_limited: false,
            steps: VecDeque::new(),
            was_ready: false,
            pause: TrialPause::new(PAUSE_STEPS, LONGEST_PAUSE_STEPS, 0),
        }
    }

    /// The lead in versions, or the number of samplers.
    #[must_use]
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// The lead or the number of samplers, if it is limited below all that there is.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.is_limited.then_some(self.amount)
    }

    /// Sets the largest amount. Samplers that join meanwhile get slots if nothing limits their number, and are a reserve otherwise.
    pub fn set_most(&mut self, most: u64) {
        self.most = most.max(self.least());
        self.amount = if self.is_limited { self.amount.min(self.most) } else { self.most };
    }

    /// Takes a step into account; the new amount, if it changes.
    pub fn observe(&mut self, step: StepObservation) -> Option<u64> {
        self.pause.step();
        if self.steps.len() == READY_STEPS {
            self.steps.pop_front();
        }
        // With a batch ready the lease itself takes the time, or waits for one slow group, which no larger lead changes.
        let for_one_group = self.was_ready && self.of == AdmissionLimit::Lead;
        let wait_s = if for_one_group { 0.0 } else { step.wait_s };
        self.was_ready = step.ready_groups >= self.batch_groups;
        self.steps.push_back(StepObservation { wait_s, ..step });
        let next = if self.needs_more() {
            self.pause.begin();
            self.amount + 1
        } else if self.can_do_with_less() {
            self.amount - 1
        } else {
            return None;
        };
        (self.amount, self.is_limited) = (next, next < self.most);
        self.start_again();
        Some(next)
    }

    /// Takes a step into account that nothing is decided after, because another limit has changed.
    pub fn skip(&mut self, step: StepObservation) {
        self.pause.step();
        self.was_ready = step.ready_groups >= self.batch_groups;
        self.start_again();
    }

    /// Forgets the steps so far, because another limit has changed what they show.
    pub fn start_again(&mut self) {
        self.steps.clear();
    }

    fn least(&self) -> u64 {
        match self.of {
            AdmissionLimit::Lead => 0,
            AdmissionLimit::Samplers => 1,
        }
    }

    /// Whether the trainer waits for what more of this would give it.
    fn needs_more(&self) -> bool {
        let Some(first) = self.steps.len().checked_sub(WAITING_STEPS) else { return false };
        // What has just been leased has freed slots that samplers have not taken yet.
        let is_full = |step: &&StepObservation| step.free_slots <= self.batch_groups;
        let full = self.steps.range(first..).filter(is_full).count();
        let is_cause = self.of == AdmissionLimit::Samplers || 2 * full >= WAITING_STEPS;
        self.amount < self.most && is_cause && self.has_waited(WAITING_STEPS)
    }

    /// Whether the trainer has waited in the last `count` steps.
    fn has_waited(&self, count: usize) -> bool {
        let steps = || self.steps.range(self.steps.len().saturating_sub(count)..);
        let [waited, all] = [|step: &StepObservation| step.wait_s, |step: &StepObservation| step.step_s]
            .map(|of| steps().map(of).sum::<f64>());
        waited > WAITS * all
    }

    /// Whether batches have waited for the trainer after every step, and not the trainer for them.
    fn can_do_with_less(&self) -> bool {
        let ready = |step: &StepObservation| step.ready_groups >= RESERVE_BATCHES * self.batch_groups;
        self.amount > self.least()
            && self.pause.is_over()
            && self.steps.len() == READY_STEPS
            && self.steps.iter().all(ready)
            && !self.has_waited(READY_STEPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(wait_s: f64, ready_groups: usize, free_slots: usize) -> StepObservation {
        StepObservation { wait_s, step_s: 1.0, ready_groups, free_slots }
    }

    /// The amounts after each of `steps`.
    fn amounts(control: &mut AdmissionControl, steps: impl IntoIterator<Item = StepObservation>) -> Vec<u64> {
        steps
            .into_iter()
            .map(|step| {
                control.observe(step);
                control.amount()
            })
            .collect()
    }

    #[test]
    fn a_trainer_that_finds_batches_ready_needs_less() {
        let mut control = AdmissionControl::new(AdmissionLimit::Lead, 8, 4);
        assert_eq!(amounts(&mut control, vec![step(0.0, 32, 0); 8]), [4, 4, 4, 4, 4, 4, 4, 3]);
        // One step without a reserve, and none of the eight counts.
        let steps = [vec![step(0.0, 24, 0); 7], vec![step(0.0, 15, 0)], vec![step(0.0, 24, 0); 7]].concat();
        assert_eq!(amounts(&mut control, steps).last(), Some(&3));
        assert_eq!(amounts(&mut control, vec![step(0.0, 24, 0); 100]).last(), Some(&0));
    }

    #[test]
    fn a_trainer_that_waits_without_a_free_slot_needs_a_larger_lead_and_is_not_tried_with_less_for_long() {
        let mut control = AdmissionControl::new(AdmissionLimit::Lead, 8, 4);
        amounts(&mut control, vec![step(0.0, 64, 0); 32]);
        assert_eq!(control.amount(), 0);
        // A batch was ready before the first of them.
        assert_eq!(amounts(&mut control, vec![step(0.2, 0, 8); 8]), [0, 0, 0, 1, 1, 1, 1, 2]);
        let after = amounts(&mut control, vec![step(0.0, 64, 0); 200]);
        let tried = after.iter().position(|lead| *lead < 2).unwrap();
        assert_eq!(tried as u64 + 1, 2 * PAUSE_STEPS, "the second pause is twice the first");
    }

    #[test]
    fn a_wait_for_slow_samplers_does_not_change_the_lead() {
        let mut control = AdmissionControl::new(AdmissionLimit::Lead, 8, 4);
        amounts(&mut control, vec![step(0.0, 64, 0); 8]);
        assert_eq!(amounts(&mut control, vec![step(0.5, 0, 20); 50]), [3; 50], "slots are free");
        assert_eq!(
            amounts(&mut AdmissionControl::new(AdmissionLimit::Lead, 8, 1), vec![step(0.5, 0, 0); 50]),
            [1; 50],
            "the bound"
        );
        amounts(&mut control, vec![step(0.0, 8, 20); 4]);
        assert_eq!(amounts(&mut control, vec![step(0.5, 8, 0); 50]), [3; 50], "a batch is ready");
    }

    #[test]
    fn a_trainer_that_waits_needs_more_samplers() {
        let mut control = AdmissionControl::new(AdmissionLimit::Samplers, 8, 4);
        let fewer = [vec![3; 8], vec![2; 8], vec![1]].concat();
        assert_eq!(amounts(&mut control, vec![step(0.0, 64, 0); 24])[7..], fewer);
        assert_eq!(amounts(&mut control, vec![step(0.0, 64, 0); 24]), [1; 24], "one is the least");
        assert_eq!(
            amounts(&mut control, vec![step(0.5, 64, 0); 8]),
            [2, 2, 2, 2, 3, 3, 3, 3],
            "for slow groups"
        );
        assert_eq!(
            amounts(&mut control, vec![step(0.1, 64, 0); 80]).last(),
            Some(&4),
            "no trial of less while it waits"
        );
    }

    #[test]
    fn samplers_that_join_are_used_or_a_reserve() {
        let mut control = AdmissionControl::new(AdmissionLimit::Samplers, 8, 2);
        control.set_most(3);
        assert_eq!((control.amount(), control.limit()), (3, None));
        amounts(&mut control, vec![step(0.0, 64, 0); 8]);
        control.set_most(5);
        assert_eq!((control.amount(), control.limit()), (2, Some(2)), "fewer were enough");
        for most in [1, 0] {
            control.set_most(most);
            assert_eq!(control.amount(), 1, "a run whose samplers are all gone waits for one");
        }
        control.set_most(2);
        assert_eq!(
            (control.amount(), control.limit()),
            (1, Some(1)),
            "the one that is started again is a reserve"
        );
        amounts(&mut control, vec![step(0.5, 0, 0); 4]);
        assert_eq!((control.amount(), control.limit()), (2, None));
    }
}
