//! Groups whose rewards are all equal teach nothing: they make room for others, up to a bound.
//!
//! DAPO (arXiv 2503.14476, section 3.2) samples until a batch is full of groups with variance, and gives up after
//! 10 generation batches.
//!
//! Invariant: between two windows of `window` kept groups at most `most` are dropped, so that a run whose groups are all
//! alike goes on, slower, and says so in its metrics.

use super::Verdict;

/// Counts of the window that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refill {
    window: u64,
    most: u64,
    kept: u64,
    dropped: u64,
}

impl Refill {
    /// At most `ratio` dropped for each kept group, counted over `window` kept ones.
    pub(super) fn new(ratio: f64, window: usize) -> Self {
        let window = window.max(1) as u64;
        Self { window, most: (ratio * window as f64).ceil() as u64, kept: 0, dropped: 0 }
    }

    /// What becomes of the next group.
    pub(super) fn judge(&mut self, zero_variance: bool) -> Verdict {
        if zero_variance && self.dropped < self.most {
            self.dropped += 1;
            return Verdict::Drop;
        }
        self.kept += 1;
        if self.kept == self.window {
            (self.kept, self.dropped) = (0, 0);
        }
        Verdict::Keep
    }
}
