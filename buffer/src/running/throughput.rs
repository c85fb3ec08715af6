//! The throughput of a sampler under a limit on running sequences, and the demand of the trainer.
//!
//! Invariant: capacities are those of one limit, and are forgotten with it; what was spent, tokens and time, counts for the demand under
//! whatever limit.

use std::collections::VecDeque;

use trajectory::PolicyVersion;

use super::RunningObservation;

/// Standard error of a mean capacity, as a share of it, from which it decides: half of the margin of a limit that is enough.
const PRECISION: f64 = 0.015;
/// Fewest decode steps of a window.
const WINDOW_STEPS: f64 = 64.0;
/// Decode steps after which a window ends without a new version.
const LONGEST_WINDOW_STEPS: f64 = 1024.0;
/// Fewest windows that a mean is taken over.
const FEWEST_WINDOWS: usize = 2;
/// Windows from which a mean decides, however much they differ; earlier ones are forgotten.
const MOST_WINDOWS: usize = 8;
/// Windows that the demand is measured over.
const DEMAND_WINDOWS: usize = 32;

/// What was measured under a limit.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LimitThroughput {
    window: LimitWindow,
    /// Capacities in the last windows, tokens per second.
    rates: Vec<f64>,
    /// Of the last windows, under any limit: tokens and seconds of all the time, and the tokens that the capacity was for in that time.
    spent: VecDeque<[f64; 3]>,
}

/// A window so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LimitWindow {
    /// The version at its first step at the limit.
    version: Option<PolicyVersion>,
    /// Steps, tokens and seconds at the limit.
    steps: f64,
    tokens: f64,
    seconds: f64,
    /// Tokens and seconds of all the time since the window before.
    spent: [f64; 2],
}

impl LimitThroughput {
    /// Adds time, under whatever limit.
    pub(super) fn spend(&mut self, seen: RunningObservation) {
        let [tokens, seconds] = self.window.spent;
        self.window.spent = [tokens + seen.tokens, seconds + seen.elapsed_s];
    }

    /// Adds decode steps at the limit. True if they have ended a window.
    pub(super) fn add(&mut self, seen: RunningObservation) -> bool {
        let Some((rate, [tokens, seconds])) = self.window.add(seen) else { return false };
        if self.rates.len() == MOST_WINDOWS {
            self.rates.remove(0);
        }
        self.rates.push(rate);
        if self.spent.len() == DEMAND_WINDOWS {
            self.spent.pop_front();
        }
        self.spent.push_back([tokens, seconds, rate * seconds]);
        true
    }

    /// Begins with another limit.
    pub(super) fn forget_capacity(&mut self) {
        self.rates.clear();
        self.window = LimitWindow { spent: self.window.spent, ..LimitWindow::default() };
    }

    /// Capacity in the only window, tokens per second; `None` if there is none, or another.
    pub(super) fn single_window(&self) -> Option<f64> {
        self.rates.first().copied().filter(|_| self.rates.len() == 1)
    }

    /// Mean capacity in the windows, tokens per second; `None` of too few.
    pub(super) fn mean(&self) -> Option<f64> {
        let count = self.rates.len();
        (count >= FEWEST_WINDOWS).then(|| self.rates.iter().sum::<f64>() / count as f64)
    }

    /// Whether the windows agree on `mean`, or are enough.
    pub(super) fn is_precise(&self, mean: f64) -> bool {
        let count = self.rates.len() as f64;
        let squares: f64 = self.rates.iter().map(|rate| (rate - mean) * (rate - mean)).sum();
        // The standard error, squared: the variance of a window over the number of windows.
        let squared_error = squares / (count - 1.0) / count;
        self.rates.len() == MOST_WINDOWS || squared_error <= (PRECISION * mean) * (PRECISION * mean)
    }

    /// Demand of a limit of `capacity`, tokens per second.
    pub(super) fn demand(&self, capacity: f64) -> f64 {
        let add = |[a, b, c]: [f64; 3], [d, e, f]: &[f64; 3]| [a + d, b + e, c + f];
        let [tokens, seconds, possible] = self.spent.iter().fold([0.0; 3], add);
        if seconds > 0.0 { (tokens / seconds).max(tokens / possible * capacity) } else { 0.0 }
    }
}

impl LimitWindow {
    /// Adds decode steps at the limit. If the window has ended, its capacity in tokens per second, and tokens and seconds of all the time.
    fn add(&mut self, seen: RunningObservation) -> Option<(f64, [f64; 2])> {
        let version = *self.version.get_or_insert(seen.version);
        self.steps += seen.steps;
        self.tokens += seen.tokens;
        self.seconds += seen.decode_s;
        let updated = version != seen.version && self.steps >= WINDOW_STEPS;
        if (!updated && self.steps < LONGEST_WINDOW_STEPS) || self.seconds <= 0.0 {
            return None;
        }
        let ended = std::mem::take(self);
        Some((ended.tokens / ended.seconds, ended.spent))
    }
}
