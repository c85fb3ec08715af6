//! What is remembered of every task: how often it passed.
//!
//! Invariant: what is remembered does not depend on the order in which the outcomes of different groups arrive, an outcome
//! that arrives twice in a row counts once, and a group that is generated again is decided on as it was the first time.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use trajectory::{Group, GroupId, PolicyVersion, TaskId, Trajectory};

/// What became of one group; one line of the history that survives a resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
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
}

impl Outcome {
    /// The outcome of a scored group; `None` if no trajectory of it has a score.
    #[must_use]
    pub fn of(group: &Group) -> Option<Self> {
        let scored = || group.sampled().filter(|trajectory| trajectory.score.total.is_some());
        let trajectories = scored().count() as u64;
        let passes = scored().filter(|trajectory| passed(trajectory)).count() as u64;
        let version = group.oldest_version().filter(|_| trajectories > 0)?;
        Some(Self { task: group.task.id, group: group.id, version, passes, trajectories })
    }
}

/// Whether a trajectory is a success: it is correct by the criterion of the run, whatever penalties and bonuses there are.
pub(super) fn passed(trajectory: &Trajectory) -> bool {
    trajectory.score.correct == Some(true)
}

/// What is remembered of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TaskHistory {
    newest: Outcome,
    /// The newest but one.
    before: Option<Outcome>,
    pub(super) passes: u64,
    pub(super) trajectories: u64,
}

impl TaskHistory {
    /// Share of the trajectories of the newest group that passed: older ones are of a policy that is gone.
    pub(super) fn pass_rate(&self) -> f64 {
        self.newest.passes as f64 / self.newest.trajectories.max(1) as f64
    }

    /// What was known when `group` was to start at `served`. Its own outcome is known already if it was lost after it was
    /// scored; one from before `served` is of another process that gave out the same ids.
    pub(super) fn before(self, group: GroupId, served: PolicyVersion) -> Option<Self> {
        let Outcome { group: newest, version, passes, trajectories, .. } = self.newest;
        if newest != group || version < served {
            return Some(self);
        }
        Some(Self {
            newest: self.before?,
            before: None,
            passes: self.passes - passes,
            trajectories: self.trajectories - trajectories,
        })
    }
}

/// What is remembered of all tasks of a run.
#[derive(Debug, Default)]
pub(super) struct History {
    tasks: HashMap<TaskId, Option<TaskHistory>>,
}

impl History {
    /// Nothing yet of any of `tasks`.
    pub(super) fn of(tasks: impl IntoIterator<Item = TaskId>) -> Self {
        Self { tasks: tasks.into_iter().map(|task| (task, None)).collect() }
    }

    /// Number of tasks.
    pub(super) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// What is remembered of `task`, if it has been drawn.
    pub(super) fn get(&self, task: TaskId) -> Option<&TaskHistory> {
        self.tasks.get(&task)?.as_ref()
    }

    /// Takes an outcome in; that of a task which is not of this run says nothing.
    pub(super) fn add(&mut self, outcome: &Outcome) {
        let Some(task) = self.tasks.get_mut(&outcome.task) else { return };
        let order = |outcome: &Outcome| (outcome.version, outcome.group);
        match task {
            // A group lost in a crash is generated again as it was.
            Some(known) if order(&known.newest) == order(outcome) => {}
            Some(known) => {
                known.passes += outcome.passes;
                known.trajectories += outcome.trajectories;
                if order(outcome) > order(&known.newest) {
                    known.before = Some(std::mem::replace(&mut known.newest, *outcome));
                } else if known.before.is_none_or(|before| order(outcome) > order(&before)) {
                    known.before = Some(*outcome);
                }
            }
            None => {
                let Outcome { passes, trajectories, .. } = *outcome;
                *task = Some(TaskHistory { newest: *outcome, before: None, passes, trajectories });
            }
        }
    }
}
