//! Groups of trajectories: what the buffer carries from rollout workers to the trainer.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{PolicyVersion, Sample, Task, VersionRun};

/// Place of a group in the run's stream of tasks: given out in ascending order at admission, unique in a run.
///
/// Together with the seed it determines the task and every random number that its generation uses, so that a group
/// lost in a crash is sampled again bit for bit. Groups that were submitted without admission are not in that stream; their
/// ids are far above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GroupId(pub u64);

impl std::fmt::Display for GroupId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "group {}", self.0)
    }
}

/// Why a model call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The policy sampled an end-of-sequence or stop token.
    StopToken,
    /// The decoded text reached a stop string.
    StopString,
    /// The completion reached `max_completion_length`.
    Length,
}

/// One turn of the policy in a trajectory: one completion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The range of the completion in the token ids of the sample, its stop token included.
    pub completion: Range<usize>,
    /// Why it ended.
    pub stop: StopReason,
    /// Reward of this turn by itself, from an environment or for process supervision; `None` where only the whole
    /// trajectory is judged. It is not part of [`Score::total`]; [`Trajectory::reward`] is the sum of both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    /// Runs of the versions that computed the keys and values of the tokens before the completion, up to it. Those of earlier
    /// tokens were in the KV cache. Empty in the usual case: one version, for all tokens of a first turn, and for the
    /// last token of the turn before and all that follow it of a later one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefill: Vec<VersionRun>,
}

/// The result of one reward function for one trajectory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// Name of the reward in the recipe.
    pub name: String,
    /// Value before weighting; `None` if the reward failed, or does not apply to this trajectory.
    pub value: Option<f64>,
    /// Why it failed.
    pub error: Option<String>,
    /// Further outputs of the reward, by name.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub details: Map<String, Value>,
}

impl Component {
    /// The numbers among its details; true is 1 and false 0.
    pub fn numbers(&self) -> impl Iterator<Item = (&str, f64)> {
        let number =
            |value: &Value| value.as_f64().or_else(|| value.as_bool().map(|yes| f64::from(u8::from(yes))));
        self.details.iter().filter_map(move |(name, value)| Some((name.as_str(), number(value)?)))
    }
}

/// The rewards of a trajectory as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Weighted sum of the components; `None` if a component failed and the trajectory must not be trained on.
    pub total: Option<f64>,
    /// Each reward by itself, in the order of the recipe.
    pub components: Vec<Component>,
    /// Whether the answer is correct by the criterion of the run (`eval.correct`), independent of the weights; `None` without
    /// a criterion, or if the sender of the group did not state it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correct: Option<bool>,
}

/// The reward of an episode, its undiscounted return: [`Score::total`] plus the rewards of its turns. This is the one definition of the reward of a
/// trajectory, wherever trajectories are compared, selected, or shown; `None` if `score` has no total.
#[must_use]
pub fn episode_reward<'a>(score: &Score, turns: impl IntoIterator<Item = &'a Turn>) -> Option<f64> {
    let turns = turns.into_iter().filter_map(|turn| turn.reward);
    Some(turns.fold(score.total?, |sum, reward| sum + reward))
}

/// A further token stream of an episode whose agent did not only append to its conversation: it rewrote its history, asked
/// a second agent, or began again. It has the reward of the episode.
///
/// A completion that several streams have in common is trained on in the first of them; in the others it is context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Branch {
    /// The token streams that are trained on.
    pub sample: Sample,
    /// The turns of the policy in this stream that are in no earlier one, in order.
    pub turns: Vec<Turn>,
}

/// One episode of the policy on a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    /// Which of the group's episodes this is, from 0.
    pub index: u32,
    /// The token streams that are trained on; of an episode with branches, those of its first branch.
    pub sample: Sample,
    /// The turns of the policy in `sample`, in order.
    pub turns: Vec<Turn>,
    /// Its further branches. The episode counts once in every baseline and mean, however many it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub branches: Vec<Branch>,
    /// The completion as text, without its stop token; of several turns all completions and the messages between them. For
    /// people.
    pub text: String,
    /// Its rewards as a whole.
    pub score: Score,
    /// Whether it is the greedy baseline of its group (ReMax): no token of its sample is trained on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub baseline: bool,
    /// The role that the policy played, in an environment of several roles. Each role of an episode is a trajectory of its
    /// own, and is compared with the same role of the other episodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}

impl Trajectory {
    /// Most entries of [`Trajectory::branches`] that are taken from another program.
    pub const MAX_BRANCHES: usize = 1023;

    /// The reward of the whole episode, see [`episode_reward`]. `None` if a reward failed and the
    /// trajectory must not be trained on.
    #[must_use]
    pub fn reward(&self) -> Option<f64> {
        episode_reward(&self.score, self.all_turns())
    }

    /// Its rows: the token streams of all branches, each with its turns.
    pub fn rows(&self) -> impl Iterator<Item = (&Sample, &[Turn])> {
        let further = self.branches.iter().map(|branch| (&branch.sample, &branch.turns[..]));
        std::iter::once((&self.sample, &self.turns[..])).chain(further)
    }

    /// The token streams of all branches.
    pub fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.rows().map(|(sample, _)| sample)
    }

    /// The turns of all branches.
    pub fn all_turns(&self) -> impl Iterator<Item = &Turn> {
        self.rows().flat_map(|(_, turns)| turns)
    }

    /// Number of tokens that are trained on, in all branches.
    #[must_use]
    pub fn trained_tokens(&self) -> usize {
        self.samples().map(Sample::trained_tokens).sum()
    }

    /// The oldest version in any branch: staleness is measured against it.
    #[must_use]
    pub fn oldest_version(&self) -> PolicyVersion {
        let further = self.branches.iter().map(|branch| branch.sample.oldest_version());
        further.fold(self.sample.oldest_version(), PolicyVersion::min)
    }

    /// Number of tokens that the policy generated.
    #[must_use]
    pub fn completion_tokens(&self) -> usize {
        self.all_turns().map(|turn| turn.completion.len()).sum()
    }

    /// Whether the last completion of a branch reached its length limit.
    #[must_use]
    pub fn truncated(&self) -> bool {
        self.rows().any(|(_, turns)| turns.last().is_some_and(|turn| turn.stop == StopReason::Length))
    }
}

/// The trajectories of one task; those of the same role are compared with each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Its place in the stream of tasks.
    pub id: GroupId,
    /// What was asked.
    pub task: Task,
    /// The episodes, ordered by index; never empty.
    pub trajectories: Vec<Trajectory>,
}

impl Group {
    /// The oldest policy version in any of its samples, or `None` for a group without trajectories.
    #[must_use]
    pub fn oldest_version(&self) -> Option<PolicyVersion> {
        self.trajectories.iter().map(Trajectory::oldest_version).min()
    }

    /// The trajectories that are trained on: all but baselines.
    pub fn sampled(&self) -> impl Iterator<Item = &Trajectory> {
        self.trajectories.iter().filter(|t| !t.baseline)
    }

    /// [`Trajectory::reward`] of the trajectories that have one, baselines left out.
    pub fn rewards(&self) -> impl Iterator<Item = f64> + '_ {
        self.sampled().filter_map(Trajectory::reward)
    }

    /// The roles of its trajectories, in the order of their first trajectories; `None` alone without roles.
    #[must_use]
    pub fn roles(&self) -> Vec<Option<&str>> {
        let mut roles: Vec<Option<&str>> = Vec::with_capacity(1);
        for trajectory in &self.trajectories {
            if !roles.contains(&trajectory.role.as_deref()) {
                roles.push(trajectory.role.as_deref());
            }
        }
        roles
    }

    /// The trajectories of one role that are trained on. An episode in which the role had no turn has none.
    pub fn sampled_as<'a>(&'a self, role: Option<&'a str>) -> impl Iterator<Item = &'a Trajectory> {
        let took_part = move |t: &&Trajectory| role.is_none() || t.all_turns().next().is_some();
        self.sampled().filter(move |t| t.role.as_deref() == role).filter(took_part)
    }

    /// The reward of the baseline of a role, if there is one and it has a reward.
    #[must_use]
    pub fn baseline_reward(&self, role: Option<&str>) -> Option<f64> {
        self.trajectories.iter().find(|t| t.baseline && t.role.as_deref() == role)?.reward()
    }

    /// Whether all rewards of a role are equal, baselines left out, so that its group-relative advantage is zero everywhere.
    #[must_use]
    pub fn zero_variance_of(&self, role: Option<&str>) -> bool {
        let mut rewards = self.sampled_as(role).filter_map(Trajectory::reward);
        let first = rewards.next();
        rewards.all(|r| Some(r) == first)
    }

    /// Whether the rewards of every role are equal, see [`Group::zero_variance_of`].
    #[must_use]
    pub fn zero_variance(&self) -> bool {
        self.roles().into_iter().all(|role| self.zero_variance_of(role))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::{Prompt, SampleStreams, TaskId, VersionRun};

    /// A group with the given rewards; true makes a baseline.
    fn group(outcomes: &[(Option<f64>, bool)]) -> Group {
        let trajectory = |(index, (total, baseline)): (usize, &(Option<f64>, bool))| Trajectory {
            index: index as u32,
            sample: Sample::new(SampleStreams {
                token_ids: vec![1, 2],
                loss_mask: vec![false, !baseline],
                behavior_logprobs: vec![0.0, 0.0],
                versions: vec![VersionRun { version: PolicyVersion(0), len: 2 }],
                kept: None,
                experts: None,
                temperature: 1.0,
            })
            .unwrap(),
            turns: vec![Turn {
                completion: 1..2,
                stop: StopReason::Length,
                reward: None,
                prefill: Vec::new(),
            }],
            branches: Vec::new(),
            text: String::new(),
            score: Score { total: *total, ..Score::default() },
            baseline: *baseline,
            role: None,
        };
        let task =
            Task { id: TaskId(0), prompt: Prompt::Text(String::new()), answer: None, columns: Map::new() };
        Group { id: GroupId(0), task, trajectories: outcomes.iter().enumerate().map(trajectory).collect() }
    }

    #[test]
    fn a_baseline_counts_in_no_statistics_of_its_group() {
        let flat = group(&[(Some(0.5), false), (Some(0.5), false), (Some(1.0), true)]);
        assert_eq!(flat.rewards().collect::<Vec<_>>(), [0.5, 0.5]);
        assert_eq!((flat.baseline_reward(None), flat.zero_variance()), (Some(1.0), true));
        let failed = group(&[(Some(0.0), false), (None, false), (Some(1.0), false), (None, true)]);
        assert_eq!((failed.baseline_reward(None), failed.zero_variance()), (None, false));
        assert_eq!((failed.sampled().count(), failed.rewards().count()), (3, 2));
        assert_eq!(group(&[(Some(1.0), false)]).baseline_reward(None), None);
    }

    #[test]
    fn the_reward_of_an_episode_is_its_total_and_that_of_its_turns() {
        let mut some = group(&[(Some(0.5), false), (Some(0.25), false), (None, false), (Some(1.0), true)]);
        let turn =
            |reward| Turn { completion: 1..1, stop: StopReason::StopToken, reward, prefill: Vec::new() };
        some.trajectories[1].turns = vec![turn(Some(0.5)), turn(None), turn(Some(-0.25))];
        some.trajectories[2].turns = vec![turn(Some(1.0))];
        some.trajectories[3].turns = vec![turn(Some(1.0))];
        assert_eq!(some.rewards().collect::<Vec<_>>(), [0.5, 0.5]);
        assert!(some.zero_variance(), "no total, no reward, whatever the turns say");
        assert_eq!(some.baseline_reward(None), Some(2.0));
    }

    #[test]
    fn an_episode_with_branches_is_one_member_of_its_group() {
        let mut some = group(&[(Some(0.5), false), (Some(1.0), false)]);
        let mut streams: SampleStreams = some.trajectories[1].sample.clone().into();
        let turn =
            Turn { completion: 1..2, stop: StopReason::StopToken, reward: Some(-0.5), prefill: Vec::new() };
        streams.versions = vec![VersionRun { version: PolicyVersion(3), len: 2 }];
        some.trajectories[1].sample = Sample::new(streams.clone()).unwrap();
        streams.versions = vec![VersionRun { version: PolicyVersion(2), len: 2 }];
        let branch = Branch { sample: Sample::new(streams).unwrap(), turns: vec![turn] };
        some.trajectories[1].branches = vec![branch.clone(), branch];
        let episode = &some.trajectories[1];
        assert_eq!(
            (episode.samples().count(), episode.trained_tokens(), episode.completion_tokens()),
            (3, 3, 3)
        );
        assert_eq!(episode.oldest_version(), PolicyVersion(2));
        assert_eq!(some.rewards().collect::<Vec<_>>(), [0.5, 0.0]);
        assert!(episode.truncated(), "its first branch was cut off");
        let json = serde_json::to_string(&some).unwrap();
        assert_eq!(serde_json::from_str::<Group>(&json).unwrap(), some);
    }

    #[test]
    fn roles_are_compared_by_themselves() {
        let mut game =
            group(&[(Some(1.0), false), (Some(1.0), false), (Some(-1.0), false), (Some(0.0), false)]);
        for (trajectory, role) in game.trajectories.iter_mut().zip(["x", "x", "o", "o"]) {
            trajectory.role = Some(role.to_owned());
        }
        assert_eq!(game.roles(), [Some("x"), Some("o")]);
        assert_eq!(game.sampled_as(Some("o")).map(|t| t.index).collect::<Vec<_>>(), [2, 3]);
        assert!(
            game.zero_variance_of(Some("x")) && !game.zero_variance_of(Some("o")) && !game.zero_variance()
        );
        game.trajectories[3].score.total = Some(-1.0);
        assert!(
            game.zero_variance(),
            "the winner and the loser have different rewards, which are not compared"
        );
    }

    /// Groups without baselines and turn rewards are written as before these fields existed.
    #[test]
    fn optional_fields_are_written_only_where_they_are_set() {
        let plain = group(&[(Some(1.0), false)]);
        let json = serde_json::to_string(&plain).unwrap();
        assert!(
            !json.contains("baseline")
                && !json.contains("role")
                && !json.contains("correct")
                && !json.contains("branches")
                && json.contains(r#""turns":[{"completion":{"start":1,"end":2},"stop":"length"}]"#),
            "{json}"
        );
        assert_eq!(serde_json::from_str::<Group>(&json).unwrap(), plain);
        let mut full = group(&[(Some(1.0), true)]);
        full.trajectories[0].turns[0].reward = Some(-0.25);
        full.trajectories[0].score.correct = Some(false);
        full.trajectories[0].role = Some("critic".to_owned());
        let json = serde_json::to_string(&full).unwrap();
        for field in [r#""baseline":true"#, r#""reward":-0.25"#, r#""correct":false"#, r#""role":"critic""#] {
            assert!(json.contains(field), "{json}");
        }
        assert_eq!(serde_json::from_str::<Group>(&json).unwrap(), full);
    }
}
