//! Closed forms of asynchronous training: the best division of devices, and volumes of weight transfers.
//!
//! Invariant: functions of their arguments alone. A simulation is the general case; these are its limits and what a plan is compared
//! with.
//!
//! - LlamaRL (arXiv 2505.24034): devices are divided so that both sides take equally long.
//! - HybridFlow (arXiv 2409.19256, table 2): weights that a device receives between training and generation.

/// Time per sample of the two sides on one device, seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleTimes {
    /// Generation.
    pub generation_s: f64,
    /// Training.
    pub training_s: f64,
}

impl SampleTimes {
    /// Seconds of a synchronous step of `samples` on `devices`, which do one after the other.
    #[must_use]
    pub fn synchronous_s(&self, samples: f64, devices: f64) -> f64 {
        samples * (self.generation_s + self.training_s) / devices
    }

    /// Seconds of an asynchronous step of `samples` on `devices`, of which the trainer has the share `trainer`.
    #[must_use]
    pub fn asynchronous_s(&self, samples: f64, devices: f64, trainer: f64) -> f64 {
        let sampler = self.generation_s / (1.0 - trainer);
        samples * sampler.max(self.training_s / trainer) / devices
    }

    /// The share of the devices with which the trainer takes as long as the samplers.
    #[must_use]
    pub fn best_trainer_share(&self) -> f64 {
        self.training_s / (self.generation_s + self.training_s)
    }
}

/// A side whose time per sample falls with the samples that it computes together: `fixed_s / samples + each_s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchedSide {
    /// Time of a pass whatever its samples, seconds.
    pub fixed_s: f64,
    /// Time of a sample, seconds.
    pub each_s: f64,
    /// Memory of the weights and of what belongs to them, bytes.
    pub weights: f64,
    /// Memory of a sample, bytes.
    pub sample: f64,
}

impl BatchedSide {
    /// Seconds of a sample if `memory` bytes are there for this side; infinite if its weights do not fit.
    #[must_use]
    pub fn sample_s(&self, memory: f64) -> f64 {
        let together = ((memory - self.weights) / self.sample).floor();
        if together < 1.0 { f64::INFINITY } else { self.fixed_s / together + self.each_s }
    }
}

/// Times per sample if both sides share `memory` bytes of every device, which both sides' weights occupy.
#[must_use]
pub fn colocated_times(generation: &BatchedSide, training: &BatchedSide, memory: f64) -> SampleTimes {
    SampleTimes {
        generation_s: generation.sample_s(memory - training.weights),
        training_s: training.sample_s(memory - generation.weights),
    }
}

/// Times per sample if each side has devices of `memory` bytes of its own.
#[must_use]
pub fn separate_times(generation: &BatchedSide, training: &BatchedSide, memory: f64) -> SampleTimes {
    SampleTimes { generation_s: generation.sample_s(memory), training_s: training.sample_s(memory) }
}

/// Seconds of a transfer of `bytes` of weights from `shards` devices at the same time, each over a link of `bytes_per_s`.
#[must_use]
pub fn transfer_s(bytes: f64, shards: f64, bytes_per_s: f64, latency_s: f64) -> f64 {
    bytes / shards / bytes_per_s + latency_s
}

/// Degrees of a trainer and of generation on the same devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReshardingDegrees {
    /// Tensor parallel degree of training.
    pub tensor: f64,
    /// Pipeline parallel degree of training.
    pub pipeline: f64,
    /// Data parallel degree of training.
    pub data: f64,
    /// Tensor parallel degree of generation.
    pub generation_tensor: f64,
    /// Pipeline parallel degree of generation.
    pub generation_pipeline: f64,
}

impl ReshardingDegrees {
    /// Share of the model that a device receives if all weights are gathered everywhere (DeepSpeed-Chat).
    #[must_use]
    pub fn gathered_everywhere(&self) -> f64 {
        let all = self.tensor * self.pipeline * self.data;
        (all - 1.0) / all
    }

    /// Share of the model that a device receives if the training group gathers its weights (HybridFlow without zero redundancy).
    #[must_use]
    pub fn gathered_in_group(&self) -> f64 {
        let model = self.tensor * self.pipeline;
        (model - 1.0) / model
    }

    /// Share of the model that a device receives if it keeps its part and gets the rest of its generation shard (HybridFlow).
    #[must_use]
    pub fn without_redundancy(&self) -> f64 {
        let (model, generation) =
            (self.tensor * self.pipeline, self.generation_tensor * self.generation_pipeline);
        (model - generation) / (generation * model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_division_is_as_fast_as_synchronous_steps_and_no_other_is() {
        // LlamaRL's theorem with times that are linear in the samples: overlap alone gains nothing.
        for (generation_s, training_s) in [(1.0, 1.0), (3.0, 1.0), (0.2, 5.0)] {
            let times = SampleTimes { generation_s, training_s };
            let (share, synchronous) = (times.best_trainer_share(), times.synchronous_s(64.0, 8.0));
            assert!((times.asynchronous_s(64.0, 8.0, share) - synchronous).abs() < 1e-12);
            for other in [0.1, 0.3, 0.6, 0.9] {
                assert!(times.asynchronous_s(64.0, 8.0, other) >= synchronous - 1e-12);
            }
        }
    }

    #[test]
    fn published_transfers_are_within_what_links_carry() {
        // LlamaRL: 70 billion weights in bf16 take 1.15 s, 405 billion 2.31 s. A network card has 400 Gb/s.
        for (weights, seconds, devices) in [(70e9, 1.15, 8.0), (405e9, 2.31, 16.0)] {
            assert!(transfer_s(2.0 * weights, devices, 50e9, 0.0) < seconds);
            assert!(transfer_s(2.0 * weights, 1.0, 50e9, 0.0) > seconds, "one card is not enough");
        }
        // OpenRLHF: 111.65 s for the same 70 billion is 1.25 GB/s.
        assert!((transfer_s(140e9, 1.0, 1.254e9, 0.0) / 111.65 - 1.0).abs() < 0.01);
    }

    #[test]
    fn memory_that_is_not_shared_makes_the_difference() {
        let generation = BatchedSide { fixed_s: 4.0, each_s: 0.1, weights: 20.0, sample: 1.0 };
        let training = BatchedSide { fixed_s: 2.0, each_s: 0.5, weights: 40.0, sample: 2.0 };
        let step = |times: SampleTimes| times.asynchronous_s(1.0, 1.0, times.best_trainer_share());
        let mut last = 1.0;
        for memory in [100.0, 80.0, 64.0] {
            let shared = colocated_times(&generation, &training, memory);
            let own = separate_times(&generation, &training, memory);
            let gain = shared.synchronous_s(1.0, 1.0) / step(own);
            assert!(gain > last, "the less memory, the larger the gain: {gain} at {memory}");
            last = gain;
        }
        assert!(last > 2.0, "above two only because more samples fit: {last}");
        assert!(colocated_times(&generation, &training, 60.0).generation_s.is_infinite());
        // With plenty of memory nothing is gained.
        let (shared, own) =
            (colocated_times(&generation, &training, 1e9), separate_times(&generation, &training, 1e9));
        assert!((shared.synchronous_s(1.0, 1.0) / step(own) - 1.0).abs() < 1e-6);
    }
}
