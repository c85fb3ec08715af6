//! The weighted sum of named rewards.
//!
//! Invariant: a [`Score`] has one component per reward, in order, whether it succeeded or not, and every value in it
//! is finite. This file neither limits time nor retries: a future that never finishes keeps the whole score waiting.

use std::collections::HashSet;
use std::future::poll_fn;
use std::task::Poll;

use serde::{Deserialize, Serialize};
use serde_json::Map;
use trajectory::{Component, Score};

use crate::reward::Judged;
use crate::{
    BoxFuture, Criterion, LoadCounts, Outcome, Registry, Reward, RewardContext, RewardError, RewardInput,
    RewardSpec, Scope,
};

/// The rewards of a run; their weighted sum is the score of a trajectory.
#[derive(Debug)]
pub struct RewardSet {
    rewards: Vec<WeightedReward>,
    criterion: Option<Criterion>,
}

/// One summand of a [`RewardSet`].
#[derive(Debug)]
pub struct WeightedReward {
    /// The reward.
    pub reward: Box<dyn Reward>,
    /// Factor of its value. With 0 the reward is only logged, without influence even when it fails, unless `on_error` is
    /// [`OnError::Fail`].
    pub weight: f64,
    /// The effect of its failure.
    pub on_error: OnError,
}

/// The effect of a failed reward on the trajectory. The failure is recorded in any case.
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

/// The outcomes of the rewards of [`Scope::Trajectory`] for a trajectory, without those of the group.
#[derive(Debug)]
pub struct PartScore {
    /// One outcome per reward; `None` for rewards of groups.
    judged: Vec<Option<Judged>>,
}

impl RewardSet {
    /// A set of rewards without a criterion.
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
        Ok(Self { rewards, criterion: None })
    }

    /// No reward: the rewards of the turns are all that there is.
    #[must_use]
    pub fn none() -> Self {
        Self { rewards: Vec::new(), criterion: None }
    }

    /// The same set with a criterion of correct answers; without one, scores do not have `correct`.
    ///
    /// # Errors
    /// A criterion that names no reward of the set.
    pub fn judged_by(self, criterion: Option<Criterion>) -> Result<Self, RewardError> {
        let names = || self.rewards.iter().map(|weighted| weighted.reward.name());
        if let Some(Criterion { reward, .. }) = &criterion
            && !names().any(|name| name == reward)
        {
            let known = names().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            return Err(RewardError::UnknownCriterion { name: reward.clone(), known });
        }
        Ok(Self { criterion, ..self })
    }

    /// The criterion of correct answers, if there is one.
    #[must_use]
    pub fn criterion(&self) -> Option<&Criterion> {
        self.criterion.as_ref()
    }

    /// Builds the rewards of a recipe.
    ///
    /// # Errors
    /// Those of [`Registry::build`] and of [`RewardSet::new`].
    pub fn from_specs(
        specs: &[RewardSpec],
        registry: &Registry,
        context: &RewardContext,
    ) -> Result<Self, RewardError> {
        let weighted = |spec: &RewardSpec| {
            let reward = registry.build(spec, context)?;
            Ok(WeightedReward { reward, weight: spec.weight, on_error: spec.on_error })
        };
        Self::new(specs.iter().map(weighted).collect::<Result<_, RewardError>>()?)
    }

    /// The rewards, in order.
    #[must_use]
    pub fn rewards(&self) -> &[WeightedReward] {
        &self.rewards
    }

    /// The counters of each reward since the last call, by name.
    #[must_use]
    pub fn take_loads(&self) -> Vec<(String, LoadCounts)> {
        let load =
            |weighted: &WeightedReward| (weighted.reward.name().to_owned(), weighted.reward.load().take());
        self.rewards.iter().map(load).collect()
    }

    /// Scores a trajectory by all rewards of single trajectories, concurrently.
    pub async fn begin(&self, input: &RewardInput<'_>) -> PartScore {
        let inputs = std::slice::from_ref(input);
        PartScore {
            judged: join(self.rewards.iter().map(|weighted| score_alone(&*weighted.reward, inputs))).await,
        }
    }

    /// Scores a group by the rewards of groups, and sums up. `inputs` are all trajectories of the group, `parts` the results of
    /// [`RewardSet::begin`] for each.
    ///
    /// # Errors
    /// The failure of a reward with [`OnError::Fail`]; a weighted sum that is not finite.
    pub async fn complete(
        &self,
        inputs: &[RewardInput<'_>],
        mut parts: Vec<PartScore>,
    ) -> Result<Vec<Score>, RewardError> {
        for (index, weighted) in self.rewards.iter().enumerate() {
            let reward = &weighted.reward;
            if reward.scope() == Scope::Group {
                let judged = checked(reward.name(), inputs, reward.score(inputs).await);
                for (part, judged) in parts.iter_mut().zip(judged) {
                    part.judged[index] = Some(judged);
                }
            }
        }
        inputs.iter().zip(parts).map(|(input, part)| self.sum(input, part)).collect()
    }

    /// Judges all trajectories of a group, or one by itself.
    ///
    /// # Errors
    /// Those of [`RewardSet::complete`].
    pub async fn score(&self, inputs: &[RewardInput<'_>]) -> Result<Vec<Score>, RewardError> {
        let begun = inputs.iter().map(|input| Box::pin(self.begin(input)) as BoxFuture<'_, _>);
        let parts = join(begun).await;
        self.complete(inputs, parts).await
    }

    fn sum(&self, input: &RewardInput<'_>, part: PartScore) -> Result<Score, RewardError> {
        let (mut total, mut applied, mut failed) = (0.0, false, false);
        let mut components = Vec::with_capacity(self.rewards.len());
        for (weighted, judged) in self.rewards.iter().zip(part.judged) {
            let name = weighted.reward.name().to_owned();
            match judged.unwrap_or_else(|| Err(unanswered(&name, input))) {
                Ok(Outcome { value, details }) => {
                    total += weighted.weight * value.unwrap_or(0.0);
                    applied |= value.is_some() && weighted.weight != 0.0;
                    components.push(Component { name, value, error: None, details });
                }
                Err(error) => {
                    weighted.reward.load().failed(&error);
                    match weighted.on_error {
                        OnError::Fail => return Err(error),
                        OnError::Skip => failed |= weighted.weight != 0.0,
                        OnError::Zero => applied |= weighted.weight != 0.0,
                    }
                    let error = Some(error.to_string());
                    components.push(Component { name, value: None, error, details: Map::new() });
                }
            }
        }
        // If no reward with a weight applies, the trajectory has no total and is not trained on; if all weights are 0, its
        // total is 0.
        let logged_only = self.rewards.iter().all(|weighted| weighted.weight == 0.0);
        let total = if failed || !(applied || logged_only) { None } else { Some(total) };
        match total {
            Some(value) if !value.is_finite() => Err(not_finite("total", input, value)),
            total => {
                let correct = self.criterion.as_ref().map(|criterion| criterion.judge(&components));
                Ok(Score { total, components, correct })
            }
        }
    }
}

/// The outcome of a reward for a single trajectory; `None` if it scores groups.
fn score_alone<'a>(reward: &'a dyn Reward, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Option<Judged>> {
    Box::pin(async move {
        match reward.scope() {
            Scope::Trajectory => checked(reward.name(), inputs, reward.score(inputs).await).pop(),
            Scope::Group => None,
        }
    })
}

/// One outcome for each input, with finite values.
fn checked(reward: &str, inputs: &[RewardInput<'_>], judged: Vec<Judged>) -> Vec<Judged> {
    let mut judged = judged.into_iter();
    let check = |input: &RewardInput<'_>| {
        let outcome = judged.next().unwrap_or_else(|| Err(unanswered(reward, input)))?;
        match outcome.value.filter(|value| !value.is_finite()) {
            Some(value) => Err(not_finite(reward, input, value)),
            None => Ok(outcome),
        }
    };
    inputs.iter().map(check).collect()
}

fn not_finite(reward: &str, input: &RewardInput<'_>, value: f64) -> RewardError {
    RewardError::NotFinite { reward: reward.to_owned(), trajectory: input.trajectory(), value }
}

fn unanswered(reward: &str, input: &RewardInput<'_>) -> RewardError {
    input.trajectory().failed(reward, "it returned no outcome for this trajectory")
}

/// Waits for all futures at the same time. Every wake-up polls all that are left: sets are small.
pub(crate) async fn join<T>(futures: impl Iterator<Item = BoxFuture<'_, T>>) -> Vec<T> {
    let mut futures: Vec<_> = futures.collect();
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
    use crate::{Builtin, Load};

    fn constant(name: &str, value: f64, weight: f64) -> WeightedReward {
        let reward = Box::new(Builtin::new(name, move |_: &RewardInput<'_>| Ok(value)));
        WeightedReward { reward, weight, on_error: OnError::default() }
    }

    fn failing(on_error: OnError, weight: f64) -> WeightedReward {
        let failure = |input: &RewardInput<'_>| {
            let reason = "no answer within 5 s".to_owned();
            let trajectory = input.trajectory();
            Err::<f64, _>(RewardError::Failed { reward: "judge".into(), trajectory, reason })
        };
        WeightedReward { reward: Box::new(Builtin::new("judge", failure)), weight, on_error }
    }

    fn score(rewards: Vec<WeightedReward>) -> Result<Score, RewardError> {
        let task = task("4");
        let set = RewardSet::new(rewards)?;
        Ok(block_on(set.score(&[input(&task, "4")]))?.remove(0))
    }

    #[test]
    fn the_total_is_the_weighted_sum_and_components_stay_unweighted() {
        let score = score(vec![constant("a", 2.0, 0.5), constant("b", -3.0, 2.0)]).unwrap();
        assert_eq!(score.total, Some(-5.0));
        let components: Vec<_> = score.components.iter().map(|c| (c.name.as_str(), c.value)).collect();
        assert_eq!(components, [("a", Some(2.0)), ("b", Some(-3.0))]);
    }

    #[test]
    fn correctness_does_not_depend_on_weights() {
        let task = task("4");
        let judged = |rewards: Vec<WeightedReward>, reward: &str| {
            let criterion = Criterion { reward: reward.to_owned(), threshold: 1.0 };
            let set = RewardSet::new(rewards)?.judged_by(Some(criterion))?;
            Ok::<_, RewardError>(block_on(set.score(&[input(&task, "4")]))?.remove(0).correct)
        };
        for weight in [0.0, 0.5, -1.0, 3.0] {
            let with = |value| vec![constant("bonus", 5.0, 1.0), constant("math", value, weight)];
            assert_eq!(judged(with(1.0), "math").unwrap(), Some(true));
            assert_eq!(judged(with(0.9), "math").unwrap(), Some(false));
        }
        let failed = vec![failing(OnError::Zero, 1.0), constant("a", 2.0, 1.0)];
        assert_eq!(judged(failed, "judge").unwrap(), Some(false), "what failed is not correct");
        let error = judged(vec![constant("a", 0.0, 1.0)], "b").unwrap_err().to_string();
        assert_eq!(error, "there is no reward `b` to judge what is correct; there are `a`");
        assert_eq!(score(vec![constant("a", 1.0, 1.0)]).unwrap().correct, None, "nothing says what is");
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
    fn invalid_sets_are_refused() {
        assert_eq!(RewardSet::new(vec![]).unwrap_err(), RewardError::Empty);
        let twice = vec![constant("a", 0.0, 1.0), constant("a", 0.0, 1.0)];
        assert_eq!(RewardSet::new(twice).unwrap_err(), RewardError::DuplicateName { name: "a".into() });
        let heavy = RewardSet::new(vec![constant("a", 0.0, f64::INFINITY)]).unwrap_err();
        assert!(matches!(heavy, RewardError::Weight { .. }));
        let specs = [RewardSpec::new("math"), RewardSpec::new("math")];
        assert_eq!(
            RewardSet::from_specs(&specs, &Registry::builtin(), &RewardContext::default()).unwrap_err(),
            RewardError::DuplicateName { name: "math".into() }
        );
    }

    #[test]
    fn a_reward_that_does_not_apply_counts_nothing() {
        let silent = |weight| WeightedReward {
            reward: Box::new(Builtin::new("silent", |_: &RewardInput<'_>| Ok(Outcome::default()))),
            weight,
            on_error: OnError::Skip,
        };
        let with = score(vec![silent(1.0), constant("a", 2.0, 1.0)]).unwrap();
        assert_eq!(
            (with.total, with.components[0].value, &with.components[0].error),
            (Some(2.0), None, &None)
        );
        assert_eq!(score(vec![silent(1.0)]).unwrap().total, None, "nothing says what it is worth");
        assert_eq!(score(vec![silent(1.0), constant("watched", 2.0, 0.0)]).unwrap().total, None);
        assert_eq!(score(vec![constant("watched", 2.0, 0.0)]).unwrap().total, Some(0.0));
    }

    #[test]
    fn details_stay_with_their_component_and_numbers_are_found() {
        let detailed =
            |_: &RewardInput<'_>| Ok(Outcome::from(1.0).with("acc", true).with("pred", "7").with("n", 3));
        let reward = Box::new(Builtin::new("a", detailed));
        let score = score(vec![WeightedReward { reward, weight: 1.0, on_error: OnError::Skip }]).unwrap();
        let details = &score.components[0].details;
        assert_eq!(details["pred"], "7");
        assert_eq!(score.components[0].numbers().collect::<Vec<_>>(), [("acc", 1.0), ("n", 3.0)]);
    }

    /// Worth the number of trajectories that it sees, or too few answers.
    #[derive(Debug)]
    struct OfGroups(Load, usize);

    impl Reward for OfGroups {
        fn name(&self) -> &'static str {
            "groups"
        }

        fn scope(&self) -> Scope {
            Scope::Group
        }

        fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
            let judged = inputs.iter().skip(self.1).map(|_| Ok((inputs.len() as f64).into())).collect();
            Box::pin(std::future::ready(judged))
        }

        fn load(&self) -> &Load {
            &self.0
        }
    }

    #[test]
    fn a_reward_of_groups_sees_all_at_once_and_must_answer_for_each() {
        let task = task("4");
        let inputs = ["1", "2", "3"].map(|text| input(&task, text));
        let totals = |left_out| {
            let reward: Box<dyn Reward> = Box::new(OfGroups(Load::default(), left_out));
            let groups = WeightedReward { reward, weight: 1.0, on_error: OnError::Skip };
            let set = RewardSet::new(vec![constant("a", 0.5, 1.0), groups]).unwrap();
            let scores = block_on(set.score(&inputs)).unwrap();
            let failures = set.take_loads()[1].1.errors;
            (scores.iter().map(|score| score.total).collect::<Vec<_>>(), failures)
        };
        assert_eq!(totals(0), (vec![Some(3.5); 3], 0));
        assert_eq!(totals(1), (vec![Some(3.5), Some(3.5), None], 1));
    }

    /// Finishes only after both of its kind have been started.
    #[derive(Debug)]
    struct RendezvousReward(String, std::sync::Arc<AtomicUsize>, Load);

    impl Reward for RendezvousReward {
        fn name(&self) -> &str {
            &self.0
        }

        fn score<'a>(&'a self, _: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
            let mut arrived = false;
            Box::pin(poll_fn(move |context| {
                if !std::mem::replace(&mut arrived, true) {
                    self.1.fetch_add(1, Ordering::Relaxed);
                }
                context.waker().wake_by_ref();
                if self.1.load(Ordering::Relaxed) == 2 {
                    Poll::Ready(vec![Ok(1.0.into())])
                } else {
                    Poll::Pending
                }
            }))
        }

        fn load(&self) -> &Load {
            &self.2
        }
    }

    #[test]
    fn rewards_run_at_the_same_time() {
        let arrivals = std::sync::Arc::new(AtomicUsize::new(0));
        let reward = |name: &str| WeightedReward {
            reward: Box::new(RendezvousReward(name.to_owned(), arrivals.clone(), Load::default())),
            weight: 1.0,
            on_error: OnError::Skip,
        };
        assert_eq!(score(vec![reward("a"), reward("b")]).unwrap().total, Some(2.0));
    }
}
