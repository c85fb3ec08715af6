//! The phase of the trainer's thread and its counters, for the watchdog: from opening the first file to the last evaluation.
//!
//! Invariant: the trainer writes, the watchdog reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use buffer::Stats;
use rewards::RewardSet;
use rollout::evaluate::EvaluationProgress;
use trajectory::PolicyVersion;

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::watchdog::{RunSnapshot, StallLimits, Watchdog};

/// The phase of the trainer's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrainerPhase {
    /// Opens model, data and rewards.
    Opening,
    /// Warms up the model.
    WarmUp,
    /// A training step: waits for a batch, or computes.
    Step,
    /// Exchanges an outer gradient with other islands.
    Exchange,
    /// Evaluates the policy.
    Evaluation,
    /// Writes metrics or a checkpoint.
    Writing,
}

/// Number of [`TrainerPhase`]s, rounded up to a power of two.
const PHASES: u64 = 8;

/// The trainer's phase, version and counters.
#[derive(Debug, Default)]
pub(crate) struct TrainerProgress {
    /// Number of phases entered, times [`PHASES`], plus the current phase.
    entered: AtomicU64,
    version: AtomicU64,
    evaluation: EvaluationProgress,
    /// The rewards of this process.
    rewards: Mutex<Option<Arc<RewardSet>>>,
}

impl TrainerProgress {
    /// Enters `phase`, or its next piece of work.
    pub(crate) fn enter(&self, phase: TrainerPhase) {
        let entered = self.entered.load(Ordering::Relaxed) / PHASES + 1;
        self.entered.store(entered * PHASES + phase as u64, Ordering::Relaxed);
    }

    /// Sets the version of the policy.
    pub(crate) fn reach(&self, version: PolicyVersion) {
        self.version.store(version.0, Ordering::Relaxed);
    }

    /// Sets the rewards that the trainer may wait for.
    pub(crate) fn set_rewards(&self, rewards: Option<Arc<RewardSet>>) {
        *self.rewards.lock().unwrap_or_else(PoisonError::into_inner) = rewards;
    }

    /// The counters of the current evaluation.
    pub(crate) fn evaluation(&self) -> &EvaluationProgress {
        &self.evaluation
    }

    fn is(&self, phase: TrainerPhase) -> bool {
        self.entered.load(Ordering::Relaxed) % PHASES == phase as u64
    }

    fn version(&self) -> PolicyVersion {
        PolicyVersion(self.version.load(Ordering::Relaxed))
    }

    /// Counters that change only when the trainer makes progress.
    pub(crate) fn counts(&self) -> Vec<u64> {
        let EvaluationProgress { generated, judged, steps, .. } = &self.evaluation;
        [&self.entered, steps, generated, judged].map(|count| count.load(Ordering::Relaxed)).to_vec()
    }

    /// Whether it does anything but wait for a batch.
    pub(crate) fn is_busy(&self, stats: Option<&Stats>) -> bool {
        !self.is(TrainerPhase::Step) || stats.is_some_and(|stats| stats.next_step > self.version())
    }

    /// The phase, as a sentence, without what a training step waits for.
    fn describe(&self) -> String {
        let version = self.version();
        let EvaluationProgress { answers, generated, judged, .. } = &self.evaluation;
        let [answers, generated, judged] =
            [answers, generated, judged].map(|count| count.load(Ordering::Relaxed));
        if self.is(TrainerPhase::Evaluation) {
            return format!(
                "the trainer evaluates {version}: of {answers} answers {generated} are generated and {judged} judged"
            );
        }
        if self.is(TrainerPhase::Writing) {
            return format!("the trainer writes down the step to {version}, or its checkpoint");
        }
        if self.is(TrainerPhase::Exchange) {
            return format!("the trainer waits for the coordinator of islands in the step from {version}");
        }
        if self.is(TrainerPhase::WarmUp) {
            return "the trainer computes a step of the warm-up".to_owned();
        }
        if self.is(TrainerPhase::Opening) {
            return "the process opens model, data and rewards".to_owned();
        }
        format!("the trainer computes the step from {version}")
    }

    /// The phase in a run with a buffer, as a sentence; `stats` is `None` if the buffer does not answer.
    pub(crate) fn describe_with_buffer(&self, stats: Option<&Stats>) -> String {
        let version = self.version();
        match stats {
            _ if !self.is(TrainerPhase::Step) => self.describe(),
            Some(stats) if stats.next_step <= version => format!(
                "the trainer waits for a batch of {} groups for the step from {version}; the buffer has {stats}",
                stats.batch_groups
            ),
            Some(_) => self.describe(),
            None => format!("the trainer is in the step from {version}; the buffer does not answer"),
        }
    }

    /// The load of each busy reward, a sentence each.
    pub(crate) fn describe_rewards(&self) -> Vec<String> {
        let rewards = self.rewards.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let busy = |weighted: &rewards::WeightedReward| {
            let (waiting, running) = weighted.reward.load().now();
            let name = weighted.reward.name();
            (waiting + running > 0)
                .then(|| format!("reward `{name}` judges {running} trajectories, {waiting} wait for it"))
        };
        rewards.iter().flat_map(|rewards| rewards.rewards()).filter_map(busy).collect()
    }

    /// The first new failure of each reward, by name.
    pub(crate) fn failures(&self) -> Vec<(String, String)> {
        let rewards = self.rewards.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let failed = |weighted: &rewards::WeightedReward| {
            Some((weighted.reward.name().to_owned(), weighted.reward.load().first_failure()?))
        };
        rewards.iter().flat_map(|rewards| rewards.rewards()).filter_map(failed).collect()
    }

    /// The snapshot of a run whose samplers have not started.
    fn snapshot(&self) -> RunSnapshot {
        let mut roles = vec![self.describe()];
        roles.extend(self.describe_rewards());
        RunSnapshot { counts: self.counts(), roles, busy: true }
    }

    /// Starts a watchdog for the time before samplers start; `say` gets its messages. It never ends the process.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub(crate) fn watch(
        self: &Arc<Self>,
        recipe: &Recipe,
        say: impl Fn(&str) + Send + 'static,
    ) -> Result<Watchdog, Failure> {
        let progress = Arc::clone(self);
        Watchdog::start(limits(recipe), move || progress.snapshot(), say, || {})
    }
}

/// Limits on the time without progress.
pub(crate) fn limits(recipe: &Recipe) -> StallLimits {
    StallLimits { quiet: Duration::from_secs_f64(recipe.deadlines.quiet_s), hang: recipe.wait() * 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_says_how_far_it_is_and_moves() {
        let progress = TrainerProgress::default();
        assert_eq!(progress.snapshot().roles, ["the process opens model, data and rewards"]);
        progress.reach(PolicyVersion(3));
        progress.enter(TrainerPhase::Evaluation);
        let before = progress.counts();
        progress.evaluation().answers.store(20, Ordering::Relaxed);
        progress.evaluation().generated.store(20, Ordering::Relaxed);
        progress.evaluation().judged.store(7, Ordering::Relaxed);
        assert_ne!(before, progress.counts());
        let RunSnapshot { roles, busy, .. } = progress.snapshot();
        assert_eq!(roles, ["the trainer evaluates v3: of 20 answers 20 are generated and 7 judged"]);
        assert!(busy);
        let before = progress.counts();
        progress.enter(TrainerPhase::Evaluation);
        assert_ne!(before, progress.counts(), "the next piece of work of the same phase");
        progress.enter(TrainerPhase::Exchange);
        let waits = "the trainer waits for the coordinator of islands in the step from v3";
        assert_eq!(progress.describe_with_buffer(None), waits);
        progress.enter(TrainerPhase::Step);
        assert!(!progress.is_busy(None));
        assert_eq!(
            progress.describe_with_buffer(None),
            "the trainer is in the step from v3; the buffer does not answer"
        );
    }
}
