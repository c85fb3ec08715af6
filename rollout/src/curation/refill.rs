//! Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal have no advantage and are
//! replaced by others, up to a bound.
//!
//! DAPO samples until a batch is full of groups with variance, and stops after 10 generation batches.
//!
//! Invariant: per window of `window` kept groups at most `most` are dropped, so that a run whose groups all have equal
//! rewards continues, slower, and its metrics show it.

use super::CurationVerdict;

/// Counts of the current window.
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

    /// Whether the next group is kept.
    pub(super) fn judge(&mut self, zero_variance: bool) -> CurationVerdict {
        if zero_variance && self.dropped < self.most {
            self.dropped += 1;
            return CurationVerdict::Drop;
        }
        self.kept += 1;
        if self.kept == self.window {
            (self.kept, self.dropped) = (0, 0);
        }
        CurationVerdict::Keep
    }
}
