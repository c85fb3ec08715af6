//! Speeds of the two sides of a run, alone and while they have the same cores, compared with those of a simulation.
//!
//! Invariant: a simulation has a bounded number of completions, and a factor is at most `MOST_SLOWER`.

use simulator::{ResourceSharing, SamplerFleet, Scenario, SimulationError, simulate};

use super::calibration::MeasuredTraining;

/// Least share of the time in which a side works from which the other one is said to have the same cores.
const MIN_BUSY: f64 = 0.1;
/// Most that a side is taken to be slower while the other one computes.
const MOST_SLOWER: f64 = 4.0;

/// What the sampler of a run did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredSampling {
    /// Groups of a batch, and completions of a group.
    pub batch: [usize; 2],
    /// Bound on staleness, versions.
    pub max_staleness: u64,
    /// Most sequences that decode together.
    pub max_running: usize,
    /// Time in which the sampler worked for a token, seconds.
    pub token_s: f64,
}

/// What both sides of a run did while they had the same cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredContention {
    /// What the sampler did.
    pub sampling: MeasuredSampling,
    /// A training step.
    pub training: MeasuredTraining,
    /// Share of the time in which the sampler, and the trainer, waited.
    pub idle: [f64; 2],
}

impl MeasuredContention {
    /// Factor of the sampler's time while the trainer computes, for `scenario` and the factor of the `trainer`: the one with which the
    /// sampler takes as long for a token as it did, at most `MOST_SLOWER`.
    ///
    /// # Errors
    /// A scenario that cannot be simulated.
    pub(super) fn sampler_factor(&self, scenario: &Scenario, trainer: f64) -> Result<f64, SimulationError> {
        /// Halvings of the range.
        const HALVINGS: usize = 8;
        let [mut low, mut high] = [1.0, MOST_SLOWER];
        for _ in 0..HALVINGS {
            let sampler = f64::midpoint(low, high);
            let simulated =
                self.sampling.simulated_token_s(scenario, ResourceSharing::Cores { sampler, trainer })?;
            if simulated < self.sampling.token_s { low = sampler } else { high = sampler }
        }
        Ok(f64::midpoint(low, high))
    }

    /// Factor of the trainer's time while the sampler works, for a step that took as long as `alone`, at most `MOST_SLOWER`. `None` if the
    /// sampler hardly worked.
    pub(super) fn trainer_factor(&self, alone: &MeasuredTraining) -> Option<f64> {
        let token_s = |step: &MeasuredTraining| step.seconds / (step.sequences * step.length);
        let speed = token_s(alone) / token_s(&self.training);
        // The sampler waits while the trainer computes; in the rest of that time the trainer has the speed 1 / factor.
        let [sampler, trainer] = self.idle;
        let idle = sampler / (1.0 - trainer).max(MIN_BUSY);
        if 1.0 - idle < MIN_BUSY || !speed.is_finite() {
            return None;
        }
        let factor = if speed > idle { (1.0 - idle) / (speed - idle) } else { MOST_SLOWER };
        Some(factor.clamp(1.0, MOST_SLOWER))
    }
}

impl MeasuredSampling {
    /// Its time over that of the sampler of `scenario` for the same batches: a run does more than the decode steps of a benchmark.
    ///
    /// # Errors
    /// A scenario that cannot be simulated.
    pub(super) fn time_ratio(&self, scenario: &Scenario) -> Result<f64, SimulationError> {
        let simulated = self.simulated_token_s(scenario, ResourceSharing::Separate)?;
        Ok(self.token_s / simulated.max(f64::MIN_POSITIVE))
    }

    /// Time in which one sampler of `scenario` works for a token of the same batches, seconds.
    fn simulated_token_s(
        &self,
        scenario: &Scenario,
        sharing: ResourceSharing,
    ) -> Result<f64, SimulationError> {
        /// Most completions, and most steps that count.
        const MOST: [u64; 2] = [50_000, 60];
        let [batch_groups, group_size] = self.batch;
        let warm_steps = self.max_staleness.saturating_add(2);
        let counted = (MOST[0] / (batch_groups * group_size).max(1) as u64).clamp(4, MOST[1]);
        let samplers = SamplerFleet {
            count: 1,
            max_running: self.max_running,
            count_adapts: false,
            running_adapts: false,
            absences: Vec::new(),
            ..scenario.samplers.clone()
        };
        let run = Scenario {
            steps: warm_steps.saturating_add(counted),
            warm_steps,
            batch_groups,
            group_size,
            max_staleness: self.max_staleness,
            lead_adapts: false,
            sharing,
            samplers,
            ..scenario.clone()
        };
        let outcome = simulate(&run, 0)?;
        let tokens = (batch_groups * group_size) as f64 * outcome.mean_length;
        Ok(outcome.step_s * (1.0 - outcome.sampler_idle) / tokens.max(1.0))
    }
}

#[cfg(test)]
mod tests {
    use simulator::LengthModel;

    use super::*;
    use crate::simulate::calibration::SHARED;

    /// The times of a sampler are those of a synchronous run, whatever the bound and the slots of the recipe.
    #[test]
    fn a_synchronous_run_says_how_much_slower_its_sampler_is() {
        let mut scenario = Scenario::new(16, 8, LengthModel::with_mean(40.0, 100.0, 0.5, SHARED));
        (scenario.max_staleness, scenario.samplers.max_running) = (0, 32);
        let outcome = simulate(&Scenario { steps: 200, ..scenario.clone() }, 3).unwrap();
        let simulated = outcome.step_s * (1.0 - outcome.sampler_idle) / (128.0 * outcome.mean_length);
        let measured =
            MeasuredSampling { batch: [16, 8], max_staleness: 0, max_running: 32, token_s: 1.5 * simulated };
        (scenario.max_staleness, scenario.samplers.max_running) = (4, 512);
        let ratio = measured.time_ratio(&scenario).unwrap();
        assert!((ratio / 1.5 - 1.0).abs() < 0.05, "{ratio}");
    }

    /// What a simulation with known factors says of a run gives these factors.
    #[test]
    fn an_asynchronous_run_says_how_much_slower_each_side_is_beside_the_other() {
        let mut scenario = Scenario::new(16, 8, LengthModel::with_mean(40.0, 100.0, 0.5, SHARED));
        (scenario.max_staleness, scenario.samplers.max_running) = (2, 128);
        scenario.trainer = simulator::TrainingCost::per_token(1e-4);
        let training = |outcome: &simulator::SimulationOutcome| MeasuredTraining {
            threads: 2,
            sequences: 128.0,
            length: outcome.mean_length,
            seconds: outcome.step_s * (1.0 - outcome.trainer_idle),
            is_of_run: true,
        };
        let alone = simulate(&Scenario { max_staleness: 0, steps: 100, ..scenario.clone() }, 3).unwrap();
        let factors = ResourceSharing::Cores { sampler: 1.3, trainer: 1.8 };
        let both = simulate(&Scenario { sharing: factors, steps: 100, ..scenario.clone() }, 3).unwrap();
        let token_s = both.step_s * (1.0 - both.sampler_idle) / (128.0 * both.mean_length);
        let both_sides = MeasuredContention {
            sampling: MeasuredSampling { batch: [16, 8], max_staleness: 2, max_running: 128, token_s },
            training: training(&both),
            idle: [both.sampler_idle, both.trainer_idle],
        };
        let trainer = both_sides.trainer_factor(&training(&alone)).unwrap();
        let sampler = both_sides.sampler_factor(&scenario, trainer).unwrap();
        assert!(
            (sampler / 1.3 - 1.0).abs() < 0.1 && (trainer / 1.8 - 1.0).abs() < 0.15,
            "{sampler} {trainer}"
        );
        let fast = MeasuredTraining { seconds: 1e-9, ..training(&both) };
        let factor = |of: MeasuredContention| of.trainer_factor(&training(&alone));
        assert_eq!(factor(MeasuredContention { training: fast, ..both_sides }), Some(1.0));
        let slow = MeasuredTraining { seconds: 1e9, ..training(&both) };
        assert_eq!(
            factor(MeasuredContention { training: slow, idle: [0.5, 0.0], ..both_sides }),
            Some(MOST_SLOWER)
        );
        assert_eq!(factor(MeasuredContention { idle: [0.95, 0.0], ..both_sides }), None);
    }
}
