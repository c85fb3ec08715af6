//! When a worker did what: its phases, the times of its episodes, and changes of its limit, until a reader takes them.
//!
//! Invariant: at most [`MAX_PHASES`] phases, [`MAX_EPISODES`] episodes and [`MAX_LIMIT_CHANGES`] changes are kept; what comes later is
//! left out and counted.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rewards::load::unix_seconds;
use serde::{Deserialize, Serialize};
use trajectory::{GroupId, PolicyVersion};

use crate::worker::WorkerPhase;

/// Most phases between two calls of [`ActivityLog::take`].
pub const MAX_PHASES: usize = 512;
/// Most episodes between two calls of [`ActivityLog::take`].
pub const MAX_EPISODES: usize = 1024;
/// Most entries of changes of the limit between two calls of [`ActivityLog::take`].
pub const MAX_LIMIT_CHANGES: usize = 256;
/// A phase between two decode steps that is shorter belongs to what surrounds it, seconds.
const BRIEF: f64 = 1e-3;

/// A worker was in one phase; times are seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseSpan {
    /// What it did.
    pub phase: WorkerPhase,
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
    /// The version that was applied, of [`WorkerPhase::Applying`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<PolicyVersion>,
}

/// When an episode passed the stations on its way to the buffer, seconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EpisodeTimes {
    /// Its group.
    pub group: GroupId,
    /// Which of the group's episodes it is.
    pub index: u32,
    /// Its group got a slot.
    pub admitted: f64,
    /// Its last token was sampled.
    pub sampled: f64,
    /// The rewards of single trajectories had judged it.
    pub scored: f64,
    /// The rewards of groups had judged its group, which is about to be stored.
    #[serde(default)]
    pub settled: f64,
    /// Its group was stored.
    pub stored: f64,
}

/// A sampler changed how many sequences it runs at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitChange {
    /// When, seconds since 1970.
    pub at: f64,
    /// The version that it served.
    pub version: PolicyVersion,
    /// Sequences at once until then.
    pub before: usize,
    /// Sequences at once from then on.
    pub after: usize,
    /// Tokens per second while the limit before was reached; 0 if it was not.
    pub capacity: f64,
    /// Tokens per second of all the time.
    pub demand: f64,
}

/// What a worker did since the last look.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// Its phases, in order.
    pub phases: Vec<PhaseSpan>,
    /// The episodes of the groups that it stored.
    pub episodes: Vec<EpisodeTimes>,
    /// Sequences up to which requests were admitted at the end, if that adapts.
    #[serde(default)]
    pub running_limit: Option<usize>,
    /// The changes of that.
    #[serde(default)]
    pub limit_changes: Vec<LimitChange>,
    /// Number of phases, episodes and changes that were too many to be kept.
    pub left_out: u64,
}

impl Activity {
    /// Adds what was done afterwards, within the limits.
    pub fn append(&mut self, later: Self) {
        self.left_out = self.left_out.saturating_add(later.left_out);
        later.phases.into_iter().for_each(|span| self.push_phase(span));
        later.episodes.into_iter().for_each(|times| self.push_episode(times));
        self.running_limit = later.running_limit.or(self.running_limit);
        later.limit_changes.into_iter().for_each(|change| self.push_change(change));
    }

    /// What another program reports, within the limits: spans of finite numbers that end after they begin.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        self.phases.retain(|span| span.start.is_finite() && span.end.is_finite() && span.start <= span.end);
        let finite = |times: &EpisodeTimes| {
            let EpisodeTimes { admitted, sampled, scored, settled, stored, .. } = times;
            [admitted, sampled, scored, settled, stored].into_iter().all(|time| time.is_finite())
        };
        self.episodes.retain(finite);
        self.limit_changes.retain(|change| {
            [change.at, change.capacity, change.demand].iter().all(|number| number.is_finite())
        });
        let mut bounded = Self::default();
        bounded.append(self);
        bounded
    }

    fn push_phase(&mut self, span: PhaseSpan) {
        if self.phases.len() < MAX_PHASES {
            self.phases.push(span);
        } else {
            self.left_out = self.left_out.saturating_add(1);
        }
    }

    fn push_change(&mut self, change: LimitChange) {
        if self.limit_changes.len() < MAX_LIMIT_CHANGES {
            self.limit_changes.push(change);
        } else {
            self.left_out = self.left_out.saturating_add(1);
        }
    }

    fn push_episode(&mut self, times: EpisodeTimes) {
        if self.episodes.len() < MAX_EPISODES {
            self.episodes.push(times);
        } else {
            self.left_out = self.left_out.saturating_add(1);
        }
    }
}

/// Where a worker and its scoring write down what they do.
#[derive(Debug, Default)]
pub struct ActivityLog {
    state: Mutex<ActivityState>,
}

#[derive(Debug, Default)]
struct ActivityState {
    /// A phase of some length, and when it began.
    phase: Option<(WorkerPhase, f64)>,
    /// A phase between two decode steps.
    between: Option<(WorkerPhase, f64)>,
    kept: Activity,
}

impl ActivityLog {
    /// The worker enters `phase`.
    pub(crate) fn enter(&self, phase: WorkerPhase) {
        self.state().enter(phase, unix_seconds());
    }

    /// The worker has applied `version`, which took `seconds` until now.
    pub(crate) fn applied(&self, version: PolicyVersion, seconds: Duration) {
        self.state().applied(version, seconds.as_secs_f64(), unix_seconds());
    }

    /// The sampler runs `limit` sequences at once, after `changes`.
    pub(crate) fn limited(&self, limit: usize, changes: Vec<LimitChange>) {
        let mut state = self.state();
        state.kept.running_limit = Some(limit);
        changes.into_iter().for_each(|change| state.kept.push_change(change));
    }

    /// A group was stored.
    pub(crate) fn stored(&self, episodes: &[EpisodeTimes]) {
        let stored = unix_seconds();
        let mut state = self.state();
        episodes.iter().for_each(|times| state.kept.push_episode(EpisodeTimes { stored, ..*times }));
    }

    /// What was done since the last call; of a phase that goes on, the part until now.
    #[must_use]
    pub fn take(&self) -> Activity {
        self.state().take(unix_seconds())
    }

    fn state(&self) -> MutexGuard<'_, ActivityState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActivityState {
    fn enter(&mut self, phase: WorkerPhase, now: f64) {
        if let Some((between, start)) = self.between.take()
            && now - start >= BRIEF
            // What was applied is written down by `applied`; the rest of this phase is a look for newer weights.
            && between != WorkerPhase::Applying
        {
            self.close(start);
            self.kept.push_phase(PhaseSpan { phase: between, start, end: now, version: None });
            self.phase = self.phase.map(|(phase, _)| (phase, now));
        }
        match phase {
            WorkerPhase::Applying | WorkerPhase::Admitting | WorkerPhase::HandingOver => {
                self.between = Some((phase, now));
            }
            _ if self.phase.is_some_and(|(current, _)| current == phase) => {}
            _ => {
                self.close(now);
                self.phase = Some((phase, now));
            }
        }
    }

    fn applied(&mut self, version: PolicyVersion, seconds: f64, now: f64) {
        let start = self.phase.map_or(now - seconds, |(_, began)| began.max(now - seconds));
        self.close(start);
        let (phase, version) = (WorkerPhase::Applying, Some(version));
        self.kept.push_phase(PhaseSpan { phase, start, end: now, version });
        self.phase = self.phase.map(|(phase, _)| (phase, now));
        self.between = self.between.map(|(phase, _)| (phase, now));
    }

    /// Writes down the current phase up to `end`.
    fn close(&mut self, end: f64) {
        if let Some((phase, start)) = self.phase
            && end > start
        {
            self.kept.push_phase(PhaseSpan { phase, start, end, version: None });
        }
    }

    fn take(&mut self, now: f64) -> Activity {
        let end = self.between.map_or(now, |(_, start)| start);
        self.close(end);
        self.phase = self.phase.map(|(phase, start)| (phase, end.max(start)));
        let next = Activity { running_limit: self.kept.running_limit, ..Activity::default() };
        std::mem::replace(&mut self.kept, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::WorkerPhase::{Admitting, Applying, Decoding, HandingOver, Waiting};

    fn spans(activity: &Activity) -> Vec<(WorkerPhase, f64, f64)> {
        activity.phases.iter().map(|span| (span.phase, span.start, span.end)).collect()
    }

    #[test]
    fn short_phases_belong_to_what_surrounds_them_and_long_ones_do_not() {
        let mut state = ActivityState::default();
        // Two decode steps, a wait in two parts, and a hand-over that waits for rewards.
        for (phase, now) in [
            (Applying, 0.0),
            (Decoding, 0.0001),
            (HandingOver, 1.0),
            (Admitting, 1.0001),
            (Decoding, 1.0002),
            (Applying, 2.0),
            (Waiting, 2.005),
            (Admitting, 3.0),
            (Waiting, 3.0005),
            (HandingOver, 4.0),
            (Decoding, 6.0),
        ] {
            state.enter(phase, now);
        }
        let expected = [(Decoding, 0.0001, 2.005), (Waiting, 2.005, 4.0), (HandingOver, 4.0, 6.0)];
        assert_eq!(spans(&state.take(6.0)), expected);
        assert_eq!(spans(&state.take(7.5)), [(Decoding, 6.0, 7.5)], "the part until now");
        state.applied(PolicyVersion(3), 0.25, 8.0);
        state.enter(Waiting, 8.5);
        let taken = state.take(8.5);
        assert_eq!(spans(&taken), [(Decoding, 7.5, 7.75), (Applying, 7.75, 8.0), (Decoding, 8.0, 8.5)]);
        assert_eq!(taken.phases[1].version, Some(PolicyVersion(3)));
    }

    #[test]
    fn what_is_kept_and_what_others_report_is_bounded() {
        let log = ActivityLog::default();
        log.stored(&vec![EpisodeTimes::default(); MAX_EPISODES + 3]);
        let taken = log.take();
        assert_eq!((taken.episodes.len(), taken.left_out), (MAX_EPISODES, 3));
        assert!(taken.episodes[0].stored > 0.0);
        assert_eq!(log.take(), Activity::default());
        let span = |start, end| PhaseSpan { phase: Waiting, start, end, version: None };
        let mut phases = vec![span(f64::NAN, 1.0), span(2.0, 1.0), span(0.0, f64::INFINITY)];
        phases.extend(vec![span(0.0, 1.0); MAX_PHASES + 1]);
        let episodes = vec![EpisodeTimes { scored: f64::NAN, ..EpisodeTimes::default() }];
        let change = |demand| LimitChange {
            at: 1.0,
            version: PolicyVersion(2),
            before: 16,
            after: 8,
            capacity: 9.0,
            demand,
        };
        let mut limit_changes = vec![change(f64::NAN)];
        limit_changes.extend(vec![change(9.0); MAX_LIMIT_CHANGES + 1]);
        let running_limit = Some(8);
        let reported = Activity { phases, episodes, running_limit, limit_changes, left_out: u64::MAX };
        let bounded = reported.bounded();
        assert_eq!((bounded.phases.len(), bounded.episodes.len()), (MAX_PHASES, 0));
        assert_eq!((bounded.limit_changes.len(), bounded.running_limit), (MAX_LIMIT_CHANGES, Some(8)));
        assert_eq!(bounded.left_out, u64::MAX);
    }
}
