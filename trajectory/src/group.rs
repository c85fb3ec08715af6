//! What the buffer carries: the trajectories of one task that are compared with each other.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{PolicyVersion, Sample, Task};

/// Place of a group in the run's stream of tasks: given out in ascending order at admission, unique in a run.
///
/// Together with the seed it determines the task and every random number that its generation uses, so that a group
/// lost in a crash is generated again exactly as it would have been. Groups that came to a buffer without admission are
/// not in that stream; their ids lie far above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

/// One model call in a trajectory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// Where the completion stands in the token ids of the sample, its stop token included.
    pub completion: Range<usize>,
    /// Why it ended.
    pub stop: StopReason,
}

/// One reward function's verdict on one trajectory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// Name of the reward in the recipe.
    pub name: String,
    /// What it is worth before weighting; `None` if the reward failed.
    pub value: Option<f64>,
    /// Why it failed.
    pub error: Option<String>,
}

/// What a trajectory is worth.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Weighted sum of the components; `None` if a component failed and the trajectory must not be trained on.
    pub total: Option<f64>,
    /// Each reward by itself, in the order of the recipe.
    pub components: Vec<Component>,
}

/// One episode of the policy on a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    /// Which of the group's episodes this is, from 0.
    pub index: u32,
    /// The token streams that are trained on.
    pub sample: Sample,
    /// The model calls, in order.
    pub turns: Vec<Turn>,
    /// The last completion as text, without its stop token; for people and rewards.
    pub text: String,
    /// What it is worth.
    pub score: Score,
}

impl Trajectory {
    /// Number of tokens that the policy generated.
    #[must_use]
    pub fn completion_tokens(&self) -> usize {
        self.turns.iter().map(|turn| turn.completion.len()).sum()
    }

    /// Whether the last model call was cut off by its length limit.
    #[must_use]
    pub fn truncated(&self) -> bool {
        self.turns.last().is_some_and(|turn| turn.stop == StopReason::Length)
    }
}

/// The trajectories of one task that are compared with each other.
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
        self.trajectories.iter().map(|t| t.sample.oldest_version()).min()
    }

    /// The rewards of the trajectories that have one.
    pub fn rewards(&self) -> impl Iterator<Item = f64> + '_ {
        self.trajectories.iter().filter_map(|t| t.score.total)
    }

    /// Whether all rewards are equal, so that a group-relative advantage is zero everywhere.
    #[must_use]
    pub fn zero_variance(&self) -> bool {
        let mut rewards = self.rewards();
        let first = rewards.next();
        rewards.all(|r| Some(r) == first)
    }
}
