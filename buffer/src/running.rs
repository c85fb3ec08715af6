//! How many sequences a sampler runs at once, adapted to the throughput that it measures.
//!
//! Beyond the number that saturates a processor or a GPU, more sequences give no more tokens per second: each becomes slower, its
//! group ends later, and is staler when it is trained on. If slow groups reach the bound on staleness, samplers even wait for slots. The
//! rule keeps the smallest limit that is enough, among limits that differ by factors of the square root of 2.
//!
//! - The capacity of a limit is the throughput while it is reached: no other group would be admitted. A window of such decode steps ends
//!   with a new version of the weights, so that it has what a trainer takes from a sampler on shared cores.
//! - The demand is the tokens per second of all the time, with waits for slots, in the last `DEMAND_WINDOWS`, under whatever limit. It is at
//!   least the capacity times the share of that time in which the sampler was busy: a sampler that was busy all the time under a slower
//!   limit has the demand of its capacity.
//! - A limit is enough if its capacity is within [`MARGIN`] of that of the best limit, or [`HEADROOM`] times the demand.
//! - A trial decodes under the next smaller limit, or under twice the limit if the capacity is less than [`NEED`] times the demand, until the
//!   mean capacity is known to `PRECISION`. A smaller limit is kept if it is enough, or is not reached; a larger one if its capacity is
//!   larger by more than [`MARGIN`].
//! - After a trial that is kept the next one begins at once. After one that is not, the limit is fixed for [`HOLD_WINDOWS`], twice that the
//!   next time, and the next trial is in the other direction. A capacity that differs by [`DRIFT`] from what it was at the last decision
//!   ends the hold, and so does a demand that has grown beyond the capacity of a limit that was kept for a smaller one.
//!
//! The constants are those with which a run of `simulator/tests/simulation.rs` is at most 5 % slower than under the best fixed limit.
//!
//! Invariant: the limit is between the size of a group and the bound. Without steps at the limit nothing is decided. Seconds come from
//! the caller.

mod throughput;

use trajectory::PolicyVersion;

use self::throughput::LimitThroughput;
use crate::trial_pause::TrialPause;

/// Share of the capacity that a smaller limit may lose against the best.
const MARGIN: f64 = 0.03;
/// Capacity over demand from which a smaller limit is enough.
const HEADROOM: f64 = 1.15;
/// Capacity over demand below which a larger limit is tried.
const NEED: f64 = 1.05;
/// A first window of a trial that is this share below what is enough ends the trial: four times [`MARGIN`].
const CLEAR_LOSS: f64 = 0.12;
/// Windows before the first trial: completions and their contexts are short after a start.
const FIRST_WINDOWS: u64 = 4;
/// Windows without a trial after one that was not kept; doubled each time, up to [`LONGEST_HOLD_WINDOWS`].
const HOLD_WINDOWS: u64 = 16;
/// See [`HOLD_WINDOWS`]: windows of decode steps.
const LONGEST_HOLD_WINDOWS: u64 = 1024;
/// Share by which the capacity differs from that of the last decision once the hold ends early.
const DRIFT: f64 = 0.2;
/// Decode steps of a trial in a row without the limit being reached, after which the trial ends: another bound decides how many sequences
/// run, so that a smaller limit costs nothing, and a larger one gives nothing.
const UNREACHED_STEPS: f64 = 1024.0;

/// What a sampler did with one number of sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunningObservation {
    /// The version that samples.
    pub version: PolicyVersion,
    /// Sequences in flight, those in prefill included.
    pub in_flight: usize,
    /// Decode steps.
    pub steps: f64,
    /// Tokens that they sampled.
    pub tokens: f64,
    /// Time of these steps, seconds.
    pub decode_s: f64,
    /// Time since the end of the steps before, seconds.
    pub elapsed_s: f64,
}

/// A change of the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunningChange {
    /// Sequences at once until now.
    pub before: usize,
    /// Sequences at once from now on.
    pub after: usize,
    /// Capacity under `before`, tokens per second; 0 if the limit was not reached.
    pub capacity: f64,
    /// Demand, tokens per second.
    pub demand: f64,
}

/// Decides how many sequences a sampler runs at once.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningControl {
    group_size: usize,
    /// The limits to choose from, ascending.
    limits: Vec<usize>,
    /// Place of the limit in `limits`.
    at: usize,
    /// Capacity of the limit that is kept as a share of that of the best limit.
    share: f64,
    trial: Option<LimitTrial>,
    measured: LimitThroughput,
    /// Capacity at the last decision, tokens per second.
    decided: Option<f64>,
    upwards: bool,
    /// Windows until the next trial.
    pause: TrialPause,
}

/// A limit that is tried.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LimitTrial {
    /// Place of the limit that it is compared with.
    from: usize,
    /// The capacity of that, tokens per second.
    rate: f64,
    /// The demand before, tokens per second.
    demand: f64,
    /// Decode steps since the limit was last reached.
    unreached_steps: f64,
}

impl RunningControl {
    /// For groups of `group_size` sequences and at most `max_running` at once, from which it begins.
    #[must_use]
    pub fn new(group_size: usize, max_running: usize) -> Self {
        let group_size = group_size.max(1);
        let mut limits = vec![max_running.max(group_size)];
        let mut exact = limits[0] as f64;
        while limits[limits.len() - 1] > group_size {
            exact /= std::f64::consts::SQRT_2;
            let groups = (exact / group_size as f64).round().max(1.0) as usize;
            let smaller = groups * group_size;
            if smaller < limits[limits.len() - 1] {
                limits.push(smaller);
            }
        }
        limits.reverse();
        Self {
            group_size,
            at: limits.len() - 1,
            limits,
            share: 1.0,
            trial: None,
            measured: LimitThroughput::default(),
            decided: None,
            upwards: false,
            pause: TrialPause::new(HOLD_WINDOWS, LONGEST_HOLD_WINDOWS, FIRST_WINDOWS),
        }
    }

    /// Sequences at once.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limits[self.at]
    }

    /// Takes decode steps into account; the change of the limit, if there is one.
    pub fn observe(&mut self, seen: RunningObservation) -> Option<RunningChange> {
        self.measured.spend(seen);
        if self.limits.len() == 1 || seen.in_flight > self.limit() {
            // More than a smaller limit allows are not a window of that limit; they end.
            return None;
        }
        let reached = seen.in_flight + self.group_size > self.limit();
        if let Some(trial) = &mut self.trial {
            trial.unreached_steps = if reached { 0.0 } else { trial.unreached_steps + seen.steps };
            if trial.unreached_steps > UNREACHED_STEPS {
                let trial = *trial;
                return self.not_reached(trial);
            }
        }
        if !reached || !self.measured.add(seen) {
            return None;
        }
        self.pause.step();
        match self.trial {
            Some(trial) => self.judge(trial),
            None => self.begin_trial(),
        }
    }

    /// Another bound than the limit decides how many sequences run.
    fn not_reached(&mut self, trial: LimitTrial) -> Option<RunningChange> {
        if self.upwards {
            return Some(self.revert(trial, 0.0));
        }
        (self.trial, self.decided) = (None, self.measured.mean());
        self.pause.start_again();
        None
    }

    fn begin_trial(&mut self) -> Option<RunningChange> {
        let mean = self.measured.mean()?;
        let demand = self.measured.demand(mean);
        let needs_more = mean < NEED * demand;
        if self.decided.is_some_and(|decided| (mean / decided - 1.0).abs() > DRIFT) {
            (self.decided, self.share) = (None, 1.0);
            self.pause.start_again();
        }
        if needs_more && self.share < 1.0 - MARGIN {
            self.upwards = true;
            self.pause.end();
        }
        if !self.pause.is_over() || !self.measured.is_precise(mean) {
            return None;
        }
        let last = self.limits.len() - 1;
        self.upwards = (self.upwards || self.at == 0) && self.at < last && needs_more;
        if !self.upwards && self.at == 0 {
            return None;
        }
        // Steps of the square root of 2 that gain less than the margin each may gain more together.
        let tried = if self.upwards { (self.at + 2).min(last) } else { self.at - 1 };
        self.trial = Some(LimitTrial { from: self.at, rate: mean, demand, unreached_steps: 0.0 });
        Some(self.change(tried, [mean, demand]))
    }

    fn judge(&mut self, trial: LimitTrial) -> Option<RunningChange> {
        let as_good = (1.0 - MARGIN) * trial.rate / self.share;
        let enough = match self.upwards {
            true => trial.rate / (1.0 - MARGIN),
            false => as_good.min(HEADROOM * trial.demand),
        };
        if let Some(first) =
            self.measured.single_window().filter(|first| *first < (1.0 - CLEAR_LOSS) * enough)
        {
            return Some(self.revert(trial, first));
        }
        let mean = self.measured.mean()?;
        if !self.measured.is_precise(mean) {
            return None;
        }
        if mean < enough {
            return Some(self.revert(trial, mean));
        }
        self.share = (self.share * mean / trial.rate).min(1.0);
        (self.trial, self.decided) = (None, Some(mean));
        self.pause.start_again();
        // Its windows are those that the next trial is compared with.
        self.begin_trial()
    }

    /// Ends a trial of a limit of `capacity` that is not kept.
    fn revert(&mut self, trial: LimitTrial, capacity: f64) -> RunningChange {
        if self.upwards {
            // The larger limit is not better by more than the margin, but it may be the best.
            let best = if capacity > 0.0 { trial.rate / capacity } else { self.share };
            self.share = best.clamp(1.0 - MARGIN, 1.0);
        }
        (self.trial, self.decided) = (None, Some(trial.rate));
        self.upwards = !self.upwards;
        self.pause.begin();
        self.change(trial.from, [capacity, trial.demand])
    }

    fn change(&mut self, to: usize, [capacity, demand]: [f64; 2]) -> RunningChange {
        let before = self.limit();
        self.at = to;
        self.measured.forget_capacity();
        RunningChange { before, after: self.limit(), capacity, demand }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes `steps` steps, a version every 100, always at the limit; `tokens_per_s` is the throughput by sequences and step. Returns
    /// the limit after every step.
    fn limits(
        control: &mut RunningControl,
        steps: u64,
        tokens_per_s: impl Fn(usize, u64) -> f64,
    ) -> Vec<usize> {
        (0..steps)
            .map(|step| {
                let in_flight = control.limit();
                let tokens = in_flight as f64;
                let seconds = tokens / tokens_per_s(in_flight, step);
                let version = PolicyVersion(step / 100);
                control.observe(RunningObservation {
                    version,
                    in_flight,
                    steps: 1.0,
                    tokens,
                    decode_s: seconds,
                    elapsed_s: seconds,
                });
                control.limit()
            })
            .collect()
    }

    /// The limit that most of the later half of `limits` have.
    fn kept(limits: &[usize]) -> usize {
        let mut counts = std::collections::BTreeMap::new();
        limits[limits.len() / 2..].iter().for_each(|limit| *counts.entry(*limit).or_insert(0) += 1);
        counts.into_iter().max_by_key(|(_, count)| *count).unwrap().0
    }

    /// Tokens per second of `n` sequences that share a step of `1 + n / saturates` milliseconds.
    fn saturating(saturates: f64) -> impl Fn(usize, u64) -> f64 {
        move |n, _| 1e3 * n as f64 / (1.0 + n as f64 / saturates)
    }

    #[test]
    fn the_limits_are_whole_groups_between_a_group_and_the_bound() {
        assert_eq!(RunningControl::new(8, 128).limits, [8, 16, 24, 32, 48, 64, 88, 128]);
        assert_eq!(RunningControl::new(8, 100).limits, [8, 16, 24, 32, 48, 72, 100]);
        let mut one = RunningControl::new(8, 8);
        assert_eq!(limits(&mut one, 5_000, saturating(1.0)), vec![8; 5_000]);
    }

    #[test]
    fn the_smallest_limit_within_the_margin_of_the_best_is_kept() {
        // 512 sequences reach 512 / (512 + 8) of the limit of this curve, so 97 % of that are 163 sequences or more.
        let limits_of =
            |curve: &dyn Fn(usize, u64) -> f64| limits(&mut RunningControl::new(8, 512), 100_000, curve);
        let saturates = limits_of(&saturating(8.0));
        assert_eq!(kept(&saturates), 184);
        // Every sequence counts: nothing is given away.
        let grows = limits_of(&|n, _| n as f64);
        assert_eq!(kept(&grows), 512);
        let trials = grows.windows(2).filter(|pair| pair[1] < pair[0]).count();
        assert!((3..=40).contains(&trials), "{trials} trials: the holds double");
        // Too many sequences are slower.
        let falls = limits_of(&|n, _| 1e3 / (1.0 + (n as f64 / 64.0 - 1.0).abs()));
        assert_eq!(kept(&falls), 64);
    }

    #[test]
    fn noise_is_averaged() {
        // Steps that a trainer on the same cores makes three times as slow, and 20 % of noise from step to step.
        let noisy = |n: usize, step: u64| {
            let trains = if step % 100 < 40 { 1.0 / 3.0 } else { 1.0 };
            let noise =
                1.0 + 0.2 * ((step.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / 8_388_608.0 - 1.0);
            saturating(8.0)(n, step) * trains * noise
        };
        let kept = kept(&limits(&mut RunningControl::new(8, 512), 100_000, noisy));
        assert!((128..=256).contains(&kept), "{kept}");
    }

    #[test]
    fn a_throughput_that_drifts_is_measured_again() {
        let mut control = RunningControl::new(8, 512);
        let short = limits(&mut control, 100_000, saturating(8.0));
        // Now more sequences pay, and the hold of the first curve has ended early.
        let long = limits(&mut control, 40_000, |n, _| 300.0 * n as f64 / (1.0 + n as f64 / 1e3));
        assert_eq!((kept(&short), kept(&long)), (184, 512));
    }

    #[test]
    fn without_the_limit_nothing_is_decided_and_a_trial_ends() {
        let mut control = RunningControl::new(8, 64);
        let seen = |in_flight| RunningObservation {
            version: PolicyVersion(0),
            in_flight,
            steps: 64.0,
            tokens: 64.0 * 32.0,
            decode_s: 1.0,
            elapsed_s: 1.0,
        };
        for _ in 0..1_000 {
            assert_eq!(control.observe(seen(56)), None, "another group fits");
            assert_eq!(control.observe(seen(72)), None, "sequences of a larger limit");
        }
        let mut changes = (0..1_000).filter_map(|_| control.observe(seen(64)));
        let change = changes.next().unwrap();
        assert_eq!((change.before, change.after), (64, 48));
        assert!((change.capacity - 64.0 * 32.0).abs() < 1e-9);
        assert!((0..1_000).all(|_| control.observe(seen(32)).is_none()), "the smaller limit costs nothing");
        assert_eq!(control.limit(), 48);
    }

    #[test]
    fn a_limit_with_headroom_over_the_demand_is_enough() {
        // Every sequence counts, and the sampler waits for slots for three quarters of the time.
        let mut control = RunningControl::new(8, 512);
        let mut decode = |idle: f64, steps: u64| {
            for step in 0..steps {
                let (in_flight, version) = (control.limit(), PolicyVersion(step / 100));
                let tokens = in_flight as f64;
                // The demand is at most 128 sequences of one token a second.
                let elapsed_s = if idle > 0.0 { (tokens / 128.0).max(1.0) } else { 1.0 };
                let seen =
                    RunningObservation { version, in_flight, steps: 1.0, tokens, decode_s: 1.0, elapsed_s };
                control.observe(seen);
            }
            control.limit()
        };
        assert_eq!(decode(1.0, 50_000), 184);
        assert_eq!(decode(0.0, 50_000), 512, "the trainer has become faster");
    }

    #[test]
    fn a_larger_limit_that_is_not_reached_is_not_kept() {
        let mut control = RunningControl::new(8, 64);
        let mut seconds = 0.0;
        let mut decode = |control: &mut RunningControl, in_flight| {
            seconds += 1.0;
            let version = PolicyVersion(seconds as u64);
            control.observe(RunningObservation {
                version,
                in_flight,
                steps: 64.0,
                tokens: 100.0,
                decode_s: 1.0,
                elapsed_s: 1.0,
            })
        };
        // Any limit has the same throughput: the smallest is found, and the next trial is of a larger one.
        let mut limits = vec![64];
        while limits.len() < 7 {
            let limit = control.limit();
            limits.extend(decode(&mut control, limit).map(|change| change.after));
        }
        assert_eq!(limits, [64, 48, 32, 24, 16, 8, 24]);
        let mut changes = (0..1_000).filter_map(|_| decode(&mut control, 8));
        let back = changes.next().unwrap();
        assert_eq!((back.before, back.after, back.capacity), (24, 8, 0.0));
    }
}
