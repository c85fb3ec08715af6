//! What the watchdog sees of a run: what has been done, and what every role does just now.
//!
//! Invariant: looking changes nothing, but that workers of which nothing was heard for too long are forgotten, and those
//! that serve other weights than they say.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::rewards::RewardSet;
use buffer::{Consumer, Stats};
use rollout::Progress;
use trajectory::PolicyVersion;
use weights::{Hub, LeftOut};

use crate::peers::Peers;
use crate::report::Report;
use crate::watchdog::Situation;
use crate::workers::roster::Roster;

/// What the thread of the trainer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// A training step: it waits for a batch, or computes.
    Step,
    /// It looks how good the policy is.
    Evaluation,
    /// It writes metrics or a checkpoint.
    Writing,
}

/// Where the trainer is: how often it went on, what it does, at which version.
#[derive(Debug, Default)]
pub(super) struct Stage {
    /// Stages entered, times four, and the last of them.
    entered: AtomicU64,
    version: AtomicU64,
}

impl Stage {
    pub(super) fn enter(&self, doing: Doing, version: PolicyVersion) {
        self.version.store(version.0, Ordering::Relaxed);
        let entered = self.entered.load(Ordering::Relaxed) / 4 + 1;
        self.entered.store(entered * 4 + doing as u64, Ordering::Relaxed);
    }

    /// Whether it does anything but wait for a batch.
    fn works(&self, stats: Option<&Stats>) -> bool {
        let in_step = self.entered.load(Ordering::Relaxed) % 4 == Doing::Step as u64;
        !in_step || stats.is_some_and(|stats| stats.next_step.0 > self.version.load(Ordering::Relaxed))
    }

    fn describe(&self, stats: Option<&Stats>) -> String {
        let version = PolicyVersion(self.version.load(Ordering::Relaxed));
        let entered = self.entered.load(Ordering::Relaxed);
        if entered % 4 == Doing::Evaluation as u64 {
            return format!("the trainer evaluates {version}, or waits for rewards of that");
        }
        if entered % 4 == Doing::Writing as u64 {
            return format!("the trainer writes down the step to {version}, or its checkpoint");
        }
        match stats {
            Some(stats) if stats.next_step <= version => format!(
                "the trainer waits for a batch of {} groups for the step from {version}; the buffer has {stats}",
                stats.batch_groups
            ),
            Some(_) => format!("the trainer computes the step from {version}"),
            None => format!("the trainer is in the step from {version}; the buffer does not answer"),
        }
    }
}

/// See the module.
pub(super) struct View {
    pub(super) stage: Arc<Stage>,
    pub(super) inside: Option<Arc<Mutex<Progress>>>,
    pub(super) roster: Arc<Roster>,
    pub(super) rewards: Option<Arc<RewardSet>>,
    pub(super) consumer: Arc<dyn Consumer>,
    pub(super) hub: Hub,
    pub(super) peers: Arc<Peers>,
    /// Silence after which a worker is forgotten.
    pub(super) heartbeat: Duration,
    pub(super) report: Arc<Report>,
}

impl View {
    pub(super) fn look(&self) -> Situation {
        for name in self.roster.drop_silent(self.heartbeat) {
            let silent = self.heartbeat.as_secs_f64();
            self.report.note(&format!(
                "{name} has not been heard of for {silent:.0} s; others will do what it had begun"
            ));
        }
        // A hub that has failed says so to whoever uses it next.
        for LeftOut { subscriber, error } in self.hub.take_left_out().unwrap_or_default() {
            self.roster.expel(&subscriber);
            self.peers.refuse(&subscriber, ("left_out", &error.to_string()));
            self.report.note(&format!("{subscriber} is left out, and the run goes on without it: {error}"));
        }
        let inside = self.inside.as_ref().map(|p| *p.lock().unwrap_or_else(PoisonError::into_inner));
        let all = self.roster.progress(inside);
        let stats = self.consumer.stats().ok();
        let mut counts = vec![self.stage.entered.load(Ordering::Relaxed), all.engine.steps, all.groups];
        counts.extend(stats.iter().flat_map(|stats| {
            [stats.next_step.0, stats.next_id.0, stats.finalized as u64, stats.leased as u64, stats.expired]
        }));
        let mut roles = vec![self.stage.describe(stats.as_ref())];
        roles.extend(inside.map(|progress| format!("sampler 0 {}", progress.doing)));
        let members = self.roster.members();
        if inside.is_none() && members.is_empty() {
            roles.push("nobody samples: no rollout worker has joined".to_owned());
        }
        roles.extend(members.iter().map(|member| {
            format!(
                "{} (process {} on {}) {} for {:.0} s, heard of {:.0} s ago",
                member.name, member.pid, member.host, member.doing, member.doing_s, member.silent_s
            )
        }));
        for weighted in self.rewards.iter().flat_map(|rewards| rewards.rewards()) {
            let (waiting, running) = weighted.reward.load().now();
            if waiting + running > 0 {
                let name = weighted.reward.name();
                roles.push(format!("reward `{name}` judges {running} trajectories, {waiting} wait for it"));
            }
        }
        let works = self.stage.works(stats.as_ref());
        Situation { counts, roles, works }
    }
}
