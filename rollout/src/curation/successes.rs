//! The newest success of every task, for groups that fail entirely (DART's experience pool, arXiv 2509.23866).
//!
//! Invariant: a replayed success is within the staleness bound at the version served, with the behavior log-probabilities and
//! versions of its sampling. Successes over the bound are removed.

use std::collections::HashMap;

use trajectory::{Group, PolicyVersion, TaskId, Trajectory};

/// At most one trajectory per task.
#[derive(Debug, Default)]
pub(super) struct Successes {
    newest: HashMap<TaskId, Trajectory>,
}

impl Successes {
    /// Keeps `success`, and drops successes more than `max_staleness` versions older than `served`.
    pub(super) fn keep(
        &mut self,
        task: TaskId,
        success: &Trajectory,
        served: PolicyVersion,
        max_staleness: u64,
    ) {
        self.newest.retain(|_, kept| within(kept, served, max_staleness));
        let newer = |kept: &Trajectory| kept.oldest_version() > success.oldest_version();
        if !self.newest.get(&task).is_some_and(newer) {
            self.newest.insert(task, success.clone());
        }
    }

    /// Puts the success of the group's task, if there is one, in the place of the last sampled trajectory of its role; whether it
    /// did.
    pub(super) fn replay(&self, group: &mut Group, served: PolicyVersion, max_staleness: u64) -> bool {
        let stored = self.newest.get(&group.task.id).filter(|kept| within(kept, served, max_staleness));
        let Some(stored) = stored else { return false };
        let fits = |trajectory: &&mut Trajectory| !trajectory.baseline && trajectory.role == stored.role;
        let Some(place) = group.trajectories.iter_mut().rfind(fits) else { return false };
        *place = Trajectory { index: place.index, ..stored.clone() };
        true
    }

    /// Number of tasks with a success.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.newest.len()
    }
}

fn within(trajectory: &Trajectory, served: PolicyVersion, max_staleness: u64) -> bool {
    trajectory.oldest_version().staleness_at(served) <= max_staleness
}
