//! Rewards and tools: times that are drawn, and a queue for those that run at the same time.
//!
//! Invariant: requests begin in the order of their arrival, and never more than `concurrency` of them run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::draws::{DrawPurpose, Draws};
use crate::events::VirtualTime;
use crate::scenario::{LatencyModel, RewardService};

/// Rewards that run.
#[derive(Debug)]
pub(crate) struct RewardQueue {
    service: RewardService,
    /// Ends of those that run.
    running: BinaryHeap<Reverse<VirtualTime>>,
}

impl RewardQueue {
    pub(crate) fn new(service: RewardService) -> Self {
        Self { service, running: BinaryHeap::new() }
    }

    /// The end of a reward that takes `seconds` and is asked for at `now`.
    pub(crate) fn end_of(&mut self, seconds: f64, now: f64) -> f64 {
        while self.running.peek().is_some_and(|end| end.0.0 <= now) {
            self.running.pop();
        }
        let begins = if self.running.len() < self.service.concurrency {
            now
        } else {
            // Every one of them is asked for in the order of time, so that the first to end is free for this one.
            self.running.pop().map_or(now, |end| end.0.0)
        };
        let end = begins + seconds;
        if self.service.concurrency < usize::MAX {
            self.running.push(Reverse(VirtualTime(end)));
        }
        end
    }
}

impl LatencyModel {
    /// A time for the draw `number`, seconds.
    pub(crate) fn draw(&self, seed: u64, purpose: DrawPurpose, number: u64) -> f64 {
        if self.median_s <= 0.0 {
            return 0.0;
        }
        let mut draws = Draws::new(seed, purpose, number);
        (self.median_s * libm::exp(self.sigma * draws.normal())).min(self.longest_s.max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_wait_for_those_before_them() {
        let service = RewardService { time: LatencyModel::NONE, concurrency: 2 };
        let mut queue = RewardQueue::new(service);
        let ends: Vec<f64> = [3.0, 1.0, 1.0, 1.0].map(|seconds| queue.end_of(seconds, 0.0)).to_vec();
        assert_eq!(ends, [3.0, 1.0, 2.0, 3.0]);
        assert_eq!(queue.end_of(1.0, 10.0), 11.0);
    }

    #[test]
    fn times_have_their_median_and_their_cut() {
        let time = LatencyModel { median_s: 0.2, sigma: 1.0, longest_s: 5.0 };
        let mut drawn: Vec<f64> = (0..4001).map(|n| time.draw(1, DrawPurpose::Rewards, n)).collect();
        drawn.sort_by(f64::total_cmp);
        assert!((drawn[2000] / 0.2 - 1.0).abs() < 0.08, "{}", drawn[2000]);
        assert!(drawn[4000] <= 5.0);
        assert_eq!(LatencyModel::NONE.draw(1, DrawPurpose::Rewards, 3), 0.0);
    }
}
