//! Time of a training step.
//!
//! Invariant: a function of the lengths of the batch alone; the slowest rank counts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::events::VirtualTime;

/// Time of the parts of a training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingCost {
    /// Of every lease, seconds.
    pub fixed_s: f64,
    /// Of a rank for a token of prompt or completion, seconds: all passes, those before the update among them.
    pub per_token_s: f64,
    /// Of a rank for the square of the tokens of a sequence (attention), seconds.
    pub per_square_s: f64,
    /// Of the optimizer, for every lease, seconds.
    pub optimizer_s: f64,
    /// Until a lease that is granted is handed out, seconds: the journal commits it. The trainer waits.
    pub lease_s: f64,
    /// Between two steps, seconds: logs are written. The trainer neither computes nor waits for a batch.
    pub logs_s: f64,
    /// Ranks that divide the sequences of a batch; the step takes the time of the slowest. At least 1.
    pub ranks: usize,
    /// Steps between checkpoints; 0 for none.
    pub checkpoint_every: u64,
    /// Time that the trainer waits for a checkpoint, seconds.
    pub checkpoint_s: f64,
    /// Leases of a step: a trainer that streams begins with a part of its batch. At least 1.
    pub leases: usize,
}

impl TrainingCost {
    /// One rank that takes `per_token_s` seconds for a token, and no time for anything else.
    #[must_use]
    pub fn per_token(per_token_s: f64) -> Self {
        Self {
            fixed_s: 0.0,
            per_token_s,
            per_square_s: 0.0,
            optimizer_s: 0.0,
            lease_s: 0.0,
            logs_s: 0.0,
            ranks: 1,
            checkpoint_every: 0,
            checkpoint_s: 0.0,
            leases: 1,
        }
    }

    /// Seconds for sequences of `lengths` tokens (`[sequences]`), without a checkpoint. Sequences go to the rank with the least work,
    /// the longest first (Graham 1969, LPT).
    #[must_use]
    pub fn seconds(&self, lengths: &[f64]) -> f64 {
        let of = |length: f64| self.per_token_s * length + self.per_square_s * length * length;
        let slowest = if self.ranks <= 1 {
            lengths.iter().map(|length| of(*length)).sum()
        } else {
            let mut work: Vec<f64> = lengths.iter().map(|length| of(*length)).collect();
            work.sort_by(|a, b| b.total_cmp(a));
            let mut ranks: BinaryHeap<Reverse<VirtualTime>> =
                (0..self.ranks).map(|_| Reverse(VirtualTime(0.0))).collect();
            for seconds in work {
                if let Some(mut least) = ranks.peek_mut() {
                    least.0.0 += seconds;
                }
            }
            ranks.into_iter().map(|rank| rank.0.0).fold(0.0, f64::max)
        };
        self.fixed_s + slowest + self.optimizer_s
    }

    pub(crate) fn is_usable(&self) -> bool {
        let times = [
            self.fixed_s,
            self.per_token_s,
            self.per_square_s,
            self.optimizer_s,
            self.lease_s,
            self.logs_s,
            self.checkpoint_s,
        ];
        self.ranks >= 1 && self.leases >= 1 && times.iter().all(|time| time.is_finite() && *time >= 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_counts() {
        let mut cost = TrainingCost::per_token(0.5);
        assert_eq!(cost.seconds(&[3.0, 3.0, 2.0, 2.0, 2.0]), 6.0);
        cost.ranks = 2;
        assert_eq!(cost.seconds(&[3.0, 3.0, 2.0, 2.0, 2.0]), 3.5, "LPT: 3 + 2 + 2 against 3 + 2");
        (cost.fixed_s, cost.optimizer_s, cost.per_square_s) = (1.0, 0.25, 0.1);
        assert!((cost.seconds(&[2.0]) - (1.25 + 1.0 + 0.4)).abs() < 1e-12);
    }
}
