//! What the watchdog sees of a run: what has been done, and what every role does just now.
//!
//! Invariant: looking changes nothing, but that workers of which nothing was heard for too long are forgotten, and those
//! that serve other weights than they say.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use buffer::Consumer;
use rollout::Progress;
use weights::{Hub, RejectedSubscriber};

use crate::peers::Peers;
use crate::report::Report;
use crate::stage::Stage;
use crate::watchdog::Situation;
use crate::workers::roster::Roster;

/// See the module.
pub(super) struct View {
    pub(super) stage: Arc<Stage>,
    pub(super) inside: Option<Arc<Mutex<Progress>>>,
    pub(super) roster: Arc<Roster>,
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
        for RejectedSubscriber { subscriber, error } in self.hub.take_rejected().unwrap_or_default() {
            self.roster.expel(&subscriber);
            self.peers.refuse(&subscriber, ("left_out", &error.to_string()));
            self.report.note(&format!("{subscriber} is left out, and the run goes on without it: {error}"));
        }
        // Not only when the step ends: a first batch may never come of rewards that fail.
        for (reward, failure) in self.stage.failures() {
            self.report.first_failure(&reward, &failure);
        }
        let inside = self.inside.as_ref().map(|p| *p.lock().unwrap_or_else(PoisonError::into_inner));
        let all = self.roster.progress(inside);
        let stats = self.consumer.stats().ok();
        let mut counts = self.stage.counts();
        counts.extend([all.engine.steps, all.groups]);
        counts.extend(stats.iter().flat_map(|stats| {
            [stats.next_step.0, stats.next_id.0, stats.finalized as u64, stats.leased as u64, stats.expired]
        }));
        let mut roles = vec![self.stage.describe_beside(stats.as_ref())];
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
        roles.extend(self.stage.describe_rewards());
        let works = self.stage.works(stats.as_ref());
        Situation { counts, roles, works }
    }
}
