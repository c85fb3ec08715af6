//! The weighted sum of named rewards.
//!
//! Invariant: a [`Score`] has one component per reward, in order, whether it succeeded or not, and every value in it
//! is finite. This file neither limits time nor retries: a future that never finishes keeps the whole score waiting.

use std::collections::HashSet;
use std::future::poll_fn;
use std::task::Poll;

use serde::{Deserialize, Serialize};
use trajectory::{Component, Score};

use crate::{BoxFuture, Reward, RewardError, RewardInput, RewardSpec};

/// Rewards that together say what a trajectory is worth.
#[derive(Debug)]
pub struct RewardSet {
    rewards: Vec<WeightedReward>,
}

/// One summand of a [`RewardSet`].
#[derive(Debug)]
pub struct WeightedReward {
    /// What is summed.
    pub reward: Box<dyn Reward>,
    /// Factor of its value. With 0 the reward is only watched: logged, and without influence even when it fails,
    /// unless `on_error` is [`OnError::Fail`].
    pub weight: f64,
    /// What its failure means for the trajectory.
    pub on_error: OnError,
}

/// What the failure of a reward means for the trajectory. The failure is recorded in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The trajectory has no total and is not trained on.
    #[default]
    Skip,
    /// The reward counts 0.
    Zero,
    /// The run ends.
    Fail,
}

impl RewardSet {
    /// Puts rewards together.
    ///
    /// # Errors
    /// No reward at all, two rewards of one name, a weight that is not finite.
    pub fn new(rewards: Vec<WeightedReward>) -> Result<Self, RewardError> {
        if rewards.is_empty() {
            return Err(RewardError::Empty);
        }
        let mut names = HashSet::new();
        for WeightedReward { reward, weight, .. } in &rewards {
            if !names.insert(reward.name()) {
                return Err(RewardError::DuplicateName { name: reward.name().to_owned() });
            }
            if !weight.is_finite() {
                return Err(RewardError::Weight { reward: reward.name().to_owned(), weight: *weight });
            }
        }
        Ok(Self { rewards })
    }

    /// Builds what a recipe states.
    ///
    /// # Errors
    /// Those of [`RewardSpec::build`] and of [`RewardSet::new`].
    pub fn from_specs(specs: &[RewardSpec]) -> Result<Self, RewardError> {
        let weighted = |spec: &RewardSpec| {
            Ok(WeightedReward { reward: spec.build()?, weight: spec.weight, on_error: spec.on_error })
        };
        Self::new(specs.iter().map(weighted).collect::<Result<_, RewardError>>()?)
    }

    /// Names of the rewards, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.rewards.iter().map(|weighted| weighted.reward.name())
    }

    /// Scores a trajectory with all rewards at the same time.
    ///
    /// # Errors
    /// The failure of a reward with [`OnError::Fail`]; a weighted sum that is not finite.
    pub async fn score(&self, input: &RewardInput<'_>) -> Result<Score, RewardError> {
        let outcomes = join(self.rewards.iter().map(|w| w.reward.score(input)).collect()).await;
        let mut total = Some(0.0);
        let mut components = Vec::with_capacity(self.rewards.len());
        for (weighted, outcome) in self.rewards.iter().zip(outcomes) {
            let name = weighted.reward.name().to_owned();
            match outcome.and_then(|value| finite(&name, input, value)) {
                Ok(value) => {
                    total = total.map(|sum| sum + weighted.weight * value);
                    components.push(Component { name, value: Some(value), error: None });
                }
                Err(error) => {
                    match weighted.on_error {
                        OnError::Fail => return Err(error),
                        OnError::Skip if weighted.weight != 0.0 => total = None,
                        OnError::Skip | OnError::Zero => {}
                    }
                    components.push(Component { name, value: None, error: Some(error.to_string()) });
                }
            }
        }
        let total = total.map(|sum| finite("total", input, sum)).transpose()?;
        Ok(Score { total, components })
    }
}

fn finite(reward: &str, input: &RewardInput<'_>, value: f64) -> Result<f64, RewardError> {
    if value.is_finite() {
        return Ok(value);
    }
    Err(RewardError::NotFinite { reward: reward.to_owned(), trajectory: input.trajectory(), value })
}

/// Waits for all futures at the same time. Every wake-up polls all that are left: sets are small.
async fn join<T>(mut futures: Vec<BoxFuture<'_, T>>) -> Vec<T> {
    let mut outputs: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(value) = future.as_mut().poll(context)
            {
                *output = Some(value);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::testing::{block_on, input, task};
    use crate::{Builtin, RewardKind};

    fn constant(name: &str, value: f64, weight: f64) -> WeightedReward {
        let reward = Box::new(Builtin::new(name, move |_: &RewardInput<'_>| Ok(value)));
        WeightedReward { reward, weight, on_error: OnError::default() }
    }

    fn failing(on_error: OnError, weight: f64) -> WeightedReward {
        let failure = |input: &RewardInput<'_>| {
            let reason = "no answer within 5 s".to_owned();
            Err(RewardError::Failed { reward: "judge".into(), trajectory: input.trajectory(), reason })
        };
        WeightedReward { reward: Box::new(Builtin::new("judge", failure)), weight, on_error }
    }

    fn score(rewards: Vec<WeightedReward>) -> Result<Score, RewardError> {
        let task = task("4");
        block_on(RewardSet::new(rewards)?.score(&input(&task, "4")))
    }

    #[test]
    fn the_total_is_the_weighted_sum_and_components_stay_unweighted() {
        let score = score(vec![constant("a", 2.0, 0.5), constant("b", -3.0, 2.0)]).unwrap();
        assert_eq!(score.total, Some(-5.0));
        let components: Vec<_> = score.components.iter().map(|c| (c.name.as_str(), c.value)).collect();
        assert_eq!(components, [("a", Some(2.0)), ("b", Some(-3.0))]);
    }

    #[test]
    fn a_failure_is_recorded_and_means_what_the_recipe_says() {
        let with = |on_error, weight| score(vec![failing(on_error, weight), constant("a", 2.0, 1.0)]);
        for (on_error, weight, total) in
            [(OnError::Skip, 1.0, None), (OnError::Skip, 0.0, Some(2.0)), (OnError::Zero, 1.0, Some(2.0))]
        {
            let score = with(on_error, weight).unwrap();
            assert_eq!(score.total, total, "{on_error:?}");
            assert_eq!(score.components[0].value, None);
            assert_eq!(
                score.components[0].error.as_deref(),
                Some("reward `judge` failed for task 7, trajectory 3: no answer within 5 s")
            );
            assert_eq!(score.components[1].value, Some(2.0));
        }
        assert!(matches!(with(OnError::Fail, 0.0), Err(RewardError::Failed { .. })));
    }

    #[test]
    fn values_that_are_not_finite_are_failures() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let score = score(vec![constant("a", bad, 1.0)]).unwrap();
            assert_eq!((score.total, score.components[0].value), (None, None));
            let error = score.components[0].error.as_deref().unwrap();
            assert!(error.contains("reward `a`") && error.contains("task 7, trajectory 3"), "{error}");
        }
        let overflow = score(vec![constant("a", 1e308, 100.0)]);
        assert!(matches!(overflow, Err(RewardError::NotFinite { reward, .. }) if reward == "total"));
    }

    #[test]
    fn sets_that_make_no_sense_are_refused() {
        assert_eq!(RewardSet::new(vec![]).unwrap_err(), RewardError::Empty);
        let twice = vec![constant("a", 0.0, 1.0), constant("a", 0.0, 1.0)];
        assert_eq!(RewardSet::new(twice).unwrap_err(), RewardError::DuplicateName { name: "a".into() });
        let heavy = RewardSet::new(vec![constant("a", 0.0, f64::INFINITY)]).unwrap_err();
        assert!(matches!(heavy, RewardError::Weight { .. }));
        let specs = [RewardSpec::new(RewardKind::Math), RewardSpec::new(RewardKind::Math)];
        assert_eq!(
            RewardSet::from_specs(&specs).unwrap_err(),
            RewardError::DuplicateName { name: "math".into() }
        );
    }

    /// Finishes only after both of its kind have been started.
    #[derive(Debug)]
    struct Rendezvous(String, std::sync::Arc<AtomicUsize>);

    impl Reward for Rendezvous {
        fn name(&self) -> &str {
            &self.0
        }

        fn score<'a>(&'a self, _: &'a RewardInput<'a>) -> BoxFuture<'a, Result<f64, RewardError>> {
            let mut arrived = false;
            Box::pin(poll_fn(move |context| {
                if !std::mem::replace(&mut arrived, true) {
                    self.1.fetch_add(1, Ordering::Relaxed);
                }
                context.waker().wake_by_ref();
                if self.1.load(Ordering::Relaxed) == 2 { Poll::Ready(Ok(1.0)) } else { Poll::Pending }
            }))
        }
    }

    #[test]
    fn rewards_run_at_the_same_time() {
        let arrivals = std::sync::Arc::new(AtomicUsize::new(0));
        let reward = |name: &str| WeightedReward {
            reward: Box::new(Rendezvous(name.to_owned(), arrivals.clone())),
            weight: 1.0,
            on_error: OnError::Skip,
        };
        assert_eq!(score(vec![reward("a"), reward("b")]).unwrap().total, Some(2.0));
    }
}
