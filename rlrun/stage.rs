//! What the process of a run does just now, and how far it is: for the watchdog, from the first file that is opened to the
//! last evaluation.
//!
//! Invariant: it is only told; looking changes nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use buffer::Stats;
use rewards::RewardSet;
use rollout::evaluate::EvaluationProgress;
use trajectory::PolicyVersion;

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::watchdog::{Limits, Situation, Watchdog};

/// What the thread of the trainer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It opens model, data and rewards.
    Opening,
    /// It warms the model up.
    WarmUp,
    /// A training step: it waits for a batch, or computes.
    Step,
    /// It looks how good the policy is.
    Evaluation,
    /// It writes metrics or a checkpoint.
    Writing,
}

/// Number of [`Doing`]s, rounded up to a power of two.
const DOINGS: u64 = 8;

/// Where the trainer is: how often it went on, what it does, at which version.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    /// Stages entered, times [`DOINGS`], and the last of them.
    entered: AtomicU64,
    version: AtomicU64,
    evaluation: EvaluationProgress,
    /// Those of this process.
    rewards: Mutex<Option<Arc<RewardSet>>>,
}

impl Stage {
    /// The trainer goes on with something else, or with the next piece of the same.
    pub(crate) fn enter(&self, doing: Doing) {
        let entered = self.entered.load(Ordering::Relaxed) / DOINGS + 1;
        self.entered.store(entered * DOINGS + doing as u64, Ordering::Relaxed);
    }

    /// The policy is at `version`.
    pub(crate) fn reach(&self, version: PolicyVersion) {
        self.version.store(version.0, Ordering::Relaxed);
    }

    /// These are the rewards that it may wait for.
    pub(crate) fn meet(&self, rewards: Option<Arc<RewardSet>>) {
        *self.rewards.lock().unwrap_or_else(PoisonError::into_inner) = rewards;
    }

    /// Where an evaluation says how far it is.
    pub(crate) fn evaluation(&self) -> &EvaluationProgress {
        &self.evaluation
    }

    fn is(&self, doing: Doing) -> bool {
        self.entered.load(Ordering::Relaxed) % DOINGS == doing as u64
    }

    fn version(&self) -> PolicyVersion {
        PolicyVersion(self.version.load(Ordering::Relaxed))
    }

    /// Counts that only move when the trainer gets on.
    pub(crate) fn counts(&self) -> Vec<u64> {
        let EvaluationProgress { generated, judged, steps, .. } = &self.evaluation;
        [&self.entered, steps, generated, judged].map(|count| count.load(Ordering::Relaxed)).to_vec()
    }

    /// Whether it does anything but wait for a batch.
    pub(crate) fn works(&self, stats: Option<&Stats>) -> bool {
        !self.is(Doing::Step) || stats.is_some_and(|stats| stats.next_step > self.version())
    }

    /// What it does, but for what a training step waits for.
    fn describe(&self) -> String {
        let version = self.version();
        let EvaluationProgress { answers, generated, judged, .. } = &self.evaluation;
        let [answers, generated, judged] =
            [answers, generated, judged].map(|count| count.load(Ordering::Relaxed));
        if self.is(Doing::Evaluation) {
            return format!(
                "the trainer evaluates {version}: of {answers} answers {generated} are generated and {judged} judged"
            );
        }
        if self.is(Doing::Writing) {
            return format!("the trainer writes down the step to {version}, or its checkpoint");
        }
        if self.is(Doing::WarmUp) {
            return "the trainer computes a step of the warm-up".to_owned();
        }
        if self.is(Doing::Opening) {
            return "the process opens model, data and rewards".to_owned();
        }
        format!("the trainer computes the step from {version}")
    }

    /// What the trainer of a run with a buffer does; `stats` is what the buffer says, if it answers.
    pub(crate) fn describe_beside(&self, stats: Option<&Stats>) -> String {
        let version = self.version();
        match stats {
            _ if !self.is(Doing::Step) => self.describe(),
            Some(stats) if stats.next_step <= version => format!(
                "the trainer waits for a batch of {} groups for the step from {version}; the buffer has {stats}",
                stats.batch_groups
            ),
            Some(_) => self.describe(),
            None => format!("the trainer is in the step from {version}; the buffer does not answer"),
        }
    }

    /// What each reward that has something to do does.
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

    /// Rewards that have failed lately, with what they said first.
    pub(crate) fn failures(&self) -> Vec<(String, String)> {
        let rewards = self.rewards.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let failed = |weighted: &rewards::WeightedReward| {
            Some((weighted.reward.name().to_owned(), weighted.reward.load().first_failure()?))
        };
        rewards.iter().flat_map(|rewards| rewards.rewards()).filter_map(failed).collect()
    }

    /// What is seen where nothing samples beside the trainer.
    fn alone(&self) -> Situation {
        let mut roles = vec![self.describe()];
        roles.extend(self.describe_rewards());
        Situation { counts: self.counts(), roles, works: true }
    }

    /// Watches the process as long as nothing samples beside the trainer; `say` gets what there is to say.
    ///
    /// # Errors
    /// A system without room for a thread.
    pub(crate) fn watch_alone(
        self: &Arc<Self>,
        recipe: &Recipe,
        say: impl Fn(&str) + Send + 'static,
    ) -> Result<Watchdog, Failure> {
        let stage = Arc::clone(self);
        // Whoever works alone is never ended.
        Watchdog::start(limits(recipe), move || stage.alone(), say, || {})
    }
}

/// How long a run may stand still.
pub(crate) fn limits(recipe: &Recipe) -> Limits {
    Limits { quiet: Duration::from_secs_f64(recipe.deadlines.quiet_s), hang: recipe.wait() * 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_says_how_far_it_is_and_moves() {
        let stage = Stage::default();
        assert_eq!(stage.alone().roles, ["the process opens model, data and rewards"]);
        stage.reach(PolicyVersion(3));
        stage.enter(Doing::Evaluation);
        let before = stage.counts();
        stage.evaluation().answers.store(20, Ordering::Relaxed);
        stage.evaluation().generated.store(20, Ordering::Relaxed);
        stage.evaluation().judged.store(7, Ordering::Relaxed);
        assert_ne!(before, stage.counts());
        let Situation { roles, works, .. } = stage.alone();
        assert_eq!(roles, ["the trainer evaluates v3: of 20 answers 20 are generated and 7 judged"]);
        assert!(works);
        let before = stage.counts();
        stage.enter(Doing::Evaluation);
        assert_ne!(before, stage.counts(), "the next piece of the same");
        stage.enter(Doing::Step);
        assert!(!stage.works(None));
        assert_eq!(
            stage.describe_beside(None),
            "the trainer is in the step from v3; the buffer does not answer"
        );
    }
}
