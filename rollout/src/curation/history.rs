//! The history of every task: how often it passed.
//!
//! Invariant: the history does not depend on the order in which outcomes of different groups arrive; an outcome that arrives
//! twice in a row counts once; a group that is sampled again after a crash gets the same decision.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use trajectory::{Group, GroupId, PolicyVersion, TaskId, Trajectory};

use crate::scoring::ENVIRONMENT;

/// The outcome of one group; one line of the history file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskOutcome {
    /// The task.
    pub task: TaskId,
    /// The group.
    pub group: GroupId,
    /// The oldest version in the group.
    pub version: PolicyVersion,
    /// Trajectories that passed.
    pub passes: u64,
    /// Trajectories that were scored, baselines left out.
    pub trajectories: u64,
    /// Turns of the longest episode that passed, those of all roles; `None` if none passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub success_turns: Option<u64>,
}

impl TaskOutcome {
    /// The outcome of a scored group; `None` if no trajectory of it has a score.
    #[must_use]
    pub fn of(group: &Group) -> Option<Self> {
        let scored = || group.sampled().filter(|trajectory| trajectory.score.total.is_some());
        let trajectories = scored().count() as u64;
        let passes = scored().filter(|trajectory| passed(trajectory)).count() as u64;
        let version = group.oldest_version().filter(|_| trajectories > 0)?;
        let success_turns = scored().filter(|trajectory| passed(trajectory)).map(turns).max();
        Some(Self { task: group.task.id, group: group.id, version, passes, trajectories, success_turns })
    }
}

/// Turns of the episode of a trajectory: of all its roles, if it has several.
fn turns(trajectory: &Trajectory) -> u64 {
    let played = trajectory.score.components.iter().find(|component| component.name == ENVIRONMENT);
    let counted = played.and_then(|played| played.details.get("turns")?.as_u64());
    counted.unwrap_or(trajectory.turns.len() as u64)
}

/// Whether a trajectory is a success: correct by the criterion of the run, independent of its reward.
pub(super) fn passed(trajectory: &Trajectory) -> bool {
    trajectory.score.correct == Some(true)
}

/// The history of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TaskHistory {
    newest: TaskOutcome,
    /// The newest but one.
    before: Option<TaskOutcome>,
    pub(super) passes: u64,
    pub(super) trajectories: u64,
    /// The largest of all outcomes.
    pub(super) success_turns: Option<u64>,
    /// The same without the newest.
    success_turns_before: Option<u64>,
}

impl TaskHistory {
    /// Share of the trajectories of the newest group that passed; older groups are of an older policy.
    pub(super) fn pass_rate(&self) -> f64 {
        self.newest.passes as f64 / self.newest.trajectories.max(1) as f64
    }

    /// The history when `group` was to start at `served`. It contains the outcome of the group itself if that was lost after
    /// scoring; an outcome from before `served` belongs to an earlier process with the same ids.
    pub(super) fn before(self, group: GroupId, served: PolicyVersion) -> Option<Self> {
        let TaskOutcome { group: newest, version, passes, trajectories, .. } = self.newest;
        if newest != group || version < served {
            return Some(self);
        }
        Some(Self {
            newest: self.before?,
            before: None,
            passes: self.passes - passes,
            trajectories: self.trajectories - trajectories,
            success_turns: self.success_turns_before,
            success_turns_before: None,
        })
    }
}

/// The history of all tasks of a run.
#[derive(Debug, Default)]
pub(super) struct History {
    tasks: HashMap<TaskId, Option<TaskHistory>>,
}

impl History {
    /// An empty history of `tasks`.
    pub(super) fn of(tasks: impl IntoIterator<Item = TaskId>) -> Self {
        Self { tasks: tasks.into_iter().map(|task| (task, None)).collect() }
    }

    /// Number of tasks.
    pub(super) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// The history of `task`, if it has been drawn.
    pub(super) fn get(&self, task: TaskId) -> Option<&TaskHistory> {
        self.tasks.get(&task)?.as_ref()
    }

    /// Adds an outcome; that of a task of another run is ignored.
    pub(super) fn add(&mut self, outcome: &TaskOutcome) {
        let Some(task) = self.tasks.get_mut(&outcome.task) else { return };
        let order = |outcome: &TaskOutcome| (outcome.version, outcome.group);
        match task {
            // A group lost in a crash is sampled again bit for bit.
            Some(known) if order(&known.newest) == order(outcome) => {}
            Some(known) => {
                known.passes += outcome.passes;
                known.trajectories += outcome.trajectories;
                let longest = known.success_turns;
                known.success_turns = longest.max(outcome.success_turns);
                if order(outcome) > order(&known.newest) {
                    known.success_turns_before = longest;
                    known.before = Some(std::mem::replace(&mut known.newest, *outcome));
                    return;
                }
                known.success_turns_before = known.success_turns_before.max(outcome.success_turns);
                if known.before.is_none_or(|before| order(outcome) > order(&before)) {
                    known.before = Some(*outcome);
                }
            }
            None => {
                let TaskOutcome { passes, trajectories, success_turns, .. } = *outcome;
                let newest = *outcome;
                *task = Some(TaskHistory {
                    newest,
                    before: None,
                    passes,
                    trajectories,
                    success_turns,
                    success_turns_before: None,
                });
            }
        }
    }
}
