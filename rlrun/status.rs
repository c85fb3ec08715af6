//! `status.json`: the present state of a run, for the live page: buffer, weights, and what every role does.
//!
//! Invariant: a reader sees a whole file. It is written at most once a second, by the watchdog's thread, so that it stays true while
//! the run makes no progress. A file that cannot be written is left.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::weights::{Lag, PushCost};
use buffer::{Buffer, GroupFilter, Stats};
use serde_json::{Value, json};

/// Time between two writes.
const EVERY: Duration = Duration::from_secs(1);
/// Most groups that are listed.
const MAX_GROUPS: usize = 256;
/// Most leases that are listed.
const MAX_LEASES: usize = 64;

/// The state that the last step left.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepStatus {
    /// Steps done.
    pub(crate) step: u64,
    /// Seconds of the run.
    pub(crate) time_s: f64,
    /// The sentence on what limits the run; empty if nothing does.
    pub(crate) bottleneck: String,
    /// The last push of weights.
    pub(crate) push: Option<PushCost>,
    /// The version of every sampler.
    pub(crate) lags: Vec<Lag>,
}

/// The file.
#[derive(Debug)]
pub(crate) struct RunStatus {
    path: PathBuf,
    step: Mutex<StepStatus>,
    written: Mutex<Option<Instant>>,
}

impl RunStatus {
    /// The file in `run_dir`.
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { path: run_dir.join("status.json"), step: Mutex::default(), written: Mutex::default() }
    }

    /// A step is done.
    pub(crate) fn step(&self, status: StepStatus) {
        *lock(&self.step) = status;
    }

    /// Writes the file if the last write is a second old.
    pub(crate) fn refresh(&self, roles: &[String], stats: Option<&Stats>, buffer: Option<&Buffer>) {
        {
            let mut written = lock(&self.written);
            if written.is_some_and(|at| at.elapsed() < EVERY) {
                return;
            }
            *written = Some(Instant::now());
        }
        self.write(roles, stats, buffer);
    }

    /// Writes the file.
    pub(crate) fn write(&self, roles: &[String], stats: Option<&Stats>, buffer: Option<&Buffer>) {
        let StepStatus { step, time_s, bottleneck, push, lags } = lock(&self.step).clone();
        let status = json!({
            "step": step,
            "time_s": time_s,
            "bottleneck": bottleneck,
            "roles": roles,
            "buffer": stats.map(|stats| described(stats, buffer)),
            "weights": push.map(|push| json!({
                "version": push.version,
                "bytes": push.delta_bytes.unwrap_or(push.full_bytes),
                "publish_s": push.took.as_secs_f64(),
                "receivers": lags.iter().map(receiver).collect::<Vec<_>>(),
            })),
        });
        let temporary = self.path.with_extension("json.tmp");
        // No role waits for this file, and the next second writes it again.
        let _ = std::fs::write(&temporary, status.to_string())
            .and_then(|()| std::fs::rename(&temporary, &self.path));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn receiver(lag: &Lag) -> Value {
    let receipt = lag.receipt.as_ref();
    json!({
        "name": lag.subscriber,
        "lag": lag.versions,
        "version": receipt.map(|receipt| receipt.version),
        "bytes": receipt.map(|receipt| receipt.bytes),
        "apply_s": receipt.map(|receipt| receipt.took.as_secs_f64()),
        "stall_s": receipt.map(|receipt| receipt.stalled.as_secs_f64()),
    })
}

/// The counts of a buffer, and its first groups and leases if it is in this process.
fn described(stats: &Stats, buffer: Option<&Buffer>) -> Value {
    let page = buffer.and_then(|buffer| buffer.list(&GroupFilter::default(), None, MAX_GROUPS).ok());
    let leases = buffer.and_then(|buffer| buffer.leases(None).ok());
    json!({
        "capacity": stats.slots,
        "batch_groups": stats.batch_groups,
        "max_staleness": stats.max_staleness,
        "next_step": stats.next_step,
        "admitted": stats.admitted,
        "claimed": stats.claimed,
        "finalized": stats.finalized,
        "leased": stats.leased,
        "again": stats.again,
        "bytes": stats.bytes,
        "dropped_stale": stats.dropped_stale,
        "evicted": stats.evicted,
        "expired": stats.expired,
        "quarantined": stats.quarantined,
        "groups": page.map(|page| page.groups),
        "leases": leases.map(|leases| leases.into_iter().take(MAX_LEASES).collect::<Vec<_>>()),
    })
}

#[cfg(test)]
mod tests {
    use buffer::{AdmitRequest, BufferConfig, Consumer, Producer};
    use trajectory::PolicyVersion;

    use super::*;

    #[test]
    fn the_file_has_the_counts_of_the_buffer_and_is_not_written_all_the_time() {
        let directory = tempfile::tempdir().unwrap();
        let status = RunStatus::new(directory.path());
        let buffer = Buffer::in_memory(BufferConfig::new(2, 1)).unwrap();
        let request = AdmitRequest { served: PolicyVersion(0), limit: 1, hold: None, holder: None };
        buffer.admit(request, Duration::ZERO).unwrap();
        let stats = buffer.stats().unwrap();
        let step = StepStatus { step: 3, time_s: 1.5, ..StepStatus::default() };
        status.step(StepStatus { bottleneck: "sampling".to_owned(), ..step });
        status.refresh(&["the trainer waits".to_owned()], Some(&stats), Some(&buffer));
        let read = || -> Value {
            serde_json::from_slice(&std::fs::read(directory.path().join("status.json")).unwrap()).unwrap()
        };
        let first = read();
        assert_eq!((&first["step"], &first["roles"][0]), (&json!(3), &json!("the trainer waits")));
        assert_eq!(
            (&first["buffer"]["admitted"], &first["buffer"]["groups"][0]["state"]),
            (&json!(1), &json!("admitted"))
        );
        assert!(first["buffer"]["groups"][0]["age_ms"].is_u64(), "{first}");
        assert_eq!((&first["weights"], &first["buffer"]["leases"]), (&Value::Null, &json!([])));
        status.step(StepStatus { step: 4, ..StepStatus::default() });
        status.refresh(&[], None, None);
        assert_eq!(read()["step"], 3, "a second has not passed");
        status.write(&[], None, None);
        assert_eq!((&read()["step"], &read()["buffer"]), (&json!(4), &Value::Null));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
