//! When the journal committed: the longest commits since a reader took them.
//!
//! Invariant: at most [`MAX_COMMITS`] are kept. The cost is two looks at the clock and a short lock for each commit.

use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::store::CommitTime;

/// Most commits between two calls of [`CommitLog::take`]; of more, the shorter ones are left out.
const MAX_COMMITS: usize = 64;
/// A shorter commit is left out, seconds.
const BRIEF: f64 = 1e-3;

/// The times of commits.
#[derive(Debug, Default)]
pub(super) struct CommitLog(Mutex<Vec<CommitTime>>);

impl CommitLog {
    /// Does `commit` and keeps its time.
    pub(super) fn time<R>(&self, commit: impl FnOnce() -> R) -> R {
        let start = unix_seconds();
        let done = commit();
        self.add(CommitTime { start, end: unix_seconds() });
        done
    }

    /// The commits since the last call, in order.
    pub(super) fn take(&self) -> Vec<CommitTime> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, new: CommitTime) {
        let seconds = |commit: &CommitTime| commit.end - commit.start;
        if seconds(&new) < BRIEF {
            return;
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(new);
        if kept.len() > MAX_COMMITS {
            let shortest = kept.iter().enumerate().min_by(|(_, a), (_, b)| seconds(a).total_cmp(&seconds(b)));
            if let Some(shortest) = shortest.map(|(index, _)| index) {
                kept.remove(shortest);
            }
        }
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_commits_are_kept_in_order() {
        let log = CommitLog::default();
        for n in 0..200_u32 {
            let start = f64::from(n);
            log.add(CommitTime { start, end: start + if n % 4 == 0 { 0.5 } else { 0.1 } });
            log.add(CommitTime { start, end: start + BRIEF / 2.0 });
        }
        let kept = log.take();
        assert_eq!(kept.len(), MAX_COMMITS);
        assert!(kept.windows(2).all(|pair| pair[0].start < pair[1].start), "{kept:?}");
        assert_eq!(kept.iter().filter(|commit| commit.end - commit.start > 0.4).count(), 50);
        assert_eq!(log.take(), []);
        assert_eq!(log.time(|| 3), 3);
    }
}
