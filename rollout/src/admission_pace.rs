//! How often a worker asks a buffer in another process for slots.
//!
//! Slots become free as the trainer advances, and a sampler can use them once it serves the version that was trained. So a worker
//! asks at once when it serves a newer version, and after a grant; between them each refusal doubles the pause, since a slot that
//! becomes free otherwise (another worker is lost, a group is dropped) is rare.
//!
//! Invariant: the number of requests without a grant grows with the number of versions and, slowly, with time, and not with the
//! number of decode steps. A worker of the buffer's own process is not paced: its question is a short lock.

use std::time::{Duration, Instant};

use trajectory::PolicyVersion;

/// Pause after the first refusal.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause: the delay with which a slot is noticed that no version frees.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// When a worker asks again.
#[derive(Debug, Default)]
pub(crate) struct AdmissionPace {
    /// The version that was served at the last refusal, and when to ask again.
    refused: Option<(PolicyVersion, Instant)>,
    pause: Duration,
}

impl AdmissionPace {
    /// Whether a worker that serves `served` asks now.
    pub(crate) fn is_due(&self, served: PolicyVersion, now: Instant) -> bool {
        self.refused.is_none_or(|(version, again)| version != served || now >= again)
    }

    /// There was no slot for `served`.
    pub(crate) fn refused(&mut self, served: PolicyVersion, now: Instant) {
        let known = self.refused.is_some_and(|(version, _)| version == served);
        self.pause = if known { (2 * self.pause).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
        self.refused = Some((served, now + self.pause));
    }

    /// There was a slot.
    pub(crate) fn granted(&mut self) {
        self.refused = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_without_slots_asks_less_and_less_until_it_serves_a_newer_version() {
        let (mut pace, start) = (AdmissionPace::default(), Instant::now());
        let (old, new) = (PolicyVersion(3), PolicyVersion(4));
        // As often as it decodes, for a minute.
        let asked = |pace: &mut AdmissionPace, served: PolicyVersion, from: Instant| {
            let steps = (0..60_000).map(|step| from + Duration::from_millis(step));
            let asks = steps.filter(|now| {
                let due = pace.is_due(served, *now);
                if due {
                    pace.refused(served, *now);
                }
                due
            });
            asks.count()
        };
        let count = asked(&mut pace, old, start);
        assert!((100..150).contains(&count), "{count} requests in a minute");
        assert!(!pace.is_due(old, start + Duration::from_secs(60)));
        assert!(pace.is_due(new, start + Duration::from_secs(60)), "its slots may be free");
        pace.refused(new, start);
        assert!(!pace.is_due(new, start) && pace.is_due(new, start + FIRST_PAUSE));
        pace.granted();
        assert!(pace.is_due(new, start));
    }
}
