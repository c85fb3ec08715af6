//! The time without a trial after one that was not kept.
//!
//! Invariant: what is never kept is tried ever less often, up to once in the longest pause.

/// Counts down until the next trial; twice as long after each trial that was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrialPause {
    first: u64,
    longest: u64,
    left: u64,
    next: u64,
}

impl TrialPause {
    /// A pause of `first` steps after the first trial that is not kept, and of at most `longest` after later ones. The first trial may
    /// begin after `delay` steps.
    #[must_use]
    pub fn new(first: u64, longest: u64, delay: u64) -> Self {
        Self { first, longest, left: delay, next: first }
    }

    /// Counts a step.
    pub fn step(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// Whether a trial may begin.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Begins a pause, twice as long as the one before.
    pub fn begin(&mut self) {
        self.left = self.next;
        self.next = (2 * self.next).min(self.longest);
    }

    /// Ends the pause; the next one has its length.
    pub fn end(&mut self) {
        self.left = 0;
    }

    /// Ends the pause; the next one is as long as the first.
    pub fn start_again(&mut self) {
        (self.left, self.next) = (0, self.first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut pause = TrialPause::new(2, 5, 1);
        let mut length = || {
            let mut steps = 0;
            while !pause.is_over() {
                pause.step();
                steps += 1;
            }
            pause.begin();
            steps
        };
        assert_eq!([length(), length(), length(), length(), length()], [1, 2, 4, 5, 5]);
    }
}
