//! What the watchdog sees of a run: its counters, and the phase of every role.
//!
//! Invariant: a snapshot changes nothing of the run, except that it removes workers whose heartbeat is overdue, and workers that the hub
//! has excluded.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use buffer::{Buffer, Consumer};
use rollout::Progress;
use weights::{Hub, RejectedSubscriber, RelayFallback};

use crate::peers::Peers;
use crate::report::Report;
use crate::status::RunStatus;
use crate::trainer_progress::TrainerProgress;
use crate::watchdog::RunSnapshot;
use crate::workers::registry::WorkerRegistry;

/// See the module.
pub(super) struct WatchdogView {
    pub(super) progress: Arc<TrainerProgress>,
    pub(super) local: Option<Arc<Mutex<Progress>>>,
    pub(super) registry: Arc<WorkerRegistry>,
    pub(super) consumer: Arc<dyn Consumer>,
    pub(super) hub: Hub,
    pub(super) peers: Arc<Peers>,
    /// Time without a heartbeat after which a worker is removed.
    pub(super) heartbeat: Duration,
    pub(super) report: Arc<Report>,
    /// Written with every snapshot, at most once a second.
    pub(super) status: Arc<RunStatus>,
    /// The buffer, if it is in this process.
    pub(super) buffer: Option<Arc<Buffer>>,
}

impl WatchdogView {
    pub(super) fn snapshot(&self) -> RunSnapshot {
        for name in self.registry.drop_silent(self.heartbeat) {
            let silent = self.heartbeat.as_secs_f64();
            self.report.note(&format!(
                "{name} has sent no heartbeat for {silent:.0} s; other samplers repeat its work"
            ));
        }
        // An error of the hub is reported by its next user.
        for RejectedSubscriber { subscriber, error } in self.hub.take_rejected().unwrap_or_default() {
            self.registry.exclude(&subscriber);
            self.peers.refuse(&subscriber, "left_out", &error.to_string());
            self.report.note(&format!("{subscriber} is excluded, and the run continues without it: {error}"));
        }
        // One line a second, however many samplers report.
        let fallbacks = self.hub.take_fallbacks().unwrap_or_default();
        if let Some(RelayFallback { subscriber, relay, version, reason, detail }) = fallbacks.first() {
            let more = match fallbacks.len() - 1 {
                0 => String::new(),
                others => format!("; {others} more versions were taken so"),
            };
            self.report.note(&format!(
                "{subscriber} took {version} from the run instead of {relay}: {reason} ({detail}){more}"
            ));
        }
        // Reported here too: with failing rewards the first step may never end.
        for (reward, failure) in self.progress.failures() {
            self.report.first_failure(&reward, &failure);
        }
        let local = self.local.as_ref().map(|p| *p.lock().unwrap_or_else(PoisonError::into_inner));
        let all = self.registry.progress(local);
        let stats = self.consumer.stats().ok();
        let mut counts = self.progress.counts();
        counts.extend([all.engine.steps, all.groups]);
        counts.extend(stats.iter().flat_map(|stats| {
            [stats.next_step.0, stats.next_id.0, stats.finalized as u64, stats.leased as u64, stats.expired]
        }));
        let mut roles = vec![self.progress.describe_with_buffer(stats.as_ref())];
        let sampler =
            |progress: Progress| format!("sampler 0 (serves {}) {}", progress.served, progress.doing);
        roles.extend(local.map(sampler));
        let members = self.registry.members();
        if local.is_none() && members.is_empty() {
            roles.push("no sampler: no rollout worker has joined".to_owned());
        }
        roles.extend(members.iter().map(|member| {
            let served =
                member.served_version.map_or_else(String::new, |version| format!(", serves v{version}"));
            format!(
                "{} (process {} on {}{served}) {} for {:.0} s, last heartbeat {:.0} s ago",
                member.name, member.pid, member.host, member.doing, member.doing_s, member.silent_s
            )
        }));
        roles.extend(self.progress.describe_rewards());
        self.status.refresh(&roles, stats.as_ref(), self.buffer.as_deref());
        let busy = self.progress.is_busy(stats.as_ref());
        RunSnapshot { counts, roles, busy }
    }
}
