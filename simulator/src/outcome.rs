//! What a simulation gives, and its spread over seeds.
//!
//! Invariant: means leave out the first steps of the scenario; shares are between 0 and 1.

use std::fmt;

use crate::scenario::{Scenario, SimulationError};
use crate::simulation::simulate;

/// The means of a simulated run, after its first steps.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulationOutcome {
    /// Steps that the means are over.
    pub steps: u64,
    /// Time of a step, seconds.
    pub step_s: f64,
    /// Tokens of trained completions per second.
    pub tokens_per_s: f64,
    /// Share of the time in which a sampler has no running sequence, a mean over samplers; seconds over seconds.
    pub sampler_idle: f64,
    /// Samplers that get groups, a mean over steps.
    pub active_samplers: f64,
    /// Share of the time in which the trainer waits for a batch; seconds over seconds.
    pub trainer_idle: f64,
    /// Time of a step in which the trainer waits for a batch, seconds.
    pub wait_s: f64,
    /// Trained groups by staleness, the version of the step minus the version of the oldest token.
    pub staleness: Vec<u64>,
    /// Groups that were dropped because they exceeded the bound, over the whole run.
    pub dropped: u64,
    /// Tokens of a trained completion.
    pub mean_length: f64,
    /// Events of the whole run.
    pub events: u64,
    /// Virtual time of the whole run, seconds.
    pub time_s: f64,
}

/// Which side the other one waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitingSide {
    /// The trainer waits for batches.
    Sampling,
    /// Samplers wait for versions.
    Training,
    /// Both wait: for the longest completions, rewards, tools or weights.
    Waiting,
}

impl fmt::Display for LimitingSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sampling => "sampling",
            Self::Training => "training",
            Self::Waiting => "waiting",
        })
    }
}

impl SimulationOutcome {
    /// Mean staleness of the trained groups, versions.
    #[must_use]
    pub fn mean_staleness(&self) -> f64 {
        let groups: u64 = self.staleness.iter().sum();
        let sum: u64 = self.staleness.iter().zip(0..).map(|(groups, versions)| groups * versions).sum();
        sum as f64 / groups.max(1) as f64
    }
}

/// 10th percentile, median and 90th percentile over seeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutcomeRange {
    /// 10th percentile.
    pub p10: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
}

impl OutcomeRange {
    /// The percentiles of `values` (`[seeds]`), linear between neighbours; NaN without a value.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
            let place = share * last as f64;
            let below = place.floor() as usize;
            let above = (below + 1).min(last);
            sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
        };
        Self { p10: at(0.1), p50: at(0.5), p90: at(0.9) }
    }
}

/// A scenario over seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct RangeOverSeeds {
    /// Seeds.
    pub seeds: u64,
    /// Time of a step, seconds.
    pub step_s: OutcomeRange,
    /// Tokens of trained completions per second.
    pub tokens_per_s: OutcomeRange,
    /// Share of the time in which a sampler has nothing to do.
    pub sampler_idle: OutcomeRange,
    /// Samplers that get groups, a mean over steps.
    pub active_samplers: OutcomeRange,
    /// Share of the time in which the trainer waits for a batch.
    pub trainer_idle: OutcomeRange,
    /// Time of a step in which the trainer waits for a batch, seconds.
    pub wait_s: OutcomeRange,
    /// Mean staleness of the trained groups, versions.
    pub mean_staleness: OutcomeRange,
    /// Trained groups of all seeds by staleness.
    pub staleness: Vec<u64>,
    /// Dropped groups of all seeds.
    pub dropped: u64,
}

impl RangeOverSeeds {
    /// What limits the run, by the medians.
    #[must_use]
    pub fn limits(&self) -> LimitingSide {
        /// Share of idle time on both sides from which neither limits the other.
        const BOTH: f64 = 0.25;
        match (self.sampler_idle.p50, self.trainer_idle.p50) {
            (sampler, trainer) if sampler > BOTH && trainer > BOTH => LimitingSide::Waiting,
            (sampler, trainer) if trainer >= sampler => LimitingSide::Sampling,
            _ => LimitingSide::Training,
        }
    }
}

/// Simulates `scenario` for the seeds 0 to `seeds` - 1, at least one.
///
/// # Errors
/// As [`simulate`].
pub fn over_seeds(scenario: &Scenario, seeds: u64) -> Result<RangeOverSeeds, SimulationError> {
    let seeds = seeds.max(1);
    let outcomes: Vec<SimulationOutcome> =
        (0..seeds).map(|seed| simulate(scenario, seed)).collect::<Result<_, _>>()?;
    let range =
        |of: fn(&SimulationOutcome) -> f64| OutcomeRange::of(&outcomes.iter().map(of).collect::<Vec<f64>>());
    let mut staleness = Vec::new();
    for outcome in &outcomes {
        if staleness.len() < outcome.staleness.len() {
            staleness.resize(outcome.staleness.len(), 0);
        }
        outcome.staleness.iter().zip(&mut staleness).for_each(|(groups, sum)| *sum += groups);
    }
    Ok(RangeOverSeeds {
        seeds,
        step_s: range(|outcome| outcome.step_s),
        tokens_per_s: range(|outcome| outcome.tokens_per_s),
        sampler_idle: range(|outcome| outcome.sampler_idle),
        active_samplers: range(|outcome| outcome.active_samplers),
        trainer_idle: range(|outcome| outcome.trainer_idle),
        wait_s: range(|outcome| outcome.wait_s),
        mean_staleness: range(SimulationOutcome::mean_staleness),
        staleness,
        dropped: outcomes.iter().map(|outcome| outcome.dropped).sum(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_linear_between_neighbours() {
        let range = OutcomeRange::of(&[4.0, 0.0, 2.0, 1.0, 3.0]);
        assert_eq!((range.p10, range.p50, range.p90), (0.4, 2.0, 3.6));
        assert_eq!(OutcomeRange::of(&[7.0]), OutcomeRange { p10: 7.0, p50: 7.0, p90: 7.0 });
        assert!(OutcomeRange::of(&[]).p50.is_nan());
    }
}
