//! The state machine of curation: results in, decisions out.
//!
//! Invariant: a decision depends only on the reports of the same task, whatever the order of other reports; every group that
//! starts is settled or starts again. It depends on neither buffer nor engine.

use std::collections::HashSet;

use trajectory::{Group, GroupId, PolicyVersion, TaskId};

use super::history::{History, TaskHistory, TaskOutcome, passed};
use super::refill::Refill;
use super::successes::Successes;
use super::{CurationConfig, CurationCounts, pools, size, turns};

/// What to do with the next place in the stream of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Sample a group.
    Start {
        /// Completions of it.
        group_size: usize,
        /// Most turns of an episode of it; `None`: the limit of its environment.
        max_turns: Option<usize>,
    },
    /// Go on to the next place.
    Skip(Skip),
}

/// Why a place is passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// The task passes too often to teach anything.
    Retired,
    /// The task never passed.
    Unlearnable,
    /// The task is easy or hard, and was not drawn this time.
    PooledOut,
}

/// What to do with a scored group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurationVerdict {
    /// It goes to the buffer.
    Keep,
    /// Another takes its slot.
    Drop,
}

/// The result of a scored group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettledGroup {
    /// What the history keeps of it; `None` without scores.
    pub outcome: Option<TaskOutcome>,
    /// Whether it goes to the buffer.
    pub verdict: CurationVerdict,
}

/// Why no task is left to draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted {
    /// All tasks.
    pub tasks: usize,
    /// Tasks that pass too often.
    pub retired: usize,
    /// Tasks that never passed.
    pub unlearnable: usize,
}

/// Which tasks are drawn and which groups are kept.
#[derive(Debug)]
pub struct Curator {
    config: CurationConfig,
    history: History,
    retired: usize,
    unlearnable: usize,
    refill: Option<Refill>,
    successes: Successes,
    served: PolicyVersion,
    /// Groups that started and are not settled.
    pending: HashSet<GroupId>,
    counts: CurationCounts,
}

impl Curator {
    /// A curator of `tasks` with an empty history.
    #[must_use]
    pub fn new(config: CurationConfig, tasks: impl IntoIterator<Item = TaskId>) -> Self {
        Self {
            config,
            history: History::of(tasks),
            retired: 0,
            unlearnable: 0,
            refill: config.max_refill_ratio.map(|ratio| Refill::new(ratio, config.batch_groups)),
            successes: Successes::default(),
            served: PolicyVersion::default(),
            pending: HashSet::new(),
            counts: CurationCounts::default(),
        }
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &CurationConfig {
        &self.config
    }

    /// Its counts.
    #[must_use]
    pub fn counts(&self) -> CurationCounts {
        self.counts
    }

    /// The sampler serves `version` from now on.
    pub fn serve(&mut self, version: PolicyVersion) {
        self.served = version;
    }

    /// Adds the outcome of a group, from this process or one before it.
    pub fn learn(&mut self, outcome: &TaskOutcome) {
        let out = |curator: &Self| curator.out(curator.history.get(outcome.task)?);
        let before = out(self);
        self.history.add(outcome);
        let after = out(self);
        for (out, change) in [(before, -1), (after, 1)] {
            let counter = match out {
                Some(Skip::Retired) => &mut self.retired,
                Some(Skip::Unlearnable) => &mut self.unlearnable,
                Some(Skip::PooledOut) | None => continue,
            };
            *counter = counter.saturating_add_signed(change);
        }
    }

    /// What to do with the place `group` of the stream of tasks, which holds `task`.
    pub fn decide(&mut self, group: GroupId, task: TaskId) -> Decision {
        let known = self.history.get(task).and_then(|known| known.before(group, self.served));
        let pass_rate = known.as_ref().map(TaskHistory::pass_rate);
        let pooled_out = || {
            let drawn = pass_rate.is_none_or(|rate| pools::drawn(&self.config, group, rate));
            (!drawn).then_some(Skip::PooledOut)
        };
        if let Some(why) = known.and_then(|known| self.out(&known)).or_else(pooled_out) {
            self.pending.remove(&group);
            *match why {
                Skip::Retired => &mut self.counts.retired,
                Skip::Unlearnable => &mut self.counts.unlearnable,
                Skip::PooledOut => &mut self.counts.pooled_out,
            } += 1;
            return Decision::Skip(why);
        }
        let whole = self.config.group_size;
        let group_size = match (self.config.shrink, pass_rate) {
            (Some(shrink), Some(rate)) => size::completions(whole, shrink, rate),
            _ => whole,
        };
        self.counts.shrunk += u64::from(group_size < whole);
        let longest = known.and_then(|known| known.success_turns);
        let max_turns = self.config.turn_margin.and_then(|margin| turns::most(longest?, margin));
        self.counts.turn_limited += u64::from(max_turns.is_some());
        self.pending.insert(group);
        Decision::Start { group_size, max_turns }
    }

    /// What to do with a scored group; it may get a stored success.
    pub fn settle(&mut self, group: &mut Group) -> SettledGroup {
        self.pending.remove(&group.id);
        let outcome = TaskOutcome::of(group);
        if let Some(outcome) = &outcome {
            self.learn(outcome);
            if self.config.success_pool {
                self.use_success(group, outcome);
            }
        }
        let zero_variance = group.zero_variance();
        let verdict =
            self.refill.as_mut().map_or(CurationVerdict::Keep, |refill| refill.judge(zero_variance));
        if self.refill.is_some() && zero_variance {
            match verdict {
                CurationVerdict::Keep => self.counts.let_through += 1,
                CurationVerdict::Drop => self.counts.refilled += 1,
            }
        }
        SettledGroup { outcome, verdict }
    }

    /// The group did not start after all.
    pub fn forget(&mut self, group: GroupId) {
        self.pending.remove(&group);
    }

    /// Whether a group is being sampled or scored, so that more may be known of its task soon.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Why no task can be drawn any more; `None` while one can.
    #[must_use]
    pub fn exhausted(&self) -> Option<Exhausted> {
        let Self { retired, unlearnable, .. } = *self;
        let tasks = self.history.len();
        (retired + unlearnable == tasks).then_some(Exhausted { tasks, retired, unlearnable })
    }

    /// Why a task with this history is not drawn again; `None` if it is.
    fn out(&self, known: &TaskHistory) -> Option<Skip> {
        if self.config.max_pass_rate.is_some_and(|most| known.pass_rate() >= most) {
            return Some(Skip::Retired);
        }
        let unlearnable = |after| known.passes == 0 && known.trajectories >= after;
        self.config.filter_after.is_some_and(unlearnable).then_some(Skip::Unlearnable)
    }

    /// Stores a success of the group, or adds a stored one if it has none.
    fn use_success(&mut self, group: &mut Group, outcome: &TaskOutcome) {
        let (served, bound) = (self.served, self.config.max_staleness);
        if outcome.passes == 0 {
            self.counts.replayed_successes += u64::from(self.successes.replay(group, served, bound));
            return;
        }
        let success = group.sampled().filter(|t| t.score.total.is_some());
        if let Some(success) = success.filter(|t| passed(t)).last() {
            self.successes.keep(outcome.task, success, served, bound);
        }
    }

    /// Successes that are kept.
    #[cfg(test)]
    pub(super) fn successes(&self) -> usize {
        self.successes.len()
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
