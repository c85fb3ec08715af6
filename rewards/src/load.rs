//! Counters of a reward: trajectories that wait, that are being scored, failures and latencies.
//!
//! Invariant: a trajectory is counted from the creation of its guard until the guard is dropped, also when its future is
//! dropped. The cost is two atomics and one short lock for each trajectory.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::RewardError;

/// Most durations between two calls of [`Load::take`]; later trajectories are counted without a duration.
const KEPT: usize = 65_536;

/// The counters of one reward.
#[derive(Debug, Default)]
pub struct Load {
    waiting: AtomicUsize,
    running: AtomicUsize,
    errors: AtomicU64,
    timeouts: AtomicU64,
    /// The first failure since the last [`Load::take`].
    example: Mutex<Option<String>>,
    durations: Mutex<Durations>,
}

#[derive(Debug, Default)]
struct Durations {
    count: u64,
    /// Seconds until it began.
    waited: Vec<f32>,
    /// Seconds from there to its end.
    ran: Vec<f32>,
}

/// The counters of a [`Load`] since the last [`Load::take`].
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LoadCounts {
    /// Trajectories that wait now.
    pub waiting: usize,
    /// Trajectories that are being judged now.
    pub running: usize,
    /// Trajectories judged since, failures included.
    pub scored: u64,
    /// Failures since, timeouts included.
    pub errors: u64,
    /// Timeouts since.
    pub timeouts: u64,
    /// The first of the failures.
    pub example: Option<String>,
    /// Time in the queue.
    pub waited: Latency,
    /// Time of scoring.
    pub ran: Latency,
}

/// Percentiles of durations, seconds; 0 if there were none.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Latency {
    /// The median.
    pub p50_s: f64,
    /// The 95th percentile.
    pub p95_s: f64,
    /// The longest.
    pub max_s: f64,
    /// The sum.
    pub sum_s: f64,
}

impl LoadCounts {
    /// Adds the counters of another worker's reward of this name. Of percentiles the larger are kept: those of all samples
    /// together are unknown.
    pub fn add(&mut self, other: Self) {
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.running = self.running.saturating_add(other.running);
        self.scored = self.scored.saturating_add(other.scored);
        self.errors = self.errors.saturating_add(other.errors);
        self.timeouts = self.timeouts.saturating_add(other.timeouts);
        self.example = self.example.take().or(other.example);
        self.waited.add(other.waited);
        self.ran.add(other.ran);
    }
}

impl Latency {
    fn add(&mut self, other: Self) {
        self.p50_s = self.p50_s.max(other.p50_s);
        self.p95_s = self.p95_s.max(other.p95_s);
        self.max_s = self.max_s.max(other.max_s);
        self.sum_s += other.sum_s;
    }
}

impl Load {
    /// Numbers of trajectories that wait now, and that are being scored now.
    #[must_use]
    pub fn now(&self) -> (usize, usize) {
        (self.waiting.load(Ordering::Relaxed), self.running.load(Ordering::Relaxed))
    }

    /// Counts a trajectory as waiting until the guard is dropped.
    #[must_use]
    pub fn wait(&self) -> WaitingTrajectory<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        WaitingTrajectory { load: self, since: Instant::now() }
    }

    /// Counts a failure.
    pub fn failed(&self, error: &RewardError) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        if matches!(error, RewardError::Timeout { .. }) {
            self.timeouts.fetch_add(1, Ordering::Relaxed);
        }
        let mut example = self.example.lock().unwrap_or_else(PoisonError::into_inner);
        example.get_or_insert_with(|| error.to_string());
    }

    /// The first failure since [`Self::take`] was called last.
    #[must_use]
    pub fn first_failure(&self) -> Option<String> {
        self.example.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The current counts, and the totals since the last call.
    #[must_use]
    pub fn take(&self) -> LoadCounts {
        let Durations { count, waited, ran } =
            std::mem::take(&mut *self.durations.lock().unwrap_or_else(PoisonError::into_inner));
        LoadCounts {
            waiting: self.waiting.load(Ordering::Relaxed),
            running: self.running.load(Ordering::Relaxed),
            scored: count,
            errors: self.errors.swap(0, Ordering::Relaxed),
            timeouts: self.timeouts.swap(0, Ordering::Relaxed),
            example: self.example.lock().unwrap_or_else(PoisonError::into_inner).take(),
            waited: Latency::of(waited),
            ran: Latency::of(ran),
        }
    }
}

impl Latency {
    fn of(mut seconds: Vec<f32>) -> Self {
        seconds.sort_unstable_by(f32::total_cmp);
        let at = |share: f64| {
            let place = (share * seconds.len() as f64).ceil() as usize;
            seconds.get(place.saturating_sub(1)).copied().map_or(0.0, f64::from)
        };
        let sum_s = seconds.iter().copied().map(f64::from).sum();
        Self { p50_s: at(0.5), p95_s: at(0.95), max_s: at(1.0), sum_s }
    }
}

/// Guard of a waiting trajectory.
#[derive(Debug)]
pub struct WaitingTrajectory<'a> {
    load: &'a Load,
    since: Instant,
}

impl<'a> WaitingTrajectory<'a> {
    /// Counts the trajectory as running from now on.
    #[must_use]
    pub fn begin(self) -> RunningTrajectory<'a> {
        let load = self.load;
        load.running.fetch_add(1, Ordering::Relaxed);
        RunningTrajectory { load, waited: self.since.elapsed().as_secs_f32(), since: Instant::now() }
    }
}

impl Drop for WaitingTrajectory<'_> {
    fn drop(&mut self) {
        self.load.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Guard of a trajectory that is being scored.
#[derive(Debug)]
pub struct RunningTrajectory<'a> {
    load: &'a Load,
    waited: f32,
    since: Instant,
}

impl Drop for RunningTrajectory<'_> {
    fn drop(&mut self) {
        self.load.running.fetch_sub(1, Ordering::Relaxed);
        let ran = self.since.elapsed().as_secs_f32();
        let mut durations = self.load.durations.lock().unwrap_or_else(PoisonError::into_inner);
        durations.count += 1;
        if durations.ran.len() < KEPT {
            durations.waited.push(self.waited);
            durations.ran.push(ran);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_and_running_trajectories_are_counted_until_dropped() {
        let load = Load::default();
        let (one, two) = (load.wait(), load.wait());
        let running = one.begin();
        let counts = load.take();
        assert_eq!((counts.waiting, counts.running, counts.scored), (1, 1, 0));
        drop((running, two));
        let counts = load.take();
        assert_eq!((counts.waiting, counts.running, counts.scored), (0, 0, 1));
        assert_eq!(load.take(), LoadCounts::default());
    }

    #[test]
    fn percentiles_are_those_of_the_samples() {
        let latency = Latency::of((1..=100u8).rev().map(f32::from).collect());
        assert_eq!((latency.p50_s, latency.p95_s, latency.max_s, latency.sum_s), (50.0, 95.0, 100.0, 5050.0));
        assert_eq!(Latency::of(vec![]), Latency::default());
    }
}
