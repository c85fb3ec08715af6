//! Counters of a reward: trajectories that wait, that are being scored, failures and latencies, and when it was busy.
//!
//! Invariant: a trajectory is counted from the creation of its guard until the guard is dropped, also when its future is
//! dropped. The cost is four atomics and two short locks for each trajectory.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::RewardError;

/// Most durations between two calls of [`Load::take`]; later trajectories are counted without a duration.
const KEPT: usize = 65_536;
/// Most busy times between two calls of [`Load::take`]; later ones extend the last.
const MAX_BUSY: usize = 64;
/// A pause that does not end a busy time, seconds.
const PAUSE: f64 = 1e-3;

/// Seconds since 1970.
#[must_use]
pub fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

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
    /// Trajectories that are being scored.
    running: usize,
    /// The busy time that goes on while `running` is above 0.
    current: BusyTime,
    busy: Vec<BusyTime>,
}

/// A time in which at least one trajectory was being scored.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct BusyTime {
    /// When it began, seconds since 1970.
    pub start: f64,
    /// When it ended, seconds since 1970.
    pub end: f64,
    /// Trajectories whose scoring ended in it.
    pub scored: u64,
}

impl Durations {
    fn begin(&mut self, now: f64) {
        if self.running == 0 {
            self.current = BusyTime { start: now, end: now, scored: 0 };
        }
        self.running += 1;
    }

    fn end(&mut self, now: f64) {
        self.running = self.running.saturating_sub(1);
        self.current.scored += 1;
        if self.running == 0 {
            self.close(now);
        }
    }

    /// Writes down the current busy time up to `now`.
    fn close(&mut self, now: f64) {
        self.current.end = now;
        let full = self.busy.len() >= MAX_BUSY;
        match self.busy.last_mut() {
            Some(last) if full || self.current.start - last.end < PAUSE => {
                last.end = now;
                last.scored += self.current.scored;
            }
            _ => self.busy.push(self.current),
        }
    }

    /// The counts so far; a busy time that goes on is cut at `now`.
    fn take(&mut self, now: f64) -> Self {
        let running = self.running;
        if running > 0 {
            self.close(now);
        }
        let next = Self { running, current: BusyTime { start: now, end: now, scored: 0 }, ..Self::default() };
        std::mem::replace(self, next)
    }
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
    /// When trajectories were being scored, at most 64 times.
    #[serde(default)]
    pub busy: Vec<BusyTime>,
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
        let vacant = MAX_BUSY.saturating_sub(self.busy.len());
        self.busy.extend(other.busy.into_iter().take(vacant));
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
        let Durations { count, waited, ran, busy, .. } =
            self.durations.lock().unwrap_or_else(PoisonError::into_inner).take(unix_seconds());
        LoadCounts {
            waiting: self.waiting.load(Ordering::Relaxed),
            running: self.running.load(Ordering::Relaxed),
            scored: count,
            errors: self.errors.swap(0, Ordering::Relaxed),
            timeouts: self.timeouts.swap(0, Ordering::Relaxed),
            example: self.example.lock().unwrap_or_else(PoisonError::into_inner).take(),
            waited: Latency::of(waited),
            ran: Latency::of(ran),
            busy,
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
        load.durations.lock().unwrap_or_else(PoisonError::into_inner).begin(unix_seconds());
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
        durations.end(unix_seconds());
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
        assert_eq!(counts.busy.len(), 1, "the part until now");
        drop((running, two));
        let counts = load.take();
        assert_eq!((counts.waiting, counts.running, counts.scored), (0, 0, 1));
        assert_eq!(counts.busy.iter().map(|busy| busy.scored).sum::<u64>(), 1);
        assert_eq!(load.take(), LoadCounts::default());
    }

    #[test]
    fn busy_times_join_over_short_pauses_and_are_bounded() {
        let mut durations = Durations::default();
        let mut score = |start, end| {
            durations.begin(start);
            durations.end(end);
        };
        score(1.0, 2.0);
        score(2.0005, 3.0);
        score(4.0, 5.0);
        let busy = |start, end, scored| BusyTime { start, end, scored };
        let taken = durations.take(6.0).busy;
        assert_eq!(taken, [busy(1.0, 3.0, 2), busy(4.0, 5.0, 1)]);
        for n in 0..100_u32 {
            durations.begin(f64::from(n));
            durations.end(f64::from(n) + 0.5);
        }
        durations.begin(200.0);
        let taken = durations.take(201.0);
        assert_eq!((taken.busy.len(), taken.busy[MAX_BUSY - 1]), (MAX_BUSY, busy(63.0, 201.0, 37)));
        durations.end(202.0);
        assert_eq!(durations.take(203.0).busy, [busy(201.0, 202.0, 1)]);
        let mut sum = LoadCounts { busy: taken.busy, ..LoadCounts::default() };
        sum.add(LoadCounts { busy: vec![busy(0.0, 1.0, 1)], ..LoadCounts::default() });
        assert_eq!(sum.busy.len(), MAX_BUSY);
    }

    #[test]
    fn percentiles_are_those_of_the_samples() {
        let latency = Latency::of((1..=100u8).rev().map(f32::from).collect());
        assert_eq!((latency.p50_s, latency.p95_s, latency.max_s, latency.sum_s), (50.0, 95.0, 100.0, 5050.0));
        assert_eq!(Latency::of(vec![]), Latency::default());
    }
}
